"""`benchmarks.kernels` on a tiny decoder: every operator at every number of rows, and what cannot be measured."""

import json

import pytest

from benchmarks import kernels
from benchmarks.kernels import KernelsPlan, config_named
from forerun.bench.widen import num_parameters
from forerun.blocks import Plain
from forerun.errors import BadOption
from ops.native_cases import ISAS, needs_native
from refusals import refusal

TINY = Plain("llama", 300, 64, 2, 4, 2, 16, 96, 1e-5, 512, tied=True).spec
PLAN = KernelsPlan(TINY, num_threads=1, num_repeats=2, rows=(1, 3), prefill_tokens=20, context=9, contexts=(5, 70))
LAYER = ["qkv", "o", "gate, up + silu", "down", "norm + rope", "attention, 5", "all layers"]
ALWAYS = ["attention, 5, 8 bits", "attention, 70", "attention, 70, 8 bits", "LM head", "LM head, argmax", "whole pass"]


pytestmark = pytest.mark.usefixtures("one_thread")


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4", "MXFP4"])
def test_every_operator_at_every_number_of_rows(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(json.dumps(kernels.run(KernelsPlan(**{**vars(PLAN), "dtype": dtype, "isa": ISAS[-1]}))))
    printed = capsys.readouterr().out.splitlines()
    assert f"{num_parameters(TINY):,} random weights" in printed[0]
    assert "limit without speculation: " in " ".join(printed[:4])
    assert (record["bench"], record["isa"], record["plan"]["dtype"]) == ("kernels", ISAS[-1], dtype)
    words = {"int8": "8-bit", "int4": "4-bit and 8-bit", "MXFP4": "4-bit and 8-bit"}
    assert record["precision"] == f"{words.get(dtype, dtype)} weights"
    rows = {(line["operator"], line["num_rows"]) for line in record["lines"]}
    assert rows == {(name, m) for name in LAYER for m in (1, 3, 20)} | {(name, m) for name in ALWAYS for m in (1, 3)}
    assert len(record["repeat_bandwidths_bytes_per_s"]) == 2 * (1 + len(LAYER + ALWAYS))
    for line in record["lines"]:
        assert line["seconds"] > 0
        assert (line["fraction"] is None) == (line["operator"] == "norm + rope")
        if line["fraction"] is not None:
            assert 0 < line["fraction_range"][0] <= line["fraction"] <= line["fraction_range"][1]
        if line["num_rows"] == 1:
            assert line["ratio_range"] == [1, 1]
    prefill = record["prefill"]
    assert prefill["num_tokens"] == 20
    assert 0 < prefill["ratio_range"][0] <= prefill["ratio"] <= prefill["ratio_range"][1]
    assert all(any(line.startswith(name) for line in printed) for name in LAYER + ALWAYS)


@needs_native
def test_a_layer_is_the_sum_of_its_products() -> None:
    """The bytes behind each rate: those of the products and the head add up to what a whole pass reads."""
    lines = [line for line in kernels.run(PLAN)["lines"] if line["num_rows"] == 1 and line["bytes_per_s"]]
    read = {line["operator"]: line["bytes_per_s"] * line["seconds"] for line in lines}
    products = TINY.num_layers * sum(read[name] for name in ("qkv", "o", "gate, up + silu", "down"))
    norms = 4 * TINY.hidden_size * (2 * TINY.num_layers + 1)
    assert read["all layers"] == pytest.approx(products + norms)
    assert read["whole pass"] == pytest.approx(products + norms + read["LM head"])
    assert read["LM head"] == pytest.approx(320 * 64 * 2)
    assert read["LM head, argmax"] == pytest.approx(320 * 64 * 2)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "bits", "head_bits"),
    [("int8", 8.5, 8.5), ("int8:group=16", 9, 9), ("int4", 5, 8.5), ("int4:group=64", 4.5, 8.25)],
)
def test_bytes_per_second_are_of_packed_weights(dtype: str, bits: float, head_bits: float) -> None:
    """Codes and scales, and zero points under 4 bits; the LM head has 8 bits."""
    config = Plain("llama", 320, 64, 2, 4, 4, 16, 128, 1e-5, 512, tied=True).spec
    options = {"config": config, "dtype": dtype, "rows": (1, 2, 4, 8, 16)}
    lines = kernels.run(KernelsPlan(**{**vars(PLAN), **options}))["lines"]
    shapes = {"qkv": (192, 64), "o": (64, 64), "gate, up + silu": (256, 64), "down": (64, 128), "LM head": (320, 64)}
    for name, (num_out, num_in) in shapes.items():
        found = [line for line in lines if line["operator"] == name and line["num_rows"] < 20]
        assert [line["num_rows"] for line in found] == [1, 2, 4, 8, 16]
        num_bytes = num_out * num_in * (head_bits if name == "LM head" else bits) / 8
        assert all(line["bytes_per_s"] * line["seconds"] == pytest.approx(num_bytes) for line in found)


def test_what_cannot_be_measured_is_refused() -> None:
    for dtype, said in {
        "int3": r"dtype='int3' is not possible: it must be one of .*int4:group=32, 64 or 128",
        "int4:group=128": "groups of 128 do not divide the 64 inputs of .*; 32 and 64 do",
        "float16": "float16",
    }.items():
        with pytest.raises(BadOption, match=said):
            kernels.run(KernelsPlan(TINY, dtype=dtype))
    for isa in ("sse9", "reference"):
        assert f"isa='{isa}'" in refusal(BadOption, kernels.run, KernelsPlan(TINY, isa=isa))
    assert "random-1.24b" in refusal(BadOption, config_named, "random-1.24")


def test_shapes() -> None:
    assert num_parameters(config_named("random-1.24b")) == 1_235_814_400
    assert config_named("demo").hidden_size == 2048
