"""`forerun tune`: the counts that predictions are made of, the choice, the files, and whole runs on small models."""

import importlib.util
import itertools
import json
import math
import os
import random
import tomllib
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import fmean

import pytest
import typer
from typer.testing import CliRunner

from forerun.bench import report
from forerun.bench.latency import heard
from forerun.bench.plans import TunePlan
from forerun.bench.results import Tally, Variant
from forerun.bench.tune import contenders_of, drop_slow, further, run
from forerun.bench.tune_engine import candidates_of
from forerun.bench.tune_picture import caption
from forerun.bench.tune_prediction import LONGEST, Passes, Prediction, Predictor, Round, Turn, alphas, replay
from forerun.bench.tune_results import Contender, Found, Way, chosen_of, config_of, measured_of, reason_of, write_config
from forerun.cli.main import app
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened
from forerun.errors import BadOption
from forerun.types import RoundDetail, SamplingParams, StepReport
from refusals import refusal

PLAIN = Way("none", 0)


def prompt_file(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    rows = [{"prompt": "one two one two one two one"}, {"messages": [{"role": "user", "content": "ab ab ab ab"}]}]
    file.write_text("".join(json.dumps({"id": "a", "kind": "b", **row}) + "\n" for row in rows), encoding="utf-8")
    return file


def chain(num_drafted: int, num_accepted: int) -> Round:
    return Round(range(-1, num_drafted - 1), range(num_accepted))


# ------------------------------------------------------------------------------------------------------------- counting


def test_a_replay_at_the_recorded_length_is_the_record() -> None:
    tree = Round([-1, -1, 0, 0, 2], [0, 3])
    texts = [[chain(16, 16), chain(16, 3), chain(0, 0)], [tree, chain(2, 2), Round([-1, -1], [])]]
    found = replay(texts, LONGEST)
    assert (found.num_rounds, found.num_tokens) == (6, 17 + 4 + 1 + 3 + 3 + 1)
    assert found.num_nodes == 16 + 16 + 0 + 5 + 2 + 2
    assert found.num_passes == 16 + 16 + 0 + 3 + 2 + 1


def test_shorter_chains_are_counted_as_they_would_run() -> None:
    """By a drafter whose guess at each place of a text is right or not, whatever the length: all lengths are known."""
    coins = random.Random(7)
    for _ in range(20):
        is_right = [coins.random() < 0.8 for _ in range(200)]
        texts = [recorded(is_right, LONGEST)]
        for spec_length in range(1, LONGEST + 1):
            wanted = recorded(is_right, spec_length)
            found = replay(texts, spec_length)
            # What the target says itself between two long drafts is guessed by short ones, and was not tested.
            tested = list(itertools.accumulate(len(r.accepted) + 1 for r in texts[0]))
            hidden = sum(not is_right[t - 1] for t, r in zip(tested, texts[0], strict=True) if r.ends_open and t <= 200)
            assert len(wanted) - 2 * hidden - 1 <= found.num_rounds <= len(wanted) + 1
    assert hidden <= 2  # 0.8 ** 16 of the rounds are accepted as a whole


def recorded(is_right: Seq[bool], spec_length: int) -> list[Round]:
    """The rounds of such a drafter; the last draft is cut to what is left."""
    rounds, place = list[Round](), 0
    while place < len(is_right):
        guessed = is_right[place : place + min(spec_length, len(is_right) - place - 1)]
        num_accepted = next((i for i, right in enumerate(guessed) if not right), len(guessed))
        rounds.append(chain(len(guessed), num_accepted))
        place += num_accepted + 1
    return rounds


def test_runs_of_right_guesses_are_cut_into_equal_parts() -> None:
    """Independently of how the count walks: behind a rejection a run of n tokens takes ceil(n / (K + 1)) chains."""
    coins = random.Random(3)
    texts = [[chain(16, coins.randrange(16)) for _ in range(30)] for _ in range(5)]  # each ends with a rejection
    for spec_length in range(1, LONGEST + 1):
        runs = [len(round_.accepted) + 1 for text in texts for round_ in text]
        assert replay(texts, spec_length).num_rounds == sum(math.ceil(run / (spec_length + 1)) for run in runs)


def test_the_best_nodes_of_a_tree_come_first() -> None:
    """0 and 1 are siblings, 2 hangs from 1 and 3 from 2; the target took 1, 2, 3 and then said something else."""
    tree = Round([-1, -1, 1, 2, 3], [1, 2, 3])
    assert replay([[tree]], 4).num_rounds == 1
    assert replay([[tree]], 3).num_rounds == 2  # 1, 2 and a token; behind that the correction
    assert replay([[tree]], 2).num_rounds == 2  # 1 and a token; then 3, which is the first node there
    assert replay([[tree]], 1).num_rounds == 3  # 0 is wrong; 2 and a token; the correction


def test_alpha_by_position() -> None:
    assert alphas([[chain(3, 3), chain(3, 1), chain(0, 0)], [chain(3, 0)]]) == [2 / 3, 1 / 2, 1.0]
    assert alphas([[chain(0, 0)]]) == []


# --------------------------------------------------------------------------------------------------------- real rounds


def test_counts_are_those_of_a_real_run_with_shorter_drafts() -> None:
    """The shipped pair, greedy: the same text, so that what is predicted for K = 2 and 5 can be counted."""
    llm = LLM("shipped", extra_drafts="suffix:shape=tree", max_batch_size=1, prefix_caching=False)
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\nclass Line:\n"
    for draft in ("model", "suffix:shape=tree"):
        rounds = {k: run_rounds(llm, prompt, draft, k) for k in (LONGEST, 5, 2)}
        texts = [[Round(detail.parents, detail.accepted) for detail in rounds[LONGEST]]]
        assert replay(texts, LONGEST).num_rounds == len(rounds[LONGEST])
        for k in (5, 2):
            found = replay(texts, k)
            assert found.num_tokens == sum(len(detail.accepted) + 1 for detail in rounds[k])
            assert found.num_rounds == pytest.approx(len(rounds[k]), rel=0.06)
            assert found.num_nodes == pytest.approx(sum(len(detail.tokens) for detail in rounds[k]), rel=0.12)
        if draft == "model":  # the mean over the long rounds has too few of the good ones (docs/use/tuning.md)
            mean = fmean(1 + min(2, len(detail.accepted)) for detail in rounds[LONGEST])
            assert mean < 0.95 * found.tokens_per_pass


def run_rounds(llm: LLM, prompt: str, draft: str, spec_length: int) -> list[RoundDetail]:
    steps = list[StepReport]()
    params = SamplingParams(
        max_tokens=96, temperature=0, draft=draft, spec_length=spec_length, ignore_eos=True, cache_salt=str(spec_length)
    )
    with heard(llm, steps.append, detail=True):
        llm.generate(prompt, params)
    return [detail for step in steps for detail in step.rounds]


# ------------------------------------------------------------------------------------------------------------- seconds


def step(pass_s: float, *, draft_s: float = 0.0, rest_s: float = 0.01, rounds: Seq[RoundDetail] = ()) -> StepReport:
    num_drafted = sum(len(detail.tokens) for detail in rounds)
    num_emitted = 1 + sum(len(detail.accepted) for detail in rounds)
    seconds = {"draft_s": draft_s, "score_s": pass_s + rest_s, "target_forward_s": pass_s}
    return StepReport(num_decoding=1, num_rows=1 + num_drafted, num_emitted=num_emitted, rounds=list(rounds), **seconds)


def detail(num_drafted: int, num_accepted: int) -> RoundDetail:
    parents = list(range(-1, num_drafted - 1))
    nothing = [0.0] * num_drafted
    return RoundDetail(0, 0, [0] * num_drafted, parents, nothing, list(nothing), [], list(range(num_accepted)), 0, 16)


def test_every_second_of_a_prediction_is_counted_once() -> None:
    """A pass of n rows takes 1 + 0.1 (n - 1) s, 0.02 of each row more is not in the curve; drafting takes 0.2 s."""
    plain = Tally(Variant("none", 0), 0.0, [1.01], [step(1.0)] * 10)
    rounds = [detail(16, 16), detail(16, 2), detail(0, 0)]
    steps = [step(1 + 0.1 * len(one.tokens), draft_s=0.2, rest_s=0.01, rounds=[one]) for one in rounds]
    drafted = Tally(Variant("lookup", 0), 0.0, [1.0], steps)
    passes = Passes(lambda rows: 1 + 0.08 * (rows - 1))
    assert passes.v(17) == pytest.approx(1 + 0.08 * 16)
    for _ in range(6):
        passes.add(plain.steps, [step(1 + 0.1 * 11, rounds=[detail(11, 0)])])
        passes.add(plain.steps, steps[:2])
    assert passes.v(17) == pytest.approx(1 + 0.1 * 16)
    found = Predictor([Turn(plain, drafted)], passes, runs_model=False).at(LONGEST)
    num_tokens, seconds = 17 + 3 + 1, 3 * (0.2 + 0.01) + 3 * (1 + 0.1 * 32 / 3)
    assert found.tokens_per_pass == 7
    assert found.speedup == pytest.approx(num_tokens * 1.01 / seconds)
    assert found.v == pytest.approx(1 + 0.1 * 32 / 3)
    assert found.c == pytest.approx(3 * 0.2 / 32)


def by_round(*seconds: float) -> dict[int, float]:
    return dict(enumerate(seconds))


def test_a_prompt_that_is_slow_for_a_minute_cancels_out() -> None:
    plain = {0: by_round(1.0, 1.0, 10.0), 1: by_round(2.0, 2.0, 2.0)}
    found = measured_of({0: by_round(0.5, 0.5, 5.0), 1: by_round(1.0, 9.0, 1.0)}, plain)
    assert found.speedup == pytest.approx(2.0)
    assert (found.num_rounds, found.most) == (3, pytest.approx(2.0))
    assert found.least == pytest.approx(3 / (0.5 + 2 * 4.5))
    later = measured_of({0: {1: 4.5}}, {0: by_round(1.0, 9.0)})
    assert (later.speedup, later.num_rounds) == (2.0, 1), "against plain decoding's second round"


# -------------------------------------------------------------------------------------------------------------- choice


def contender(way: Way, *seconds: float) -> Contender:
    made = Contender(way, None, {0: by_round(*seconds)})
    made.measured = measured_of(made.seconds, {0: by_round(*[1.0] * len(seconds))})
    return made


def test_the_fastest_is_chosen_and_plain_decoding_where_nothing_pays() -> None:
    plain, slow = contender(PLAIN, 1.0, 1.0), contender(Way("a", 3), 0.9, 0.9)
    fast = contender(Way("b", None), 0.5, 0.6)
    assert chosen_of([plain, slow, fast], 12) == (fast, "")
    assert chosen_of([plain, contender(Way("a", 3), 0.98, 0.98)], 12) == (plain, "")
    assert chosen_of([plain], 12) == (plain, "")
    everyone = [plain, slow, fast]
    drop_slow(everyone)
    assert [one.is_out for one in everyone] == [False, True, False]


def test_what_is_not_certain_is_left_to_auto() -> None:
    plain = contender(PLAIN, 1.0, 1.0)
    paced, unsure = contender(Way("b", None), 0.99, 1.01), contender(Way("a", 3), 0.5, 1.2)
    hopeful = contender(Way("a", 3), 0.9, 1.2)
    for contenders in ([plain, unsure, paced], [plain, hopeful, paced]):
        chosen, doubt = chosen_of(contenders, 12)
        assert chosen is paced
        assert doubt.startswith("a with K = 3 made 0.83 to ")
    for contenders in ([plain], [plain, contender(Way("a", 3), 0.5, 0.5)]):
        chosen, doubt = chosen_of(contenders, 1)
        assert config_of(chosen, EngineConfig(), 1) == {"draft": "auto", "pacing": "auto"}
        assert doubt == "1 prompt of at least 4 were measured"
    said = reason_of(found_with([plain, hopeful, paced])).removeprefix("Nothing is certain: a with K = 3 made ")
    assert said.startswith("0.83 to 1.11 times plain decoding's tokens per second.")
    assert "Chosen: b with pacing=auto; more --minutes may tell." in said


def test_the_caption_of_a_picture_names_what_is_drawn() -> None:
    plain, fixed, auto = contender(PLAIN, 1.0), contender(Way("a", 3), 0.5), contender(Way("b", None), 0.9)
    assert "Star: chosen." in caption(found_with([plain, fixed, auto]), [fixed, auto])
    alone = caption(found_with([plain, contender(Way("a", 3), 1.0)]), [fixed])
    assert "Star" not in alone
    assert "Dashed" not in alone
    assert alone.endswith("Chosen: plain decoding.")


def predictions(*speedups: float, tokens: float = 2.0) -> list[Prediction]:
    return [Prediction(k, tokens, 0.1, 1.0, speedup) for k, speedup in enumerate(speedups, 1)]


def test_the_most_promising_ways_are_measured() -> None:
    found = contenders_of({"a": predictions(1.2, 1.5, 1.48, 1.2), "b": predictions(1.1, 1.0), "c": predictions(0.5)})
    assert found == [PLAIN, Way("a", 2), Way("b", 1), Way("a", 3), Way("a", None), Way("b", None)]
    assert contenders_of({"a": predictions(1.5, tokens=1.0)}) == [PLAIN], "it was never right"


def test_a_length_that_promises_more_than_all_that_were_measured_is_measured_too() -> None:
    plain, first = contender(PLAIN, 1.0), contender(Way("a", 2), 0.5)
    guesses = {"a": predictions(1.2, 1.6, 1.7, 1.5), "b": predictions(9.0)}  # a turned out to be 2 / 1.6 times as fast
    assert further([plain, first], guesses) == [Way("a", 3)]
    assert further([plain, first, contender(Way("a", 3), 0.45)], guesses) == []
    assert further([plain], guesses) == []


def found_with(contenders: Seq[Contender]) -> Found:
    return Found({}, contenders, *chosen_of(contenders, 12), {}, {}, None, {}, {}, 12, 1.0)


def test_the_config_file_has_what_starts_the_engine_again(tiny: Path, tmp_path: Path) -> None:
    given = EngineConfig(target=os.path.relpath(tiny), dtype="float32", draft="lookup", prefix_caching=False)
    fixed, auto = contender(Way("lookup:max_n=2", 3), 0.5), contender(Way("suffix", None), 0.5)
    plain, same = contender(PLAIN, 1.0), contender(Way("a", 1), 1.0)
    common = {"target": str(tiny), "dtype": "float32", "prefix_caching": False}
    wanted = [
        (fixed, {**common, "draft": "lookup:max_n=2", "spec_length": 3, "pacing": "fixed"}),
        (auto, {**common, "draft": "suffix", "pacing": "auto"}),
        (plain, {**common, "draft": "none"}),
    ]
    for chosen, options in wanted:
        assert config_of(chosen, given, 1) == options
        for name in ("written.toml", "written.json"):
            write_config(tmp_path / name, options, found_with([plain, chosen]))
            assert EngineConfig.from_sources({}, str(tmp_path / name)) == EngineConfig(**options)
    assert config_of(auto, given, 40)["max_batch_size"] == 40
    assert "Chosen: lookup:max_n=2 with K = 3, for it made 2.00 times" in reason_of(found_with([plain, fixed]))
    assert "Chosen: plain decoding, for nothing was faster by 3%" in reason_of(found_with([plain, same]))
    assert reason_of(found_with([plain])) == "Chosen: plain decoding, for no drafted token was ever right."


# ---------------------------------------------------------------------------------------------------- the whole command


def tune(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "100"})
    if code:
        assert done.exception is not None
        return str(done.exception)
    assert done.exit_code == 0, done.output
    return done.output


SMALL = ("--minutes", "1e-9", "--max-tokens", "8")  # one group of prompts, two rounds, on any machine


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the picture needs matplotlib")
def test_a_whole_run_writes_a_config_that_commands_take(tiny: Path, tmp_path: Path) -> None:
    out, picture, record_file = (tmp_path / name for name in ("forerun.json", "tune.png", "all.json"))
    files = ("--out", str(out), "--picture", str(picture), "--json", str(record_file))
    drafts = ("--draft", str(tiny), "--draft", "lookup", "--draft", "suffix:shape=tree", "--only")
    printed = tune(str(tiny), "--prompts", str(prompt_file(tmp_path)), *drafts, *files, *SMALL)
    assert "Chosen: " in printed
    assert "There was time for the first 1 of them" in printed
    assert f"Written to {out}" in printed.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(record_file.read_text(encoding="utf-8"))
    assert set(record["predictions"]) == {str(tiny), f"tree:of=(model:path={tiny})", "lookup", "suffix:shape=tree"}
    assert report.run([record_file], tmp_path / "report.html") == 1
    own = record["predictions"][str(tiny)]
    assert record["alpha_hats"][str(tiny)] == 1.0, "the target drafts for itself"
    assert [one["tokens_per_pass"] for one in own][:3] == [2.0, pytest.approx(8 / 3), 4.0]
    options = json.loads(out.read_text(encoding="utf-8"))
    assert options == record["config"]
    assert options["pacing"] == "auto", "one prompt is too few to choose by"
    assert options["target"] == str(tiny)
    asked = {"model": "m", "prompt": "x", "max_tokens": 2, "temperature": 0}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": asked}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    batch = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    for command in (["generate", "x", "--max-tokens", "2", "--temperature", "0"], ["plan"], batch):
        done = CliRunner().invoke(app, [*command, "--config", str(out)])
        assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["response"]["status_code"] == 200


def test_every_command_that_runs_an_engine_takes_a_config_file() -> None:
    top = typer.main.get_command(app)
    commands = {**top.commands, **{f"bench {k}": v for k, v in top.commands["bench"].commands.items()}}  # type: ignore[attr-defined]
    takers = {name for name, command in commands.items() if any(param.name == "config" for param in command.params)}
    assert {"generate", "chat", "serve", "batch", "lab", "plan", "tune", "bench latency", "bench methods"} <= takers


def test_two_requests_at_once_and_sampled(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "forerun.toml"
    given = ("--draft", "lookup", "--draft", "random", "--only", "--concurrency", "2", "--temperature", "0.8")
    printed = tune(str(tiny), "--prompts", str(prompt_file(tmp_path)), *given, "--out", str(out), *SMALL, "--json", "-")
    assert "2 prompts, at most 8 tokens, temperature 0.8, 2 requests at a time" in " ".join(printed.split())
    record = json.loads(printed.splitlines()[-1])
    assert record["num_prompts"] == 2
    assert tomllib.loads(out.read_text(encoding="utf-8")) == record["config"]
    assert out.read_text(encoding="utf-8").startswith("# forerun tune. Nothing is certain: 2 prompts of at least 4 ")


def test_a_drafter_that_is_never_right_is_not_chosen(tiny: Path) -> None:
    requests = (("abcdefghijklm", SamplingParams(max_tokens=6, temperature=0)),) * 4  # one group of prompts
    plan = TunePlan(requests=requests, drafts=("random",), only=True, concurrency=4, minutes=0.001, max_tokens=6)
    record = run(EngineConfig(target=str(tiny)), plan)
    assert all(one["tokens_per_pass"] == 1 and one["speedup"] <= 1 for one in record["predictions"]["random"])
    assert [one["draft"] for one in record["contenders"]] == ["none"]
    assert record["config"]["draft"] == "none"


def test_what_cannot_be_honoured_is_refused_before_anything_is_measured(tiny: Path, tmp_path: Path) -> None:
    empty, wrong, silent = (tmp_path / f"{name}.jsonl" for name in ("empty", "wrong", "silent"))
    empty.write_text("\n", encoding="utf-8")
    wrong.write_text('{"text": "x"}\n', encoding="utf-8")
    silent.write_text('{"prompt": "x", "max_tokens": 0}\n', encoding="utf-8")
    prompts = ("--prompts", str(prompt_file(tmp_path)))
    cases = {
        (str(tiny), "--prompts", str(empty)): "holds no prompt",
        (str(tiny), "--prompts", str(wrong)): "there is no prompt",
        (str(tiny), "--prompts", str(silent)): "prompt 1: max_tokens=0 is not possible: nothing would be written",
        (str(tiny), "--prompts", str(tmp_path / "absent.jsonl")): "cannot be read",
        (str(tiny), *prompts, "--out", str(tmp_path / "absent" / "f.json")): "--out .* cannot be written",
        (str(tiny), *prompts, "--draft", "lokup"): "did you mean 'lookup'",
        (str(tiny), *prompts, "--draft", "model"): "needs a draft model",
        (str(tiny), *prompts, "--only"): "--only leaves no drafter",
        (str(tiny), *prompts, "--minutes", "0"): "--minutes 0 is not possible",
        (str(tiny), *prompts, "--temperature", "-1"): "temperature=-1.0 is not possible",
        (str(tiny), *prompts, "--picture", str(tmp_path / "f.pdf")): "must end in .svg or .png",
        (str(tmp_path / "absent"), *prompts): "absent",
    }
    for arguments, why in cases.items():
        with pytest.raises(BaseException, match=why):
            raise RuntimeError(tune(*arguments, code=2))


def test_candidates_of_a_model_without_a_draft_are_those_that_need_no_file(tiny: Path) -> None:
    opened = Opened.of(EngineConfig(target=str(tiny)))
    assert candidates_of(opened, TunePlan())[:3] == ["suffix:shape=tree", "suffix", "lookup"]
    assert candidates_of(Opened.of(EngineConfig(target="shipped")), TunePlan())[:2] == ["model", "tree"]
    assert candidates_of(opened, TunePlan(drafts=("none", "lookup"), only=True)) == ["lookup"]
    assert "no drafter is left" in refusal(BadOption, candidates_of, opened, TunePlan(drafts=("none",), only=True))
