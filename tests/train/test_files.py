"""What train's commands read: files of another form are refused in one sentence that says what to do."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.conftest import little_room
from forerun.errors import BadOption, NotFound, UnsupportedModel, UserError
from forerun.train import card, lm, loop
from forerun.train.evaluate import read_prompts
from forerun.train.questions import read_questions
from forerun.train.texts import counting
from forerun.train.tokenizer import load_tokenizer
from refusals import refusal
from train.conftest import Make, run_command


def test_prompts_are_texts_under_either_name(tmp_path: Path) -> None:
    """Also with a line separator of Unicode in it, which ends no line of JSON."""
    (file := tmp_path / "prompts.jsonl").write_text('{"text": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert read_prompts(file, target="shipped") == ["a\u2028b", "c"]
    assert read_prompts(file, 1, target="shipped") == ["a\u2028b"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"text": "a"}\n{"question": "b"}\n', 'line 2 of \'.*\' has no text in "text" or "prompt": write it like'),
        (b'{"text": 3}', "line 1 of '.*' has no text"),
        (b'{"text": ""}', "line 1 of '.*' has no text"),
        (b'["a"]', r"line 1 of '.*' is no JSON object: write it like \{\"text\""),
        (b"\ndef f():\n", r"line 2 of '.*' is not JSON \(Expecting value\): write it like"),
        (b"[" * 100_000, "line 1 of '.*' is not JSON"),
        (b"\xff\xfe", "the prompt file '.*' is not UTF-8 text: convert it first"),
        (b"\n", "the prompt file '.*' is empty: write it like"),
        (None, r"the prompt file '.*' cannot be read \(Is a directory\): check its name"),
    ],
)
def test_a_file_of_other_prompts_is_refused_by_its_line(tmp_path: Path, data: bytes | None, sentence: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if data is None:
        file.mkdir()
    else:
        file.write_bytes(data)
    assert re.match(sentence, refusal(UserError, read_prompts, file, target="shipped"))


@pytest.mark.parametrize("folder", ["", "not there"])
def test_prompts_that_are_not_there_come_with_a_command_that_writes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(NotFound, read_prompts, tmp_path / folder / "my prompts.jsonl", target="shipped")
    command = shlex.split(said.split("`")[1])
    assert command[1:3] == ["train", "prompts"]
    run_command([*command[2:], "--limit", "2"])
    assert len(read_prompts(tmp_path / "my prompts.jsonl", target="shipped")) == 2


def test_tokens_are_counted_by_a_file_or_by_a_model(tmp_path: Path) -> None:
    folder = Path(card.__file__).parents[1] / "data" / "target"
    counts = {counting(name)("import os\n") for name in (str(folder), str(folder / "tokenizer.json"), "shipped")}
    assert len(counts) == 1
    (file := tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a file of the tokenizers library" in refusal(UnsupportedModel, load_tokenizer, file)


def test_a_card_of_other_files_is_refused(tiny: Make, tmp_path: Path) -> None:
    config = tiny(steps=1)
    lm.train(config, quiet=True)
    (out := tmp_path / "other").mkdir()
    run = json.loads((config.out / "run.json").read_text())
    (out / "run.json").write_text("{")
    assert "is not valid JSON" in refusal(UserError, card.read_run, out)
    (out / "run.json").write_text(json.dumps({**run, "options": {"method": "medusa"}}))
    assert "holds no run of `forerun train lm`: name an out folder of it" in refusal(BadOption, card.read_run, out)
    (out / "run.json").write_text(json.dumps(run))
    assert "the log '" in refusal(NotFound, card.read_run, out)
    (out / "log.jsonl").write_text("")
    assert "is empty" in refusal(NotFound, card.read_run, out)
    (out / "log.jsonl").write_text('{"step": 1}\n{"st')
    assert re.match("line 2 of '.*' is not JSON .*: remove the line", refusal(BadOption, card.read_run, out))
    (numbers := tmp_path / "numbers").write_text('{"temperature": 0}\n')
    assert "line 1 of" in (said := refusal(BadOption, card.pair_section, numbers))
    assert "has no number num_prompts: measure again with `forerun train pair --out`" in said


@pytest.mark.parametrize("data", [b"", b"not a state", b"PK\x03\x04"])
def test_a_state_that_cannot_be_read_is_refused(tiny: Make, data: bytes) -> None:
    lm.train(tiny(steps=1), quiet=True)
    (tiny().out / "state.pt").write_bytes(data)
    said = refusal(BadOption, lm.train, tiny(steps=2), resume=True, quiet=True)
    assert re.match(r"the state '.*' cannot be read \(.+\): remove it to begin anew, or name another folder", said)


def test_questions_that_nest_without_end_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "questions.jsonl").write_text("[" * 100_000)
    assert "is not JSON" in refusal(UnsupportedModel, read_questions, [file])


def test_a_log_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    config = SimpleNamespace(out=tmp_path, rows_per_step=1, seq_len_tokens=8)
    run: Any = SimpleNamespace(config=config, step=1, elapsed_s=0.5)
    with little_room(8), pytest.raises(OSError, match="File too large") as error:
        loop.log(run, {"train_loss": 1.0})
    assert error.value.filename == str(tmp_path / "log.jsonl")
