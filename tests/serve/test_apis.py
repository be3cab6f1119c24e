"""An API is one file: nothing else of the server knows it, and a new one has all that the others have."""

import ast
import json
from pathlib import Path

import pytest

import forerun
from forerun import LLM, SamplingParams
from forerun.serve import apis
from forerun.serve.routes import Look, plain_error
from serve.test_serve_inside import served
from speculation import llm_options

SOURCE = Path(forerun.__file__).parent
TOY = '''
"""Says what comes behind words."""

from forerun.serve.bodies import Form, Job, params_of, status_of, wants_report
from forerun.serve.events import event
from forerun.serve.fields import (
    FLAG, NAME, OF_PARAMS, TEXT, array, by_reader, either, honoured, inert, integer, neutral, noted, number, one_of,
    required, structure,
)
from forerun.serve.routes import Api, Generate, Look


def read(read, model, defaults):
    given = read.fields
    params = params_of(given, defaults, {"most": "max_tokens"}, None)
    return Job("/toy/say", model, params, prompts=(given["words"],), stream=given.get("live", False),
               report=wants_report(given), ignored=tuple(read.ignored), given=given)


def answer(job, outputs, tokenizer, answer_id, created_s):
    return {"said": outputs[0].text, "id": answer_id}


class Stream:
    def __init__(self, *given):
        pass

    def begin(self):
        return b""

    def piece(self, index, chunk):
        return event({"said": chunk.text}) if chunk.text else b""

    def end(self, outputs):
        return event({"over": True})

    def fail(self, error):
        return event({"wrong": str(error)})


def wrong(error, request_id):
    return status_of(error)[0], {"wrong": str(error), "field": status_of(error)[2]}


VOICE = structure(("name",), name=NAME, pitch=number(0, 1))
FIELDS = {"words": required(TEXT), **by_reader(most=OF_PARAMS["max_tokens"]),
          **honoured(live=FLAG, mode=one_of("slow", "fast"), times=integer(1, 5), tags=array(NAME, 1), voice=VOICE,
                     wish=either(TEXT, VOICE)),
          "colour": neutral(("grey",), "answers have none"), **noted("mood"), **inert("it is a joke", "joke")}
API = Api(
    (Generate(Form("/toy/say", FIELDS), read, answer, Stream), Look("/toy/{what}", lambda models, key, what: [what])),
    wrong, below=("/toy",), absent={"/toy/songs/sing": "nothing is sung here: ask a choir"},
)
'''


@pytest.mark.once("its routes, whatever the speculation")
async def test_an_api_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    monkeypatch.setattr(apis, "__path__", [*apis.__path__, str(tmp_path)])
    llm = LLM("shipped", **llm_options())
    plain = llm.generate("def f(", SamplingParams(temperature=0, max_tokens=5), raw=True)[0].text

    async with served(llm, names=("shipped",)) as (client, _):
        body = {"words": "def f(", "most": 5, "temperature": 0, "joke": 1, "colour": "grey", "mood": "good"}
        whole = await client.post("/toy/say", json=body)
        assert (whole.status_code, whole.json()["said"]) == (200, plain)
        assert whole.headers["x-forerun-ignored"] == "mood"
        lines = (await client.post("/toy/say", json={**body, "live": True})).text.split("\n\n")[:-1]
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(piece.get("said", "") for piece in pieces) == plain
        assert pieces[-1] == {"over": True}
        for field, value, at, sentence in (
            ("wrods", "x", "wrods", "did you mean 'words'"),
            ("colour", "red", "colour", "answers have none"),
            ("words", None, "words", "there is no words: this API wants it"),
            ("live", 1, "live", "live=1 is not possible: it must be true or false"),
            ("temperature", -1, "temperature", "temperature=-1"),
            ("mode", "loud", "mode", "mode='loud' is not possible: it must be one of slow, fast"),
            ("times", -3, "times", "times=-3 is not possible: it must be a whole number of at least 1 and at most 5"),
            ("tags", {"no": 1}, "tags", 'tags={"no": 1} is not possible: it must be a list that is not empty'),
            ("tags", ["a", ""], "tags[1]", "tags[1]='' is not possible: it must be a text that is not empty"),
            ("voice", {"pitch": 1}, "voice.name", "voice has no name: it must be a text that is not empty"),
            ("voice", {"name": "x", "pitch": 2}, "voice.pitch", "voice.pitch=2 is not possible: it must be a number"),
            ("wish", 3, "wish", "wish=3 is not possible: it must be a text or an object"),
            ("wish", {"name": 3}, "wish.name", "wish.name=3 is not possible"),
        ):
            answer = await client.post("/toy/say", json={**body, field: value})
            refused = answer.json()
            assert (answer.status_code, refused["field"], sentence in refused["wrong"]) == (400, at, True), answer.text
        right = {"mode": "slow", "times": 5, "tags": ["a"], "voice": {"name": "x", "pitch": None}, "wish": "x"}
        assert (await client.post("/toy/say", json={**body, **right})).json()["said"] == plain
        assert (await client.get("/toy/anything")).json() == ["anything"]
        for path, status, sentence in (
            ("/toy/songs/sing", 404, "ask a choir"),
            ("/toy/a/b", 404, "there is no /toy/a/b"),
            ("/toy/anything", 405, "/toy/anything takes GET"),
        ):
            answer = await client.post(path, json={})
            assert (answer.status_code, sentence in answer.json()["wrong"]) == (status, True), answer.text
        described = (await client.get("/openapi.json")).json()["paths"]
        assert [one["name"] for one in described["/toy/{what}"]["get"]["parameters"]] == ["what"]
        schema = described["/toy/say"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == ["words"]
        assert {"joke", "mood", "colour", "temperature", "draft"} <= schema["properties"].keys()


@pytest.mark.once("paths alone")
def test_a_target_without_a_path_has_errors_too() -> None:
    assert (apis.errors_of("*"), apis.refusal("*")) == (plain_error, None)


@pytest.mark.once("files alone")
def test_nothing_else_knows_an_api() -> None:
    """Neither by the name of its file nor by its paths, which a sentence to a client may name among other words."""
    known = apis.apis()
    routes = [route for api in known.values() for route in api.routes]
    paths = {route.url if isinstance(route, Look) else route.form.url for route in routes}
    paths |= {path for route in routes for path in route.also}
    for file in sorted(SOURCE.rglob("*.py")):
        is_api, mentions = file.parent.name == "apis", list[str]()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and not is_api:
                mentions += {node.value} & paths if isinstance(node.value, str) else ()
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
                mentions += [name for name in names if name.removeprefix("forerun.serve.apis.") in known]
        assert not mentions, (file, mentions)
