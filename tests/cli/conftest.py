"""Tiny random checkpoints of every architecture, and the real command line as a subprocess."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forerun.cli import main
from forerun.models.layers import DecoderConfig, parameter_shapes
from forerun.models.saving import save_checkpoint

SOURCE = Path(__file__).parents[2] / "src"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def tiny_config(model_type: str, num_layers: int = 2, max_positions: int = 256) -> DecoderConfig:
    """A model of a few thousand weights over 257 ids: one special token, 256 bytes."""
    return DecoderConfig(
        model_type=model_type,
        vocab_size=257,
        hidden_size=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        norm_eps=1e-6,
        max_positions=max_positions,
        tie_embeddings=True,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
    )


def write_tiny(
    folder: Path, model_type: str = "llama", *, seed: int = 0, end_token: str = "<|end|>", max_positions: int = 256
) -> Path:
    """A complete random checkpoint folder; `end_token` is id 0."""
    config = tiny_config(model_type, max_positions=max_positions)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        weights[name] = torch.randn(shape, generator=generator) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
    folder.mkdir(parents=True)
    _tokenizer(end_token).save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, config, weights, torch.float32, end_ids=[0], tokenizer_folder=folder)
    return folder


def _tokenizer(end_token: str) -> Tokenizer:
    vocab = {end_token: 0} | {char: i + 1 for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([end_token])
    return backend


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint per architecture and some more.

    `draft` is a draft model, `stranger` has another tokenizer, `long` has many positions.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    for model_type in ARCHITECTURES:
        write_tiny(root / model_type, model_type)
    write_tiny(root / "draft", seed=1)
    write_tiny(root / "stranger", end_token="</s>")
    write_tiny(root / "long", max_positions=100_000)
    return root


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def _given(environ: Mapping[str, str]) -> list[str]:
    """Variables of whoever runs the tests that would change what a command does."""
    return [k for k in environ if k.startswith(("FORERUN_", "NO_COLOR", "FORCE_COLOR", "COLUMNS"))]


@pytest.fixture
def cli(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `forerun ...` in the folder of the checkpoints, through `main` but in this process: torch loads once.

    stdin: text or bytes, "" by default; env: variables to set.
    """

    def run(*arguments: str, stdin: str | bytes = "", **env: str) -> Done:
        with monkeypatch.context() as patch:
            patch.chdir(checkpoints)
            for name in _given(os.environ):
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            raw = stdin if isinstance(stdin, bytes) else stdin.encode()
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
            capfd.readouterr()
            with pytest.raises(SystemExit) as exit_:
                main(arguments)
        out, err = capfd.readouterr()
        return Done(int(exit_.value.code or 0), out, err)

    return run


@pytest.fixture
def start(checkpoints: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the real command as a process of its own, with pipes; whatever still runs is killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **env: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k not in _given(os.environ)}
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=checkpoints,
            env={**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **env},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def process(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Done]:
    """Runs the real command as a process to its end."""

    def run(*arguments: str, **env: str) -> Done:
        running = start(*arguments, **env)
        out, err = running.communicate(timeout=120)
        return Done(running.returncode, out, err)

    return run
