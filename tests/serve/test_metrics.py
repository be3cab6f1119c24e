"""What metrics count of steps, without a server."""

import re
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.serve.metrics import Metrics
from tiny import write_tiny


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_experts_of_a_mixture_are_counted(tmp_path: Path, family: str) -> None:
    """Those that the reports of steps tell; a dense model has no such metric."""
    llm = LLM(str(write_tiny(tmp_path / "model", family)), draft="none")
    metrics, told = Metrics(llm, "small"), list[float]()
    llm.listen(lambda report: told.append(report.num_experts))
    llm.generate([[5, 6, 7], [90, 3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    text = metrics.text().decode()
    if family == "llama":
        assert "step_experts" not in text
        return
    found = dict(re.findall(r'^forerun:step_experts_(sum|count)\{model_name="small"\} (\S+)$', text, re.MULTILINE))
    assert float(found["count"]) == len(told) >= 8
    assert float(found["sum"]) == pytest.approx(sum(told))
    assert min(told) >= 2
