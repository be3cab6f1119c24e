"""`benchmarks.gaps`: whole runs on a tiny model, whose counts are known, and the numbers of known runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gaps import ALONE_STEPS, GapsPlan, run
from benchmarks.gaps_results import Gaps, Run, lines_of
from benchmarks.throughput_results import AUTO, PLAIN
from forerun import LLM, SamplingParams
from forerun.bench.widen import with_positions
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.models.loading import load_checkpoint
from refusals import refusal

# ---------------------------------------------------------------------------------------------------- the whole command

PLAN = GapsPlan(spec_length=2, prompt_tokens=70, long_prompt_tokens=90, num_steps=12, num_repeats=2)


def test_the_command_on_a_target_that_drafts_for_itself(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"prefill_chunk_tokens": 32, "draft_catchup_tokens": 20, "prefill_stretch": None}
    record = json.loads(json.dumps(run(EngineConfig(target=str(tiny), draft=str(tiny), **sizes), PLAN)))
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in printed)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in printed), "a column is cut short"
    heads = ("target: ", "positions of ", "limit without speculation: ", "cold, again: ", "largest gap ")
    starts = [next(i for i, line in enumerate(printed) if line.startswith(head)) for head in heads]
    assert starts == sorted(starts)
    assert record["max_positions"] > 256, "the tiny model's own"

    variants = [PLAIN, "K=2", "K=2, late", AUTO]
    assert [line["variant"] for line in record["lines"]] == variants
    assert sorted(record["plan"].items()) == sorted({**vars(PLAN)}.items())
    turns = [(r["repeat"], r["variant"]) for r in record["runs"]]
    assert turns == [(0, v) for v in variants] + [(1, v) for v in variants[1:] + variants[:1]]
    for each in record["runs"]:
        check_counts(each)
    known = [Run(**{k: Gaps(**v) if isinstance(v, dict) else v for k, v in r.items()}) for r in record["runs"]]
    assert json.loads(json.dumps(lines_of(known), default=vars)) == record["lines"]


def check_counts(record: dict[str, Any]) -> None:
    """A step is one event of each request that decodes in it, however many tokens it brings."""
    assert record["num_cached_cold"] == 0
    assert record["num_cached_repeated"] == 64, "the full blocks of 70 tokens"
    chunks = 3  # 32 + 32 + 25 of the 89 tokens before the last, then the step that decodes it
    assert [record[phase]["num"] for phase in ("alone", "reading", "behind")] == [ALONE_STEPS, chunks + 1, 2 * 12]
    for phase in ("alone", "reading", "behind"):
        assert 0 < record[phase]["median_s"] <= record[phase]["p99_s"] <= record[phase]["max_s"]
    if record["variant"] == PLAIN:
        assert record["draft_prefill_s"] == 0
    if record["variant"] == "K=2":
        assert record["draft_prefill_s"] > 0
    if record["variant"] == "K=2, late":
        assert record["draft_prefill_s"] > 0
        assert 16 <= record["most_caught_up"] <= 20
        # Both requests emit in each of these steps; the first is the one that brings the long request's first token.
        assert 90 // 20 <= record["catching_up"]["num"] / 2 <= 90 // 16


def test_lookup_is_never_late(tiny: Path, tmp_path: Path, record_of: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": text, "text": text}) + "\n" for text in ("abc", "abd")), encoding="utf-8")
    base = ("--target", str(tiny), "--draft", "lookup", "--prompt-file", str(file), "--kv-cache-backend", "contiguous")
    sizes = ("--prompt-tokens", "40", "--long-prompt-tokens", "30", "--steps", "5", "--repeats", "1")
    record = record_of("gaps", *base, *sizes, "--draft-catchup-tokens", "9", "--spec-length", "3")
    assert [each["variant"] for each in record["runs"]] == [PLAIN, "K=3", AUTO]
    assert {each["num_cached_repeated"] for each in record["runs"]} == {0}, "a contiguous cache shares nothing"
    assert (record["bench"], record["draft"], record["draft_catchup_tokens"]) == ("gaps", "lookup", 9)


def test_a_model_with_more_positions_has_the_same_weights(tiny: Path) -> None:
    checkpoint = load_checkpoint(tiny, with_tokenizer=True)
    longer = with_positions(checkpoint, 600)
    assert (checkpoint.model.config.max_positions, longer.model.config.max_positions) == (256, 600)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    texts = [LLM(each, draft="none").generate(list(range(1, 60)), params)[0].token_ids for each in (checkpoint, longer)]
    assert texts[0] == texts[1]
    assert len(LLM(longer, draft="none").generate([[5] * 500], params)[0].token_ids) == 9


# ----------------------------------------------------------------------------------------------------------- numbers


def known_run(variant: str, repeat: int, behind: tuple[float, float], late: Gaps | None = None) -> Run:
    alone, reading = Gaps(40, 1.0, 1.2, 1.5), Gaps(4, 2.0, 2.5, 3.0)
    rest = {"catching_up": late, "most_caught_up": repeat, "long_prompt_s": 9, "draft_prefill_s": 1}
    return Run(
        variant, repeat, 4.0, 0, 1.0 + repeat, 64, alone, reading=reading, behind=Gaps(20, behind[0], *behind), **rest
    )


def test_every_number_of_a_line() -> None:
    runs = [
        known_run("a", 0, (1.0, 2.0), Gaps(3, 1.5, 1.9, 2.0)),
        known_run("b", 0, (1.0, 9.0)),
        known_run("a", 1, (2.0, 3.0)),
        known_run("a", 2, (4.0, 5.0), Gaps(9, 5.0, 5.0, 5.0)),
    ]
    line, other = lines_of(runs)
    assert (line.variant, other.variant) == ("a", "b")
    assert (line.cold_s, line.repeated_s, line.long_prompt_s, line.draft_prefill_s) == (4.0, 2.0, 9, 1)
    assert line.repeated_over_cold.values == (0.25, 0.5, 0.75)
    assert (line.alone_median_s, line.alone_max_over_median.median) == (1.0, 1.5)
    assert (line.reading_median_s, line.reading_over_alone.median) == (2.0, 2.0)
    assert line.reading_p99_over_alone.median == 2.5
    assert (line.behind_median_s, line.behind_max_s) == (2.0, 3.0)
    assert line.behind_max_over_median.values == (2.0, 1.5, 1.25)
    assert (line.behind_max_over_median.median, line.behind_max_over_median.range) == (1.5, (1.25, 2.0))
    assert line.catching_up_over_median is not None
    assert line.catching_up_over_median.values == (1.5, 1.25)
    assert (line.most_caught_up, other.most_caught_up) == (2, 0)
    assert other.catching_up_over_median is None


def test_gaps_of_known_seconds() -> None:
    gaps = Gaps.of([1.0, 2.0, 6.0])
    assert (gaps.num, gaps.median_s, gaps.max_s, gaps.max_over_median) == (3, 2.0, 6.0, 3.0)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_repeats": 0}, "--repeats 0 is not possible: it must be at least 1"),
        ({"num_steps": 1}, "--steps 1 is not possible: it must be at least 2"),
        ({"long_prompt_tokens": 1}, "--long-prompt-tokens 1 is not possible: it must be at least 2"),
        ({"spec_length": 0}, "--spec-length 0 is not possible: it must be at least 1"),
    ],
)
def test_plans_that_leave_nothing_to_measure(options: dict[str, Any], sentence: str) -> None:
    assert refusal(BadOption, GapsPlan, **options) == sentence


def test_what_is_a_variant_already_is_refused_before_anything_is_loaded() -> None:
    assert "pacing='fixed' is " in refusal(BadOption, run, EngineConfig(target="nowhere", pacing="fixed"), PLAN)


def test_the_99th_percentile_is_a_gap_that_99_of_100_do_not_exceed() -> None:
    gaps = Gaps.of([float(n) for n in range(200, 0, -1)])
    assert (gaps.num, gaps.median_s, gaps.p99_s, gaps.max_s) == (200, 100.5, 198.0, 200.0)
    assert Gaps.of([3.0]).p99_s == 3.0


def test_streams_wait_no_more_than_was_asked(tiny: Path, record_of: Any) -> None:
    """Two streams, and a prompt that is read in pieces beside them; without a drafter there is nothing to compare."""
    sizes = ("--prompt-tokens", "40", "--long-prompt-tokens", "90", "--steps", "5", "--repeats", "1", "--streams", "2")
    record = record_of("gaps", "--target", str(tiny), "--draft", "none", *sizes, "--max-itl-ms", "1")
    assert (record["max_itl_ms"], record["prefill_stretch"]) == (1.0, 3.0)
    assert [each["variant"] for each in record["runs"]] == [PLAIN]
    for each in record["runs"]:
        assert each["alone"]["num"] == 2 * ALONE_STEPS
        assert each["reading"]["num"] > 2 * 90 // 32, "not in chunks of 512"
