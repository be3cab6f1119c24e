"""What is kept of responses, and for how long."""

import json
from typing import Any

import pytest

from forerun.serve import kept
from forerun.serve.bodies import Refused
from forerun.serve.kept import Kept
from refusals import refusal

pytestmark = pytest.mark.once("no engine runs")


def response(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "role": "assistant", "content": text}]}


def test_a_body_is_extended_by_the_conversation_before() -> None:
    memory = Kept()
    memory.put("me", response("resp_1"), b'[{"role":"user","content":"a"}]')
    body = json.dumps({"input": "b", "previous_response_id": "resp_1"}).encode()
    assert [item["content"] for item in json.loads(memory.extend("me", body))["input"]] == ["a", "x", "b"]
    assert "is not kept here" in refusal(Refused, memory.extend, "you", body)
    rest = ('{"input": 1}', '{"previous_response_id": no', '{"previous_response_id": null}', '["previous_response_id"]')
    for as_it_is in map(str.encode, rest):
        assert memory.extend("me", as_it_is) == as_it_is


def test_references_stand_for_the_items_of_kept_responses() -> None:
    memory = Kept()
    call = {"id": "fc_1a_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"id": "msg_1a", "type": "message", "role": "assistant", "content": "x"}
    memory.put("me", {"id": "resp_1a", "output": [said, call]}, b"[]")
    asked, result = {"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": "1"}
    refers = [{"type": "item_reference", "id": "msg_1a"}, {"type": "item_reference", "id": "fc_1a_1"}]
    body = json.dumps({"input": [asked, *refers, result]}).encode()
    assert json.loads(memory.extend("me", body))["input"] == [asked, said, call, result]
    goes_on = json.dumps({"input": [refers[1], result], "previous_response_id": "resp_1a"}).encode()
    assert json.loads(memory.extend("me", goes_on))["input"] == [said, call, call, result]
    assert "input[1] refers to 'msg_1a', which is not kept here" in refusal(Refused, memory.extend, "you", body)
    for unknown in ("fc_1a_2", "fc_2b", "fc", "", None, 7):
        with pytest.raises(Refused, match="send the item itself"):
            memory.extend("me", json.dumps({"input": [{"type": "item_reference", "id": unknown}]}).encode())
    as_it_is = json.dumps({"input": "item_reference"}).encode()
    assert memory.extend("me", as_it_is) == as_it_is


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    memory = Kept(lambda: now_s)
    monkeypatch.setattr(kept, "MOST_RESPONSES", 3)
    for i in range(5):
        memory.put("me", response(f"resp_{i}"), b"[]")
    with pytest.raises(Refused):
        memory.get("me", "resp_1")
    assert memory.get("me", "resp_2")["id"] == "resp_2"
    monkeypatch.setattr(kept, "MOST_BYTES", 2200)
    memory.put("me", response("long", "y" * 1000), b"[]")
    assert list(memory._kept) == ["long"]
    assert memory._num_bytes == memory._kept["long"].num_bytes
    memory.put("me", response("too long", "y" * 5000), b"[]")
    assert (memory._num_bytes, len(memory._kept)) == (0, 0)
    memory.put("me", response("old"), b"[]")
    now_s = kept.MOST_AGE_S + 1
    assert "unless store is false" in refusal(Refused, memory.get, "me", "old")
