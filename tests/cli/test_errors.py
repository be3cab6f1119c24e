"""Errors at the door: one sentence on standard error, exit code 2, no traceback, nothing on standard output."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA = ("generate", "--target", "llama", "x")
CASES = {
    "unknown_command": (("gnerate",), "No such command 'gnerate'"),
    "unknown_option": ((*LLAMA, "--temprature", "1"), "--temprature"),
    "not_a_number": ((*LLAMA, "--top-k", "many"), "Invalid value for '--top-k'"),
    "temperature": ((*LLAMA, "--temperature", "-1"), "temperature=-1.0 is not possible: it must be 0"),
    "top_p": ((*LLAMA, "--top-p", "2"), r"top_p=2.0 is not possible: it must be in (0, 1]"),
    "spec_length": ((*LLAMA, "--spec-length", "0"), "it must be in 1 .. 64"),
    "dtype": ((*LLAMA, "--dtype", "float3"), "there is no dtype called 'float3' (did you mean 'float32'?)"),
    "drafter": ((*LLAMA, "--draft", "lokup"), "there is no drafter 'lokup' (did you mean 'lookup'?)"),
    "drafter_option": ((*LLAMA, "--draft", "lookup:maxn=3"), "did you mean 'max_n'?"),
    "drafter_value": ((*LLAMA, "--draft", "lookup:max_n=0"), "it must be in 1 .. 64"),
    "acceptance": ((*LLAMA, "--acceptance", "raito"), "did you mean 'ratio'?"),
    "target": (("generate", "--target", "./nowhere", "x"), "there is no folder nowhere"),
    "draft_folder": ((*LLAMA, "--draft", "./nowhere"), "there is no folder"),
    "no_tokenizer": (("generate", "--target", "bare", "x"), "bare"),
    "prompt_file": (("generate", "--target", "llama", "--prompt-file", "no.txt"), "the prompt file 'no.txt' cannot be"),
    "no_prompt": (("generate", "--target", "llama"), "there is no prompt: write it as an argument"),
    "too_long": (("generate", "--target", "llama", "x" * 300), "the prompt has 300 tokens and max_tokens=128"),
    "pair": ((*LLAMA, "--draft", "./stranger"), "at id 0: the target (llama) has '<|end|>'"),
    "json_and_rounds": ((*LLAMA, "--json", "--rounds"), "--json and --rounds exclude each other"),
    "config": ((*LLAMA, "--config", "no.toml"), "the config file 'no.toml' does not exist"),
    "shape": (("bench", "widen", "llama", "out", "--shape", "2b"), "there is no shape '2b'"),
    "shrink": (("bench", "widen", "llama", "out", "--hidden-size", "16"), "widening cannot shrink it"),
    "bench_prompts": (
        ("bench", "latency", "--target", "llama", "--prompt-file", "no.jsonl"),
        "there is no prompt file",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_exit_code_2(cli: Any, checkpoints: Path, case: str) -> None:
    (checkpoints / "bare").mkdir(exist_ok=True)
    arguments, sentence = CASES[case]
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_ends_cleanly(start: Any) -> None:
    run = start("generate", "--target", "llama", "--rounds", "--max-tokens", "250", "--ignore-eos", "x")
    run.stdout.readline()  # it is generating
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode in (130, 0)  # 0 where it was done already
    assert "Traceback" not in stderr


def test_a_reader_that_leaves_is_no_error(start: Any) -> None:
    run = start("generate", "--target", "llama", "--rounds", "--max-tokens", "250", "--ignore-eos", "x")
    run.stdout.readline()
    run.stdout.close()
    stderr = run.stderr.read()
    assert run.wait(timeout=60) in (141, 0)
    assert stderr == ""


@pytest.mark.parametrize("case", ["unknown_option", "pair"])
def test_the_same_from_a_shell(process: Any, case: str) -> None:
    arguments, sentence = CASES[case]
    done = process(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert sentence in done.stderr


def test_help_is_quick_and_needs_no_torch(process: Any) -> None:
    script = (
        "import sys\nfrom forerun.cli import _run\n"
        "for words in ([], ['generate'], ['demo'], ['bench'], ['bench', 'latency'], ['bench', 'widen'], ['train']):\n"
        "    assert _run([*words, '--help']) == 0\n"
        "assert not {'torch', 'tokenizers', 'transformers'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=environment)
    seconds = []
    for _ in range(3):  # processor seconds: a busy machine must not decide this
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


def test_version(cli: Any) -> None:
    assert cli("--version").stdout.startswith("forerun 0.")
