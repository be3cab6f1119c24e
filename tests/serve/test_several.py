"""Several models in one server: each its engine, chosen by the field `model`; their memory is planned together."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.engine import fitting
from forerun.engine.opened import Opened
from forerun.errors import BadOption, CapacityError, NotFound
from forerun.serve.aside import LONG_BYTES
from forerun.serve.bodies import meant
from forerun.serve.options import ServerOptions
from forerun.serve.server import named
from refusals import refusal
from serve.running import CODE, Running, assert_refused, serving

pytestmark = pytest.mark.once("each model has its own drafter")
TWO = """
max_batch_size = 2

[models.small]
target = "shipped"

[models.plain]
target = "shipped"
draft = "none"
max_seq_len = 128
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("config") / "models.toml"
    path.write_text(TWO, encoding="utf-8")
    with serving("--config", str(path), target=None) as running:
        yield running


def test_a_model_is_found_by_the_names_that_clients_make_of_its_own(two: Running) -> None:
    """Ollama's put a tag behind it."""
    for name in ("plain", "plain:latest"):
        body = {"model": name, "prompt": CODE, "max_tokens": 2}
        assert two.http.post("/v1/completions", json=body).json()["model"] == "plain"
        assert two.http.get(f"/v1/models/{name}").json()["id"] == "plain"
    assert meant("model.gguf", ["model.gguf"]) == meant("model", ["model.gguf"]) == "model.gguf"
    assert meant("model:latest", ["model.gguf"]) == "model.gguf"
    assert meant("other", ["model.gguf"]) == "other"


def test_a_body_chooses_the_model(two: Running) -> None:
    client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0)
    told = {model.id: model.to_dict()["max_model_len"] for model in client.models.list()}
    assert told == {"small": 2048, "plain": 128}
    (expected,) = LLM("shipped", draft="none").generate(CODE, SamplingParams(max_tokens=16, temperature=0))
    reports = {}
    asked: Any = {"prompt": CODE, "max_tokens": 16, "temperature": 0}
    asked["extra_body"] = {"speculation": {"report": True}}
    for model in told:
        answer = client.completions.create(model=model, **asked)
        assert (answer.model, answer.choices[0].text) == (model, expected.text)
        reports[model] = answer.to_dict()["forerun"]["draft"]
        chunks = client.completions.create(model=model, stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert reports["plain"] == "none" != reports["small"]
    assert two.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 1}).json()["model"] == "small"


def test_a_long_body_chooses_it_too(two: Running) -> None:
    """Those are read by another process, which knows all models."""
    body = {"prompt": CODE * 40, "max_tokens": 1, "metadata": {"x": "y" * LONG_BYTES}}
    assert two.http.post("/v1/completions", json={**body, "model": "small"}).json()["model"] == "small"
    error = assert_refused(two.http.post("/v1/completions", json={**body, "model": "plain"}), "128")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_unknown_model_is_refused_with_the_names_that_are_there(two: Running, path: str) -> None:
    talk = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 2}
    asked = {"/v1/completions": {"prompt": CODE}, "/v1/responses": {"input": CODE}}.get(path, talk)
    assert_refused(two.http.post(path, json={"model": "gpt-5", **asked}), "'small' or 'plain'", 404)
    assert two.http.get("/v1/models/gpt-5").status_code == 404
    assert two.http.get("/v1/models/plain").json()["root"] == "plain"


def test_metrics_are_told_apart_by_the_label_of_the_model(two: Running) -> None:
    """And each is declared once, as the format wants it."""
    for model, num in (("small", 3), ("plain", 5)):
        two.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": num, "model": model, "ignore_eos": True})
    text = two.http.get("/metrics").text
    for model in ("small", "plain"):
        name = rf'^forerun:request_success_total{{finished_reason="length",model_name="{model}"}} ([1-9]\S*)$'
        assert re.search(name, text, re.M)
        answers = rf'^forerun:http_requests_total{{model_name="{model}",path="/v1/completions",status="200"}} \S+$'
        assert re.search(answers, text, re.M)
    declared = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(declared) == len(set(declared))


def test_each_model_is_said_in_a_line(two: Running) -> None:
    assert re.findall(r"^(\w+) \(.*draft (\w+), up to 2 requests at once, of up to ([\d,]+) tokens", two.log, re.M) == [
        ("small", "auto", "2,048"),
        ("plain", "none", "128"),
    ]
    assert re.search(r"^lab of small: http://\S+/lab/$", two.log, re.M)


def test_a_file_with_models_is_read(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_SPEC_LENGTH", "3")
    text = f"max_seq_len = 64\n{TWO}"
    models = EngineConfig.several((), {"max_seq_len": None, "dtype": "float32"}, written(text, "models.toml"))
    (small, first), (plain, second) = models
    assert (small, plain) == ("small", "plain")
    assert (first.draft, first.max_batch_size, first.max_seq_len) == ("auto", 2, 64)
    assert (second.draft, second.max_batch_size, second.max_seq_len) == ("none", 2, 128)
    assert {(one.spec_length, one.dtype) for one in (first, second)} == {(3, "float32")}
    in_json = json.dumps({"models": {"a": {"target": "shipped", "draft_model": "lookup"}}})
    ((name, config),) = EngineConfig.several((), {}, written(in_json, "models.json"))
    assert (name, config.draft) == ("a", "lookup")


@pytest.mark.parametrize(
    ("text", "targets", "error"),
    [
        ("[models]", [], r"write \[models.NAME\]"),
        ("models = 3", [], "models=3 is not possible"),
        ("[models.a]\ndraft = 'none'", [], r"\[models.a\] has no target"),
        ("[models.a]\ntarget = 'shipped'\nspeed = 9", [], r"\[models.a\]: .*there is no option 'speed'"),
        ("target = 'shipped'\n[models.a]\ntarget = 'shipped'", [], "contradict each other"),
        (TWO, ["shipped"], "name them in one place"),
    ],
)
def test_what_is_no_list_of_models_is_refused(text: str, targets: list[str], error: str, written: Any) -> None:
    assert re.search(error, refusal(BadOption, EngineConfig.several, targets, {}, written(text, "models.toml")))


def test_other_commands_take_one_model(written: Any) -> None:
    said = refusal(BadOption, EngineConfig.from_sources, {}, written(TWO, "models.toml"))
    assert "names models (small, plain), as `forerun serve` takes them" in said


def test_no_two_models_have_one_name(tmp_path: Path) -> None:
    one = EngineConfig(target="shipped")
    assert [names for names, _ in named([one, ("other", one)], ServerOptions())] == [("shipped",), ("other",)]
    assert named([one], ServerOptions(served_names=("a", "b")))[0][0] == ("a", "b")
    assert re.search(r"2 models are called 'shipped'.*--config", refusal(BadOption, named, [one, one], ServerOptions()))
    with pytest.raises(BadOption, match="--served-model-name 'a' is not possible with 2 models"):
        named([one, one], ServerOptions(served_names=("a", "b")))


def test_memory_is_planned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that would fit alone and not together are refused before a weight is read; with what fits."""
    configs = {"a": EngineConfig(target="shipped", draft="none"), "b": EngineConfig(target="shipped")}
    found = {name: fitting.refuse_early(Opened.of(config)) for name, config in configs.items()}
    alone = {name: one.plan(None).total_bytes for name, one in found.items()}
    whole = fitting.plan_together(found, None)
    assert whole.total_bytes == sum(alone.values())
    assert {part.name.partition(":")[0] for part in whole.parts} == {"a", "b"}
    fitting.refuse_together(configs)
    room = whole.total_bytes - 1
    assert all(total < room for total in alone.values())
    monkeypatch.setattr(fitting, "available_bytes", lambda device: room)
    with pytest.raises(CapacityError, match="these 2 engines together") as refused:
        fitting.refuse_together(configs)
    plan = fitting.plan_together(found, room)
    assert [set(one) for one in plan.suggestions] == [{"max_batch_size"}, {"max_seq_len"}]
    for options in plan.suggestions:
        assert all(f"{name}={value}" in str(refused.value) for name, value in options.items())

        def with_options(more: int, options: Any = options) -> int:
            changed = {name: value + more for name, value in options.items()}
            at_most = {name: fitting._at_most(one, changed) for name, one in found.items()}
            return sum(one.plan(None, config=at_most[name]).total_bytes for name, one in found.items())

        step = 16 if "max_seq_len" in options else 1
        assert with_options(0) <= room < with_options(step)


def test_what_is_wrong_with_one_model_names_it() -> None:
    with pytest.raises(NotFound, match=r"^b: "):
        fitting.refuse_together({"a": EngineConfig(target="shipped"), "b": EngineConfig(target="./nowhere")})
