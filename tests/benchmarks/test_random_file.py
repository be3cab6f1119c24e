"""Files in the shapes of published models are read by the engine, and each token chooses experts for itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recurrent
from benchmarks.random_file import SHAPES, Hybrid, write
from forerun import LLM, SamplingParams
from forerun.blocks import Spec
from forerun.errors import BadOption
from forerun.models.opened import spec_of
from ops.native_cases import needs_native
from small_hybrid import small_hybrid

PUBLISHED = Path(__file__).parents[1] / "models" / "published.json"
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


@needs_native
@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
def test_a_small_hybrid_has_states_and_a_block_that_drafts(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.gguf"
    write(path, small_hybrid(name), 8, "Q4_K", "Q4_K", further=True)
    assert [block.recurrence is not None for block in spec_of(path).blocks] == [True, True, True, False] * 2
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    llms = [LLM(str(path), draft=draft, max_seq_len=256) for draft in ("none", "mtp")]
    plain, drafted = (llm.generate([list(range(40, 90))], params)[0].token_ids for llm in llms)
    assert plain == drafted
    assert len(set(plain)) > 4, "a mean beside 0 would make all tokens alike"


@pytest.mark.parametrize(("name", "own", "published"), [
    ("qwen3.5-9b", "9b", "Qwen/Qwen3.5-9B"), ("qwen3.5-35b-a3b", "35b-a3b", "Qwen/Qwen3.5-35B-A3B"),
])  # fmt: skip
def test_hybrids_have_the_published_sizes(tmp_path: Path, name: str, own: str, published: str) -> None:
    """What both benchmarks run has the blocks of the published model, but for what a file says of how it is stored."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(PUBLISHED.read_text(encoding="utf-8"))[published]))
    whole, four = spec_of(tmp_path), recurrent.SHAPES[own]
    assert (four.hidden_size, four.blocks) == (whole.hidden_size, whole.blocks[:4])
    shape = SHAPES[name]
    assert isinstance(shape, Hybrid)
    assert sizes_of(shape) == sizes_of_spec(whole)


def sizes_of(s: Hybrid) -> dict[str, int]:
    return {"hidden": s.hidden, "heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "experts": s.experts,
            "chosen": s.chosen, "ffn": s.ffn, "shared": s.shared, "key_heads": s.key_heads,
            "value_heads": s.value_heads, "state_dim": s.state_dim, "conv": s.conv}  # fmt: skip


def sizes_of_spec(spec: Spec) -> dict[str, int]:
    block, full = spec.blocks[0], spec.blocks[3].attention
    assert block.recurrence is not None
    assert full is not None
    e, r = block.experts, block.recurrence
    assert r.key_dim == r.value_dim
    fed = e.mlp if e else block.mlp
    assert fed is not None
    return {"hidden": spec.hidden_size, "heads": full.heads, "kv_heads": full.kv_heads, "head_dim": full.head_dim,
            "experts": e.num if e else 0, "chosen": e.chosen if e else 0, "ffn": fed.size,
            "shared": e.shared.size if e and e.shared else 0, "key_heads": r.key_heads, "value_heads": r.value_heads,
            "state_dim": r.key_dim, "conv": r.conv}  # fmt: skip
