"""Backends are the files of ops/ that have a NAME: which one computes what, and what is said of those that do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams, ops
from forerun.blocks import Attention, Experts, Mlp, Plain, Recurrence, Spec, weight_shapes
from forerun.cli import doctor
from forerun.cli.words import backend, closing_line
from forerun.config import EngineConfig
from forerun.errors import BadOption, UnsupportedModel
from forerun.models.families import family
from forerun.ops.torch import TorchModel, empty_weights
from forerun.registry import stated
from refusals import refusal
from saved import save_checkpoint
from support import needs_native
from tiny import byte_tokenizer, write_tiny

PLAIN = Plain("llama", 61, 32, 2, 4, 2, 8, 48, 1e-5, 64, tied=True).spec


def with_blocks(**changes: Any) -> Spec:
    return replace(PLAIN, blocks=tuple(replace(block, **changes) for block in PLAIN.blocks))


def with_experts(**changes: Any) -> Spec:
    return with_blocks(experts=Experts(4, 2, Mlp(16), **changes))  # beside a feed-forward part, as Gemma 4 has them


def test_a_backend_is_its_file_and_an_option_of_the_engine() -> None:
    found = stated("forerun.ops", "NAME")
    assert set(found.values()) == set(ops.backends()) >= {"native", "reference", "reference_row_by_row"}
    for name in found.values():
        assert EngineConfig(ops=name).ops == name
    assert "ops='nativ' is not possible (did you mean 'native'" in refusal(BadOption, EngineConfig, ops="nativ")


@needs_native
def test_auto_takes_the_fastest_that_computes_a_model() -> None:
    assert ops.resolve("auto", "cpu", PLAIN) == "native"
    assert list(ops.faster("native", "cpu", PLAIN)) == []
    assert ops.resolve("auto", "cpu", with_experts()) == "native"
    odd = with_blocks(attention=Attention(4, 2, 15))
    assert ops.resolve("auto", "cpu", odd) == "reference"
    assert list(ops.faster("reference", "cpu", odd)) == [
        ("native", "the native kernels compute no pairs of dimensions where head_dim is odd, as 15")
    ]
    with pytest.raises(UnsupportedModel, match="cannot run on ops='native': the native kernels compute no pairs"):
        ops.resolve("native", "cpu", odd)
    assert "ops='native' computes on the CPU and contradicts" in refusal(BadOption, ops.resolve, "native", "cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recurrence": Recurrence("short_conv", 3)}, "blocks that keep a state"),
        ({"mlp": None, "experts": Experts(4, 2, Mlp(8), choice_bias=True)}, "for the choice of experts alone"),
        ({"attention": Attention(2, 1, 1024)}, "heads of 1024, but up to 512"),
    ],
)
def test_cuda_refuses_what_its_kernels_lack(changes: dict[str, Any], words: str) -> None:
    assert words in (ops.backend("cuda").supports(with_blocks(**changes)) or "")


@needs_native
def test_auto_takes_no_backend_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter could run the CUDA kernels on a CPU, a thousand times as slowly."""
    monkeypatch.setattr(ops.backend("cuda"), "usable", lambda device: None)
    assert ops.resolve("auto", "cpu", PLAIN) == "native"
    assert ops.resolve("cuda", "cpu", PLAIN) == "cuda"


@needs_native
def test_the_closing_line_says_what_computes_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the kernels refuse runs in torch, and says so."""
    folder = write_tiny(tmp_path / "tiny")
    params = SamplingParams(max_tokens=2, temperature=0)
    llm = LLM(str(folder), draft="none")
    assert "native operators, greedy" in closing_line(llm, llm.generate([[5, 6]], params)[0], params)
    monkeypatch.setattr(ops.backends()["native"], "supports", lambda spec: "the native kernels compute no such thing")
    llm = LLM(str(folder), draft="none")
    said = closing_line(llm, llm.generate([[5, 6]], params)[0], params)
    assert "reference operators (the native kernels compute no such thing), greedy" in said


REFUSED = "the native kernels compute no pairs of dimensions where head_dim is odd, as 5"


def write_odd(folder: Path, **changes: int) -> Path:
    """A tiny GPT-2 whose heads have 5 dimensions, which the kernels refuse."""
    sizes = {"n_embd": 15, "n_head": 3, "n_layer": 1, "n_positions": 128, "vocab_size": 257, **changes}
    spec = family("gpt2").read({"model_type": "gpt2", **sizes})
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in weight_shapes(spec).items()}
    folder.mkdir(parents=True)
    byte_tokenizer("<|end|>").save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, spec, weights, torch.float32, end_ids=[0], tokenizer_folder=folder)
    return folder


@needs_native
def test_target_and_draft_model_are_each_computed_by_the_best(tmp_path: Path) -> None:
    """And the texts are those of the target alone; what an option names computes both, or refuses."""
    native_one, odd = str(write_tiny(tmp_path / "tiny")), str(write_odd(tmp_path / "odd"))
    params = SamplingParams(max_tokens=8, temperature=0)
    for target, draft, expected in (
        (native_one, odd, f"native operators; drafts by reference operators ({REFUSED})"),
        (odd, native_one, f"reference operators ({REFUSED}); drafts by native operators"),
        (odd, odd, f"reference operators ({REFUSED})"),
    ):
        plain = LLM(target, draft="none", max_seq_len=128).generate([[5, 6, 7]], params)[0].token_ids
        llm = LLM(target, draft=draft, pacing="fixed", spec_length=3, max_seq_len=128)
        (out,) = llm.generate([[5, 6, 7]], params)
        assert out.token_ids == plain
        assert out.report.num_drafted > 0
        assert backend(llm) == expected
    with pytest.raises(UnsupportedModel, match=f"cannot run on ops='native': {REFUSED}"):
        LLM(native_one, draft=odd, ops="native", max_seq_len=128)
    llm = LLM(native_one, draft=odd, ops="reference", max_seq_len=128)
    assert backend(llm) == "reference operators"


@needs_native
def test_doctor_says_what_computes_a_model(tmp_path: Path) -> None:
    found = doctor.computed(str(write_odd(tmp_path / "odd")))
    assert found.backend == "reference"
    assert found.slower_because == {"native": REFUSED}
    assert doctor.computed(str(write_tiny(tmp_path / "tiny"))).slower_because == {}


@pytest.mark.parametrize(
    "changes", [{}, {"score": "sigmoid", "normalise": False, "scale": 2.5}, {"shared": Mlp(8), "shared_gate": True}]
)
def test_experts_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    """Shazeer et al. 2017, eq. 1: each row alone, in float64."""
    spec = with_experts(**changes)
    generator = torch.Generator().manual_seed(1)
    empty = empty_weights(spec, torch.float32, "cpu")
    weights = {n: w.normal_(0, 0.3, generator=generator).double() for n, w in empty.items()}
    model, e = TorchModel(spec, weights), spec.blocks[0].experts
    experts = model.blocks[0].experts
    x = torch.randn(5, 32, generator=generator).double()
    found, num_experts = experts.run(model.ops, x, x)
    chosen = set[int]()
    at = "model.layers.0.mlp."

    def fed(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (weights[f"{at}{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    for row, out in zip(x, found, strict=True):
        scores = weights[f"{at}gate.weight"] @ row
        scores = scores.sigmoid() if e.score == "sigmoid" else scores.softmax(-1)
        best = scores.topk(2)
        ids = best.indices.tolist()
        chosen |= set(ids)
        shares = best.values / best.values.sum() if e.normalise else best.values
        wanted = sum(s * e.scale * fed(f"experts.{i}.", row) for s, i in zip(shares, ids, strict=True))
        if e.shared is not None:
            wanted += torch.sigmoid(weights[f"{at}shared_expert_gate.weight"] @ row) * fed("shared_expert.", row)
        assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)
    assert num_experts == len(chosen)
