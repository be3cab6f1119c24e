"""Files in the shapes of published mixtures are read by the engine, and each token chooses experts for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.random_file import SHAPES, write
from forerun import LLM, SamplingParams
from forerun.errors import BadOption
from forerun.models.opened import spec_of
from ops.native_cases import needs_native

SMALL = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 32, "chosen": 4, "ffn": 64}


@needs_native
@pytest.mark.parametrize(("name", "kind"), [("qwen3-30b-a3b", "Q4_0"), ("gpt-oss-20b", "MXFP4")])
def test_a_small_file_runs_and_unlike_tokens_choose_unlike_experts(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "a.gguf"
    assert write(path, replace(SHAPES[name], **SMALL), 2, "Q4_0", kind) == path.stat().st_size
    llm = LLM(str(path), draft="none", max_seq_len=256, max_batch_size=8)
    found = dict[int, float]()
    llm.listen(lambda report: found.update({report.num_rows: report.num_experts}))
    llm.generate([[7 * i + 40] for i in range(8)], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    assert found[8] > 16, "independent rows choose 21 of 32 experts"


def test_the_published_sizes_are_those_of_the_models(tmp_path: Path) -> None:
    """A whole layer takes too long to write: what a small file keeps of them is read, the rest compared."""
    write(tmp_path / "a.gguf", replace(SHAPES["gpt-oss-20b"], **SMALL), 4, "Q8_0", "MXFP4")
    spec = spec_of(tmp_path / "a.gguf")
    assert [block.attention.window for block in spec.blocks if block.attention] == [128, None, 128, None]
    assert all(block.attention.sinks for block in spec.blocks if block.attention)
    wide = SHAPES["qwen3-30b-a3b"]
    assert (wide.hidden, wide.experts, wide.chosen, wide.ffn) == (2048, 128, 8, 768)
    with pytest.raises(BadOption, match="rows of 48 weights do not divide into the blocks of 32 of Q4_0"):
        write(tmp_path / "b.gguf", replace(wide, **{**SMALL, "ffn": 48}), 1, "Q4_0", "Q4_0")
