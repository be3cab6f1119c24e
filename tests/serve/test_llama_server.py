"""Routes of llama-server that its web page, health checks and older clients ask for."""

import json
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.serve.apis import generating, llama_server
from forerun.serve.bodies import Refused
from serve.running import CODE, Running, assert_refused

pytestmark = pytest.mark.once("texts and forms, whatever the speculation")


def test_a_completion_is_what_the_engine_says(server: Running, plain: LLM) -> None:
    (expected,) = plain.generate(CODE, SamplingParams(max_tokens=12, temperature=0), raw=True)
    body = {"prompt": CODE, "n_predict": 12, "temperature": 0, "cache_prompt": True, "samplers": []}
    whole = server.http.post("/completion", json=body).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == (expected.text, True, "limit")
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (12, len(expected.prompt_ids))
    lines = server.http.post("/completion", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == expected.text
    chosen = server.http.post("/completion", json={**body, "response_fields": ["content", "timings/predicted_n"]})
    assert chosen.json() == {"content": expected.text, "timings/predicted_n": 12}
    told = server.http.post("/completion", json={**body, "timings_per_token": True, "return_progress": False})
    assert told.headers["x-forerun-ignored"] == "timings_per_token"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"]["predicted_n"] == 12
    ids = server.http.post("/completion", json={**body, "prompt": expected.prompt_ids}).json()
    assert ids["content"] == expected.text
    stopped = server.http.post("/completion", json={**body, "stop": [expected.text[1:4]]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected.text[1:4])
    assert stopped["content"] == expected.text[:1]


def test_what_its_page_asks_first(server: Running) -> None:
    props = server.http.get("/props").json()
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (2048, 8)
    assert (props["model_alias"], props["modalities"]["vision"]) == ("shipped", False)
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)
    assert server.http.get("/health").json() == {"status": "ok"}


def test_paths_that_it_has_without_a_version(server: Running, plain: LLM) -> None:
    body = {"prompt": CODE, "n_predict": 4, "temperature": 0}
    whole = server.http.post("/completion", json=body).json()["content"]
    assert server.http.post("/completions", json=body).json()["content"] == whole
    chat = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 4, "temperature": 0}
    answers = [server.http.post(f"{base}/chat/completions", json=chat).json()["choices"] for base in ("/v1", "")]
    assert answers[0] == answers[1]
    text = server.http.post("/apply-template", json={"messages": chat["messages"]}).json()["prompt"]
    assert plain.tokenizer.encode(text, False) == plain.apply_chat_template(chat["messages"])
    begun = [*chat["messages"], {"role": "assistant", "content": "It is"}]
    goes_on = server.http.post("/apply-template", json={"messages": begun, "continue_final_message": True}).json()
    assert goes_on["prompt"] == text + "It is"
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = server.http.post("/apply-template", json={"messages": chat["messages"], "tools": tools})
    assert_refused(answer, "tools")  # its template knows none
    sides = {"input_prefix": CODE, "input_suffix": "return x"}
    # The shipped model has no tokens for it.
    assert_refused(server.http.post("/infill", json=sides), "no tokens for filling in")
    for missing in sides:
        answer = server.http.post("/infill", json={**sides, missing: None})
        assert_refused(answer, f"there is no {missing}: send the text on both sides")


def test_texts_to_ids_and_back_in_its_form(server: Running) -> None:
    ids = server.http.post("/tokenize", json={"content": CODE}).json()["tokens"]
    assert ids == server.http.post("/tokenize", json={"prompt": CODE, "add_special_tokens": False}).json()["tokens"]
    pieces = server.http.post("/tokenize", json={"content": CODE, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["content"] == CODE
    special = {"content": "<|endoftext|>a"}
    parsed = server.http.post("/tokenize", json=special).json()["tokens"]
    spelled = server.http.post("/tokenize", json={**special, "parse_special": False}).json()["tokens"]
    assert len(spelled) > len(parsed) == 2
    assert server.http.post("/detokenize", json={"tokens": spelled}).json()["content"] == special["content"]
    assert_refused(server.http.post("/tokenize", json={"content": CODE, "add_special_tokens": True}), "two forms")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ["a", 1]}, "it must be a text, or a list of token ids"),
        ({"n_probs": 3}, "/v1/completions has logprobs"),
        ({"mirostat": 2}, "tokens are cut by top_k"),
        ({"n_predict": -7}, "n_predict=-7"),
        ({"samplers": ["top_k"]}, "the temperature comes first"),
        ({"t_max_predict_ms": 50}, "an answer ends by n_predict"),
        ({"n_indent": 4}, "lines are as the model writes them"),
        ({"return_tokens": True}, "each piece of a stream has its tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_not_built_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        generating()[llama_server.COMPLETION].job({"prompt": CODE, **fields}, "small")
