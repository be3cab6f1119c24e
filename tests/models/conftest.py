"""Random tiny checkpoints in either spelling of config.json, and transformers as the oracle."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.blocks import Spec, weight_shapes
from forerun.models.families import names_of
from forerun.models.opened import read_config
from models.hubserver import Client, HubServer, serve
from saved import published

Raw = dict[str, Any]
WriteCheckpoint = Callable[..., Path]
# Weights of states, and of the choice of experts, which show only where they are large.
OF_STATES = ("A_log.weight", "dt_bias.weight", "conv1d.weight", "conv.conv.weight", "choice_bias.weight")


def random_weights(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every weight random, norms and biases too, so that one left out or swapped shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        noise = torch.randn(shape, generator=generator)
        is_factor = "norm" in name or "_scal" in name
        weights[name] = 1 + 0.3 * noise if is_factor else noise * (0.3 if name.endswith(".bias") else 0.15)
        if name.endswith(OF_STATES):
            weights[name] = noise
    return weights


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """write(raw, weights=None, **extra files as dicts) -> folder."""

    def write(raw: Mapping[str, Any], weights: dict[str, torch.Tensor] | None = None, **files: Raw) -> Path:
        spec = read_config(raw)
        made = random_weights(spec) if weights is None else weights
        names = names_of(spec)
        made = made if names is None else published(names, spec, made)
        save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(raw))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return write


@pytest.fixture
def weights_of() -> Callable[..., dict[str, torch.Tensor]]:
    return lambda raw, seed=0: random_weights(read_config(raw), seed)


@pytest.fixture
def llama_raw() -> Raw:
    """A tiny llama: 15 query heads in 3 groups of 5, heads of 8 although 60 / 15 = 4."""
    return {"model_type": "llama", "vocab_size": 97, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 2,
            "num_attention_heads": 15, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[HubServer]:
    yield from serve()


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    (tmp_path / "home").mkdir()
    return Client(hub, tmp_path / "home")
