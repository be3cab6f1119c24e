"""What a newcomer types by mistake, or from habit, is answered with what to type."""

import re
import sys
from typing import Any

import pytest

from forerun.__main__ import main as entry
from forerun.cli.help import PANELS, first_sentence
from forerun.cli.main import main
from forerun.config import EngineConfig, hub_id_of
from forerun.models.hub import is_hub_id


def test_h_and_the_words_help_and_version_are_understood(cli: Any) -> None:
    assert cli("-h").stdout == cli("help").stdout == cli("--help").stdout
    assert cli("plan", "-h").stdout == cli("help", "plan").stdout != cli("help").stdout
    assert cli("version").stdout == cli("--version").stdout


@pytest.mark.parametrize(
    ("words", "answer"),
    {
        "run llama3": "there is no command run here: forerun chat MODEL is a conversation",
        "pull org/name": "there is no command pull here: a model of the hub is fetched when it is first used",
        "list": "there is no command list here: forerun models lists the models that have a name",
        "generate smollm2 question": "'smollm2' is a model, and generate takes texts: write --target smollm2",
        "generate org/name question": "'org/name' is a model, and generate takes texts",
        "generate ./llama question": "'./llama' is a model, and generate takes texts",
        "plan --target ./nope.gguf": "there is no file nope.gguf: name ",
        "plan --target some/nope.gguf:x": "there is no folder some/nope.gguf:x, and a model of the hub is written ",
        "plan --target https://example.com/org/name": "https://example.com/org/name is no address of a model on ",
    }.items(),
)
def test_habits_and_slips_are_named(refused: Any, words: str, answer: str) -> None:
    assert answer in refused(*words.split())


def test_a_message_in_the_place_of_a_model_is_named(cli: Any) -> None:
    assert "forerun generate answers a text" in cli("chat", "What is a prime number?").stderr


@pytest.mark.parametrize(
    ("address", "hub_id"),
    {
        "https://huggingface.co/org/name": "org/name",
        "http://www.huggingface.co/org/na.me-1B/?x=1": "org/na.me-1B",
        "hf.co/org/name:Q4_K_M": "org/name:Q4_K_M",
        "https://huggingface.co/org/name/tree/main": "org/name",
        "https://huggingface.co/org/name/tree/v2/": "org/name@v2",
        "https://huggingface.co/org/name/blob/main/a-Q4_K_M.gguf": "org/name:a-Q4_K_M.gguf",
        "org/name": "org/name",
        "./folder": "./folder",
    }.items(),
)
def test_an_address_on_the_hub_is_its_id(address: str, hub_id: str) -> None:
    assert hub_id_of(address) == hub_id
    config = EngineConfig(target=address, draft=address)
    assert (config.target, config.draft) == (hub_id, hub_id)
    assert is_hub_id(hub_id) == (hub_id != "./folder")


def test_the_options_of_generate_stand_in_panels(cli: Any) -> None:
    parts = re.split(r"^(\w[\w ]*):\n", cli("generate", "--help").stdout, flags=re.MULTILINE)
    panels = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [title for title in panels if title != "Arguments"] == list(PANELS)
    for flag, panel in (("dtype", "Model"), ("top-p", "Sampling"), ("draft", "Speculation"), ("json", "Output")):
        assert re.search(rf"^  --{flag}\b", panels[panel], re.MULTILINE)


def test_the_line_of_a_command_is_its_first_sentence() -> None:
    sentence = "Measure the first, second, ... child of a draft"
    assert first_sentence(f"{sentence}. More.") == sentence
    assert first_sentence("One sentence.\n\nMore.") == "One sentence"
    assert "More" not in first_sentence("Measure the first, second, ... child, e.g. here. More.\n\nStill more.")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_no_crash(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed: str
) -> None:
    """As in `forerun models >&-`."""
    monkeypatch.setattr(sys, closed, None)
    with pytest.raises(SystemExit) as end:
        main(["models"])
    assert end.value.code == 0
    assert ("smollm2" in capfd.readouterr().out) == (closed != "stdout")


def test_ctrl_c_while_modules_are_loaded_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as end:
        entry()
    assert end.value.code == 130
