"""A corpus and a model small enough to train in a second or two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, RequestOutput, SamplingParams
from forerun.train import loop
from forerun.train.config import LoopConfig, TrainConfig
from forerun.train.model import TorchModel, load_decoder, read_shape, run_windows
from forerun.train.ops import TrainingOps
from forerun.train.shape import ModelShape


def module_text(name: str, count: int) -> str:
    """A module with `count` functions that differ in a number."""
    body = "\n\n".join(f"def {name}_{i}(value):\n    total = value + {i}\n    return total" for i in range(count))
    return f'"""Module {name}."""\n\n\n{body}\n'


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Python modules: two to learn from, heapq as bench, queue as validation."""
    folder = tmp_path_factory.mktemp("sources")
    for name, count in {"alpha": 60, "beta": 60, "heapq": 20, "queue": 20}.items():
        (folder / f"{name}.py").write_text(module_text(name, count), encoding="utf-8")
    return folder


def tiny_config(out: Path, text: Path, **overrides: Any) -> TrainConfig:
    """The configuration of a tiny run; keyword arguments override its fields."""
    options: dict[str, Any] = {
        "shape": ModelShape(32, 2, 4, 2, 64, 300),
        "out": out,
        "steps": 30,
        "tokens_per_step": 128,
        "seq_len_tokens": 32,
        "lr": 1e-2,
        "warmup_steps": 3,
        "validate_every_steps": 10,
        "validation_windows": 4,
        "text": text,
        "autocast": "off",
    }
    return TrainConfig(**{**options, **overrides})


@pytest.fixture
def tiny(sources: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes the configuration of a tiny run in a folder of the test's own."""
    return lambda out="run", **overrides: tiny_config(tmp_path / out, sources, **overrides)


AGG = "matplotlib.backends.backend_agg"  # what draws


@pytest.fixture(autouse=True, scope="module")
def no_curves() -> Iterator[None]:
    """Runs draw no curves, as where matplotlib is not installed: each picture takes as long as thirty tiny steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, AGG, None)
        yield


@pytest.fixture
def curves(no_curves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that looks at a picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, AGG)


def read_log(config: LoopConfig) -> list[dict[str, Any]]:
    """The lines of a run's log, without times."""
    lines = loop.read_log(config.out)
    return [{k: v for k, v in line.items() if k not in ("elapsed_s", "tokens_per_s")} for line in lines]


def computes_as_transformers(config: TrainConfig, named: str, tolerance: float) -> tuple[TorchModel, RequestOutput]:
    """Assert that a run's checkpoint is a model of that name for transformers, and computes and writes the same there.

    Returns it as it is trained, and what the engine writes where it drafts for itself.
    """
    transformers = pytest.importorskip("transformers")
    log, folder = read_log(config), config.out / "model"
    assert log[-1]["validation_loss"] < log[0]["validation_loss"] - 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    assert isinstance(theirs, getattr(transformers, named))
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    ours = load_decoder(folder, TrainingOps(32))
    with torch.no_grad():
        expected = theirs(tokens).logits.reshape(64, -1)
        assert torch.allclose(ours.logits(run_windows(ours, tokens)), expected, atol=tolerance)
    is_tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert is_tied == ours.config.tied
    assert read_shape(folder) == config.shape
    llm = LLM(folder, draft=f"model:path={folder}", dtype="float32", spec_length=3)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    written = theirs.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert output.token_ids == written[0, 3:].tolist()
    return ours, output


Interrupt = Callable[[int, Callable[[], Any]], None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Runs a training that is stopped before a step, when its state has been saved."""

    def until(step: int, train: Callable[[], Any]) -> None:
        real_step = loop.train_step

        def stop(run: loop.Run) -> tuple[float, float]:
            if run.step == step:
                loop.save_state(run)
                raise KeyboardInterrupt
            return real_step(run)

        with monkeypatch.context() as patched:
            patched.setattr(loop, "train_step", stop)
            with pytest.raises(KeyboardInterrupt):
                train()

    return until


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
