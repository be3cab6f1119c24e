"""A corpus and a model small enough to train in a second or two."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from forerun import LLM, RequestOutput, SamplingParams
from forerun.cli.train import app
from forerun.ops import load_model
from forerun.train import lm, loop
from forerun.train.config import LoopConfig, TrainConfig
from forerun.train.model import TorchModel, deepen, load_decoder, read_shape, run_windows
from forerun.train.ops import TrainingOps
from forerun.train.shape import ModelShape
from forerun.train.stopping import Stopped
from train.written import chatting

Make = Callable[..., TrainConfig]
Interrupt = Callable[[int, Callable[[], Any]], None]


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
        "shape": ModelShape(32, 2, 4, 2, 64, 300), "out": out, "steps": 30, "tokens_per_step": 128,
        "seq_len_tokens": 32, "lr": 1e-2, "warmup_steps": 3, "validate_every_steps": 10, "validation_windows": 4,
        "text": text, "autocast": "off",
    }  # fmt: skip
    return TrainConfig(**{**options, **overrides})


@pytest.fixture
def tiny(sources: Path, tmp_path: Path) -> Make:
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


def check_exported(config: TrainConfig, named: str, tolerance: float) -> tuple[TorchModel, RequestOutput]:
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
    prompt = torch.tensor([[5, 6, 7]])
    written = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output.token_ids == written[0, 3:].tolist()
    return ours, output


def check_resumed(whole: Any, parts: Any, interrupt: Interrupt, step: int, train: Any = lm.train) -> None:
    """Assert that a run which is stopped before a step, and goes on, ends as one that is not stopped."""
    train(whole, quiet=True)
    interrupt(step, lambda: train(parts, quiet=True))
    torch.manual_seed(123)  # whatever happened in between
    train(parts, resume=True, quiet=True)
    assert read_log(parts) == read_log(whole)
    ours, theirs = (torch.load(c.out / "state.pt", weights_only=False)["weights"] for c in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def check_deepened(weights: dict[str, Tensor], shape: ModelShape, deep: ModelShape) -> dict[str, Tensor]:
    """Assert that weights which are made deeper compute the same, and return them."""
    grown = deepen(weights, shape, deep, seed=1)
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
    models = [load_model(s.spec(), w, TrainingOps(32)) for s, w in ((shape, weights), (deep, grown))]
    assert torch.equal(*(run_windows(model, tokens) for model in models))
    return grown


def run_command(command: str | list[str]) -> str:
    """Run `forerun train` with these words, and return what it prints."""
    done = CliRunner().invoke(app, command.split() if isinstance(command, str) else command)
    assert done.exit_code == 0, done.output
    return done.output


def check_command(sizes: str, text: Path, out: Path, shape: ModelShape) -> None:
    """Assert that `forerun train lm` with these sizes writes a model of this shape."""
    run = f"--out {out} --text {text} --max-steps 1 --tokens-per-step 64 --seq-len-tokens 32 --quiet"
    run_command(f"lm {sizes} --vocab-size 300 {run}")
    assert read_shape(out / "model") == shape


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random target with a chat template."""
    return chatting(tmp_path_factory.mktemp("target") / "model", max_positions=1024)


@contextmanager
def ctrl_c_behind(owner: Any, function: str, num: int) -> Iterator[None]:
    """Let Ctrl-C come once in a `with` block: behind the call number `num` of a function of a class or module."""
    real, calls = getattr(owner, function), itertools.count(1)

    def stopping(*given: Any) -> Any:
        value = real(*given)
        torch.rand(3)  # as a head that draws
        if next(calls) == num:
            signal.raise_signal(signal.SIGINT)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, stopping)
        yield


@pytest.fixture
def interrupt() -> Interrupt:
    """Runs a training that Ctrl-C stops behind a step."""

    def behind(step: int, train: Callable[[], Any]) -> None:
        with ctrl_c_behind(loop, "train_step", step), pytest.raises(Stopped, match=f"^step {step}$"):
            train()

    return behind


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
