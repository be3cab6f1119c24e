"""What passes of a mixture of experts tell of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams, native
from forerun.types import StepReport
from tiny import write_tiny

needs_native = pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")


def reports_of(folder: Path, ops: str, prompts: list[list[int]]) -> list[StepReport]:
    """The steps in which all prompts decode."""
    llm, found = LLM(str(folder), draft="none", ops=ops, dtype="float32"), list[StepReport]()
    llm.engine.listen(found.append)
    llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [report for report in found if report.num_decoding == len(prompts) and not report.num_prefill_tokens]


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
