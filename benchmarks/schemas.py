"""`benchmarks.schemas` asks for answers under random JSON schemas with speculation, and counts those that do not match.

Schemas are nested objects, arrays, unions, enumerations, constants, patterns, and numbers and texts with bounds, with
names of several scripts. Each is asked at several temperatures, by the drafters of the engine in turn, and every
finished answer is checked by the jsonschema package. One that is cut by --max-tokens must be the beginning of a text of
the grammar.

    python -m benchmarks.schemas --target shipped --schemas 3400
"""

import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import jsonschema

from benchmarks.start import measuring, start
from forerun.bench.plans import Plan
from forerun.bench.tables import Column, table
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.errors import BadOption
from forerun.registry import option
from forerun.sampling.grammar import vocabulary
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

DEPTH = 3  # of a schema
KINDS = ("valid", "invalid", "cut", "wrongly cut", "failed")  # of answers
WHITESPACE = ("free", "compact", "spaced")
_NAMES = (
    *("name", "id", "größe", "名前", "a b", 'quo"te', "back\\slash", "emoji 🙂", "x"),
    "very_long_name_of_a_property",
)
_TEXTS = ("red", "dark red", "grün", "緑", 'a "b"', "", "\\n", "🙂", "line\nbreak")
_PATTERNS = ("^[a-z]{1,8}$", "^[0-9]{3}-[0-9]{4}$", "^(north|south)-[A-F]+$", "^é{2,4}$", r"^\w{2}\d{1,3}$")
_FORMATS = ("uuid", "ipv4")  # jsonschema reads a time as an old draft did, and Python's dates have no year 0000


@dataclass(frozen=True)
class SchemasPlan(Plan):
    """The options of the benchmark."""

    num_schemas: int = option(100, "random schemas", flag="--schemas", min=1)
    temperatures: tuple[float, ...] = option((0.0, 0.7, 1.2), "of the answers to each", flag="--temperature")
    max_tokens: int = option(200, "of an answer", min=1)
    batch: int = option(16, "answers at once", min=1)
    seed: int = option(1, "of the schemas")


@dataclass(frozen=True)
class SchemasLine:
    """One row of the table and of the JSON. accepted: of drafted tokens, all together."""

    temperature: float
    num_answers: int
    num_valid: int
    num_invalid: int
    num_cut: int
    num_wrongly_cut: int  # beginnings of no text of the grammar
    num_failed: int
    num_tokens: int
    accepted: float


def random_schema(chance: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """Return a schema, at most so many levels deep, whose strings and arrays are bounded."""
    kinds = ["enum", "const", "integer", "number", "string", "pattern", "format", "boolean", "null"] * (depth < DEPTH)
    kind = chance.choice(kinds + ["object", "object", "array", "anyOf"] * 2 * (depth > 0))
    if kind == "enum":
        return {"enum": chance.sample([*_TEXTS, 3, -1.5, None, True], chance.randint(1, 5))}
    if kind == "const":
        return {"const": chance.choice([*_TEXTS, 7, None])}
    if kind == "integer":
        low = chance.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + chance.choice((0, 1, 9, 5000))}
    if kind == "number":
        least = round(chance.uniform(-50, 50), 2)
        return {"type": "number", "minimum": least, "exclusiveMaximum": least + chance.choice((0.5, 3, 1000))}
    if kind == "string":
        return {"type": "string", "minLength": chance.randint(0, 3), "maxLength": chance.randint(3, 20)}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(_PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": chance.choice(_FORMATS)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "array":
        fewest = chance.randint(0, 2)
        bounds = {"minItems": fewest, "maxItems": fewest + chance.randint(0, 3)}
        return {"type": "array", "items": random_schema(chance, depth - 1), **bounds}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth - 1) for _ in range(chance.randint(2, 3))]}
    names = chance.sample(_NAMES, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a text is JSON that a schema allows. Decimals are compared exactly, not as they are rounded."""
    try:
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        jsonschema.validate(json.loads(text, parse_float=Decimal), exact, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def measure(llm: LLM, plan: SchemasPlan) -> tuple[list[SchemasLine], list[dict[str, Any]], Counter[str]]:
    """Ask for all answers. Returns a line for each temperature, the wrong answers, and why schemas were refused."""
    chance, drafts = random.Random(plan.seed), tuple(llm.drafters)
    refused, wrong = Counter[str](), list[dict[str, Any]]()
    asked: list[tuple[dict[str, Any], str]] = []
    while len(asked) < plan.num_schemas:
        schema, whitespace = random_schema(chance), chance.choice(WHITESPACE)
        try:
            vocabulary(llm.tokenizer).compiled(SamplingParams(json_schema=schema, json_whitespace=whitespace))
        except BadOption as error:
            refused[str(error)[:80]] += 1
            continue
        asked.append((schema, whitespace))
    lines = []
    for temperature in plan.temperatures:
        counts, drafted, accepted, num_tokens = Counter[str](), 0, 0, 0
        for first in range(0, len(asked), plan.batch):
            part = asked[first : first + plan.batch]
            params = [
                SamplingParams(
                    json_schema=schema,
                    json_whitespace=whitespace,
                    temperature=temperature,
                    seed=first + i,
                    max_tokens=plan.max_tokens,
                    draft=drafts[(first + i) % len(drafts)],
                )
                for i, (schema, whitespace) in enumerate(part)
            ]
            requests = llm.submit(["value = "] * len(part), params, raw=True)
            while any(request.seq.finish_reason is None for request in requests):
                time.sleep(0.001)
            for request, (schema, _) in zip(requests, part, strict=True):
                kind = _kind(llm, request, schema)
                counts[kind] += 1
                if kind not in ("valid", "cut"):
                    said = {"schema": schema, "text": request.text, "draft": request.seq.draft, "kind": kind}
                    wrong.append({**said, "temperature": temperature, "error": str(request.error)})
                drafted, accepted = drafted + request.report.num_drafted, accepted + request.report.num_accepted
                num_tokens += request.seq.num_output_tokens
        valid, invalid, cut, wrongly_cut, failed = (counts[kind] for kind in KINDS)
        made = (temperature, len(asked), valid, invalid, cut, wrongly_cut, failed, num_tokens)
        lines.append(SchemasLine(*made, accepted / max(1, drafted)))
    return lines, wrong, refused


def _kind(llm: LLM, request: Any, schema: Mapping[str, Any]) -> str:
    seq = request.seq
    if request.error is not None:
        return "failed"
    if seq.finish_reason == "length":
        compiled = vocabulary(llm.tokenizer).compiled(seq.params)
        assert compiled is not None
        return "cut" if compiled.start(seq.end_ids, 0).takes([], seq.output_ids) else "wrongly cut"
    return "valid" if is_valid(request.text, schema) else "invalid"


TABLE = (
    Column("temperature", "temperature", "{:g}"),
    Column("answers", "num_answers", "{}"),
    Column("valid", "num_valid", "{}"),
    Column("invalid", "num_invalid", "{}"),
    Column("cut", "num_cut", "{}"),
    Column("wrongly\ncut", "num_wrongly_cut", "{}"),
    Column("failed", "num_failed", "{}"),
    Column("tokens", "num_tokens", "{}"),
    Column("accepted", "accepted", "{:.2f}"),
)


def run(config: EngineConfig, plan: SchemasPlan) -> dict[str, Any]:
    """Measure, print the table, and return all of it for JSON."""
    console = make_console()
    with LLM.from_config(config) as llm:
        lines, wrong, refused = measure(llm, plan)
    console.print(table(lines, TABLE))
    for one in wrong[:5]:
        console.print(json.dumps(one, ensure_ascii=False), markup=False)
    console.print(f"schemas that were refused, and others taken in their place: {sum(refused.values())}")
    for why, num in refused.most_common(5):
        console.print(f"  {num}: {why}", markup=False)
    return {
        "bench": "schemas",
        "target": config.target,
        "plan": plan.record(),
        "lines": [asdict(line) for line in lines],
        "wrong": wrong,
        "refused": dict(refused),
    }


command = measuring(
    run,
    SchemasPlan,
    flags.engine("target", "draft", "extra_drafts", "max_batch_size", "config", "ops"),
    "Ask for answers under random JSON schemas with speculation, and count those that do not match.",
)


if __name__ == "__main__":
    start(command)
