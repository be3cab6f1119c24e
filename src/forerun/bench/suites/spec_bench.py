"""Spec-Bench: 480 questions of six tasks, for speculative decoding (Xia et al. 2024, arXiv:2401.07851, section 6).

The first task is MT-bench. Its eight kinds count as one kind, as in Spec-Bench's leaderboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation, said

TITLE = "Spec-Bench"
LICENCE = "Apache-2.0"
HOME = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
TASKS = {
    "translation": "translation",
    "summarization": "summary",
    "qa": "question",
    "math_reasoning": "maths",
    "rag": "retrieval",
}


def conversation(line: Mapping[str, Any]) -> Conversation:
    """Read a question with all of its turns."""
    task = TASKS.get(line["category"], "turns")
    return Conversation(f"spec-bench-{line['question_id']}", task, said(*line["turns"]))
