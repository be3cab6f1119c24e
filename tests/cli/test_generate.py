"""`forerun generate` as a user runs it: every architecture, every way in and out."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import processes
from forerun.cli import words
from forerun.config import EngineConfig
from forerun.native import isa
from forerun.types import SamplingParams

GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_architecture_with_every_drafter(cli: Any, architecture: str) -> None:
    texts = set()
    for draft in ("none", "lookup:max_n=2", "./draft"):
        done = cli("generate", "--target", f"./{architecture}", "--draft", draft, *GREEDY, "def f(n):", code=0)
        assert "12 tokens in" in done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1


def test_what_is_loaded_is_spared_from_garbage_collections(cli: Any) -> None:
    """The libraries' objects, through which a full collection takes 50 to 100 ms; nothing where nothing was loaded."""
    assert cli("generate", "--target", "llama", *GREEDY, "a").is_spared
    assert cli("chat", "shipped", *GREEDY, stdin="a\n").is_spared
    assert not cli("generate", "--target", "nowhere", "a").is_spared


def test_a_frozen_engine_leaves_without_a_word() -> None:
    """Objects that no collection looks at are alive when the process ends; the native ones are no leak."""
    code = "import gc, forerun; llm = forerun.LLM('shipped'); cycle = [llm]; cycle.append(cycle); gc.freeze()"
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_has_text_tokens_and_report(cli: Any) -> None:
    done = cli("generate", "--target", "llama", "--draft", "./draft", *GREEDY, "--json", "a", "bb")
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outputs) == 2
    for output in outputs:
        assert len(output["token_ids"]) == 12
        assert output["finish_reason"] == "length"
        report = output["report"]
        assert len(report["origins"]) == 12
        assert report["num_emitted"] >= 12
        assert set(report) >= {"acceptance_rate", "mean_accepted_length", "alpha_hat", "acceptance_per_position"}


def test_a_beam_search_prints_its_texts_and_scores(cli: Any) -> None:
    base = ("generate", "--target", "llama", "--draft", "./draft", *GREEDY, "--num-beams", "3", "a")
    one = cli(*base, "--early-stopping", "true", "--draft-beams", "4", "--verbose", code=0)
    assert re.search(r"score -\d+\.\d{4}, .*3 beams", one.stderr)
    assert re.search(r"\d+\.\d rows per target pass", one.stderr)
    both = [json.loads(line) for line in cli(*base, "--n", "2", "--json").stdout.splitlines()]
    assert both[0]["score"] >= both[1]["score"]
    assert both[0]["score"] == pytest.approx(both[0]["cumulative_logprob"] / len(both[0]["token_ids"]))
    assert both[0]["report"]["rows_per_pass"] >= 1
    plain = [json.loads(line) for line in cli(*base, "--n", "2", "--json", "--draft", "none").stdout.splitlines()]
    assert [text["text"] for text in plain] == [text["text"] for text in both]
    several = cli(*base, "--n", "2").stdout
    assert (several.count("==> 1: a <=="), several.count("==> 2: a <==")) == (1, 1)
    found = cli("generate", "--target", "llama", *GREEDY, "--num-beams", "3", "a")
    assert "drafts from the text (lookup)" in found.stderr  # which searches for beams
    assert "--rounds shows how one text grows" in cli(*base, "--rounds").stderr
    assert "set temperature to 0" in cli("generate", "--target", "llama", "--num-beams", "3", "a").stderr


def test_a_file_behind_an_at_sign_is_a_text_and_that_is_said(cli: Any, written: Any) -> None:
    for text, is_said in ((f"@{written('abc', 'text.txt')}", True), ("@nobody", False)):
        done = cli("generate", text, "--target", "llama", *GREEDY, code=0)
        assert ("is sent as it is; --prompt-file reads a file" in done.stderr) == is_said


def test_a_lossy_rule_is_named_with_its_price(cli: Any) -> None:
    drafts = ("--draft", "./draft", "--pacing", "fixed", "--seed", "1")
    base = ("generate", "--target", "llama", *drafts, "--max-tokens", "12", "a")
    report = json.loads(cli(*base, "--acceptance", "lenience:l=0.5", "--json").stdout)["report"]
    assert (report["acceptance"], report["is_lossless"]) == ("lenience:l=0.5", False)
    assert 0 <= report["tv_price"] <= 1
    lossy = f"lossy: lenience:l=0.5, TV price {report['tv_price']:.1%} a tested token"
    assert lossy in cli(*base, "--acceptance", "lenience:l=0.5").stderr
    assert "lossy: typical," in cli(*base, "--acceptance", "typical").stderr
    assert "lossy" not in cli(*base, "--acceptance", "block").stderr


def test_the_ways_in_are_one_prompt(cli: Any, written: Any) -> None:
    base = ("generate", "--target", "llama", "--draft", "none", *GREEDY)
    outputs = [
        cli(*base, "def f(n):\n").stdout,
        cli(*base, "--prompt-file", written("def f(n):\n", "prompt.txt")).stdout,
        cli(*base, stdin="def f(n):\n").stdout,
        cli(*base, "-", stdin="def f(n):\n").stdout,
    ]
    assert len(set(outputs)) == 1
    assert outputs[0].strip()


def test_stop_string_is_cut_and_names_the_reason(cli: Any) -> None:
    base = ("generate", "--target", "llama", "--draft", "none", "--temperature", "0", "--json", "--max-tokens", "40")
    text = json.loads(cli(*base, "def f(n):").stdout)["text"]
    stop = next(char for char in text[5:] if char.isascii() and char.isprintable())
    cut = json.loads(cli(*base, "--stop", stop, "def f(n):").stdout)
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_seed_repeats_and_is_reported(cli: Any) -> None:
    base = ("generate", "--target", "llama", "--json", "--max-tokens", "12", "x")
    first = json.loads(cli(*base, "--seed", "7", "--draft", "none").stdout)
    second = json.loads(cli(*base, "--seed", "7", "--draft", "./draft").stdout)
    assert first["seed"] == 7
    assert first["token_ids"] == second["token_ids"]  # match verification: the drafter does not matter


def test_variables_and_config_file_are_below_flags(cli: Any, written: Any) -> None:
    file = written('target = "nowhere"\ndraft = "none"\n', "forerun.toml")
    base = ("generate", *GREEDY, "--json", "--config", file, "x")
    assert "nowhere" in cli(*base).stderr
    assert json.loads(cli(*base, FORERUN_TARGET="llama").stdout)["report"]["num_drafted"] == 0
    from_flag = cli(*base, "--draft", "./draft", "--spec-length", "5", FORERUN_TARGET="llama", FORERUN_DRAFT="lookup")
    assert json.loads(from_flag.stdout)["report"]["num_drafted"] > 12


def test_batch_prints_a_heading_for_each_prompt(cli: Any) -> None:
    done = cli("generate", "--target", "llama", *GREEDY, "one", "two")
    assert "==> 1: one <==" in done.stdout
    assert "==> 2: two <==" in done.stdout


def test_every_option_has_a_flag(cli: Any) -> None:
    printed = cli("generate", "--help").stdout
    renamed = {"bad_words": "bad-word", "stop_token_ids": "stop-token-id", "ignore_config_keys": "ignore-config-key"}
    fields = [f for kind in (SamplingParams, EngineConfig) for f in kind.__dataclass_fields__]
    assert [f for f in fields if f"--{renamed.get(f, f.replace('_', '-'))}" not in printed] == []


def test_flags_of_sampling_reach_the_engine(cli: Any) -> None:
    base = ("generate", "--target", "llama", "--json", *GREEDY, "x")
    forced = json.loads(cli(*base, "--logit-bias", "7=99", "--logit-bias", "8=-1", "--logprobs", "2").stdout)
    assert forced["token_ids"] == [7] * 12
    assert len(forced["logprobs"]) == 12
    assert forced["logprobs"][0]["token_id"] == 7
    assert len(forced["logprobs"][0]["top"]) == 2
    stopped = json.loads(cli(*base, "--logit-bias", "7=99", "--stop-token-id", "7", "--min-tokens", "3").stdout)
    assert len(stopped["token_ids"]) == 4
    assert "logprobs" not in stopped
    char = next(c for c in json.loads(cli(*base).stdout)["text"] if c.isascii() and c.isprintable())
    assert char not in json.loads(cli(*base, "--bad-word", char).stdout)["text"]
    for penalty in (("--repetition-penalty", "9"), ("--presence-penalty", "2"), ("--frequency-penalty", "2")):
        ids = json.loads(cli(*base, "--logit-bias", "7=6", *penalty).stdout)["token_ids"]
        assert ids != json.loads(cli(*base, "--logit-bias", "7=6").stdout)["token_ids"], penalty


def test_a_prediction_is_a_text_or_a_file(cli: Any, refused: Any, written: Any) -> None:
    """It makes the passes fewer and changes no token; an @ is doubled at the beginning of a text."""
    base = ("--target", "shipped", "--draft", "lookup", "--pacing", "fixed")
    asked = ("generate", *base, *GREEDY, "--json", "def f(n):")
    plain = json.loads(cli(*asked).stdout)
    file = written(plain["text"], "file")
    for given in (plain["text"], f"@{file}", f"@@{plain['text']}"):
        found = json.loads(cli(*asked, "--prediction", given).stdout)
        assert found["token_ids"] == plain["token_ids"]
        assert found["report"]["num_accepted"] >= 6
    assert "the file of --prediction" in refused(*asked, "--prediction", f"@{file}-of-nobody")


def test_each_line_of_a_batch_has_its_own_parameters(cli: Any, written: Any) -> None:
    lines = [
        {"prompt": "def f(n):"},
        {"prompt": "a\u2028b", "max_tokens": 3, "seed": 5, "temperature": 1, "logprobs": 0},
        {"prompt": [5, 6, 7], "logit_bias": {"9": 99}, "max_tokens": 4, "stop": None},
    ]
    file = written("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", "prompts.jsonl")
    base = ("generate", "--target", "llama", "--draft", "./draft", *GREEDY)
    outputs = [json.loads(line) for line in cli(*base, "--json", "--prompt-file", file).stdout.splitlines()]
    assert [len(output["token_ids"]) for output in outputs] == [12, 3, 4]
    assert outputs[0]["token_ids"] == json.loads(cli(*base, "--json", "def f(n):").stdout)["token_ids"]
    assert outputs[1]["seed"] == 5
    assert ["logprobs" in output for output in outputs] == [False, True, False]
    assert outputs[2]["token_ids"] == [9] * 4
    file = written(json.dumps(lines[0]) + "\n" + json.dumps(lines[2]), "prompts.jsonl")
    printed = cli(*base, "--prompt-file", file).stdout
    assert "==> 1: def f(n): <==" in printed
    assert "==> 2: " in printed


CHATTY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def chatty(checkpoints: Path, tmp_path: Path) -> str:
    """A model with a chat template."""
    folder = shutil.copytree(checkpoints / "llama", tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(CHATTY, encoding="utf-8")
    return str(folder)


def test_a_model_with_a_chat_template_answers(cli: Any, refused: Any, chatty: str) -> None:
    """Behind a text that is no conversation such a model often ends at once, and nothing said why."""
    base = ("generate", "--target", chatty, "--draft", "none", *GREEDY)
    answered, asked, continued = (cli(*base, *way, "hello") for way in ((), ("--chat",), ("--raw",)))
    assert answered.stdout == cli(*base, "--raw", "<user>hello<assistant>").stdout
    assert asked.stdout == answered.stdout
    assert continued.stdout == cli("generate", "--target", "llama", "--draft", "none", *GREEDY, "hello").stdout
    assert continued.stdout != answered.stdout
    assert "chat template" in refused("generate", "--target", "llama", "--chat", "hello")


def test_the_heading_of_a_conversation_is_its_last_message(cli: Any, chatty: str, written: Any) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    lines = [{"messages": [*talk, {"role": "user", "content": "what\nnow"}]}, {"prompt": "hello"}, {"prompt": [5, 6]}]
    file = written("\n".join(map(json.dumps, lines)), "talks.jsonl")
    printed = cli("generate", "--target", chatty, *GREEDY, "--prompt-file", file).stdout
    headings = [line for line in printed.splitlines() if line.startswith("==> ")]
    assert headings[:2] == ["==> 1: now <==", "==> 2: hello <=="]


def test_the_closing_line(cli: Any) -> None:
    base = ("generate", "--target", "llama", "--draft", "none", "--dtype", "float32")
    one = cli(*base, "--temperature", "0", "--max-tokens", "1", "a").stderr
    said = r"1 token in 1 target pass, \d+\.\d tokens/s, float32, (native|reference) operators, greedy"
    assert re.fullmatch(rf"\[llama, no drafts, {said}, cut at --max-tokens\]\n", one)
    drawn = cli(*base, "--top-p", "0.5", "--max-tokens", "2", "--seed", "7", "a").stderr
    assert "2 tokens in 2 target passes, " in drawn
    assert "operators, temperature 1, top-p 0.5, seed 7, cut" in drawn
    told = cli(*base[:3], "--draft", "./draft", *GREEDY, "--verbose", "a").stderr
    assert "alpha-hat" in told.splitlines()[1]
    if isa() != "reference":
        assert "bfloat16 (the file has float32)" in told


def test_the_closing_line_names_a_card_that_is_idle(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked where the driver is there."""
    cuda = pytest.importorskip("forerun.ops.cuda")
    monkeypatch.setattr(cuda, "card", lambda: "NVIDIA H100")
    monkeypatch.setattr(cuda, "usable", lambda device: None)
    for is_there in (False, True):
        monkeypatch.setattr(words, "has_card", lambda is_there=is_there: is_there)
        said = cli("generate", "a", "--target", "llama", "--draft", "none", "--max-tokens", "1").stderr
        assert ("--device cuda would compute on NVIDIA H100" in " ".join(said.split())) == is_there


# ----------------------------------------------------------------------------------------------------------- rounds


ROUNDS = ("generate", "--target", "llama", "--max-tokens", "40", "--temperature", "0", "--rounds")


def rounds(cli: Any, *more: str, **env: str) -> list[str]:
    return list(cli(*ROUNDS, *more, code=0, **env).stdout.splitlines())


def test_rounds_count_tokens_and_runs(cli: Any) -> None:
    # The target drafts for itself: everything is accepted.
    done = cli(*ROUNDS, "--draft", "./llama", "--spec-length", "5", "def f(n):")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["accepted, [-rejected-], {never tested}, [+the target's own+]", "pass accepted/drafted"]
    assert lines[2].startswith("   1  5/5")
    assert "[-" not in "".join(lines[2:9])
    assert lines[9] == ""
    plain = cli(*ROUNDS[:-1], "--draft", "none", "def f(n):").stdout
    assert done.stdout.endswith(f"\n\n{plain}")  # the text itself comes behind the passes
    assert "40 tokens in 7 target passes, " in done.stderr


def test_rounds_mark_rejections_in_a_real_pipe(process: Any) -> None:
    lines = rounds(process, "--draft", "./draft", "def f(n):")
    assert any("[-" in line and "-][+" in line for line in lines[2:])
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)


def test_rounds_in_colour_have_the_marks_too_and_no_color_wins(cli: Any) -> None:
    """What is copied from a terminal loses its colours."""
    colour = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    coloured = rounds(cli, "--draft", "./draft", "--spec-length", "3", "x", **colour)
    assert any("\x1b[31m[-" in line for line in coloured)
    plain = rounds(cli, "--draft", "./draft", "--spec-length", "3", "x", **colour, NO_COLOR="1")
    assert "31m" not in "".join(plain)
    bare = [[re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines] for lines in (coloured, plain)]
    assert bare[0] == bare[1]


def test_rounds_wrap_in_80_columns(cli: Any) -> None:
    lines = rounds(cli, "--draft", "./llama", "--spec-length", "39", "def f(n):")
    assert all(len(line) <= 80 for line in lines)
    assert lines[3].startswith(" " * 11)
