"""`benchmarks.schemas`: random schemas, all of whose answers match, and what counts as one that does not."""

import json
import random
from typing import Any

import jsonschema
import pytest

from benchmarks.schemas import SchemasPlan, is_valid, measure, random_schema
from forerun import LLM


def test_every_answer_matches_its_schema() -> None:
    plan = SchemasPlan(num_schemas=9, max_tokens=100)
    with LLM("shipped", max_batch_size=16) as llm:
        lines, wrong, _ = measure(llm, plan)
    assert wrong == []
    for line in lines:
        assert (line.num_invalid, line.num_wrongly_cut, line.num_failed) == (0, 0, 0)
        assert line.num_valid + line.num_cut == 9
        assert line.num_valid > 2
        assert line.accepted > 0.3, "it drafts"


def test_schemas_are_schemas_of_every_kind() -> None:
    chance = random.Random(2)
    texts = [json.dumps(random_schema(chance)) for _ in range(300)]
    for text in texts:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    for word in ("enum", "const", "pattern", "format", "anyOf", "items", "exclusiveMaximum", "\\u7dd1"):
        assert any(word in text for text in texts), word
    assert len(set(texts)) > 200


@pytest.mark.parametrize(
    ("text", "schema", "valid"),
    [
        ("3", {"type": "integer"}, True),
        ("3.5", {"type": "integer"}, False),
        ("{", {}, False),
        ('"x"', {"pattern": "^y"}, False),
        ('"1.2.3.456"', {"format": "ipv4"}, False),
        ("0.9999999999999999999999", {"exclusiveMaximum": 1}, True),
    ],
)
def test_what_is_valid(text: str, schema: dict[str, Any], valid: bool) -> None:
    assert is_valid(text, schema) == valid
