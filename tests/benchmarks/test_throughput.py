"""`benchmarks.throughput`: whole runs on a tiny model, whose counts are known, and the numbers of known runs."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.throughput import LENGTHS, AlwaysWrong, ThroughputPlan, never_emitted, run
from benchmarks.throughput_results import AGAIN, AUTO, PLAIN, WRONG, Counts, bars_of, best_of, fixed_name, lines_of
from forerun.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadOption
from forerun.pacing import make
from forerun.types import Budget, Probs, SamplingParams, Sequence
from refusals import refusal
from support import VOCAB, random_decoder, runner_for

TOKENS = 9


def prompt_file(folder: Path, *texts: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": t, "text": t}) + "\n" for t in texts), encoding="utf-8")
    return file


# ---------------------------------------------------------------------------------------------------- the whole command


def test_the_command_on_a_target_that_drafts_for_itself(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every draft is right and no step is left out: all counts of single requests are known."""
    file = prompt_file(tmp_path, *"abcdef")
    sizes = {"max_tokens": TOKENS, "num_repeats": 2, "num_waves": 5}
    plan = ThroughputPlan(concurrencies=(1, 3), spec_lengths=(1, 2), prompt_file=file, **sizes)
    record = as_json(run(EngineConfig(target=str(tiny), draft=str(tiny)), plan))
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    heads = ["target: ", "limit without speculation: ", "once ", "at once: ", "auto over the better of"]
    heads += ["auto with a drafter", "the noise"]
    starts = [next(i for i, line in enumerate(printed.splitlines()) if line.startswith(head)) for head in heads]
    assert starts == sorted(starts)
    assert "was right" not in printed
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # no column is cut short

    variants = [PLAIN, AGAIN, "K=1", "K=2", AUTO, WRONG]
    runs = [Counts(**without_rate(r)) for r in record["runs"]]
    turns = [[(r.repeat, r.concurrency, r.variant) for r in runs[i : i + 6]] for i in range(0, len(runs), 6)]
    for turn, (repeat, concurrency) in enumerate(product((0, 1), (1, 3))):
        assert sorted(turns[turn]) == sorted((repeat, concurrency, variant) for variant in variants)
    for counts in runs:
        check_counts(counts)
    assert json.loads(json.dumps([as_json(line) for line in lines_of(runs, (1, 2))])) == record["lines"]
    assert {name: as_json(bar) for name, bar in bars_of(lines_of(runs, (1, 2))).items()} == record["bars"]
    assert [draft["shape"] for draft in record["drafts"]] == [record["shape"]]


def check_counts(counts: Counts) -> None:
    """Of a drafter that is always right, in a run of which no decoding is left out."""
    lengths = [round(share * TOKENS) for share in LENGTHS]
    assert sorted(lengths) == [4, 7, 9, 11, 14], "five waves of one request: one of each length"
    if counts.concurrency == 1:
        assert counts.num_committed == sum(lengths)
    else:  # some are cut off, unless the last three end in one step; behind the prompts the batch is full
        assert 5 * 3 * min(lengths) < counts.num_committed <= 3 * sum(lengths)
    assert 0 < counts.forward_s < counts.seconds
    assert counts.num_drafted <= counts.num_granted
    per_step = {PLAIN: 1, AGAIN: 1, "K=1": 2, "K=2": 3}.get(counts.variant)
    if per_step is not None and counts.concurrency == 1:
        num_steps = sum(-(-length // per_step) for length in lengths)
        assert (counts.num_steps, counts.num_sequence_steps) == (num_steps, num_steps)
    if counts.variant in (PLAIN, AGAIN, WRONG):
        assert counts.num_accepted == 0
        assert counts.num_sequence_steps == counts.num_committed
    else:
        assert counts.num_accepted == counts.num_committed - counts.num_sequence_steps
        # With `auto` the drafter may believe what it finds in the text, which is not always right.
        assert counts.num_accepted == counts.num_drafted or counts.variant == AUTO


def without_rate(record: dict[str, Any]) -> dict[str, Any]:
    counts = Counts(**{k: v for k, v in record.items() if k != "tokens_per_s"})
    assert counts.tokens_per_s == record["tokens_per_s"]
    return {k: v for k, v in record.items() if k != "tokens_per_s"}


def as_json(made: Any) -> Any:
    return json.loads(json.dumps(made, default=vars))


def test_prompts_are_part_of_a_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_of: Any) -> None:
    """4 and 20 tokens of prompts in chunks of 8: the first request decodes in two steps beside the second's prompt."""
    monkeypatch.setenv("FORERUN_PREFILL_CHUNK_TOKENS", "8")
    monkeypatch.setenv("FORERUN_PREFILL_STRETCH", "0")  # else how long steps take decides
    file = prompt_file(tmp_path, "a" * 5, "b" * 21)
    base = ("--target", str(tiny), "--draft", "lookup", "--prompt-file", str(file), "--repeats", "2")
    sizes = ("--concurrency", "2", "--spec-length", "1", "--spec-length", "4", "--max-tokens", "6", "--waves", "1")
    record = record_of("throughput", *base, *sizes, "--no-wrong-drafter", "--temperature", "0.5")
    plan = {"concurrencies": [2], "spec_lengths": [1, 4], "max_tokens": 6, "num_repeats": 2, "temperature": 0.5}
    assert record["plan"].items() >= plan.items()
    assert (record["bench"], record["draft"]) == ("throughput", "lookup")
    plain = [run for run in record["runs"] if run["variant"] == PLAIN]
    # A step of the shorter prompt, and six in which its request decodes, three of them beside the other's prompt; with
    # the third token of the second request the run is over.
    assert (plain[0]["num_committed"], plain[0]["num_steps"]) == (6 + 3, 7)
    assert {run["variant"] for run in record["runs"]} == {PLAIN, AGAIN, "K=1", "K=4", AUTO}
    assert [line["wrong_over_plain"] for line in record["lines"]] == [None]
    assert sorted(record["bars"]) == ["again_over_plain", "auto_over_better", "auto_over_max"]


# ----------------------------------------------------------------------------------------------------------- numbers

RATES = {  # tokens per second in three repeats; the third is of a machine that is half as fast
    PLAIN: (10.0, 10.0, 5.0),
    AGAIN: (9.0, 10.0, 6.0),
    fixed_name(2): (12.0, 12.0, 9.0),
    fixed_name(4): (14.0, 11.0, 5.0),
    AUTO: (12.0, 11.0, 6.0),
    WRONG: (10.0, 9.0, 5.5),
}


def known_runs(concurrency: int = 2) -> list[Counts]:
    """Each run has 20 steps of a second's worth of tokens; a quarter of the time is outside of the forward passes."""
    return [
        Counts(name, concurrency, repeat, 20, 40, round(20 * rate), 60, 50, 30, seconds=20.0, forward_s=15.0)
        for name, rates in RATES.items()
        for repeat, rate in enumerate(rates)
    ]


def test_every_number_of_a_line() -> None:
    (line,) = lines_of(known_runs(), (2, 4))
    # Over plain: K=2 1.2, 1.2, 1.8 and K=4 1.4, 1.1, 1.0; the third repeat's 1.8 does not choose for itself.
    assert line.spec_lengths == (2, 2, 4)
    assert (line.plain_tokens_per_s, line.fixed_tokens_per_s, line.auto_tokens_per_s) == (10.0, 12.0, 11.0)
    assert line.auto_over_better.values == pytest.approx((12 / 12, 11 / 12, 6 / 5))
    assert line.auto_over_better.median == pytest.approx(1.0)
    assert line.auto_over_better.range == pytest.approx((11 / 12, 1.2))
    assert line.wrong_over_plain is not None
    assert line.wrong_over_plain.values == pytest.approx((1.0, 0.9, 1.1))
    assert line.again_over_plain is not None
    assert line.again_over_plain.values == pytest.approx((0.9, 1.0, 1.2))
    assert (line.again_over_plain.median, line.again_over_plain.range) == (1.0, (0.9, 1.2))
    assert (line.mean_granted, line.mean_drafted, line.mean_accepted) == (1.5, 1.25, 0.75)
    cost = line.plain_cost
    assert (cost.mean_batch, cost.step_s, cost.overhead_share) == (2.0, 1.0, 0.25)
    assert cost.overhead_us_per_sequence == pytest.approx(0.25e6 / 2)


def test_plain_is_the_rival_where_no_length_pays_elsewhere_and_the_faster_one_of_a_repeat_is_told_apart() -> None:
    runs = [
        Counts(name, 1, repeat, num_committed=committed, seconds=1.0, num_steps=1, num_sequence_steps=1)
        for repeat, rates in enumerate(({PLAIN: 10, "K=3": 20, AUTO: 10}, {PLAIN: 10, "K=3": 8, AUTO: 10}))
        for name, committed in rates.items()
    ]
    (line,) = lines_of(runs, (3,))
    assert line.auto_over_better.values == (1.0, 10 / 8)  # plain, for the other repeat says so, then K=3
    assert line.auto_over_max.values == (0.5, 1.0)


def test_bars_are_over_all_pairs_and_name_the_worst_concurrency() -> None:
    runs = [*known_runs(2), *known_runs(8)[:-1], Counts(WRONG, 8, 2, 20, 40, 40, seconds=20.0)]
    bars = bars_of(lines_of(runs, (2, 4)))
    assert bars["auto_over_better"].num_pairs == 6
    assert bars["auto_over_better"].geometric_mean == pytest.approx((11 / 12 * 1.2) ** (1 / 3))
    bar = bars["wrong_over_plain"]  # at 8 the last repeat is 2 / 5
    assert bar.geometric_mean == pytest.approx((0.9 * 1.1 * 0.9 * 0.4) ** (1 / 6))
    assert (bar.smallest_median, bar.at_concurrency) == (pytest.approx(0.9), 8)


def test_the_best_length_weighs_repeats_alike() -> None:
    repeats = [{name: run for run in known_runs() if run.repeat == r for name in [run.variant]} for r in range(3)]
    assert best_of((PLAIN, "K=2", "K=4"), repeats[:2]) == "K=4"  # 1.4 x 1.1 over 1.2 x 1.2
    assert best_of((PLAIN, "K=2", "K=4"), repeats) == "K=2"


# ------------------------------------------------------------------------------------------------- always wrong


def test_the_wrong_drafter_fills_its_budget_and_asks_before_each_token() -> None:
    asked: list[tuple[int, int]] = []

    def go_on(b: int, depth: int, draft_probs: Probs) -> bool:
        asked.append((b, depth))
        return (b, depth) != (1, 2) and draft_probs.point == 7

    seqs = [Sequence(i, [1], 1, SamplingParams(), 0, 9, frozenset(), ()) for i in range(3)]
    draft = AlwaysWrong(7).propose(seqs, Budget([3, 4, 0], 9, go_on), [])
    assert draft.tokens == [7] * 5
    assert draft.node_starts == [0, 3, 5, 5]
    assert draft.parents == [-1, 0, 1, -1, 3]
    assert all(probs.at(7) == 1 for probs in draft.probs)
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_the_wrong_drafter_is_never_right_and_changes_no_text(temperature: float) -> None:
    model, prompt = random_decoder(3, row_by_row=True), [5, 9, 2, 17]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    texts, reports = [], []
    for spec_length in (None, 3):
        runner = runner_for(model)
        wrong = never_emitted(runner, prompt)
        assert runner.cache.free_tokens() == runner.cache.num_blocks * runner.cache.block_tokens
        engine = Engine(runner, AlwaysWrong(wrong), make("fixed", spec_length), max_seq_len=256)
        engine.listen(reports.append)
        request = engine.add(prompt, params if spec_length else SamplingParams(**{**vars(params), "draft": "none"}))
        while request.seq.finish_reason is None:
            engine.step()
        texts.append(request.seq.output_ids)
    assert texts[0] == texts[1]
    assert wrong not in texts[0]
    assert sum(report.num_drafted for report in reports) > 100
    assert sum(report.num_accepted for report in reports) == 0


def test_an_id_without_a_token_is_the_wrong_one() -> None:
    runner = runner_for(random_decoder(3))
    runner.holes = [VOCAB - 4]
    assert never_emitted(runner, [5, 9, 2]) == VOCAB - 4
    assert torch.is_inference_mode_enabled() is False


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_repeats": 1}, "--repeats 1 is not possible: the best fixed length of a repeat is chosen on the others"),
        ({"max_tokens": 1}, "--max-tokens 1 is not possible: it must be at least 2"),
        ({"concurrencies": (4, 4)}, "--concurrency 4 4 is not possible: each must be at least 1, and none twice"),
        ({"spec_lengths": (0,)}, "--spec-length 0 is not possible: each must be at least 1, and none twice"),
        ({"spec_lengths": ()}, "--spec-length nothing is not possible"),
    ],
)
def test_plans_that_leave_nothing_to_compare(options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(BadOption, ThroughputPlan, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft": "none"}, "draft='none' leaves nothing to compare with plain decoding: name a drafter"),
        ({"pacing": "fixed"}, "pacing='fixed' is not what is measured here: leave it out, or name auto's options"),
        ({}, "--concurrency 3 needs as many prompts, and the prompt file has 2: lower it, or name a longer"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_read(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    plan = ThroughputPlan(concurrencies=(1, 3), prompt_file=prompt_file(tmp_path, "a", "b"))
    assert sentence in refusal(BadOption, run, EngineConfig(target=str(tmp_path / "absent"), **options), plan)
