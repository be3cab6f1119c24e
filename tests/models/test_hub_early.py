"""What the small files of a pair show is refused, or used, before any weight comes down the line."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import processes
from models.hubserver import Client, HubServer, contents, serve
from tiny import write_tiny

TARGET = "org/target"
GENERATE = ("generate", "--target", TARGET, "--max-tokens", "4", "hello")
Outcomes = tuple[dict[str, dict[str, Any]], list[str]]
SAMPLES = b'{"do_sample": false, "max_new_tokens": 7}'


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(write_tiny(tmp_path_factory.mktemp("early") / "tiny"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(write_tiny(tmp_path_factory.mktemp("early") / "stranger", end_token="</s>"))


CASES = {
    "no_template": ({}, ("chat", TARGET), "chat template"),
    "no_such_template": ({}, ("chat", TARGET, "--chat-template", "no.jinja"), "no.jinja"),
    "broken_tokenizer": ({"tokenizer.json": b"{}"}, GENERATE, "tokenizer.json is not a file of the tokenizers library"),
    "beams": ({"generation_config.json": b'{"num_beams": 4}'}, (*GENERATE, "--generation-config", "model"),
              "num_beams=4"),
    "end_ids": ({"generation_config.json": b'{"eos_token_id": "</s>"}'}, GENERATE, "eos_token_id='</s>'"),
    "draft_typo": ({}, (*GENERATE, "--draft", "lokup"), "did you mean 'lookup'"),
    "no_draft": ({}, (*GENERATE, "--draft", "org/nothing"), "there is no model org/nothing"),
    "stranger": ({}, (*GENERATE, "--draft", "org/stranger"), "tokenizer differs from the target's at id 0"),
    "too_long": ({}, (*GENERATE, "--max-seq-len", "100000"), "--max-seq-len 100000 is not possible"),
    "cache": ({}, (*GENERATE, "--kv-cache-backend", "contiguous", "--kv-cache-tokens", "16"),
              "--kv-cache-tokens 16 is less than one block"),
    "pacing": ({}, (*GENERATE, "--pacing", "nonsense"), "nonsense"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tiny: dict[str, bytes], stranger: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each case printed, and what was fetched for it."""
    with contextlib.contextmanager(serve)() as hub:
        client = Client(hub, tmp_path_factory.mktemp("home"))
        hub.publish("org/stranger", stranger)
        for case, (changed, _, _) in CASES.items():
            hub.publish(f"{TARGET}-{case}", tiny | changed)
        commands = [[part.replace(TARGET, f"{TARGET}-{case}") for part in CASES[case][1]] for case in CASES]
        return dict(zip(CASES, client.foreruns(*commands), strict=True)), [asked.path for asked in hub.requests]


@pytest.mark.parametrize("case", CASES)
def test_refused_before_the_weights(outcomes: Outcomes, case: str) -> None:
    said, fetched = outcomes
    assert (said[case]["code"], said[case]["out"]) == (2, "")
    assert CASES[case][2] in said[case]["err"]
    assert said[case]["err"].count("\n") == 1
    assert not [path for path in fetched if path.endswith(".safetensors")]


def test_suggested_values_apply_the_first_time_too(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.publish("org/target", tiny | {"generation_config.json": SAMPLES})
    arguments = ["generate", "--target", "org/target", "--draft", "none", "--json", "hi"]
    arguments += ["--generation-config", "model"]
    first = json.loads(client.forerun(*arguments)[0])
    later = client.foreruns(arguments, [*arguments, "--max-tokens", "3"])
    second, overruled = (json.loads(said["out"]) for said in later)
    assert len(first["token_ids"]) <= 7
    assert first["token_ids"] == second["token_ids"]
    assert overruled["token_ids"] == first["token_ids"][:3]


def test_opening_a_pair_asks_each_listing_once(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    """Each look at the hub would wait for its own time limit where the network is down."""
    for name in ("org/target", "org/draft"):
        hub.publish(name, tiny)
    client.forerun(*GENERATE, "--draft", "org/draft")
    listings = [asked.path for asked in hub.requests if asked.path.startswith("/api/models/")]
    assert sorted(listings) == [f"/api/models/org/{name}/revision/main" for name in ("draft", "target")]
    assert sorted(hub.fetched()).count("model.safetensors") == 2


def started(client: Client, code: str, *arguments: str) -> Any:
    """A process that runs this code; it is written to, and read."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    return processes.Popen(command, stdin=pipe, stdout=pipe, text=True, env=client.environ(), cwd=client.home)


MOVES = """
import sys
from forerun import LLM
from forerun.engine.opened import Opened
from forerun.models import hub
hub.LISTING_KEPT_S = 0.0
load = Opened.load
def load_when_told(opened):
    print("small files are read", flush=True)
    sys.stdin.readline()
    return load(opened)
Opened.load = load_when_told
llm = LLM("org/target", draft="none")
print(llm.checkpoint.folder.name, llm.tokenizer.folder.name, llm.tokenizer.id_to_token[0])
Opened.load = load
texts = [one.generate([[5, 6]], one.params(temperature=0)) for one in (llm, LLM(sys.argv[1], draft="none"))]
print(texts[0][0].token_ids == texts[1][0].token_ids)
"""


def test_a_branch_that_moves_gives_the_weights_of_the_small_files(
    hub: HubServer, client: Client, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    """Not the tokenizer of one commit with the weights of another."""
    for name, data in tiny.items():
        (tmp_path / name).write_bytes(data)
    moved = write_tiny(tmp_path / "moved", seed=1, end_token="</s>")
    commit = hub.publish("org/target", tiny)
    with started(client, MOVES, str(tmp_path)) as run:
        assert run.stdout.readline() == "small files are read\n"
        hub.publish("org/target", moved)
        print(file=run.stdin, flush=True)
        assert run.stdout.readline().split() == [commit, commit, "<|end|>"]
        assert run.stdout.readline() == "True\n"


LATE = """
import sys
from forerun.errors import NotFound
from forerun.models.hub import locate
try:
    locate("org/late")
except NotFound as error:
    print(error, flush=True)
sys.stdin.readline()
print(locate("org/late"))
"""


def test_a_look_that_failed_is_not_remembered(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    """After the name, the licence or the server is corrected, the same process can go on."""
    with started(client, LATE) as run:
        assert "there is no model org/late" in run.stdout.readline()
        commit = hub.publish("org/late", tiny)
        print(file=run.stdin, flush=True)
        assert commit in run.stdout.readline()


def test_after_a_plan_an_offline_run_says_what_is_missing(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    """The small files are in the cache then, which have no chat template; the weights are not."""
    hub.publish("org/target", tiny)
    client.forerun("plan", "--target", "org/target", "--draft", "none", "--memory", "16GB")
    generated, chatted = client.foreruns(GENERATE, ("chat", "org/target"), HF_HUB_OFFLINE="1")
    assert (generated["code"], chatted["code"]) == (2, 2)
    assert "HF_HUB_OFFLINE" in generated["err"]
    assert "has no chat template" in chatted["err"]
