"""`forerun batch` as a user runs it: answers equal to generate's, kills, Ctrl-C, refusals."""

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pexpect
import pytest

import processes
from forerun import LLM, SamplingParams
from forerun.engine.request import Request
from forerun.serve.apis.openai import CHAT, COMPLETIONS
from forerun.serve.batch import seed_of
from speculation import environment

GREEDY = {"temperature": 0, "max_tokens": 24}
CODE = ("def fib(n):", "class Stack:", "import os", "for i in range(", "x = [", "try:\n    ", "while True:", "return ")


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


# ---------------------------------------------------------------------------------------------------------- answers


def test_answers_are_those_of_generate(process: Any, write: Any, answers: Any, llm: LLM, out: Path) -> None:
    """Greedy and drawn, both urls, several prompts and choices, a seed given and one taken from the custom_id."""
    ids = llm.tokenizer.encode("def f(")
    requests = write(
        ("greedy", COMPLETIONS, {"prompt": "def fib(n):", **GREEDY, "logprobs": 1}),
        ("drawn", COMPLETIONS, {"prompt": "def fib(n):"}),
        ("ids", COMPLETIONS, {"prompt": ids, "temperature": 0.7, "seed": 5, "model": "shipped", "top_k": 20}),
        ("texts", COMPLETIONS, {"prompt": ["class A:", "import "], "n": 2, "seed": 2**64 - 1, "max_tokens": 6}),
        ("chat", CHAT, {"messages": messages("class Stack:"), **GREEDY, "logprobs": True, "top_logprobs": 2}),
    )
    done = process("batch", str(requests), str(out), code=0)
    assert done.stdout == ""
    # The first process on a machine also says that it measured what passes take.
    said = [line for line in done.stderr.splitlines() if not line.startswith("measured what passes ")]
    summary = r"\[5 requests: 5 answered, 0 refused; 104 tokens in \d+\.\d s, \d+\.\d tokens/s\]"
    assert re.fullmatch(summary, "\n".join(said))
    got = {custom_id: response["body"] for custom_id, response in answers().items()}

    expected = llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=24, logprobs=1))[0]
    assert got["greedy"]["choices"][0]["text"] == expected.text
    assert got["greedy"]["choices"][0]["finish_reason"] == expected.finish_reason == "length"
    assert got["greedy"]["choices"][0]["logprobs"]["token_logprobs"] == [p.logprob for p in expected.logprobs or ()]
    assert got["greedy"]["usage"]["completion_tokens"] == 24
    drawn = llm.generate("def fib(n):", SamplingParams(max_tokens=16, seed=seed_of("drawn")))[0]
    assert got["drawn"]["choices"][0]["text"] == drawn.text
    assert got["drawn"]["forerun"]["seed"] == seed_of("drawn")
    of_ids = llm.generate([ids], SamplingParams(max_tokens=16, temperature=0.7, seed=5, top_k=20))[0]
    assert (got["ids"]["choices"][0]["text"], got["ids"]["model"]) == (of_ids.text, "shipped")
    texts = llm.generate(["class A:", "import "], SamplingParams(max_tokens=6, n=2, seed=2**64 - 1))
    assert [choice["text"] for choice in got["texts"]["choices"]] == [output.text for output in texts]
    assert len({choice["text"] for choice in got["texts"]["choices"]}) == 4
    chat = llm.chat([messages("class Stack:")[0]], SamplingParams(temperature=0, max_tokens=24))[0]
    assert got["chat"]["choices"][0]["message"] == {"role": "assistant", "content": chat.text, "refusal": None}
    assert got["chat"]["object"] == "chat.completion"
    assert len(got["chat"]["choices"][0]["logprobs"]["content"]) == 24


def test_refused_requests_have_their_line_and_the_others_their_answer(batch: Any, write: Any, answers: Any) -> None:
    """Refused by the body, by the tokenizer, by the engine, for want of room, and on the way."""
    cases: list[tuple[str, str, dict[str, Any], int, str | None]] = [
        ("stream", COMPLETIONS, {"prompt": "x", "stream": True}, 400, "stream"),
        ("tools", CHAT, {"messages": messages("x"), "tools": [{"type": "function"}]}, 400, "tools"),
        ("model", COMPLETIONS, {"prompt": "x", "model": 4}, 400, "model"),
        ("unknown", COMPLETIONS, {"prompt": "x", "frequency": 1}, 400, "frequency"),
        ("empty", COMPLETIONS, {"prompt": ""}, 400, None),
        ("surrogate", COMPLETIONS, {"prompt": "\ud800"}, 400, None),
        ("template", CHAT, {"messages": messages("x"), "chat_template_kwargs": {"mood": "good"}}, 400, None),
        ("ids", COMPLETIONS, {"prompt": [1, 4096]}, 400, None),
        ("rule", COMPLETIONS, {"prompt": "x", "acceptance": "always"}, 400, None),
        ("long", COMPLETIONS, {"prompt": "x", "max_tokens": 4000}, 400, None),
        ("drafter", COMPLETIONS, {"prompt": "x", "draft": "a" * 300}, 400, None),
        ("deep", CHAT, {"messages": [{"role": "user", "content": "x", "extra": nested(900)}]}, 400, None),
        ("self", CHAT, {"messages": messages("x"), "chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs"),
        ("room", COMPLETIONS, {"prompt": "x", "max_tokens": 600}, 503, None),
        ("bias", COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): "-inf" for i in range(3)}}, 400, "logit_bias"),
        ("on the way", COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): -1e999 for i in range(4096)}}, 400, None),
    ]
    fine = [(f"fine {i}", COMPLETIONS, {"prompt": "x =", "max_tokens": 4}) for i in range(3)]
    requests = write(fine[0], *(case[:3] for case in cases), *fine[1:])
    done = batch(requests, "--kv-cache-tokens", "512", code=2)
    assert done.is_spared, "a garbage collection would stop all requests for a while"
    first = "'stream' was refused: stream=true is not possible: a batch writes whole answers; leave it out\n"
    assert done.stderr.startswith(f"{first}[{len(cases) + 3} requests: 3 answered, {len(cases)} refused; ")
    assert done.stderr.endswith("; --retry-refused asks the refused ones again]\n")
    got = answers()
    assert [got[custom_id]["status_code"] for custom_id, _, _ in fine] == [200] * 3
    for custom_id, _, _, status, param in cases:
        error = got[custom_id]["body"]["error"]
        assert (got[custom_id]["status_code"], error["param"]) == (status, param), (custom_id, error)
        assert error["message"]
    assert got["long"]["body"]["error"]["code"] == "context_length_exceeded"
    # Nothing is missing: no model is asked for.
    again = batch(requests, "--target", "nowhere", code=2)
    assert again.stderr == (
        f"{first}[{len(cases) + 3} requests: 3 answered, {len(cases)} refused; {len(cases) + 3} of them before; "
        "--retry-refused asks the refused ones again]\n"
    )


def test_whatever_goes_wrong_in_a_line_ends_that_line(
    batch: Any, write: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is read, and when its answer is made; the others are answered."""
    submit, output = LLM.submit, Request.output

    def submitting(self: LLM, prompts: Any, *given: Any, **named: Any) -> Any:
        if prompts == ["two"]:
            raise OSError("the disk is on fire")
        return submit(self, prompts, *given, **named)

    def making(self: Request) -> Any:
        if self.seq.seed == seed_of("three"):
            raise ValueError("no text for you")
        return output(self)

    monkeypatch.setattr(LLM, "submit", submitting)
    monkeypatch.setattr(Request, "output", making)
    lines = [(name, COMPLETIONS, {"prompt": name, "max_tokens": 3}) for name in ("one", "two", "three", "four")]
    batch(write(*lines), code=2)
    got = answers()
    assert [got[name]["status_code"] for name, _, _ in lines] == [200, 500, 500, 200]
    for name, said in (("two", "the disk is on fire"), ("three", "no text for you")):
        error = got[name]["body"]["error"]
        assert (error["code"], said in error["message"]) == ("internal_error", True)


# ------------------------------------------------------------------------------------------------------ interrupted


def many() -> list[tuple[str, str, dict[str, Any]]]:
    """40 requests, each third one drawn."""
    bodies = [{"prompt": f"# {i}\n{CODE[i % 8]}", "max_tokens": 16, "temperature": int(i % 3 == 0)} for i in range(40)]
    return [(f"request-{i}", COMPLETIONS, body) for i, body in enumerate(bodies)]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.once("kills, whatever the speculation")
def test_killed_at_any_moment_a_run_goes_on(
    start: Any, process: Any, write: Any, answers: Any, llm: LLM, out: Path
) -> None:
    """kill -9 at two random moments; then every request is answered exactly once, and as if nothing had been."""
    requests = write(*many())
    moments = sorted(random.sample(range(1, 21), 2))
    kept = b""
    for moment in moments:
        run = start("batch", str(requests), str(out))
        while num_lines(out) < moment and run.poll() is None:
            time.sleep(0.001)
        time.sleep(random.random() * 0.03)
        run.kill()
        assert run.wait() in (-signal.SIGKILL, 0)  # it may have been done just before
        content = out.read_bytes()
        assert content.startswith(kept), f"a finished line was lost or changed, killed at {moments}"
        kept = content[: content.rfind(b"\n") + 1]
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_0123", "custom_id": "request-5", "resp')
    done = process("batch", str(requests), str(out), code=0)
    num_before = kept.count(b"\n")
    assert f"; {num_before} of them before" in done.stderr
    assert out.read_bytes().startswith(kept)
    got = answers()
    assert got.keys() == {custom_id for custom_id, _, _ in many()}
    params = [
        SamplingParams(max_tokens=16, temperature=body["temperature"], seed=seed_of(custom_id))
        for custom_id, _, body in many()
    ]
    outputs = llm.generate([body["prompt"] for _, _, body in many()], params)
    for (custom_id, _, _), output in zip(many(), outputs, strict=True):
        assert got[custom_id]["body"]["choices"][0]["text"] == output.text, (custom_id, moments)


@pytest.mark.once("a signal, whatever the speculation")
def test_ctrl_c_in_a_terminal_that_shows_a_bar(refused: Any, write: Any, answers: Any, out: Path) -> None:
    """It says how to go on; and while the run lives, a second one is kept out. A long request may end until then."""
    long = [(f"long-{i}", COMPLETIONS, {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}) for i in range(40)]
    short = [(f"short-{i}", COMPLETIONS, {"prompt": "x", "max_tokens": 2}) for i in range(2)]
    requests = write(*short, *long)
    command = [sys.executable, "-m", "forerun", "batch", str(requests), str(out)]
    env = {**os.environ, **environment(), "FORERUN_TARGET": "shipped", "TERM": "xterm-256color", "COLUMNS": "100"}
    child = processes.spawn(command, encoding="utf-8", timeout=90, env=env, dimensions=(24, 100))
    child.expect(r"2/42\D.* \d+\.\d tokens/s")
    assert "another process is writing" in refused("batch", str(requests), str(out), "--target", "nowhere")
    child.sendintr()
    child.expect(r"stopped: (\d+) of 42 requests have their answer; the same command goes on from here\r\n")
    num_answered = int(child.match[1])
    child.expect(pexpect.EOF)
    assert "Traceback" not in (child.before or "")
    child.close()
    assert child.exitstatus == 130
    assert 2 <= num_answered == len(answers()) < 42
    assert {"short-0", "short-1"} <= answers().keys()


def test_requests_that_change_between_two_runs(batch: Any, write: Any, answers: Any, out: Path) -> None:
    """Another body or url is another request; the order of keys and white space are not."""

    def requests(second: str, third: str) -> Path:
        body = {"prompt": "x = ", "max_tokens": 3, "logit_bias": {"5": 1, "6": 2}}
        path: Path = write(("a", COMPLETIONS, body), ("b", COMPLETIONS, {"prompt": second, "max_tokens": 3}))
        with path.open("a", encoding="utf-8") as file:
            file.write(third)
        return path

    third = '{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é", "max_tokens": 2}}\n'
    same = '{ "body":{"max_tokens":2,"prompt":"\\u00e9"},"url":"/v1/completions","method":"POST", "custom_id":"c" }\n'
    batch(requests("def f(", third), code=0)
    before, content = answers(), out.read_bytes()
    again = batch(requests("def f(", same), "--target", "nowhere", code=0)
    assert again.stderr == "[3 requests: 3 answered, 0 refused; 3 of them before]\n"
    changed = requests("class A:", same)
    done = batch(changed, "--target", "nowhere", code=2)
    assert (done.stdout, out.read_bytes()) == ("", content)
    assert "has answers to 1 request ('b') that ask something else now: give --redo-changed" in done.stderr
    done = batch(changed, "--redo-changed", code=0)
    assert done.stderr.startswith("asked again: 1 request ('b')\n[3 requests: 3 answered, 0 refused; 2 of ")
    after = answers()
    assert {custom_id for custom_id in before if after[custom_id] != before[custom_id]} == {"b"}
    batch(changed, "--target", "nowhere", code=0)


def test_a_display_says_that_the_model_is_loaded(batch: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[bool]()
    monkeypatch.setattr("forerun.cli.waiting.loading", lambda opened: nullcontext(loaded.append(opened.is_shipped)))
    batch(write(("a", COMPLETIONS, {"prompt": "x", "max_tokens": 1})), code=0)
    assert loaded == [True]


def test_a_model_may_be_called_anything_unless_its_name_is_said(
    batch: Any, write: Any, answers: Any, out: Path
) -> None:
    """A file written for another service is answered as it is; the answers say what answered."""
    body = {"prompt": "x = ", "max_tokens": 2}
    requests = write(("a", COMPLETIONS, {**body, "model": "gpt-4o-mini"}), ("b", COMPLETIONS, {**body, "model": "own"}))
    done = batch(requests, code=0)
    assert done.stderr.startswith("requests that ask for the model 'gpt-4o-mini' and 1 more are answered by shipped; ")
    assert {response["body"]["model"] for response in answers().values()} == {"shipped"}
    out.unlink()
    done = batch(requests, "--served-model-name", "mine", "--served-model-name", "own", code=2)
    assert done.stderr.startswith("'a' was refused: model='gpt-4o-mini' is not here: it must be 'mine' or 'own', or")
    got = answers()
    assert (got["a"]["status_code"], got["a"]["body"]["error"]["code"]) == (404, "model_not_found")
    assert got["b"]["body"]["model"] == "mine"


def test_refused_requests_are_asked_again_where_that_is_wanted(batch: Any, write: Any, answers: Any) -> None:
    """By another configuration, or with another body; answers that are there stay as they are."""

    def requests(rule: str) -> Path:
        body = {"prompt": "x = ", "max_tokens": 2}
        bodies = {"a": body, "b": {**body, "max_tokens": 700, "stop": ["="]}, "c": {**body, "acceptance": rule}}
        path: Path = write(*((custom_id, COMPLETIONS, asked) for custom_id, asked in bodies.items()))
        return path

    done = batch(requests("always"), "--kv-cache-tokens", "512", code=2)
    assert "[3 requests: 1 answered, 2 refused; " in done.stderr
    before = answers()
    kept = batch(requests("always"), "--target", "nowhere")
    assert kept.stderr.startswith("'b' was refused: "), "what is not asked again is not passed over in silence"
    changed = batch(requests("ratio"), "--target", "nowhere")
    assert "('c') that ask something else now: give --redo-changed" in changed.stderr
    done = batch(requests("ratio"), "--retry-refused", code=0)
    assert done.stderr.startswith("asked again: 2 requests ('b', 'c')\n[3 requests: 3 answered, 0 refused; 1 of ")
    assert answers()["a"] == before["a"]


@pytest.mark.once("nothing is run")
def test_answers_of_an_earlier_version_count_as_they_are(batch: Any, write: Any, out: Path) -> None:
    requests = write(("a", COMPLETIONS, {"prompt": "x"}))
    line = {"id": "batch_req_0123456789abcdef01234567", "custom_id": "a", "response": {"status_code": 200}}
    out.write_text(json.dumps(line) + "\n", encoding="utf-8")
    for flags in ((), ("--redo-changed",)):
        done = batch(requests, "--target", "nowhere", *flags, code=0)
        assert "of an earlier version: 1; whether these requests have changed is not known" in done.stderr


# ---------------------------------------------------------------------------------------------------- at the door

LINE = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x"}}
GOOD = json.dumps(LINE)
MALFORMED = {
    "no JSON": ("{", "line 2 is not valid JSON"),
    "a list": ("[]", "line 2 is not a JSON object"),
    "no custom_id": (json.dumps({**LINE, "custom_id": None}), "line 2 has no custom_id"),
    "an empty custom_id": (json.dumps({**LINE, "custom_id": ""}), "line 2 has the custom_id ''"),
    "the same custom_id": (GOOD, "line 2 has the custom_id 'a' of line 1"),
    "a number": (json.dumps({**LINE, "custom_id": 7}), "line 2 has the custom_id 7 (it must be a text"),
    "another url": (json.dumps({**LINE, "custom_id": "b", "url": "/v1/embeddings"}), "line 2 has the url '/v1/emb"),
    "a list as url": (json.dumps({**LINE, "custom_id": "b", "url": [COMPLETIONS]}), "line 2 has the url ['/v1/comp"),
    "another method": (json.dumps({**LINE, "custom_id": "b", "method": "GET"}), "line 2 has the method 'GET'"),
    "no body": (json.dumps({**LINE, "custom_id": "b", "body": None}), "line 2 has no body"),
    "other key": (json.dumps({**LINE, "custom_id": "b", "bodi": {}}), "there is no key 'bodi' (did you mean 'body'?)"),
    "deep": ("[" * 100_000, "line 2 is not valid JSON"),
}


@pytest.mark.once("nothing is run")
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines_are_refused_before_anything_is_run(refused: Any, written: Any, out: Path, case: str) -> None:
    line, sentence = MALFORMED[case]
    said = refused("batch", written(f"{GOOD}\n{line}\n", "in.jsonl"), str(out), "--target", "nowhere")
    assert sentence in said
    assert said.endswith(": mend the input, nothing was run")
    assert not out.exists()


@pytest.mark.once("nothing is run")
def test_the_first_malformed_lines_are_named(refused: Any, tmp_path: Path) -> None:
    requests, out = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    requests.write_bytes(GOOD.encode() + b"\n\n" + b"\xff\n" * 7)
    said = refused("batch", str(requests), out)
    assert "line 3 is not UTF-8; line 4 is not UTF-8" in said
    assert "line 7 is not UTF-8; and 2 more lines" in said
    requests.write_bytes(b"\n")
    assert "has no request" in refused("batch", str(requests), out)
    assert "does not exist" in refused("batch", "nowhere.jsonl", out)
    assert "is not a file" in refused("batch", "/dev/null", out)


@pytest.mark.once("nothing is run")
def test_wrong_outputs_and_models_without_a_template(refused: Any, write: Any, out: Path) -> None:
    requests = write(("a", CHAT, {"messages": messages("x")}))
    before = requests.read_bytes()
    said = refused("batch", str(requests), str(requests), "--target", "nowhere")
    assert "is not an answer of forerun batch: name the output file" in said
    assert requests.read_bytes() == before
    assert "chat template" in refused("batch", str(requests), str(out), "--target", "llama")


# -------------------------------------------------------------------------------------------------------------- help


@pytest.mark.once("nothing is run")
def test_every_option_of_the_engine_that_generate_has(cli: Any) -> None:
    """Those of sampling are in the bodies; what generate prints and reads is not here."""
    flags = {name: {*re.findall(r"^  (--[\w-]+)", cli(name, "--help").stdout, re.M)} for name in ("generate", "batch")}
    sampling = {f"--{name.replace('_', '-')}" for name in SamplingParams.__dataclass_fields__}
    sampling = sampling - {"--draft", "--spec-length"} | {"--bad-word", "--stop-token-id"}
    of_generate = {"--target", "--prompt-file", "--json", "--rounds", "--chat", "--verbose"}
    of_batch = {"--redo-changed", "--retry-refused", "--served-model-name"}
    of_batch |= {"--ray", "--ray-engines", "--ray-cpus", "--ray-gpus"}
    assert flags["generate"] - sampling - of_generate == flags["batch"] - of_batch
