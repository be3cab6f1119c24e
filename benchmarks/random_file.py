"""`benchmarks.random_file` writes a GGUF file in the shape of a published mixture of experts, with random weights.

Some layers of it are enough to time passes with their true sizes, in forerun and in llama.cpp alike:

    python -m benchmarks.random_file qwen3-30b-a3b layers.gguf
    python -m benchmarks.peers --target layers.gguf --forward 1 --forward 8

Routers are random, too, so that different tokens share no more experts than chance gives them: a worst case. The
vocabulary is that of the shipped model, for with four layers an LM head of 150,000 ids would be most of each pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.start import start
from forerun.engine.opened import SHIPPED_TARGET
from forerun.errors import BadOption
from forerun.registry import unknown

STD, EMBEDDED_STD = 0.02, 1.0  # of all matrices; of embeddings, so that a router sees which token there is
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder whose layers are all alike, by the names of GGUF. own: more keys of the architecture."""

    arch: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    ffn: int
    theta: float
    own: Mapping[str, Any]
    qk_norm: bool = False
    biases: bool = False  # of attention, router and experts; and a sink for each head

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The matrices of a layer that have few bits: name and sizes, inputs last."""
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attn_q", (rows, self.hidden)
        yield "attn_k", (kv_rows, self.hidden)
        yield "attn_v", (kv_rows, self.hidden)
        yield "attn_output", (self.hidden, rows)

    def expert_matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The same of its experts, which lie in one tensor."""
        yield "ffn_gate_exps", (self.experts, self.ffn, self.hidden)
        yield "ffn_up_exps", (self.experts, self.ffn, self.hidden)
        yield "ffn_down_exps", (self.experts, self.hidden, self.ffn)

    def vectors(self) -> Iterator[tuple[str, Array]]:
        """What is stored in float32, without `.weight` where the name has an ending."""
        for name in ("attn_norm", "ffn_norm") if self.qk_norm else ("attn_norm", "post_attention_norm"):
            yield name, np.ones(self.hidden, np.float32)
        if self.qk_norm:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield name, np.ones(self.head_dim, np.float32)
        if self.biases:
            yield "attn_sinks", np.zeros(self.heads, np.float32)
            yield "ffn_gate_inp.bias", np.zeros(self.experts, np.float32)
            for name, sizes in [*self.matrices(), *self.expert_matrices()]:
                yield f"{name}.bias", np.zeros(sizes[:-1], np.float32)


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 32, 4, 128, 128, 8, 768, 1e6, {}, qk_norm=True),
    "gpt-oss-20b": Shape(
        "gpt-oss", 2880, 64, 8, 64, 32, 4, 2880, 150000.0,
        {"attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
         "rope.scaling.original_context_length": 4096},
        biases=True,
    ),
}  # fmt: skip


def write(path: Path, shape: Shape, num_layers: int, kind: str, expert_kind: str) -> int:
    """Write the file; returns its bytes. kind: the type of the embedding and of attention's matrices."""
    import gguf

    generator, writer = np.random.default_rng(0), gguf.GGUFWriter(path, shape.arch)
    for key, value in {**_keys(shape, num_layers), **_vocabulary()}.items():
        _add(writer, key, value)
    num_ids = len(_vocabulary()["tokenizer.ggml.tokens"])

    def add(name: str, sizes: tuple[int, ...], kind: str, std: float = STD) -> None:
        data = _random(generator, sizes, kind, std)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", (num_ids, shape.hidden), kind, EMBEDDED_STD)
    add("output", (num_ids, shape.hidden), kind)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for i in range(num_layers):
        for name, sizes in shape.matrices():
            add(f"blk.{i}.{name}", sizes, kind)
        for name, sizes in shape.expert_matrices():
            add(f"blk.{i}.{name}", sizes, expert_kind)
        router = generator.standard_normal((shape.experts, shape.hidden)) * STD
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router.astype(np.float32))
        for name, vector in shape.vectors():
            writer.add_tensor(f"blk.{i}.{name}" if "." in name else f"blk.{i}.{name}.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def _random(generator: np.random.Generator, sizes: tuple[int, ...], kind: str, std: float) -> Array:
    """Random codes as a type stores them, with one scale for all: bytes [..., rows, bytes of a row]."""
    import gguf

    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if sizes[-1] % block:
        raise BadOption(f"rows of {sizes[-1]} weights do not divide into the blocks of {block} of {kind}")
    data = generator.integers(0, 256, (*sizes[:-1], sizes[-1] // block, num_bytes), dtype=np.uint8)
    spread = {"Q4_0": 4.3, "Q8_0": 73.9, "IQ4_NL": 69.0}
    if kind == "MXFP4":
        data[..., 0] = 127 - 7  # a power of two; the table of numbers has a deviation of 2.9
    else:
        if kind not in spread:
            raise BadOption(unknown("type", kind, (*spread, "MXFP4")))
        if kind == "Q4_0":  # codes from -7 to 7: a mean beside 0 would make all tokens alike from layer to layer
            low, high = generator.integers(1, 16, (2, *data.shape), dtype=np.uint8)
            data = low | high << 4
        data[..., :2] = np.array([std / spread[kind]], np.float16).view(np.uint8)
    return np.ascontiguousarray(data.reshape(*sizes[:-1], -1))


def _keys(shape: Shape, num_layers: int) -> dict[str, Any]:
    own = {
        "block_count": num_layers,
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "expert_feed_forward_length": shape.ffn,
        "expert_count": shape.experts,
        "expert_used_count": shape.chosen,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.theta,
        **shape.own,
    }
    return {f"{shape.arch}.{key}": value for key, value in own.items()}


def _vocabulary() -> dict[str, Any]:
    """The tokenizer of the shipped model."""
    raw = json.loads((Path(SHIPPED_TARGET) / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["merges"]]
    tokens = sorted(raw["vocab"], key=raw["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type that its value has in Python; whole numbers are of 32 bits."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def command(
    shape: Annotated[str, typer.Argument(help=f"whose sizes: {' or '.join(SHAPES)}", show_default=False)],
    out: Annotated[Path, typer.Argument(help="file to write", show_default=False)],
    layers: Annotated[int, typer.Option(help="how many, all alike", min=1)] = 4,
    kind: Annotated[str, typer.Option("--type", help="of embeddings, attention and head: Q4_0, Q8_0 or IQ4_NL")] = (
        "Q4_0"
    ),
    expert_type: Annotated[
        str | None, typer.Option(help="of experts, MXFP4 as well [default: as --type]", show_default=False)
    ] = None,
) -> None:
    """Write a GGUF file in the shape of a published mixture of experts, with random weights."""
    if shape not in SHAPES:
        raise BadOption(unknown("shape", shape, SHAPES))
    num_bytes = write(out, SHAPES[shape], layers, kind, expert_type or kind)
    print(f"{out}: {layers} layers of {shape} with random weights, {num_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    start(command)
