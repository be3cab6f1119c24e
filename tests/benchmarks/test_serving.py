"""`benchmarks.serving`: whole runs against a running server, and the numbers of known runs."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.serving import ServingPlan, bodies_of, read_prompts
from benchmarks.serving_client import (
    CHAT,
    COMPLETION,
    Answered,
    Load,
    Run,
    Server,
    due_times_s,
    read_answer,
    read_stream,
)
from benchmarks.serving_overhead import Timed, compare, overhead_of
from benchmarks.serving_results import Limits, lines_of, quiet_gaps_s
from benchmarks.serving_servers import forerun_command, free_port, of_variant, peer_command, started
from forerun.config import EngineConfig
from forerun.errors import BadOption, InternalError, NotFound
from refusals import refusal

# ------------------------------------------------------------------------------------------------ against a server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Of the shipped pair, as the benchmark starts it."""
    port = free_port()
    command = forerun_command(EngineConfig(target="shipped", spec_length=3, max_batch_size=4), port)
    with started("fixed", command, port, is_own=True) as server:
        yield server


@pytest.mark.once("a process of its own, which speculates")
def test_a_run_at_two_loads(server: Server, tmp_path: Path, record_of: Any) -> None:
    pytest.importorskip("matplotlib")
    sizes = ("--requests", "5", "--repeats", "1", "--max-tokens", "8", "--kind", "chat")
    loads = ("--concurrency", "3", "--rate", "40", "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000")
    where = ("--url", f"one={server.url}/v1/", "--url", server.url, "--picture", str(tmp_path / "plot.svg"))
    record = record_of("serving", *where, *sizes, *loads)
    names = ("one", server.url.removeprefix("http://"))
    assert [(s["name"], s["model"]) for s in record["servers"]] == [(name, "shipped") for name in names]
    wanted = [(name, load) for load in ("3 at once", "40/s") for name in names]
    assert [(line["server"], line["load"]) for line in record["lines"]] == wanted
    for line in record["lines"]:
        assert (line["num_requests"], line["num_answered"], line["failures"]) == (5, 5, {})
        assert line["num_good"] == 5
        assert 0 < line["goodput_per_s"] == line["requests_per_s"]
        for name in ("ttft_s", "itl_s", "tpot_s"):
            p = line[name]
            assert 0 < p["p50"] <= p["p90"] <= p["p99"]
        assert line["tokens_per_piece"] > 1, "drafts are accepted, so pieces hold several tokens"
    assert (record["lines"][0]["speedup"] is None, record["lines"][1]["speedup"] > 0) == (True, True)
    assert len(record["runs"]) == 2 * 2
    for run in record["runs"]:
        assert run["num_tokens"] == 5 * 8
        assert run["tokens_per_s"] == run["num_tokens"] / run["seconds"]
        for r in run["requests"]:
            assert 0 <= r["due_s"] <= r["due_s"] + r["ttft_s"] <= r["ended_s"] <= run["seconds"]
    by_load = {run["load"]: [r["due_s"] for r in run["requests"]] for run in record["runs"] if run["repeat"] == 0}
    assert by_load["40/s"] == due_times_s(40, 5, seed=1)
    assert "output tokens/s" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


@pytest.mark.once("a process of its own, which speculates")
def test_what_is_refused_is_counted_and_said(server: Server, record_of: Any, bench: Any) -> None:
    """A limit that no request can meet; then requests that the server refuses, of which nothing can be measured."""
    base = ("--url", server.url, "--requests", "2", "--repeats", "1", "--concurrency", "2", "--max-tokens", "3")
    (line,) = record_of("serving", *base, "--slo-ttft-ms", "0.001")["lines"]
    assert (line["num_answered"], line["num_good"], line["goodput_per_s"]) == (2, 0, 0)
    done = bench("serving", *base, "--served-model-name", "another", "--json", "-")
    assert done.exit_code == 2
    assert "answered no request (status 404" in done.stdout + done.stderr


SMALL = ("--target", "shipped", "--requests", "4", "--repeats", "1", "--max-tokens", "8", "--concurrency", "2")


@pytest.mark.parity
def test_the_servers_that_it_starts(record_of: Any) -> None:
    record = record_of("serving", *SMALL)
    assert [line["server"] for line in record["lines"]][:3] == ["plain", "fixed", "auto"]
    assert all(line["num_answered"] == 4 for line in record["lines"])
    assert record["lines"][0]["tokens_per_piece"] < record["lines"][1]["tokens_per_piece"]


@pytest.mark.parity
def test_the_overhead_of_texts_and_http(record_of: Any) -> None:
    """All three ways make the same texts, which the benchmark checks itself."""
    record = record_of("serving", *SMALL, "--overhead")
    assert [o["way"] for o in record["overheads"]] == ["engine", "texts", "HTTP"]
    assert (record["overheads"][0]["share"], record["overheads"][0]["cpu_share"]) == (0, 0)
    if Path("/proc/self/stat").exists():
        assert record["overheads"][2]["cpu_share"] > 0
    assert record["median_step_s"] > 0


# ---------------------------------------------------------------------------------------------------------- numbers


def answered(index: int, due_s: float, arrivals_s: list[float], num_tokens: int = 0, error: str | None = None) -> Any:
    ended_s = max([due_s, *arrivals_s])
    return Answered(index, due_s, due_s, ended_s, 200, error, arrivals_s, num_tokens or len(arrivals_s))


def test_every_number_of_a_line() -> None:
    load, limits = Load(rate=2.0), Limits(ttft_s=0.5, itl_s=0.2)
    good = answered(0, 0.0, [0.5, 0.7, 0.9], num_tokens=5)  # TPOT 0.1
    late = answered(1, 1.0, [1.6, 1.7, 1.8])
    slow = answered(2, 2.0, [2.1, 2.6])  # TPOT 0.5
    short = answered(3, 3.0, [3.2])  # one token, so no TPOT
    failed = answered(4, 3.0, [], error="status 429: full")
    answers = (good, late, slow, short, failed)
    runs = [Run("a", load, 0, 4.0, 1.0, answers), Run("b", load, 0, 2.0, 0.0, answers)]
    first, second = lines_of(runs, limits)
    assert (first.num_requests, first.num_answered, first.failures) == (5, 4, {"status 429: full": 1})
    assert (first.tokens_per_s, second.tokens_per_s) == (11 / 4, 11 / 2)
    assert (first.speedup, second.speedup, second.speedup_range) == (None, 2.0, (2.0, 2.0))
    assert (first.requests_per_s, first.client_cpu_share) == (1.0, 0.25)
    assert first.tokens_per_piece == 11 / 9
    assert (first.num_good, first.goodput_per_s, second.goodput_per_s) == (2, 0.5, 1.0)
    assert first.ttft_s is not None
    assert first.ttft_s.p50 == pytest.approx(0.35)  # of 0.1, 0.2, 0.5 and 0.6
    assert first.itl_s is not None
    assert (first.itl_s.p50, first.itl_s.p99) == (pytest.approx(0.2), pytest.approx(0.488))
    assert first.tpot_s is not None
    assert first.tpot_s.p50 == pytest.approx(0.1)  # of 0.1, 0.1 and 0.5
    (line,) = lines_of([replace(runs[0], answers=(failed,))], limits)
    assert (line.ttft_s, line.itl_s, line.tokens_per_piece, line.tokens_per_s) == (None, None, None, 0)


def test_gaps_while_another_request_waits_are_apart() -> None:
    stream = answered(0, 0.0, [0.1, 0.2, 0.4, 0.5, 1.0])
    other = answered(1, 0.25, [0.35, 0.36])  # waits inside of the second gap
    assert quiet_gaps_s([stream]) == pytest.approx([0.1, 0.2, 0.1, 0.5])
    assert quiet_gaps_s([stream, other]) == pytest.approx([0.1, 0.1, 0.5, 0.01])
    assert quiet_gaps_s([stream, other, answered(2, 0.3, [0.45])]) == pytest.approx([0.1, 0.5])


def test_arrivals_of_a_poisson_process() -> None:
    times = due_times_s(50.0, 4000, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert mean(gap * gap for gap in gaps) == pytest.approx(2 / 50**2, rel=0.15)  # exponential, and not constant
    assert times[:100] == due_times_s(50.0, 100, seed=3) != due_times_s(50.0, 100, seed=4)


def event(body: Any) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def text(said: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": said}}], **more})


DONE = b"data: [DONE]\n\n"


def test_a_stream_in_pieces_that_end_anywhere() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
    whole = role + text("Grüß") + b": ping\n\n" + text(" Gott") + usage + DONE
    for form in (whole, whole.replace(b"\n", b"\r\n")):
        answer = Answered(0, 0.0, 0.0)
        read_stream(answer, [(float(i), form[i : i + 1]) for i in range(len(form))])
        assert (answer.text, answer.num_tokens, answer.num_prompt_tokens, answer.error) == ("Grüß Gott", 5, 7, None)
        assert len(answer.arrivals_s) == 2
    answer = Answered(0, 0.0, 0.0)
    read_stream(answer, [(1.0, role), (2.0, text("a") + text("b")), (3.0, text("c") + DONE)])
    assert (answer.arrivals_s, answer.num_tokens) == ([2.0, 3.0], 3)  # without usage pieces are counted


def test_answers_are_read_from_their_bytes_wherever_they_were_cut() -> None:
    """A stream in chunks, byte by byte; one that breaks off; and a refusal."""
    form = text("a") + text("b") + DONE
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(form), form)
    answer = Answered(0, 0.0, 0.0, reads=[(float(i), whole[i : i + 1]) for i in range(len(whole))])
    read_answer(answer)
    assert (answer.status, answer.text, answer.num_tokens, answer.error) == (200, "ab", 2, None)
    begin = len(whole) - len(form) - len(b"\r\n0\r\n\r\n")
    assert answer.arrivals_s == [float(begin + len(text("a")) - 1), float(begin + len(text("a") + text("b")) - 1)]
    answer = Answered(0, 0.0, 0.0, reads=[(1.0, whole[:-5])])
    read_answer(answer)
    assert answer.error is not None
    assert answer.error.startswith("RemoteProtocolError: ")
    answer = Answered(0, 0.0, 0.0, reads=[(1.0, b"HTTP/1.1 429 Busy\r\ncontent-length: 4\r\n\r\nwait")])
    read_answer(answer)
    assert (answer.status, answer.error) == (429, "status 429: wait")


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (text("a"), "the stream broke off"),
        (text("a") + event({"error": {"message": "the engine has failed"}}), "the engine has failed"),
        (b"data: {\n\n" + DONE, "an event could not be read: {"),
        (event([1]) + DONE, "an event could not be read: [1]"),
    ],
)
def test_streams_that_fail(stream: bytes, sentence: str) -> None:
    answer = Answered(0, 0.0, 0.0)
    read_stream(answer, [(1.0, stream)])
    assert answer.error is not None
    assert sentence in answer.error


def test_requests_are_the_same_for_every_server_and_share_no_prompt_of_an_earlier_run() -> None:
    plan = ServingPlan(num_requests=60, temperature=0.5, kinds=("chat", "list"))
    prompts = read_prompts(plan)
    one, two = Server("a", "http://a", "m", is_salted=True), Server("b", "http://b", "n")
    first, chats = (list(bodies_of(one, CHAT, prompts, plan, repeat, "run")) for repeat in (0, 1))
    texts = list(bodies_of(two, COMPLETION, prompts, plan, 1, "run"))
    assert [body["seed"] for body in chats] == [body["seed"] for body in texts] == list(range(61, 121))
    for chat, text in zip(chats, texts, strict=True):
        assert chat["messages"][-1]["content"] in text["prompt"]
    assert len({(json.dumps(body["messages"]), body["cache_salt"]) for body in first + chats}) == 120
    assert not any("cache_salt" in body for body in texts)


def test_what_the_overhead_is_held_against() -> None:
    rates = {"engine": (10, 20), "texts": (9, 20), "HTTP": (8, 19)}
    timed = [Timed(way, i, 1.0, rate, ("a",)) for way, found in rates.items() for i, rate in enumerate(found)]
    assert overhead_of("engine", timed).share == 0
    http = overhead_of("HTTP", timed)
    assert (http.tokens_per_s, http.share) == (13.5, pytest.approx(0.125))
    assert http.range == pytest.approx((0.05, 0.2))
    assert http.cpu_share is None
    timed = [replace(t, cpu_s=2.0 if t.way == "HTTP" else 1.0) for t in timed]
    http = overhead_of("HTTP", timed)
    assert http.cpu_s_per_token == pytest.approx(mean([2 / 8, 2 / 19]))
    assert http.cpu_share == pytest.approx(mean([2 / 8 * 10 - 1, 2 / 19 * 20 - 1]))
    compare(timed)
    with pytest.raises(InternalError, match=r"request 0 of repeat 1 has another text with HTTP.*'b', and not 'a'"):
        compare([*timed[:-1], replace(timed[-1], texts=("b",))])


# --------------------------------------------------------------------------------------------- servers and refusals


def test_command_lines() -> None:
    options = {"max_batch_size": 16, "ignore_config_keys": "a,b", "calibrate": False}
    config = EngineConfig(target="smollm2", draft="lookup", **options)
    serve = [sys.executable, "-m", "forerun", "serve", "smollm2", "--port", "7", "--log-level", "warning"]
    rest = ["--ignore-config-key", "a", "--ignore-config-key", "b", "--max-batch-size", "16"]
    plain, fixed, auto = (forerun_command(of_variant(name, config), 7) for name in ("plain", "fixed", "auto"))
    assert plain == [*serve, "--draft", "none", "--pacing", "fixed", "--no-calibrate", *rest]
    assert fixed[len(serve) :][:6] == ["--draft", "lookup", "--spec-length", "5", "--pacing", "fixed"]
    assert auto[len(serve) :][:4] == ["--draft", "lookup", "--pacing", "auto"]


def test_other_engines_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_batch_size=16, max_seq_len=512)
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no vllm on the PATH" in refusal(NotFound, peer_command, "vllm", config, tmp_path, 7)
    for name in ("llama-server", "vllm"):
        (tmp_path / name).touch(mode=0o755)
    where = ["--host", "127.0.0.1", "--port", "7"]
    assert peer_command("llama-server", config, gguf, 7)[1:] == [
        "--model", str(gguf), *where, "--parallel", "16", "--ctx-size", "8192"
    ]  # fmt: skip
    assert peer_command("vllm", config, tmp_path, 7)[1:] == [
        "serve", str(tmp_path), *where, "--max-num-seqs", "16", "--max-model-len", "512"
    ]  # fmt: skip
    with pytest.raises(BadOption, match="llama-server runs a GGUF file, and the target is a folder"):
        peer_command("llama-server", config, tmp_path, 7)
    assert "vllm runs a folder, and the target is a file" in refusal(BadOption, peer_command, "vllm", config, gguf, 7)


def test_a_server_that_does_not_start_says_why() -> None:
    dying = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(int(sys.argv[1]))"]
    with pytest.raises(InternalError, match="the server x ended with exit code 3; its last words: no such model"):
        started("x", [*dying, "3"], free_port(), is_own=True).__enter__()
    with pytest.raises(BadOption, match="the server x refuses how it is started: no such model"):
        started("x", [*dying, "2"], free_port(), is_own=True).__enter__()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--variant", "fast"), "--variant 'fast' is not possible: it must be plain, fixed, auto, llama-"),
        (("--concurrency", "9", "--requests", "8"), "--concurrency 9 is not possible with --requests 8"),
        (("--rate", "0"), "a load of 0/s is not possible: it must be above 0"),
        (("--slo-itl-ms", "0"), "--slo-itl-ms 0 is not possible"),
        (("--timeout-s", "0"), "--timeout-s 0 is not possible"),
        (("--url", "localhost:8000"), "--url 'localhost:8000' is no address"),
        (("--url", "http://127.0.0.1:9"), "no server answers at 'http://127.0.0.1:9'"),
        (("--url", "http://127.0.0.1:9", "--overhead"), "it starts it: drop --url"),
        (("--picture", "plot.pdf"), "its name must end in .svg or .png"),
    ],
)
def test_refusals(args: tuple[str, ...], sentence: str, bench: Any) -> None:
    done = bench("serving", *args, "--json", "-")
    assert done.exit_code == 2
    assert sentence in done.stderr
