"""SPEED-Bench: 880 prompts of eleven kinds for speculative decoding (arXiv:2604.09557).

No package holds the prompts, so the user must name a file of prompts in JSON lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation, said

TITLE = "SPEED-Bench"
LICENCE = "as its card says"
HOME = "nvidia/SPEED-Bench on the hub, as JSON lines with question_id, category and turns"


def conversation(line: Mapping[str, Any]) -> Conversation:
    """Read a prompt with all of its turns."""
    turns = line["turns"]
    return Conversation(
        f"speed-bench-{line['question_id']}", str(line["category"]), said(*[turns] if isinstance(turns, str) else turns)
    )
