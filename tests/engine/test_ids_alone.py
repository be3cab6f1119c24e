"""A model without a tokenizer: ids go in and come out, and who asks for a text is told so before weights are read."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import LLM, SamplingParams
from forerun.bench import latency
from forerun.cli.main import app
from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.errors import BadOption, NotFound
from forerun.models.loading import load_checkpoint
from forerun.train.model import initial_weights
from forerun.train.shape import ModelShape
from refusals import refusal
from saved import save_checkpoint
from tiny import write_tiny

NUM_IDS = 27
NO_TEXT = r"has no tokenizer\.json, so it takes and gives token ids, not text: give lists of ids as prompts, or copy"


def write_model(folder: Path, seed: int, layers: int) -> Path:
    shape = ModelShape(32, layers, 2, 1, 64, NUM_IDS, max_positions=256)
    weights = {name: weight * 8 if weight.ndim > 1 else weight for name, weight in initial_weights(shape, seed).items()}
    save_checkpoint(folder, shape.spec(), weights)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ids") / "target", 0, 2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ids") / "draft", 0, 1)


@pytest.mark.parametrize("method", ["draft model", "suffix", "self", "early_exit"])
def test_drafters_write_what_plain_decoding_writes(target: Path, draft: Path, method: str) -> None:
    prompts = [[20], [21, 3, 3], [5] * 9]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=7) for t in (1.0, 0.0, 0.7)]
    plain = LLM(target, draft="none").generate(prompts, params)
    llm = LLM(target, draft=str(draft) if method == "draft model" else method, spec_length=3)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.text for o in outputs] == ["", "", ""]
    assert sum(o.report.num_drafted for o in outputs) > 0
    assert {i for o in outputs for i in o.token_ids} <= set(range(NUM_IDS))
    assert not llm.has_text


def test_texts_are_refused_with_a_way_out(target: Path) -> None:
    llm = LLM(target, draft="none")
    for ask in (
        lambda: llm.generate("a text"),
        lambda: next(iter(llm.stream("a text"))),
        lambda: llm.tokenizer,
        lambda: load_checkpoint(target, with_tokenizer=True).text_tokenizer,
        lambda: Opened.of(EngineConfig.make(target=target)).text_tokenizer(),
    ):
        with pytest.raises(NotFound, match=NO_TEXT):
            ask()
    for params in (SamplingParams(stop=("x",)), SamplingParams(bad_words=("x",)), SamplingParams(prediction="x")):
        with pytest.raises(BadOption, match=r"needs? a tokenizer"):
            llm.generate([20], params)
    assert "the model's ids are 0 .. 26" in refusal(BadOption, llm.generate, [NUM_IDS])


def test_a_draft_model_of_ids_alone_is_refused_beside_a_target_with_texts(draft: Path, tmp_path: Path) -> None:
    assert "there is no tokenizer.json in" in refusal(NotFound, LLM, write_tiny(tmp_path / "words"), draft=str(draft))


def test_the_command_line_takes_and_prints_ids(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [20], "seed": 1}\n{"prompt": [21, 4], "seed": 2}\n', encoding="utf-8")
    options = ["generate", "--target", str(target), "--draft", "lookup", "--max-tokens", "6", "--no-calibrate"]
    lines = CliRunner().invoke(app, [*options, "--prompt-file", str(file)], catch_exceptions=False).stdout.splitlines()
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (1, 2)]
    wanted = LLM(target, draft="none").generate([[20], [21, 4]], params)
    texts = ["".join(f" {token}" for token in out.token_ids) for out in wanted]
    assert lines == ["==> 1: [20] <==", texts[0], "==> 2: [21, 4] <==", texts[1]]
    (target / "model.safetensors").rename(tmp_path / "away")  # no weight is looked for before the sentence
    try:
        (target / "model.safetensors").touch()
        with pytest.raises(NotFound, match=NO_TEXT):
            CliRunner().invoke(app, [*options, "a text"], catch_exceptions=False, standalone_mode=False)
    finally:
        (tmp_path / "away").rename(target / "model.safetensors")


def test_the_benchmark_takes_prompts_of_ids(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "ids": [20]}\n{"id": "b", "text": "x"}\n', encoding="utf-8")
    assert latency.read_texts_or_ids(5, file) == [("a", [20]), ("b", "x")]
    with pytest.raises(BadOption, match="the prompt 'a' is token ids, and this benchmark takes texts"):
        latency.read_prompts(5, file)
    file.write_text(json.dumps({"id": "a", "ids": "x"}), encoding="utf-8")
    assert "is not a prompt file" in refusal(BadOption, latency.read_texts_or_ids, 5, file)
