"""Errors at the door: one sentence on standard error, exit code 2, no traceback, nothing on standard output."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from cli.conftest import little_room
from forerun.cli.main import _as_typed
from forerun.errors import UnsupportedModel, has_card, program, raising_os_errors

LLAMA = ("generate", "--target", "llama", "x")
CASES = {
    "unknown_command": (("gnerate",), "No such command 'gnerate'"),
    "unknown_option": ((*LLAMA, "--temprature", "1"), "--temprature"),
    "not_a_number": ((*LLAMA, "--top-k", "many"), "Invalid value for '--top-k': it must be a valid integer: see"),
    "port": (("serve", "--port", "99999"), "Invalid value for '--port': it must be less than or equal to 65535: see"),
    "temperature": ((*LLAMA, "--temperature", "-1"), "--temperature -1.0 is not possible: it must be 0"),
    "behind_others": ((*LLAMA, "--temperature", "-1", "--", r"--a\qb"), "--temperature -1.0 is not possible"),
    "top_p": ((*LLAMA, "--top-p", "2"), r"--top-p 2.0 is not possible: it must be in (0, 1]"),
    "spec_length": ((*LLAMA, "--spec-length", "0"), "it must be in 1 .. 64"),
    "dtype": ((*LLAMA, "--dtype", "float3"), "--dtype 'float3' is not possible (did you mean 'float32'?)"),
    "command": (("generat", "x"), "Did you mean 'generate'? forerun --help lists all"),
    "drafter": ((*LLAMA, "--draft", "lokup"), "there is no drafter 'lokup' (did you mean 'lookup'?)"),
    "draft_name": ((*LLAMA, "--draft", "nope"), "or a draft model: its folder, GGUF file or hub id (org/name)"),
    "drafter_option": ((*LLAMA, "--draft", "lookup:maxn=3"), "did you mean 'max_n'?"),
    "drafter_value": ((*LLAMA, "--draft", "lookup:max_n=0"), "it must be in 1 .. 64"),
    "acceptance": ((*LLAMA, "--acceptance", "raito"), "did you mean 'ratio'?"),
    "target": (("generate", "--target", "./nowhere", "x"), "there is no folder nowhere"),
    "target_file": (("generate", "--target", "./nowhere.gguf", "x"), "there is no file nowhere.gguf"),
    "target_name": (("generate", "--target", "smollm", "x"), "there is no folder smollm (did you mean smollm2?)"),
    "target_case": (("generate", "--target", "SmolLM2", "x"), "there is no folder SmolLM2 (did you mean smollm2?)"),
    "target_empty": (("generate", "--target", "", "x"), "--target '' names nothing: leave target out"),
    "draft_empty": ((*LLAMA, "--draft", ""), "--draft '' names nothing: leave draft out"),
    "draft_folder": ((*LLAMA, "--draft", "./nowhere"), "there is no folder"),
    "draft_file": ((*LLAMA, "--draft", "nowhere.gguf"), "there is no file 'nowhere.gguf'"),
    "draft_auto": ((*LLAMA, "--draft", "auto:x=1"), "--draft 'auto:x=1' is not possible: 'auto' has no options"),
    "no_tokenizer": (("generate", "--target", "bare", "x"), "bare"),
    "prompt_file": (("generate", "--target", "llama", "--prompt-file", "no.txt"), "the prompt file 'no.txt' cannot be"),
    "no_prompt": (("generate", "--target", "llama"), "there is no prompt: write it as an argument"),
    "too_long": (
        ("generate", "--target", "llama", "x" * 300),
        "the prompt has 300 tokens and max_seq_len is 256, so there is no room for an answer: shorten",
    ),
    "pair": ((*LLAMA, "--draft", "./stranger"), "at id 0: the target has '<|end|>', the draft ./stranger has"),
    "json_and_rounds": ((*LLAMA, "--json", "--rounds"), "--json and --rounds exclude each other"),
    "config_folder": ((*LLAMA, "--config", "."), "the config file '.' cannot be read (it is no file)"),
    "template_folder": ((*LLAMA, "--chat-template", "."), ". is a folder: name a chat template"),
    "nothing_drafted": ((*LLAMA, "--draft", "none", "--spec-length", "4"), "--spec-length 4 says nothing with"),
    "no_value": ((*LLAMA, "--temperature"), "requires an argument: see forerun generate --help"),
    "no_model": (("chat", "--target"), "requires an argument: see forerun chat --help"),
    "drafter_of_methods": (("bench", "methods", "./nowhere", "--draft", "nope"), "there is no drafter 'nope'"),
    "drafter_of_latency": (("bench", "latency", "./nowhere", "--draft", "nope"), "there is no drafter 'nope'"),
    "model_of_bench": (("bench", "methods", "./nowhere"), "there is no folder nowhere"),
    "model_behind": (("bench", "suite", "--target", "./nowhere", "sweet"), "there is no suite 'sweet'"),
    "model_of_batch": (("batch", "--target", "./nowhere", "in.jsonl", "out.jsonl"), "in.jsonl"),
    "model_and_no_output": (("batch", "in.jsonl", "--target", "llama"), "Missing argument 'OUT.JSONL'"),
    "model_misspelt": (("chat", "--tagret=x"), "No such option: --tagret (Possible options: --target)"),
    "model_twice": (("batch", "--target", "llama", "in.jsonl", "out.jsonl", "llama"), "The model is named twice"),
    "no_tokens": (("demo", "--max-tokens", "0"), "'--max-tokens': it must be greater than or equal to 1"),
    "batch_of_a_pipe": (("batch", "-", "out.jsonl"), "batch reads a file"),
    "model_to_quantize": (("quantize", "--target", "./nowhere", "out"), "there is no folder nowhere"),
    "not_utf8": (("generate", "--target", "llama", "caf\udce9"), "is not valid UTF-8 at character 3"),
    "stop_not_utf8": ((*LLAMA, "--stop", "\udce9"), "--stop ['\\udce9'] is not possible"),
    "bias": ((*LLAMA, "--logit-bias", "5"), "--logit-bias '5' is not possible: write ID=VALUE"),
    "stop_empty": ((*LLAMA, "--stop", ""), "--stop '' is not possible: it must be a text that is not empty"),
    "bad_word": ((*LLAMA, "--bad-word", ""), "--bad-word '' is not possible: it must be a text that"),
    "bias_id": ((*LLAMA, "--logit-bias", "x=5"), "'x' is no token id"),
    "logprobs": ((*LLAMA, "--logprobs", "2"), "logprobs are printed with --json only"),
    "max_batch_size": ((*LLAMA, "--max-batch-size", "0"), "--max-batch-size 0 is not possible"),
    "config": ((*LLAMA, "--config", "no.toml"), "the config file 'no.toml' does not exist"),
    "shape": (("bench", "widen", "llama", "out", "--shape", "2b"), "there is no shape '2b'"),
    "shrink": (("bench", "widen", "llama", "out", "--hidden-size", "16"), "widening cannot shrink it"),
    "prompts": (("bench", "latency", "--target", "llama", "--prompt-file", "no.jsonl"), "there is no prompt file"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_exit_code_2(refused: Any, checkpoints: Path, case: str) -> None:
    (checkpoints / "bare").mkdir(exist_ok=True)
    arguments, sentence = CASES[case]
    assert sentence in refused(*arguments)


@pytest.mark.parametrize(
    ("said", "typed", "told"),
    [
        ("top_k=-3 with temperature=0", "--top-k=-3", "--top-k -3 with temperature=0"),
        ("prefix_caching=True with n=1", "--prefix-caching --n 1", "prefix_caching=True with --n 1"),
        ("lookup:max_n=0 is not possible", "--draft lookup:max_n=0 --max-n 3", "lookup:max_n=0 is not possible"),
        ("no folder /tmp/seed=4, n='a,seed=4'", "--seed 4", "no folder /tmp/seed=4, n='a,seed=4'"),
        ("line 2: top_k=-3", "--top-k 5", "line 2: top_k=-3"),
        ("top_k=-3", "-- --top-k", "top_k=-3"),
    ],
)
def test_options_are_called_as_they_were_typed(said: str, typed: str, told: str) -> None:
    assert _as_typed(said, typed.split()) == told


def test_a_program_is_named_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / ".venv" / "bin" / "hf"
    place.parent.mkdir(parents=True)
    place.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(place.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert (program("hf"), program("nothing")) == (str(place), "nothing")
    monkeypatch.chdir(tmp_path)
    assert program("hf") == ".venv/bin/hf"
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert program("hf") == str(place)
    monkeypatch.chdir("/")
    monkeypatch.setenv("PATH", str(place.parent))
    assert program("hf") == "hf"


@pytest.mark.parametrize("files", [set(), {"/dev/nvidiactl"}, {"/dev/dxg"}])
def test_a_card_is_seen_by_its_device_file(monkeypatch: pytest.MonkeyPatch, files: set[str]) -> None:
    monkeypatch.setattr(os.path, "exists", files.__contains__)
    monkeypatch.setattr(sys, "platform", "linux")
    assert has_card() == bool(files)


# Far longer than any test waits, and far more lines than a pipe holds: it cannot be done before it is stopped.
ENDLESS = ("generate", "--target", "long", "--max-batch-size", "1", "--max-seq-len", "100000", "--rounds")
ENDLESS = (*ENDLESS, "--max-tokens", "90000", "--ignore-eos", "x")


def test_ctrl_c_ends_cleanly(start: Any) -> None:
    run = start(*ENDLESS)
    assert run.stdout.readline()  # it is generating
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.parametrize("rounds", [True, False])
def test_a_reader_that_leaves_is_no_error(start: Any, rounds: bool) -> None:
    run = start(*ENDLESS) if rounds else start(*(word for word in ENDLESS if word != "--rounds"))
    assert run.stdout.read(1)
    run.stdout.close()
    stderr = run.stderr.read()
    assert run.wait(timeout=60) == 141
    assert stderr == ""


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_an_output_that_cannot_be_written(full: str) -> None:
    command = [sys.executable, "-m", "forerun", "models" if full == "stdout" else "modls"]
    with open("/dev/full", "w", encoding="utf-8") as file:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: file}
        done = subprocess.run(command, **streams, text=True, check=False)
    assert done.returncode == 2
    if full == "stdout":
        assert re.fullmatch(r"error: .*No space left on device.*: make room there, or name a file .*\n", done.stderr)


def test_a_folder_for_which_there_was_no_room_can_be_written_afterwards(
    refused: Any, checkpoints: Path, tmp_path: Path
) -> None:
    def quantize(limit: str = "unlimited") -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "forerun", "quantize", checkpoints / "llama", tmp_path / "q", "--quantization"]
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *words, "int8:group=16"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = quantize("4")
    assert (done.returncode, f"error: '{tmp_path / 'q'}" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "q").exists()
    assert quantize().returncode == 0
    again = ("quantize", str(tmp_path / "q"), str(tmp_path / "new"))
    assert refused(*again).endswith(": name the unquantised original")


def test_a_context_that_the_model_does_not_have_is_not_asked_for(refused: Any) -> None:
    assert refused(*LLAMA, "--max-tokens", "999").endswith("shorten the prompt or lower max_tokens")
    said = refused(*LLAMA, "--max-tokens", "99", "--max-seq-len", "64")
    assert said.endswith("shorten the prompt or lower max_tokens, or raise max_seq_len")


def test_a_cache_that_no_memory_can_hold(refused: Any) -> None:
    assert re.match(
        r"there is no memory for this engine: It does not fit: [\d.]+ GB \([\d.]+ GiB\) are needed of [\d.]+ GB "
        r"\([\d.]+ GiB\)\. It would fit with --kv-cache-tokens \d+",
        refused(*LLAMA, "--kv-cache-tokens", "1000000000000", "--max-tokens", "2", code=3),
    )


def test_extra_drafts_are_refused_before_anything_is_loaded(refused: Any) -> None:
    """One that no memory can hold is named, as is one that has another vocabulary or does not exist."""
    big = ("--kv-cache-tokens", "1000000000000")
    for extra, code, sentence in (
        ("./draft", 3, "Weights and KV cache of --extra-drafts './draft' are "),
        ("lookup;./stranger", 2, "stranger"),
        ("./nowhere", 2, "nowhere"),
        ("eagle", 2, "eagle"),
    ):
        words = (*LLAMA, "--extra-drafts", extra, *(big if code == 3 else ()))
        assert sentence in refused(*words, "--max-tokens", "2", code=code)


def test_keys_of_config_json_that_are_to_be_ignored(
    cli: Any, refused: Any, checkpoints: Path, tmp_path: Path, written: Any
) -> None:
    """The refusal names the flag; the flag, the variable and the file then do, for targets and for draft models."""
    marked = shutil.copytree(checkpoints / "llama", tmp_path / "marked")
    raw = json.loads((marked / "config.json").read_text())
    (marked / "config.json").write_text(json.dumps(raw | {"made_by": "us", "made_in": 2026, "_model_path": "/x"}))
    options = ("--max-tokens", "2", "--temperature", "0")
    expected = cli("generate", "--target", "llama", "--draft", "none", *options, "x").stdout
    for words in (("--target", str(marked), "--draft", "none"), ("--target", "llama", "--draft", str(marked))):
        assert "--ignore-config-key made_by" in refused("generate", *words, *options, "x")
        both = ("--ignore-config-key", "made_by", "--ignore-config-key", "made_in")
        assert "made_in=2026" in refused("generate", *words, *both[:2], *options, "x")
        assert cli("generate", *words, *both, *options, "x").stdout == expected
        cli("plan", *words, *both, code=0)
        cli("plan", "--target", "llama", "--draft", "none", code=0)
        assert cli("generate", *words, *options, "x", FORERUN_IGNORE_CONFIG_KEYS="made_by,made_in").stdout == expected
        file = written('ignore_config_keys = ["made_by", "made_in"]', "forerun.toml")
        assert cli("generate", *words, *options, "--config", file, "x").stdout == expected


def test_standard_input_that_is_not_utf8(refused: Any) -> None:
    assert refused("generate", "--target", "llama", stdin=b"caf\xe9").startswith("standard input is not UTF-8 text")


JSONL_CASES = {
    "unknown": ('{"prompt": "a"}\n{"prompt": "b", "temprature": 1}', "line 2: there is no field 'temprature' (did you"),
    "not_json": ('\n{"prompt"', "line 2 is not valid JSON"),
    "no_prompt": ('{"temperature": 1}', "line 1: there is no prompt"),
    "no_object": ("3", "line 1: there is no prompt"),
    "kind_of_prompt": ('{"prompt": [1, true]}', "line 1: prompt=[1, True] is not possible"),
    "value": ('{"prompt": "a", "top_k": 1.5}', "line 1: top_k=1.5 is not possible"),
    "bias": ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 1: logit_bias={'x': 1} is not possible"),
    "logprobs": ('{"prompt": "a", "logprobs": 1}', "logprobs are printed with --json only"),
    "empty": ("", "prompts.jsonl' is empty: write a text into it"),
}


@pytest.mark.parametrize(("text", "sentence"), JSONL_CASES.values(), ids=JSONL_CASES)
def test_a_line_that_cannot_be_honoured_is_named(refused: Any, written: Any, text: str, sentence: str) -> None:
    file = written(text, "prompts.jsonl")
    assert sentence in refused("generate", "--target", "llama", "--top-k", "3", "--prompt-file", file)


def test_any_file_that_cannot_be_used_is_one_sentence(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr("forerun.cli.main._loaded", refuse)
    assert refused(*LLAMA).startswith("'weights': Permission denied")


@pytest.mark.parametrize("case", ["unknown_option", "pair"])
def test_the_same_from_a_shell(process: Any, case: str) -> None:
    arguments, sentence = CASES[case]
    done = process(*arguments, code=2)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert sentence in done.stderr


def test_version(cli: Any) -> None:
    assert cli("--version").stdout.startswith("forerun 0.")


NUMBERS = np.zeros(1 << 16)
WRITERS: dict[str, Callable[[Path], object]] = {
    "python": lambda path: path.write_bytes(NUMBERS.tobytes()),
    "tokenizers": lambda path: Tokenizer(BPE({str(i): i for i in range(2000)}, [])).save(str(path)),
    "safetensors": lambda path: save_file({"numbers": NUMBERS}, path),
    "torch": lambda path: torch.save(torch.from_numpy(NUMBERS), path.open("wb")),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_no_room_is_an_os_error_in_every_library(tmp_path: Path, write: Callable[[Path], object]) -> None:
    """The command line and the caches tell these in one sentence, which names the file."""
    file = tmp_path / "file"
    with pytest.raises(OSError, match=r".") as error, little_room(4096), raising_os_errors(file):
        write(file)
    assert (error.value.strerror, error.value.filename) == ("File too large", str(file))


@pytest.mark.parametrize("error", [RuntimeError("something else"), UnsupportedModel("something else")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    """Also while an error of the system is handled, as where a folder could not be written and another is tried."""

    def fail() -> None:
        with pytest.raises(type(error), match="something else"), raising_os_errors(Path("file")):
            raise error

    fail()
    try:
        raise PermissionError(13, "Permission denied")
    except OSError:
        fail()


def test_an_error_without_a_number_keeps_its_text() -> None:
    with pytest.raises(OSError, match=r"^3 items requested and 2 written$"), raising_os_errors(Path("file")):
        raise OSError("3 items requested and 2 written")


def test_a_reason_of_ours_counts_more_than_an_error_of_the_system() -> None:
    def fail() -> None:
        try:
            raise FileNotFoundError(2, "No such file or directory")
        except OSError:
            raise UnsupportedModel("its tokenizer is missing") from None

    with pytest.raises(UnsupportedModel), raising_os_errors(Path("file")):
        fail()
