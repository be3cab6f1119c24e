"""A corpus and a model small enough to train in a second or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.train import loop
from forerun.train.config import LoopConfig, TrainConfig
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


@pytest.fixture
def tiny(sources: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes the configuration of a tiny run; keyword arguments override its fields."""

    def make(out: str = "run", **overrides: Any) -> TrainConfig:
        options: dict[str, Any] = {
            "shape": ModelShape(32, 2, 4, 2, 64, 300),
            "out": tmp_path / out,
            "steps": 30,
            "tokens_per_step": 128,
            "seq_len_tokens": 32,
            "lr": 1e-2,
            "warmup_steps": 3,
            "validate_every_steps": 10,
            "validation_windows": 4,
            "text": sources,
            "autocast": "off",
        }
        return TrainConfig(**{**options, **overrides})

    return make


def read_log(config: LoopConfig) -> list[dict[str, Any]]:
    """The lines of a run's log, without times."""
    lines = loop.read_log(config.out)
    return [{k: v for k, v in line.items() if k not in ("elapsed_s", "tokens_per_s")} for line in lines]


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
