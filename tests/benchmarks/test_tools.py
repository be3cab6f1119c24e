"""The questions for tools fit their tools, and a call that is not valid does not count as one."""

import jsonschema
import pytest

from benchmarks.tool_questions import QUESTIONS, TOOLS
from benchmarks.tools import PLAIN, Answer, line_of


def test_forty_questions_name_functions_of_their_sets() -> None:
    assert len({question.text for question in QUESTIONS}) == 40
    asked = {(question.tools, question.function) for question in QUESTIONS}
    assert asked <= {(name, tool["function"]["name"]) for name, tools in TOOLS.items() for tool in tools}
    for tools in TOOLS.values():
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


def test_a_line_counts_valid_calls_right_functions_and_equal_texts() -> None:
    right = QUESTIONS[0].function
    made = [(0, PLAIN, 2.0, right, "a"), (0, "forced", 1.0, right, "a")]
    made += [(1, PLAIN, 2.0, "other", "b"), (1, "forced", 4.0, None, "c")]
    answers = {(i, way): Answer(i, way, seconds, 10, 5, function, text) for i, way, seconds, function, text in made}
    line = line_of("forced", answers, 2)
    assert (line.num_valid, line.num_right, line.num_same) == (1, 1, 1)
    assert line.over_plain.values == (2.0, 0.5)
    assert (line.tokens_per_s, line.tokens_per_step) == pytest.approx((4.0, 2.0))
