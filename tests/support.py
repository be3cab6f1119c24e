"""Small random llama decoders, and engines around them, which the tests of many rooms use."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from forerun import LLM, native
from forerun.blocks import Attention, Block, Mlp, Norm, Plain, Recurrence, Rope, Spec, weight_shapes
from forerun.drafters import Drafter, Target
from forerun.engine.engine import Engine
from forerun.kv.cache import BlockCache
from forerun.models.runner import Runner
from forerun.ops import load_model
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import host_of
from forerun.registry import load, make_options
from forerun.testing.engines import checkpoint_of, everyone, target_for
from forerun.types import RoundDetail, StepReport
from methods import NEEDS
from speculation import draft_of, pacing_of

__all__ = ["checkpoint_of", "everyone"]  # the tests take them from here, too
VOCAB = 61
needs_native = pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")


def random_decoder(
    seed: int, *, row_by_row: bool = False, layers: int = 2, hidden: int = 32, ffn: int = 48, scale: float = 0.3
) -> TorchModel:
    """Make a llama of a few thousand random weights; `scale` sets how peaked its distributions are."""
    config = Plain("llama", VOCAB, hidden, layers, 4, 2, 8, ffn, 1e-5, 512).spec
    return random_of(config, seed, scale, row_by_row=row_by_row)


def random_hybrid(seed: int, *, row_by_row: bool = False) -> TorchModel:
    """Make a model of three layers: two that keep states, of both kinds, and one with attention and a gate."""
    norm = Norm()
    recurrences = (Recurrence("gated_delta", 4, 2, 4, 8, 8, norm=norm), Recurrence("short_conv", 3))
    attention = Attention(4, 2, 8, rope=Rope(dims=4), gate=True)
    blocks = (
        Block(norm, recurrence=recurrences[0], pre_mlp=norm, mlp=Mlp(48)),
        Block(norm, attention, pre_mlp=norm, mlp=Mlp(48)),
        Block(norm, recurrence=recurrences[1], pre_mlp=norm, mlp=Mlp(48)),
    )
    return random_of(Spec("hybrid", VOCAB, 32, 512, blocks), seed, 0.3, row_by_row=row_by_row)


def random_of(spec: Spec, seed: int, scale: float, *, row_by_row: bool = False) -> TorchModel:
    """Make a model of random weights; `scale` sets how peaked its distributions are."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        weights[name] = torch.randn(shape, generator=generator) * scale + ("norm" in name)
    return load_model(spec, weights, ReferenceOps(row_by_row=row_by_row))


def noisy_copy(model: TorchModel | CpuModel, seed: int, noise: float = 0.02) -> Any:
    """Make a draft model that agrees with `model` most of the time, and is computed as it is."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, TorchModel):
        weights = {n: w + noise * torch.randn(w.shape, generator=generator) for n, w in model.weights.items()}
        return load_model(model.config, weights, model.ops)
    named = {name: torch.from_numpy(model.weight(name)) for name in weight_shapes(model.config)}
    weights = {n: w + noise * torch.randn(w.shape, generator=generator) for n, w in named.items()}
    return on_native(model.config, weights, model.weight_dtype)


def on_native(spec: Spec, weights: Mapping[str, Tensor], dtype: str) -> CpuModel:
    """Make a model of these weights, rounded to a type, that the native operators compute."""
    host = {name: host_of(weight).to(dtype) for name, weight in weights.items()}
    return cast(CpuModel, load_model(spec, host, CpuOps()))


def runner_for(model: Any, backend: str = "paged", max_seq_len: int = 256) -> Runner:
    return Runner(model, BlockCache.of(model, backend, max_batch_size=8, max_seq_len=max_seq_len))


def drafter_for(name: str, model: TorchModel | CpuModel, backend: str = "paged", **options: Any) -> Drafter:
    """Make any drafter; a draft model, by itself or within another drafter, is a noisy copy of the target.

    A target that is no decoder has no copy, and none of these drafters.
    """
    draft = checkpoint_of(noisy_copy(model, 7)) if isinstance(model, TorchModel | CpuModel) else None
    return built(name, target_for(model, num_ids=VOCAB, kv_cache_backend=backend, loaded_draft=draft), options)


def built(name: str, target: Target, options: Mapping[str, Any]) -> Drafter:
    """Build a drafter with these options, and with what it cannot do without (methods.py)."""
    module = load("forerun.drafters", name, "drafter")
    return module.build(make_options(module.Options, {**needed(name, target), **options}, name), target)


_FOLDER = tempfile.TemporaryDirectory(prefix="forerun-")  # until the process ends
_made: dict[tuple[str, int, int], tuple[Any, Mapping[str, Any]]] = {}  # the models are kept, so that ids stay theirs


def new_folder() -> Path:
    """Make a folder that is there until the process ends."""
    return Path(tempfile.mkdtemp(dir=_FOLDER.name))


def needed(name: str, target: Target) -> Mapping[str, Any]:
    """Return what a drafter of this target cannot do without; enumeration asks for it thousands of times."""
    key = (name, id(target.model), target.num_ids)
    if name in NEEDS and key not in _made:
        _made[key] = (target.model, NEEDS[name](target, new_folder()))
    return _made[key][1] if name in NEEDS else {}


def heard(served: Engine | LLM, *, detail: bool = False) -> list[StepReport]:
    """A list that fills with the reports of all steps from here on."""
    reports = list[StepReport]()
    served.listen(reports.append, detail=detail)
    return reports


def rounds_of(served: Engine | LLM) -> list[RoundDetail]:
    """A list that fills with the rounds of an engine."""
    rounds = list[RoundDetail]()
    served.listen(lambda report: rounds.extend(report.rounds), detail=True)
    return rounds


def engine_for(
    model: TorchModel | CpuModel,
    draft: str | None = None,
    *,
    backend: str = "paged",
    spec_length: int | None = None,
    **options: Any,
) -> Engine:
    """Make an engine; speculation.py chooses the drafter and the pacing where none is named."""
    return Engine(
        runner_for(model, backend),
        drafter_for(draft_of(draft), model, backend),
        pacing_of(spec_length),
        **{"max_seq_len": 256, **options},
    )
