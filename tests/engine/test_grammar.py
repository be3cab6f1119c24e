"""Requests with grammars in the engine: texts are plain decoding's, valid, and end where they must."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from engine.load import named, wait_for
from forerun import LLM, BadOption, SamplingParams, StepReport
from forerun.engine.request import Request
from forerun.testing import engines
from support import heard, needed
from tiny import write_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3, "pattern": "^[a-z]*$"},
        "kind": {"enum": ["first", "second"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {},
    {"json_schema": SCHEMA, "json_whitespace": "compact"},
    {"regex": "(ab|ba){3,9}"},
    {"choice": ["yes", "no", "yes, but not now", "not at all"]},
    {"json_schema": SCHEMA, "json_whitespace": "spaced"},
    {"grammar": 'start: "<" item ("," item)* ">"\nitem: /[0-9]{1,3}/ | "none"'},
    {"json_object": True},
]
DRAFTS = ("none", "suffix:shape=tree", "lookup", "model", "recycle")


def requests() -> list[SamplingParams]:
    """Greedy and match in turn, with other options of the pipeline, and some requests without a grammar."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 1.2, "seed": 6, "top_k": 30, "frequency_penalty": 0.4},
    ]
    return [SamplingParams(max_tokens=70, **grammar, **way) for way in ways for grammar in GRAMMARS]


PROMPTS = ['{"name": "ab", "kind": "second", "n": 7}', "abbaabbaab", "yes, but not at all <none,12>"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two random models of bytes, the second of which resembles the first: it has the same weights, but coarser."""
    folder = tmp_path_factory.mktemp("grammar")
    return str(write_tiny(folder / "target", inner_scale=0.05)), str(write_tiny(folder / "draft", inner_scale=0.04))


@pytest.fixture(scope="module")
def llm(models: tuple[str, str]) -> Iterator[LLM]:
    """An engine with all drafters."""
    target, draft = models
    others = f"lookup;(model:path={draft});recycle;none"
    with LLM(target, draft="suffix:shape=tree", extra_drafts=others, max_seq_len=200) as made:
        yield made


@pytest.mark.once("each request names its drafter")
def test_texts_are_those_of_plain_decoding_beside_requests_without_a_grammar(llm: LLM) -> None:
    prompts = [prompt for params in requests() for prompt in PROMPTS]
    params = [own for own in requests() for _ in PROMPTS]
    by_draft = {}
    for draft in DRAFTS:
        name = named(llm, draft.partition(":")[0])
        outs = llm.generate(prompts, [dataclasses.replace(own, draft=name) for own in params], raw=True)
        by_draft[draft] = [(out.token_ids, out.finish_reason, out.logprobs) for out in outs]
        if draft != "none":
            assert by_draft[draft] == by_draft["none"], draft
            assert sum(out.report.num_accepted for out in outs) > 100
    for own, (ids, reason, _) in zip(params, by_draft["none"], strict=True):
        assert_valid(llm.tokenizer.decode(ids, skip_special_tokens=True), own, reason)


def assert_valid(text: str, params: SamplingParams, reason: str | None) -> None:
    """A whole text is one of the grammar; one that is cut may be anything."""
    if params.constraint is None or reason == "length":
        return
    assert reason == "stop"
    if params.json_schema is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif params.json_object:
        assert isinstance(json.loads(text), dict)
    elif params.choice:
        assert text in params.choice
    else:
        assert re.fullmatch(params.regex or "<([0-9]{1,3}|none)(,([0-9]{1,3}|none))*>", text)


@pytest.mark.parametrize("acceptance", ["ratio", "block", "match", "typical", "lenience:l=0.5"])
def test_every_rule_keeps_to_the_grammar(llm: LLM, acceptance: str, speculation: Any) -> None:
    asked = {"json_schema": SCHEMA, "json_whitespace": "compact", "acceptance": acceptance, "draft": "lookup"}
    params = SamplingParams(max_tokens=90, temperature=1.1, seed=3, **asked)
    for out in llm.generate(PROMPTS * 4, params, raw=True):
        assert out.finish_reason == "stop"
        jsonschema.validate(json.loads(out.text), SCHEMA)


def test_an_output_ends_where_the_grammar_must_end_without_an_end_id(llm: LLM) -> None:
    params = SamplingParams(choice=["done"], max_tokens=50, ignore_eos=True)
    (out,) = llm.generate("x", params, raw=True)
    assert (out.text, out.finish_reason, len(out.token_ids)) == ("done", "stop", 4)
    (cut,) = llm.generate("x", dataclasses.replace(params, max_tokens=3), raw=True)
    assert (cut.text, cut.finish_reason) == ("don", "length")
    (whole,) = llm.generate("x", dataclasses.replace(params, max_tokens=4), raw=True)
    assert (whole.text, whole.finish_reason) == ("done", "stop"), "the last token that is possible completes it"


def test_several_outputs_have_states_of_their_own(llm: LLM) -> None:
    outs = llm.generate("x", SamplingParams(n=6, regex="[a-f]{8}", max_tokens=20, seed=2), raw=True)
    assert len({out.text for out in outs}) > 3
    assert all(re.fullmatch("[a-f]{8}", out.text) for out in outs)


def test_a_beam_search_keeps_to_the_grammar(llm: LLM) -> None:
    params = SamplingParams(n=3, num_beams=3, temperature=0, max_tokens=30, regex="[a-c]{4}", draft="none")
    outs = llm.generate("x", params, raw=True)
    assert all(re.fullmatch("[a-c]{4}", out.text) for out in outs)
    drafted = llm.generate("x", dataclasses.replace(params, draft="lookup"), raw=True)
    assert [(out.token_ids, out.score) for out in drafted] == [(out.token_ids, out.score) for out in outs]


def with_one_that_fails(llm: LLM, good: SamplingParams, bad: SamplingParams) -> list[Request]:
    """Run three requests, of which the second one alone is bad and fails."""
    requests = llm.submit(["x", "x", "x"], [good, bad, good], raw=True)
    wait_for(lambda: all(request.seq.finish_reason is not None for request in requests))
    assert [request.seq.finish_reason for request in requests] == ["stop", "abort", "stop"]
    return requests


def test_a_request_that_has_no_token_left_ends_alone(llm: LLM) -> None:
    a = llm.tokenizer.encode("a")[0]
    good = SamplingParams(regex="a{5}", temperature=0)
    bad = SamplingParams(regex="b{3}a{5}", temperature=0, logit_bias={a: -float("inf")})
    made = with_one_that_fails(llm, good, bad)
    assert [request.text for request in made] == ["aaaaa", "bbb", "aaaaa"]
    assert isinstance(made[1].error, BadOption)
    assert "the grammar forbid every id" in str(made[1].error)


@pytest.mark.parametrize("draft", ["none", "suffix", "model"])
def test_a_grammar_that_takes_too_much_on_the_way_ends_its_request_alone(llm: LLM, draft: str) -> None:
    """However it is found out: as a token is committed, behind which the grammar has too many ways to go on."""
    name = named(llm, draft)
    # Further away than what is tried when it is compiled.
    many = 'start: /[abc]{60}/ "," rest\nrest: ' + " ".join(["a"] * 3000) + '\na: "x"?'
    good = SamplingParams(regex="a{5}", temperature=0, draft=name)
    bad = SamplingParams(grammar=many, temperature=0, draft=name)
    made = with_one_that_fails(llm, good, bad)
    assert [made[0].text, made[2].text] == ["aaaaa", "aaaaa"]
    assert re.fullmatch("[abc]{60},", made[1].text)
    assert "grammar cannot be honoured" in str(made[1].error)
    assert llm.failure is None


def test_a_grammar_that_is_wrong_is_refused_before_anything_is_queued(llm: LLM) -> None:
    with pytest.raises(BadOption, match=r"^regex cannot be honoured"):
        llm.generate(["x", "y"], [SamplingParams(max_tokens=3), SamplingParams(regex="a(")], raw=True)


@dataclasses.dataclass
class Seen:
    """A round that was heard of: who drafted, which nodes are forced, and what became of each that was tested."""

    draft: str
    num_nodes: int
    forced: frozenset[int]
    tests: dict[int, bool]
    parts: list[tuple[str, int, int]]


def rounds_of(llm: LLM, params: SamplingParams, prompt: str = "x") -> tuple[Any, list[Seen]]:
    """The output of a request, and its rounds."""
    seen: list[Seen] = []

    def hear(report: Any) -> None:
        for step, detail in zip(report.sequences, report.rounds, strict=True):
            tests = {test.node: test.accepted for test in detail.tests}
            parts = [(part.draft, part.num_drafted, part.num_accepted) for part in step.parts]
            seen.append(Seen(step.draft, step.num_drafted, step.forced, tests, parts))

    end = llm.listen(hear, detail=True)
    (out,) = llm.generate(prompt, params, raw=True)
    end()
    return out, seen


FORM = SamplingParams(json_schema=SCHEMA, json_whitespace="spaced", temperature=1.0, seed=4, max_tokens=90)


def test_what_is_forced_is_drafted_first_and_never_refused(llm: LLM) -> None:
    """Whatever pacing grants; it is counted by itself, and a request without drafts has none."""
    plain, seen = rounds_of(llm, dataclasses.replace(FORM, draft="none"))
    assert {own.draft for own in seen} == {"none"}
    for draft in ("forced", "lookup", "model"):
        out, seen = rounds_of(llm, dataclasses.replace(FORM, draft=named(llm, draft)))
        assert out.token_ids == plain.token_ids
        assert all(own.tests[node] for own in seen for node in own.forced if node in own.tests), draft
        assert all(own.draft == "forced" for own in seen if own.forced and len(own.forced) == own.num_nodes)
        runs = [own for own in seen if 0 in own.forced]
        assert len(runs) >= (3 if draft == "forced" else 1), draft
        assert max(len(own.forced) for own in runs) >= len('{"name": "'), "all at once"
        num_forced = sum(len(own.forced) for own in seen)
        assert sum(num for own in seen for who, num, _ in own.parts if who == "forced") == num_forced
    short, _ = rounds_of(llm, dataclasses.replace(FORM, spec_length=3))
    assert short.token_ids == plain.token_ids
    assert max(drafted for drafted, _ in short.report.rounds) == 3


@pytest.mark.parametrize("draft", ["suffix", "lookup", "model", "recycle"])
def test_a_drafter_goes_on_behind_what_is_forced(llm: LLM, draft: str, speculation: Any) -> None:
    """In the same pass, and what is forced behind its guess is read in that pass, too."""
    params = dataclasses.replace(FORM, temperature=0.0, seed=None, draft=named(llm, draft))
    out, seen = rounds_of(llm, dataclasses.replace(params, spec_length=40), PROMPTS[0])
    plain, _ = rounds_of(llm, dataclasses.replace(params, draft="none"), PROMPTS[0])
    assert out.token_ids == plain.token_ids
    behind = [own for own in seen if 0 in own.forced and len(own.forced) < own.num_nodes]
    assert behind, "a guess behind what is forced"
    own = [node for each in behind for node in each.tests if node not in each.forced]
    assert own, "which the target reaches, for nothing before it is refused"
    later = {node for each in seen for node in each.forced & each.tests.keys() if node and node - 1 not in each.forced}
    assert later or draft != "model", "what is forced behind a guess, and accepted with it"


CHOICES = SamplingParams(max_tokens=6, temperature=0.0, choice=("abacba", "abacbb", "abbcca", "abbccb"))


def test_what_is_forced_stands_before_and_behind_a_guess() -> None:
    """A draft model that is the target guesses one token: with what is forced around it that is a whole text."""
    case = engines.Case("model", CHOICES, near=engines.TARGET, forced=True, gamma=1)
    ((_, (output, (report, *_))),) = engines.every_way(case)
    (step,) = report.sequences
    assert (step.num_drafted, step.forced, step.num_accepted) == (5, {0, 1, 3, 4}, 5)
    assert step.num_committed == len(output) == 6, "in one pass, with the target's own choice"


@pytest.mark.once("the case has its drafter")
@pytest.mark.parametrize("name", ["lookahead", "medusa", "pass"])
def test_a_drafter_that_cannot_draft_behind_what_is_forced_is_not_asked(name: str) -> None:
    """Its rounds would count as ones in which it found nothing, and take its time."""
    case = engines.Case(name, CHOICES, forced=True, needs=needed)
    assert not engines.drafter_for(case).drafts_behind
    ((_, (output, reports)),) = engines.every_way(case)
    assert len(output) == 6
    assert [set(report.drafts) for report in reports] == [{"forced"}] * 2, "a choice, and what is forced before it"


def test_what_is_forced_teaches_pacing_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of the drafter's own guesses alone, and the tokens of a step without those that were forced."""
    taught, pacing = list[StepReport](), llm.engine.stepper.pacing
    observe = pacing.observe
    monkeypatch.setattr(pacing, "observe", lambda report: (taught.append(report), observe(report)))
    reports = heard(llm)
    params = dataclasses.replace(FORM, temperature=0.0, draft=named(llm, "model"), spec_length=40)
    llm.generate(PROMPTS[0], params, raw=True)
    told = [
        (one, own)
        for report, of_all in zip(taught, reports, strict=True)
        for one, own in zip(of_all.sequences, report.sequences, strict=True)
    ]
    assert sum(len(one.forced) for one, _ in told) > 10
    for one, own in told:
        assert not own.forced
        assert own.num_drafted == one.num_drafted - len(one.forced)
        assert own.num_tested - own.num_accepted == one.num_tested - one.num_accepted
        assert max(own.accepted_ranks, default=0) < max(1, own.num_drafted)
    num_forced = sum(len(one.forced & set(one.accepted_ranks)) for one, _ in told)
    assert sum(r.num_emitted for r in reports) - sum(r.num_emitted for r in taught) == num_forced


def test_a_draft_model_reads_what_was_forced_with_its_round(llm: LLM) -> None:
    """Not before it, as what it lacks of a prompt, which takes a pass more."""
    reports = heard(llm)
    name = named(llm, "model")
    llm.generate("xy", dataclasses.replace(FORM, draft=name, spec_length=40), raw=True)
    steps = [report.drafts[name] for report in reports if name in report.drafts]
    assert sum(step.num_nodes for step in steps) > 10
    assert sum(step.num_catchup_tokens for step in steps) <= 2, "of the prompt"


def test_min_tokens_beyond_a_text_that_must_end_ends_with_it(llm: LLM) -> None:
    (out,) = llm.generate("x", SamplingParams(choice=["abc"], min_tokens=20, max_tokens=30), raw=True)
    assert (out.text, out.finish_reason) == ("abc", "stop")
