"""40 questions for tools, in eight sets of functions as an agent or an assistant would have them.

tool_questions.json has the functions of each set, in the form in which OpenAI's API takes them, and for each function
the questions that it answers. Schemas have what schemas of agents have: enumerations, numbers with bounds, patterns,
nested objects, lists of objects, optional fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TOOLS: Mapping[str, list[dict[str, Any]]] = {name: of_set["tools"] for name, of_set in _SETS.items()}


@dataclass(frozen=True)
class Question:
    """tools: the name of a set. function: the one that answers the question."""

    tools: str
    text: str
    function: str


QUESTIONS: tuple[Question, ...] = tuple(
    Question(tools, text, function)
    for tools, of_set in _SETS.items()
    for function, texts in of_set["questions"].items()
    for text in texts
)
