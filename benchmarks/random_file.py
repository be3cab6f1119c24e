"""`benchmarks.random_file` writes a GGUF file in the shape of a published model, with random weights.

Some layers of it are enough to time passes with their true sizes, in forerun and in llama.cpp alike:

    python -m benchmarks.random_file qwen3-30b-a3b layers.gguf
    python -m benchmarks.peers --target layers.gguf --forward 1 --forward 8

Routers are random, too, so that different tokens share no more experts than chance gives them: a worst case. The
vocabulary is that of the shipped model, for with four layers an LM head of 150,000 ids would be most of each pass.
Of every four layers of Qwen 3.5 the first three keep a state; `--further` adds the block that guesses further tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from benchmarks.start import start
from forerun.engine.opened import SHIPPED_TARGET
from forerun.errors import BadOption
from forerun.registry import unknown

# The deviation of random codes of each type, in units of its scale.
SPREAD = {"Q4_0": 4.3, "Q4_K": 4.6 * 36.5, "Q8_0": 73.9, "IQ4_NL": 69.0}
GAIN = 0.9  # the deviation of all matrices is GAIN / sqrt(hidden size), 0.02 for 2,048
EMBEDDED_STD = 1.0  # of embeddings, so that a router sees which token there is
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder whose layers are all alike, by the names of GGUF. own: more keys of the architecture.

    experts: 0 = a layer has one feed-forward part. shared: the size of an expert that all rows take, 0 = there is none.
    """

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
    shared: int = 0

    @property
    def name_of_norm(self) -> str:
        """Of the norm before the feed-forward part."""
        return "ffn_norm" if self.qk_norm else "post_attention_norm"

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of keys and values."""
        return False

    def matrices(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The matrices of a layer that have few bits, without those of its experts: name and sizes, inputs last."""
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attn_q", (rows, self.hidden)
        yield "attn_k", (kv_rows, self.hidden)
        yield "attn_v", (kv_rows, self.hidden)
        yield "attn_output", (self.hidden, rows)

    def fed_matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The same of its feed-forward part, or of its experts, each kind of which lies in one tensor."""
        many, ending = ((self.experts,), "_exps") if self.experts else ((), "")
        yield f"ffn_gate{ending}", (*many, self.ffn, self.hidden)
        yield f"ffn_up{ending}", (*many, self.ffn, self.hidden)
        yield f"ffn_down{ending}", (*many, self.hidden, self.ffn)
        if self.shared:
            yield "ffn_gate_shexp", (self.shared, self.hidden)
            yield "ffn_up_shexp", (self.shared, self.hidden)
            yield "ffn_down_shexp", (self.hidden, self.shared)

    def routers(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What chooses experts, and the gate of the shared one, which are random numbers in float32."""
        if self.experts:
            yield "ffn_gate_inp", (self.experts, self.hidden)
        if self.shared:
            yield "ffn_gate_inp_shexp", (self.hidden,)

    def vectors(self, layer: int) -> Iterator[tuple[str, Array]]:
        """What is stored in float32, by its whole name in a layer."""
        for name in ("attn_norm", self.name_of_norm):
            yield f"{name}.weight", np.ones(self.hidden, np.float32)
        if self.qk_norm and not self.keeps_state(layer):
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"{name}.weight", np.ones(self.head_dim, np.float32)
        if self.biases:
            yield "attn_sinks.weight", np.zeros(self.heads, np.float32)
            yield "ffn_gate_inp.bias", np.zeros(self.experts, np.float32)
            for name, sizes in [*self.matrices(layer), *self.fed_matrices()]:
                yield f"{name}.bias", np.zeros(sizes[:-1], np.float32)

    def keys(self) -> dict[str, Any]:
        """What the file says of the sizes, without the name of the architecture."""
        of_experts = {
            "expert_feed_forward_length": self.ffn,
            "expert_count": self.experts,
            "expert_used_count": self.chosen,
        }
        return {
            "context_length": 4096,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            **(of_experts if self.experts else {}),
            **({"expert_shared_feed_forward_length": self.shared} if self.shared else {}),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": self.theta,
            **self.own,
        }


@dataclass(frozen=True)
class Hybrid(Shape):
    """A decoder of whose layers every fourth has attention, with a gate, and the others a gated delta rule."""

    key_heads: int = 16
    value_heads: int = 32
    state_dim: int = 128  # of a key and of a value
    conv: int = 4

    EVERY: ClassVar[int] = 4

    @property
    def name_of_norm(self) -> str:
        return "post_attention_norm"

    def keeps_state(self, layer: int) -> bool:
        return (layer + 1) % self.EVERY != 0

    @property
    def width(self) -> int:
        """The inputs of a state: queries, keys and values of all heads."""
        return (2 * self.key_heads + self.value_heads) * self.state_dim

    def matrices(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if not self.keeps_state(layer):
            for name, sizes in super().matrices(layer):
                yield name, (2 * sizes[0], *sizes[1:]) if name == "attn_q" else sizes  # queries and gates
            return
        values = self.value_heads * self.state_dim
        yield "attn_qkv", (self.width, self.hidden)
        yield "attn_gate", (values, self.hidden)
        yield "ssm_beta", (self.value_heads, self.hidden)
        yield "ssm_alpha", (self.value_heads, self.hidden)
        yield "ssm_out", (self.hidden, values)

    def vectors(self, layer: int) -> Iterator[tuple[str, Array]]:
        yield from super().vectors(layer)
        if self.keeps_state(layer):
            generator = np.random.default_rng(layer)
            yield "ssm_conv1d.weight", generator.uniform(-0.5, 0.5, (self.width, self.conv)).astype(np.float32)
            yield "ssm_a", -generator.uniform(0.02, 2.0, self.value_heads).astype(np.float32)
            yield "ssm_dt.bias", np.ones(self.value_heads, np.float32)
            yield "ssm_norm.weight", np.ones(self.state_dim, np.float32)

    def keys(self) -> dict[str, Any]:
        pairs = self.head_dim // 8  # a quarter of each head is turned
        part = -(-pairs // 3)
        return {
            **super().keys(),
            "full_attention_interval": self.EVERY,
            "rope.dimension_count": 2 * pairs,
            "rope.dimension_sections": [part, part, pairs - 2 * part, 0],
            "ssm.conv_kernel": self.conv,
            "ssm.state_size": self.state_dim,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.value_heads * self.state_dim,
        }


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 32, 4, 128, 128, 8, 768, 1e6, {}, qk_norm=True),
    "gpt-oss-20b": Shape(
        "gpt-oss", 2880, 64, 8, 64, 32, 4, 2880, 150000.0,
        {"attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
         "rope.scaling.original_context_length": 4096},
        biases=True,
    ),
    "qwen3.5-9b": Hybrid("qwen35", 4096, 16, 4, 256, 0, 0, 12288, 1e7, {}, qk_norm=True),
    "qwen3.5-35b-a3b": Hybrid("qwen35moe", 2048, 16, 2, 256, 256, 8, 512, 1e7, {}, qk_norm=True, shared=512),
}  # fmt: skip


def write(
    path: Path, shape: Shape, num_layers: int, kind: str, expert_kind: str, further: bool = False, num_ids: int = 0
) -> int:
    """Write the file; returns its bytes. kind: the type of all matrices but those of experts.

    further: with the block that guesses further tokens, which the file counts as its last. num_ids: at least so many,
    of which those that the shipped model lacks stand for no text.
    """
    import gguf

    generator, writer = np.random.default_rng(0), gguf.GGUFWriter(path, shape.arch)
    counts = {"block_count": num_layers + further, **({"nextn_predict_layers": 1} if further else {})}
    of_shape = {f"{shape.arch}.{key}": value for key, value in {**counts, **shape.keys()}.items()}
    vocabulary = _vocabulary(num_ids)
    for key, value in {**of_shape, **vocabulary}.items():
        add_key(writer, key, value)
    num_ids = len(vocabulary["tokenizer.ggml.tokens"])

    usual = GAIN / math.sqrt(shape.hidden)

    def add(name: str, sizes: tuple[int, ...], kind: str, std: float = usual) -> None:
        data = _random(generator, sizes, kind, std)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def add_layer(i: int, like: int) -> None:
        for name, sizes in shape.matrices(like):
            add(f"blk.{i}.{name}", sizes, kind)
        for name, sizes in shape.fed_matrices():
            add(f"blk.{i}.{name}", sizes, expert_kind if name.endswith("_exps") else kind)
        for name, sizes in shape.routers():
            router = generator.standard_normal(sizes) * usual
            writer.add_tensor(f"blk.{i}.{name}.weight", router.astype(np.float32))
        for name, vector in shape.vectors(like):
            writer.add_tensor(f"blk.{i}.{name}", vector)

    add("token_embd", (num_ids, shape.hidden), kind, EMBEDDED_STD)
    add("output", (num_ids, shape.hidden), kind)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for i in range(num_layers):
        add_layer(i, like=i)
    if further:
        add_layer(num_layers, like=-1)  # as the one before the first would be: with attention
        add(f"blk.{num_layers}.nextn.eh_proj", (shape.hidden, 2 * shape.hidden), kind)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            writer.add_tensor(f"blk.{num_layers}.nextn.{name}.weight", np.ones(shape.hidden, np.float32))
    finish(writer)
    return path.stat().st_size


def _random(generator: np.random.Generator, sizes: tuple[int, ...], kind: str, std: float) -> Array:
    """Random codes as a type stores them, with one scale for all: bytes [..., rows, bytes of a row]."""
    import gguf

    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if sizes[-1] % block:
        raise BadOption(f"rows of {sizes[-1]} weights do not divide into the blocks of {block} of {kind}")
    data = generator.integers(0, 256, (*sizes[:-1], sizes[-1] // block, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = 127 - 7  # a power of two; the table of numbers has a deviation of 2.9
    else:
        if kind not in SPREAD:
            raise BadOption(unknown("type", kind, (*SPREAD, "MXFP4")))
        scale = std / SPREAD[kind]
        if kind == "Q4_0":  # codes from -7 to 7: a mean beside 0 would make all tokens alike from layer to layer
            low, high = generator.integers(1, 16, (2, *data.shape), dtype=np.uint8)
            data = low | high << 4
        if kind == "Q4_K":  # code x scale - 7.5 x scale, with the same random scale of 6 bits in both places
            first, last = generator.integers(0, 64, (2, *data.shape[:-1], 4), dtype=np.uint8)
            data[..., 4:8] = data[..., 8:12] = first & 63 | last >> 4 << 6
            data[..., 12:16] = last & 15 | last << 4
            data[..., 2:4] = np.array([7.5 * scale], np.float16).view(np.uint8)
        data[..., :2] = np.array([scale], np.float16).view(np.uint8)
    return np.ascontiguousarray(data.reshape(*sizes[:-1], -1))


def _vocabulary(num_ids: int) -> dict[str, Any]:
    """The tokenizer of the shipped model, and ids behind its own where more are wanted."""
    raw = json.loads((Path(SHIPPED_TARGET) / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["merges"]]
    tokens = sorted(raw["vocab"], key=raw["vocab"].get)
    tokens += [f"<unused_{i}>" for i in range(len(tokens), num_ids)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }


def add_key(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type that its value has in Python; numbers are of 32 bits, and None is left out."""
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        adds.get(type(value), writer.add_array)(key, value)


def finish(writer: Any) -> None:
    """Write all that was added to a writer of the package gguf, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def command(
    shape: Annotated[str, typer.Argument(help=f"whose sizes: {' or '.join(SHAPES)}", show_default=False)],
    out: Annotated[Path, typer.Argument(help="file to write", show_default=False)],
    layers: Annotated[int, typer.Option(help="how many", min=1)] = 4,
    kind: Annotated[str, typer.Option("--type", help=f"of all matrices but experts': {', '.join(SPREAD)}")] = "Q4_0",
    expert_type: Annotated[
        str | None, typer.Option(help="of experts, MXFP4 as well [default: as --type]", show_default=False)
    ] = None,
    further: Annotated[bool, typer.Option("--further", help="with a block that guesses further tokens")] = False,
    ids: Annotated[int, typer.Option(help="at least; 0 = those of the shipped model", min=0)] = 0,
) -> None:
    """Write a GGUF file in the shape of a published model, with random weights."""
    if shape not in SHAPES:
        raise BadOption(unknown("shape", shape, SHAPES))
    num_bytes = write(out, SHAPES[shape], layers, kind, expert_type or kind, further, ids)
    print(f"{out}: {layers} layers of {shape} with random weights, {num_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    start(command)
