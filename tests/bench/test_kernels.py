"""`forerun bench kernels` on a tiny decoder: every operator at every number of rows, and what cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from forerun.bench import bandwidth, kernels
from forerun.bench.kernels import KernelsPlan, config_named
from forerun.bench.widen import num_parameters
from forerun.errors import BadOption
from forerun.models.layers import DecoderConfig
from ops.native_cases import ISAS, needs_native

TINY = DecoderConfig("llama", 300, 64, 2, 4, 2, 16, 96, 1e-5, 512, tie_embeddings=True)
PLAN = KernelsPlan(TINY, num_threads=1, num_repeats=2, rows=(1, 3), prefill_tokens=20, context=9, contexts=(5, 70))
LAYER = ["qkv", "o", "gate, up + silu", "down", "norm + rope", "attention, 5", "all layers"]
ALWAYS = ["attention, 70", "LM head", "LM head, argmax", "whole pass"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Probes of a few megabytes; threads as they were."""
    monkeypatch.setattr(bandwidth, "MIN_BYTES", 1 << 24)
    monkeypatch.setattr(bandwidth, "MIN_BYTES_PER_THREAD", 1 << 24)
    monkeypatch.setenv("FORERUN_NUM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_operator_at_every_number_of_rows(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.run(KernelsPlan(**{**vars(PLAN), "dtype": dtype, "isa": ISAS[-1]}))
    printed = capsys.readouterr().out.splitlines()
    assert f"{num_parameters(TINY):,} random weights" in printed[0]
    assert "ceiling" in " ".join(printed[:4])
    record = json.loads(printed[-1])
    assert (record["bench"], record["isa"], record["dtype"]) == ("kernels", ISAS[-1], dtype)
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
def test_a_layer_is_the_sum_of_its_products(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes behind each rate: those of the products and the head add up to what a whole pass reads."""
    kernels.run(PLAN)
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    read = {
        line["operator"]: line["bytes_per_s"] * line["seconds"]
        for line in lines
        if line["num_rows"] == 1 and line["bytes_per_s"]
    }
    products = TINY.num_layers * sum(read[name] for name in ("qkv", "o", "gate, up + silu", "down"))
    norms = 4 * TINY.hidden_size * (2 * TINY.num_layers + 1)
    assert read["all layers"] == pytest.approx(products + norms)
    assert read["whole pass"] == pytest.approx(products + norms + read["LM head"])
    assert read["LM head"] == pytest.approx(320 * 64 * 2)
    assert read["LM head, argmax"] == pytest.approx(320 * 64 * 2)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BadOption, match="float16"):
        kernels.run(KernelsPlan(TINY, dtype="float16"))
    with pytest.raises(BadOption, match="isa='sse9'"):
        kernels.run(KernelsPlan(TINY, isa="sse9"))
    with pytest.raises(BadOption, match="isa='reference'"):
        kernels.run(KernelsPlan(TINY, isa="reference"))
    with pytest.raises(BadOption, match=r"random-1\.24b"):
        config_named("random-1.24")


def test_shapes() -> None:
    assert num_parameters(config_named("random-1.24b")) == 1_235_814_400
    assert config_named("demo").hidden_size == 2048
