"""Encoder-decoders are trained by the loop, resume exactly, and are checkpoints that transformers loads, too."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.t5 import batches, tokenizer as tokenizers, training
from benchmarks.t5.__main__ import app
from benchmarks.t5.batches import Encoded, PairBatches
from benchmarks.t5.config import PairConfig, PairShape
from benchmarks.t5.examples import Example
from benchmarks.t5.passes import PairOps, run_pairs
from forerun import LLM, SamplingParams
from forerun.cli.help import App
from forerun.cli.main import app as forerun, main
from forerun.errors import BadOption
from forerun.models.loading import load_checkpoint
from forerun.ops.torch import TorchModel
from forerun.train.tokenizer import load_tokenizer
from refusals import refusal
from train.conftest import Interrupt, check_resumed, no_curves, one_thread, read_log

__all__ = ["no_curves", "one_thread"]  # found here by their names, for every test

SHAPE = PairShape(32, 2, 3, 2, 16, 48, 300)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
Make = Callable[..., PairConfig]


@pytest.fixture(scope="session")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of examples whose targets are the words of their sources, turned round."""
    folder, rng = tmp_path_factory.mktemp("turned"), random.Random(0)
    for split, num in {"train": 400, "validation": 20}.items():
        lines = []
        for _ in range(num):
            chosen = rng.choices(WORDS, k=rng.randrange(1, 6))
            lines.append({"task": "turn", "source": f"turn: {' '.join(chosen)}", "target": " ".join(chosen[::-1])})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def small_config(out: Path, folder: Path, **overrides: Any) -> PairConfig:
    """The configuration of a tiny run; keyword arguments override its fields."""
    options: dict[str, Any] = {"shape": SHAPE, "data": (folder,), "out": out, "steps": 30, "tokens_per_step": 256,
                               "seq_len_tokens": 24, "lr": 1e-2, "warmup_steps": 3, "validate_every_steps": 10,
                               "autocast": "off"}  # fmt: skip
    return PairConfig(**{**options, **overrides})


@pytest.fixture
def small(turned: Path, tmp_path: Path) -> Make:
    """Makes the configuration of a tiny run in a folder of the test's own."""
    return lambda out="run", **overrides: small_config(tmp_path / out, turned, **overrides)


@pytest.fixture(scope="module")
def learned(turned: Path, tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A finished run of a target."""
    config = small_config(tmp_path_factory.mktemp("learned"), turned, steps=60)
    training.train(config, quiet=True)
    return config


def test_a_tiny_run_lowers_the_loss_by_task(learned: PairConfig) -> None:
    first, last = read_log(learned)[0], read_log(learned)[-1]
    assert last["validation_loss"] == last["loss_turn"] < first["validation_loss"] - 3
    assert last["final"] is True
    facts = json.loads((learned.out / "run.json").read_text())
    assert facts["num_examples"] == 400
    assert facts["num_parameters"] == SHAPE.spec().num_weights


def test_a_resumed_run_equals_an_uninterrupted_one(small: Make, interrupt: Interrupt) -> None:
    whole, parts = small("whole", autocast="bf16"), small("parts", autocast="bf16")
    check_resumed(whole, parts, interrupt, 17, training.train)


def test_the_checkpoint_is_a_t5_for_transformers_and_the_engine(learned: PairConfig) -> None:
    """Logits of the training pass over a padded batch are those of transformers; both write the same text."""
    transformers = pytest.importorskip("transformers")
    folder = learned.out / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sources, texts = ["turn: one two three", "turn: four"], ["three two", "four one two"]
    module = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    ops = PairOps()
    model = load_checkpoint(folder, dtype="float32", ops=ops).model
    assert isinstance(model, TorchModel)
    encoded = Encoded(*([np.array(ids, np.uint16) for ids in tokenizer(own)["input_ids"]] for own in (sources, texts)))
    batch = encoded.batch([0, 1])
    assert batch.sources.shape[1] > batch.filled.sum(1).min(), "one source is padded"
    with torch.no_grad():
        ours = model.logits(run_pairs(model, ops, batch.sources, batch.filled, batch.texts))[batch.learned]
        theirs = module(
            input_ids=batch.sources, attention_mask=batch.filled.long(), decoder_input_ids=batch.texts
        ).logits.flatten(0, 1)[batch.learned]
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))

    llm = LLM(str(folder), draft=f"model:path={folder}", dtype="float32", spec_length=3)
    outputs = llm.generate(sources, SamplingParams(max_tokens=12, temperature=0))
    assert any(output.report.num_drafted for output in outputs)
    for source, output in zip(sources, outputs, strict=True):
        ids = tokenizer(source, return_tensors="pt")["input_ids"]
        assert ids[0, -1] == tokenizers.END_ID
        written = module.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
        assert output.token_ids == written[1:], "behind the padding that a decoder begins with"
        assert output.report.acceptance_rate in (1, None), "a model is its own best draft"


@pytest.mark.parametrize("loss", ["kl", "alpha"])
def test_a_draft_learns_its_teacher(small: Make, learned: PairConfig, loss: str) -> None:
    shape = PairShape(16, 1, 1, 1, 16, 32, 300)
    config = small("draft", shape=shape, teacher=str(learned.out / "model"), loss=loss, steps=60)
    numbers = training.train(config, quiet=True)
    first = read_log(config)[0]
    assert numbers["alpha_turn"] > first["alpha_turn"] + 0.3
    assert numbers["kl_turn"] < first["kl_turn"] / 2
    again = small("again", shape=shape, init_from=config.out / "model", steps=1)
    training.train(again, quiet=True)
    assert read_log(again)[0]["loss_turn"] == pytest.approx(numbers["loss_turn"], abs=0.05), "but for rounded weights"


def test_an_epoch_has_every_example_once_in_batches_of_one_length() -> None:
    rng = np.random.default_rng(0)
    texts = [np.full(n, i % 90 + 2, np.uint16) for i, n in enumerate(rng.integers(1, 30, 500))]
    own = Encoded(texts, texts[::-1])
    found = PairBatches(own, 300, seed=1)
    first, second = found._epoch(0), found._epoch(1)
    assert sorted(i for batch in first for i in batch) == sorted(i for batch in second for i in batch) == [*range(500)]
    assert first != second
    sizes = []
    for step in range(len(first)):
        batch = found.batch(step)
        assert batch.sources.numel() + batch.texts.numel() <= 300
        sizes.append(int(batch.filled.sum()) / batch.sources.numel())
    assert np.mean(sizes) > 0.9, "little is padding"
    late = PairBatches(own, 300, seed=1).batch(len(first) + 3)
    assert torch.equal(late.sources, found.batch(len(first) + 3).sources), "a batch depends on the step alone"
    assert (late.texts[:, 0] == tokenizers.PAD_ID).all()
    assert torch.equal(late.texts[:, 1:], late.following[:, :-1].clamp(min=0))


def test_queries_begin_smaller_and_learn_slower(small: Make) -> None:
    task = training.prepare(small())
    names = [name for name in task.weights if name.endswith("q_proj.weight")]
    assert len(names) == 2 + 2 * 3
    assert task.rates == dict.fromkeys(names, 0.25)
    key = names[0].replace("q_proj", "k_proj")
    queries, keys = (float(task.weights[name].detach().std()) for name in (names[0], key))
    assert queries / keys == pytest.approx(0.25, rel=0.1)


def test_long_texts(learned: PairConfig) -> None:
    """A long source loses its end and keeps its mark; an example with a long target is left out."""
    long = [Example("turn", "turn: " + "one " * 40, "one"), Example("turn", "turn: one", "one " * 40)]
    found = batches.encode(long, load_tokenizer(learned.out / "tokenizer"), 24)
    assert found.lengths[:, 0].tolist() == [24]
    assert found.sources[0][-1] == tokenizers.END_ID


def test_what_is_not_possible_is_refused(small: Make, tmp_path: Path) -> None:
    assert "give --teacher" in refusal(BadOption, small, loss="kl")
    assert "give --data" in refusal(BadOption, small, data=())
    training.train(small(steps=1), quiet=True)
    model = tmp_path / "run" / "model"
    with pytest.raises(BadOption, match="has 300 ids and the model 310: give --vocab-size 300"):
        training.prepare(small("other", shape=PairShape(32, 2, 3, 2, 16, 48, 310), teacher=str(model)))
    with pytest.raises(BadOption, match="give the same sizes"):
        training.prepare(small("other", shape=PairShape(32, 1, 3, 2, 16, 48, 300), init_from=model))
    assert "is no T5" in refusal(BadOption, training.prepare, small("other", teacher="shipped"))
    assert "seed='0'" in refusal(BadOption, training.train, small(steps=2, seed=3), resume=True, quiet=True)


def test_the_commands_go_from_nothing_to_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples, a target, a draft of it, and how right they are; the old names of the commands say where they are."""

    def run(*words: object, commands: App = app) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words], commands, "python -m benchmarks.t5")
        return int(end.value.code or 0), *capsys.readouterr()

    data = tmp_path / "data"
    code, printed, _ = run("examples", "--task", "translation", "--out", data, "--num-examples", 400)
    assert (code, f" bench in {data}" in printed) == (0, True)
    sizes = "--hidden-size 16 --encoder-layers 1 --decoder-layers 1 --heads 1 --head-size 16 --ffn-size 16"
    loop = "--vocab-size 260 --max-steps 1 --tokens-per-step 512 --validation-examples 2 --quiet"
    small = [*sizes.split(), *loop.split()]
    code, printed, _ = run("train", "--out", tmp_path / "target", "--data", data, *small)
    assert (code, printed.startswith("validation_loss=")) == (0, True)
    target, draft = tmp_path / "target" / "model", tmp_path / "draft" / "model"
    taught = ["--teacher", target, "--loss", "kl"]
    code, printed, _ = run("train", "--out", tmp_path / "draft", "--data", data, *taught, *small)
    assert (code, " alpha_translation=" in printed) == (0, True)
    options = json.loads((tmp_path / "draft" / "run.json").read_text())["options"]
    assert (options["warmup_steps"], options["steps"], options["shape"]["head_size"]) == (150, 1, 16)
    numbers = ["--num-examples", 2, "--max-tokens", 4]
    code, printed, _ = run("score", "--target", target, "--data", data, "--draft", draft, *numbers)
    assert (code, printed.count(f"; {draft}: alpha-hat ")) == (0, 2)
    assert [line.split(":")[0] for line in printed.splitlines()] == ["translation T=0", "translation T=1"]
    for old, now in {"examples": "examples", "seq2seq": "train", "score": "score"}.items():
        code, _, said = run("train", old, "--help", commands=forerun)
        assert (code, f"python -m benchmarks.t5 {now} runs it" in said) == (2, True)
