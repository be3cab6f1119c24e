"""What passes of a mixture of experts tell of it."""

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.blocks import EMBEDDING, read_share, weights
from forerun.models.loading import load_checkpoint
from forerun.ops import make
from forerun.types import StepReport
from models.test_parity import WHOLE
from support import heard, needs_native
from tiny import write_tiny


def reports_of(folder: Path, ops: str, prompts: list[list[int]]) -> list[StepReport]:
    """The steps in which all prompts decode."""
    llm = LLM(str(folder), draft="none", ops=ops, dtype="float32")
    reports = heard(llm)
    llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [report for report in reports if report.num_decoding == len(prompts) and not report.num_prefill_tokens]


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
def test_a_step_tells_how_many_experts_its_rows_chose(tmp_path: Path, ops: str) -> None:
    """Two of four for each row: as many for rows that are alike, more for others, none of a dense model."""
    mixture = write_tiny(tmp_path / "mixture", "qwen3_moe")
    assert {report.num_experts for report in reports_of(mixture, ops, [[5, 6, 7]])} == {2.0}
    assert {report.num_experts for report in reports_of(mixture, ops, [[5, 6, 7]] * 3)} == {2.0}
    unlike = {report.num_experts for report in reports_of(mixture, ops, [[5, 6, 7], [90, 3], [201, 4, 8, 9]])}
    assert all(2.0 <= num <= 4.0 for num in unlike)
    assert max(unlike) > 2.5
    assert {report.num_experts for report in reports_of(write_tiny(tmp_path / "dense"), ops, [[5, 6]])} == {0.0}


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
def test_a_pass_of_one_row_reads_the_experts_that_it_chooses(tmp_path: Path, ops: str) -> None:
    """Two of four: half of the bytes that the experts' matrices have."""
    model = load_checkpoint(write_tiny(tmp_path / "mixture", "qwen3_moe"), ops=make(ops, "cpu"), dtype="float32").model
    of_experts = [w.name for w in weights(model.config) if w.role == "experts"]
    assert len(of_experts) == 2 * 4 * 3
    assert [read_share(model.config, name) for name in (of_experts[0], "model.layers.0.mlp.gate.weight")] == [0.5, 1.0]
    num_bytes = 4 * sum(model.weight(name).size for name in of_experts)
    matrices = getattr(model, "matrices", None)
    if matrices is None:
        whole = sum(tensor.nbytes for name, tensor in model.weights.items() if name != EMBEDDING)  # it is looked up
        assert model.bytes_per_pass == whole - num_bytes // 2
    else:
        packed = {name: matrix.nbytes for name, matrix in matrices.items()}
        experts = sum(size for name, size in packed.items() if ".experts." in name)
        assert experts >= num_bytes
        norms = model.bytes_per_pass - sum(packed.values()) + experts // 2
        assert norms == sum(4 * w.shape[0] for w in weights(model.config) if w.role == "vector")


@needs_native
def test_a_mixture_whose_rows_choose_every_expert(write_checkpoint: Any) -> None:
    """With nothing, a table, its own first layer and itself drafting, as far as the usual pacing finds that it pays."""
    folder = write_checkpoint(WHOLE["mixtral-all"])
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    texts = []
    for draft in ("none", "lookup", "early_exit:skip=1", f"model:path={folder}"):
        llm = LLM(str(folder), draft=draft, dtype="float32", max_seq_len=64)
        texts.append([out.token_ids for out in llm.generate([[5, 6, 7] * 3, [90, 3]], params)])
    assert texts[1:] == texts[:1] * 3
    assert {report.num_experts for report in reports_of(folder, "native", [[5, 6, 7], [90, 3]])} == {2.0}
