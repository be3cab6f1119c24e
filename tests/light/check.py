"""What works where torch is not installed: run by an interpreter that has forerun's own dependencies, and no others.

    .venv/light/bin/python tests/light/check.py

`make test-light` makes that interpreter.
"""

import json
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAY = """
from forerun import LLM, SamplingParams
params = SamplingParams(max_tokens=24, temperature=0)
texts = [LLM("shipped", draft=draft).generate("def add(a, b):", params)[0].text for draft in ("auto", "lookup", "none")]
assert len(set(texts)) == 1 and texts[0], texts
print(repr(texts[0]))
"""
WITHOUT = (
    ["convert-head", "a", "b"],
    ["generate", "hello", "--target", "shipped", "--ops", "reference"],
)


def forerun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "forerun", *arguments], capture_output=True, text=True, check=False)


def the_interpreter_has_no_torch() -> None:
    assert find_spec("torch") is None
    try:
        raise AssertionError(f"torch {version('torch')} is installed")
    except PackageNotFoundError:
        pass


def texts_are_said() -> None:
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout, end="")


def commands_run() -> None:
    for arguments in (
        ["rules"],
        ["drafters"],
        ["pacings"],
        ["plan", "--target", "shipped", "--json"],
        ["doctor", "--json"],
    ):
        done = forerun(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    assert "ratio" in forerun("rules").stdout


def what_needs_torch_says_so() -> None:
    for arguments in WITHOUT:
        done = forerun(*arguments)
        said = " ".join(done.stderr.split())
        assert done.returncode == 2, (arguments, said)
        assert said.startswith("error: "), (arguments, said)
        assert "pip install 'torch>=" in said or "pip install '.[" in said, (arguments, said)


def a_request_is_served() -> None:
    command = [sys.executable, "-m", "forerun", "serve", "shipped", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        body = json.dumps({"prompt": "def add(", "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{address.rstrip('/.')}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    for check in (
        the_interpreter_has_no_torch,
        texts_are_said,
        commands_run,
        what_needs_torch_says_so,
        a_request_is_served,
    ):
        begun_s = time.monotonic()
        check()
        print(f"{check.__name__.replace('_', ' ')}: {time.monotonic() - begun_s:.1f} s")
