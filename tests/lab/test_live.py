"""Live generation: what a viewer is told is what the engine did, and watching leaves nothing behind."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams, verify
from forerun.config import EngineConfig
from forerun.engine.fitting import usable_drafts
from forerun.engine.opened import Opened
from forerun.engine.request import Request
from forerun.lab import live
from forerun.lab.watching import COUNTS, PER_POSITION, RATES, coins_of
from forerun.types import AcceptanceTest, RoundDetail, Toss
from lab.serving import of, read, serving_lab, watch
from serve.running import JSON, assert_refused, serving, wait_for

PROMPT = "def fib(n):\n"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "draft": "model", "spec_length": 4},
    "ratio": {"temperature": 0.8, "seed": 7, "acceptance": "ratio", "draft": "model", "spec_length": 4},
    "match": {"temperature": 0.8, "seed": 8, "draft": "model", "spec_length": 4},
    "block": {"temperature": 1.0, "seed": 3, "acceptance": "block", "draft": "model", "spec_length": 5},
    "lossy": {"temperature": 1.0, "seed": 4, "acceptance": "typical", "draft": "model", "spec_length": 5},
    "tree": {"temperature": 0.8, "seed": 9, "acceptance": "ratio", "draft": "tree", "spec_length": 8},
    "traversal": {"temperature": 0.8, "seed": 9, "acceptance": "traversal", "draft": "tree", "spec_length": 8},
    "found": {"temperature": 0.0, "draft": "lookup", "spec_length": 6},
    "plain": {"temperature": 0.8, "seed": 5, "draft": "none"},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shipped", extra_drafts="tree", max_batch_size=4)


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with serving_lab(llm) as found:
        yield found


def listeners(llm: LLM) -> int:
    return len(llm.engine._listeners)


def is_idle(llm: LLM) -> bool:
    """Whether no request runs or waits, and no block of the cache belongs to one."""
    scheduler, cache = llm.engine.scheduler, llm.engine.runner.cache
    return not (scheduler.running or scheduler.waiting) and cache.free_tokens() == cache.num_blocks * cache.block_tokens


# ------------------------------------------------------------------------------------------------ what a viewer is told


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stream_says_what_generate_does(llm: LLM, url: str, name: str) -> None:
    """Text, tokens, origins and every number, in the end and behind the last round."""
    settings = {"max_tokens": 40, **SETTINGS[name]}
    events = watch(url, prompt=PROMPT, **settings)
    out = llm.generate(PROMPT, SamplingParams(**settings))[0]
    end, rounds = of(events, "end")[0], of(events, "round")
    tokens = [token for one in rounds for token in one["tokens"]]
    assert [token["id"] for token in tokens] == end["token_ids"] == out.token_ids
    assert [token["origin"] for token in tokens] == out.report.origins
    assert "".join(token["text"] for token in tokens) + end["rest"] == end["text"] == out.text
    numbers = {key: getattr(out.report, key) for key in (*COUNTS, *PER_POSITION, *RATES)}
    assert {**numbers, "is_lossless": out.report.is_lossless} == end["report"]
    counts = of(events, "counts")
    assert counts[-1]["so_far"] == numbers
    assert [one["so_far"]["num_steps"] for one in counts] == sorted(one["so_far"]["num_steps"] for one in counts)
    assert [one["number"] for one in rounds] == list(range(1, out.report.num_steps + 1))
    assert [(len(one["nodes"]), one["num_accepted"]) for one in rounds] == out.report.rounds
    kinds = [kind for kind, _ in events if kind != "counts"]
    assert [kind for kind, _ in groupby(kinds)] == ["begin", "prompt", "round", "end"]


def test_a_text_of_split_characters_is_whole(llm: LLM, url: str) -> None:
    """So hot that bytes come that are no character: what was held back comes in the end, and nothing twice."""
    settings = {"temperature": 8.0, "seed": 1, "max_tokens": 200, "ignore_eos": True, "draft": "none"}
    events = watch(url, prompt=PROMPT, **settings)
    end = of(events, "end")[0]
    pieces = [token["text"] for one in of(events, "round") for token in one["tokens"]]
    assert "".join(pieces) + end["rest"] == end["text"] == llm.generate(PROMPT, SamplingParams(**settings))[0].text
    assert "" in pieces, "no token was held back"
    assert any(ord(character) > 127 for character in end["text"])


@pytest.mark.parametrize("name", ["ratio", "tree"])
def test_coins_decide(url: str, name: str) -> None:
    """Ratio verification: a node is accepted where its coin is below its chance, which a chain has from p and q."""
    settings = {**SETTINGS[name], "temperature": 1.2, "max_tokens": 60}
    nodes = []
    for one in of(watch(url, prompt=PROMPT, **settings), "round"):
        for number, node in enumerate(one["nodes"]):
            assert node["parent"] < number
            is_tested = node["verdict"] != "untested"
            assert is_tested == (node["chance"] is not None)
            if node["coin"] is not None:
                assert (node["coin"] < node["chance"]) == (node["verdict"] == "accepted")
                nodes.append(node)
            if is_tested and name == "ratio":
                assert node["chance"] == pytest.approx(min(1, node["target_prob"] / node["draft_prob"]), abs=1e-3)
            if node["verdict"] == "accepted" and node["parent"] >= 0:
                assert one["nodes"][node["parent"]]["verdict"] == "accepted"
    assert {node["verdict"] for node in nodes} == {"accepted", "rejected"}


def test_coins_find_their_nodes() -> None:
    """Of a chain by their depth, as block verification tosses from the end; of a tree by the order of the tests."""

    def detail(parents: list[int], tests: list[tuple[int, bool]], tosses: list[tuple[int, bool]]) -> RoundDetail:
        tested = [AcceptanceTest(node, 0.5, 0.5, ok) for node, ok in tests]
        tossed = [Toss(depth, 0, 0.5, 0.1, ok) for depth, ok in tosses]
        num = len(parents)
        return RoundDetail(0, 5, [7] * num, parents, [0.5] * num, [0.5] * num, tested, [], 1, num, tossed)

    backwards = detail([-1, 0, 1], [(0, True), (1, True), (2, False)], [(2, False), (1, True)])
    assert {node: toss.depth for node, toss in coins_of(backwards).items()} == {2: 2, 1: 1}
    tree = [-1, -1, 1]
    in_order = detail(tree, [(0, False), (1, True), (2, False)], [(0, False), (0, True), (1, False)])
    assert coins_of(in_order).keys() == {0, 1, 2}
    assert coins_of(detail(tree, [(0, False), (1, True)], [(1, False), (0, True)])) == {}, "tossed in another order"
    assert coins_of(detail(tree, [(0, False), (1, True)], [])) == {}


def test_the_race_runs_behind(llm: LLM, url: str) -> None:
    """The plain lane begins when the other one has ended, and writes what plain decoding writes."""
    settings = {"max_tokens": 24, "temperature": 0.8, "seed": 8}
    events = watch(url, prompt=PROMPT, race=True, draft="model", **settings)
    lanes = [data["lane"] for _, data in events]
    assert lanes == sorted(lanes) == ["draft"] * lanes.count("draft") + ["plain"] * lanes.count("plain")
    plain = llm.generate(PROMPT, SamplingParams(draft="none", **settings))[0]
    ends = [of(events, "end", lane)[0] for lane in ("draft", "plain")]
    assert [end["token_ids"] for end in ends] == [plain.token_ids] * 2
    assert ends[1]["report"]["num_drafted"] == 0
    assert of(events, "begin")[0]["seed"] == of(events, "begin", "plain")[0]["seed"] == "8"
    assert of(events, "begin", "plain")[0]["max_tokens"] == len(plain.token_ids)
    # Neither finds its prompt in the cache: both run the same number of prompt tokens.
    assert [sum(one["num_tokens"] for one in of(events, "prompt", lane)) for lane in ("draft", "plain")] == [
        of(events, "begin")[0]["num_prompt_tokens"] - 1
    ] * 2


def test_without_a_seed_both_lanes_share_the_one_that_is_drawn(url: str) -> None:
    events = watch(url, prompt=PROMPT, race=True, draft="model", max_tokens=4, temperature=1)
    first, second = of(events, "begin")[0], of(events, "begin", "plain")[0]
    assert first["seed"] == second["seed"]
    assert first["acceptance"] == "ratio", "a seed that nobody gave chose another rule"


def test_times_of_steps_follow_each_other(url: str) -> None:
    events = watch(url, prompt=PROMPT, max_tokens=24, temperature=0, draft="model", spec_length=4)
    steps = of(events, "prompt") + of(events, "round")
    for before, step in pairwise(steps):
        took = sum(step["seconds"][part] for part in ("draft", "score", "judge", "commit"))
        assert step["at_s"] - took >= before["at_s"] - 1e-4, "a step began before the one before it had ended"
    assert all(min(step["seconds"].values()) >= 0 for step in steps)
    assert all(0 < one["draft_depth"] <= 4 for one in of(events, "round") if one["nodes"])
    assert of(events, "end")[0]["seconds"] == pytest.approx(steps[-1]["at_s"], abs=1e-5)


def test_a_conversation_is_put_into_the_template(llm: LLM, url: str) -> None:
    messages = [{"role": "user", "content": "class Stack:"}]
    events = watch(url, messages=messages, max_tokens=8, temperature=0)
    out = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0))[0]
    assert of(events, "end")[0]["text"] == out.text
    assert of(events, "begin")[0]["num_prompt_tokens"] == len(out.prompt_ids)


def test_the_menu_is_what_the_engine_has(llm: LLM, url: str) -> None:
    found = httpx.get(f"{url}api/live").json()
    assert [one["name"] for one in found["drafters"]] == list(llm.drafters)
    assert [one["name"] for one in found["rules"]] == list(verify.rules())
    for one in found["drafters"]:
        drafter = llm.drafters[one["name"]]
        assert one["rules"] == [r for r in verify.rules() if verify.find(r).judges(drafter.shape, drafter.draws)]
        assert one["about"]
    assert found["has_chat"]
    assert not found["is_chat_usual"]
    assert found["examples"]


def test_the_command_offers_every_drafter_that_can_be_had() -> None:
    with serving(command="lab") as running:
        offered = [one["name"] for one in running.http.get("/lab/api/live").json()["drafters"]]
        assert set(offered) == {"model", *usable_drafts(Opened.of(EngineConfig(target="shipped")))}
        assert offered[0] == "model"
        assert running.terminate() == 0


# ------------------------------------------------------------------------------------------------- viewers come and go


def test_nobody_listens_without_a_viewer(llm: LLM, url: str) -> None:
    """One listener while a generation is watched; none before, behind, and for other requests."""
    assert listeners(llm) == 0
    httpx.get(url)
    httpx.get(f"{url}api/live")
    llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0))
    assert listeners(llm) == 0
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
    with httpx.stream("POST", f"{url}api/live", json=body) as stream:
        seen = {listeners(llm) for _ in read(stream)}
    assert max(seen) == 1
    wait_for(lambda: listeners(llm) == 0)


@pytest.mark.parametrize("race", [False, True])
def test_a_viewer_who_leaves_ends_the_request(llm: LLM, url: str, race: bool) -> None:
    """In mid-stream: nothing listens, runs or holds memory soon after, and no lane begins any more."""
    wait_for(lambda: is_idle(llm))
    body = {"prompt": PROMPT, "max_tokens": 1800, "temperature": 1, "ignore_eos": True, "draft": "none", "race": race}
    with httpx.stream("POST", f"{url}api/live", json=body) as stream:
        names = (name for name, _ in read(stream))
        assert next(names) == "begin"
        request = wait_for(lambda: next(iter(llm.engine.scheduler.running), None))
        while next(names) != "round":
            pass
    wait_for(lambda: listeners(llm) == 0 and is_idle(llm))
    assert isinstance(request, Request)
    assert request.seq.finish_reason == "abort"
    assert request.seq.num_output_tokens < 1800


def test_a_stream_that_is_not_read_listens_no_longer_than_its_request(llm: LLM) -> None:
    """A viewer who takes nothing holds no listener behind the end of the request; closing the stream ends one."""

    async def stall(max_tokens: int, waits: bool) -> str | None:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "draft": "none"}
        wish = live.read_body(llm, body)
        request = live.make_request(llm, wish)
        stream = live.events(llm, wish, request)
        for _ in range(2):
            await anext(stream)
        if waits:
            await asyncio.to_thread(wait_for, lambda: request.seq.finish_reason is not None and not listeners(llm))
        await stream.aclose()
        await asyncio.to_thread(wait_for, lambda: request.seq.finish_reason is not None)
        assert listeners(llm) == 0
        return request.seq.finish_reason

    assert asyncio.run(stall(64, waits=True)) == "length"
    assert asyncio.run(stall(1800, waits=False)) == "abort"
    wait_for(lambda: is_idle(llm))


def test_many_viewers_get_their_own(llm: LLM, url: str) -> None:
    """More of them than the batch holds, at once: each one's text is what it gets alone."""
    settings = [
        {"max_tokens": 24, "temperature": 0.9, "seed": seed, "draft": ("model", "lookup")[seed % 2]}
        for seed in range(6)
    ]
    with ThreadPoolExecutor(len(settings)) as pool:
        watched = list(pool.map(lambda each: watch(url, prompt=PROMPT, **each), settings))
    alone = llm.generate([PROMPT] * len(settings), [SamplingParams(**each) for each in settings])
    assert [of(events, "end")[0]["token_ids"] for events in watched] == [out.token_ids for out in alone]
    wait_for(lambda: listeners(llm) == 0)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either a prompt"),
        ({"prompt": "a", "messages": []}, "either a prompt"),
        ({"prompt": ""}, "must be a text"),
        ({"prompt": 5}, "must be a text"),
        ({"prompt": " \n"}, "must be a text"),
        ({"messages": "a"}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "the message is empty"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "role"),
        ({"prompt": "a", "drafft": "lookup"}, "did you mean 'draft'"),
        ({"prompt": "a", "draft": "lokup"}, "did you mean 'lookup'"),
        ({"prompt": "a", "draft": "tree", "acceptance": "block"}, "cannot judge"),
        ({"prompt": "a", "acceptance": "no"}, "acceptance"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "temperature": "warm"}, "temperature='warm'"),
        ({"prompt": "a", "spec_length": 65}, "spec_length=65"),
        ({"prompt": "a", "max_tokens": 10**6}, "max_seq_len"),
        ({"prompt": "a", "n": 2}, "'n'"),
        ({"prompt": "a", "race": "yes"}, "race='yes'"),
        ({"prompt": "\ud800"}, "UTF-8"),
        (["prompt"], "dictionary"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(llm: LLM, url: str, body: Any, says: str) -> None:
    answer = httpx.post(f"{url}api/live", content=json.dumps(body), headers=JSON)
    assert "\n" not in assert_refused(answer, says)["message"]
    assert listeners(llm) == 0


def test_a_failure_on_the_way_is_told(llm: LLM, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises ends the stream with a sentence; the next generation runs."""
    stepper, calls = llm.engine.stepper, []
    score = type(stepper)._score

    def failing(self: Any, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 5:
            raise RuntimeError("the fifth pass")
        return score(self, *given)

    monkeypatch.setattr(type(stepper), "_score", failing)
    events = watch(url, prompt=PROMPT, max_tokens=64, temperature=0, draft="none", ignore_eos=True)
    assert events[-1][0] == "failed"
    assert "the fifth pass" in events[-1][1]["message"]
    monkeypatch.undo()
    assert watch(url, prompt=PROMPT, max_tokens=4)[-1][0] == "end"
    wait_for(lambda: listeners(llm) == 0 and is_idle(llm))


def test_watching_changes_no_token(llm: LLM) -> None:
    """The coins that are watched are the coins."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=11, acceptance="ratio", draft="model", spec_length=4)
    alone = llm.generate(PROMPT, params)[0]
    details: list[RoundDetail] = []
    end = llm.listen(lambda report: details.extend(report.rounds), detail=True)
    watched = llm.generate(PROMPT, dataclasses.replace(params))[0]
    end()
    assert watched.token_ids == alone.token_ids
    tested = [[test.accepted for test in one.tests] for one in details]
    assert tested == [[toss.is_accepted for toss in one.tosses] for one in details]
