"""Models of the hub, from a hub on this machine: what is asked for, what is kept, and every way it can fail."""

import fcntl
import json
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun import LLM, SamplingParams
from models.gguf_files import split, write_random
from models.hubserver import LOCATE, Client, HubServer, contents
from saved import save_checkpoint
from tiny import tiny_config, write_tiny

SMALL = ["config.json", "generation_config.json", "tokenizer.json"]  # of a tiny checkpoint
ALL = [*SMALL, "model.safetensors"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture(scope="session")
def files(tiny: Path) -> dict[str, bytes]:
    return contents(tiny)


@pytest.fixture(scope="session")
def shards(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same weights in three files with an index."""
    folder = tmp_path_factory.mktemp("hub") / "shards"
    weights = load_file(tiny / "model.safetensors")
    save_checkpoint(
        folder, tiny_config("llama"), weights, torch.float32, tokenizer_folder=tiny, end_ids=[0], shard_bytes=40_000
    )
    return contents(folder)


# ----------------------------------------------------------------------------------------------------- what is fetched


CLUTTER = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model-Q4.gguf", "tf_model.h5", "vocab.json")
CLUTTER += ("original/model.safetensors", "onnx/model.onnx", "model.fp16.safetensors", "extra/config.json")


def test_only_what_is_needed_and_only_once(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    more = {"chat_template.jinja": b"a", "additional_chat_templates/tool.jinja": b"b", "tokenizer_config.json": b"{}"}
    commit = hub.publish("org/tiny", files | more | dict.fromkeys(CLUTTER, b"clutter"))
    only_config, asked = client.asked({"name": "org/tiny", "config_only": True})
    assert (asked, only_config.files) == (["config.json"], ["config.json"])
    found, asked = client.asked("org/tiny")
    assert found.folder.name == commit
    assert found.files == sorted([*files, *more])
    assert sorted(asked) == sorted((set(files) | set(more)) - {"config.json"})
    assert asked[-1] == "model.safetensors"  # after everything that could have been a reason to refuse
    assert (found.folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    num_requests = len(hub.requests)
    assert client.find("org/tiny", {"name": "org/tiny", "config_only": True})[1].folder == found.folder
    assert [asked.path for asked in hub.requests[num_requests:]] == ["/api/models/org/tiny/revision/main"]


@pytest.mark.parity
def test_shards_are_those_of_the_index(hub: HubServer, client: Client, shards: dict[str, bytes]) -> None:
    hub.publish("org/shards", shards | dict.fromkeys(CLUTTER, b"clutter") | {"model-9.safetensors": b"of old"})
    found, asked = client.asked("org/shards")
    assert sum(name.startswith("model-") for name in shards) > 2
    assert sorted(asked) == found.files == sorted(shards)
    hub.publish("org/both", shards | {"model.safetensors": b"all"})
    found, asked = client.asked("org/both")
    assert sorted(asked) == found.files == sorted(ALL)
    hub.publish("org/part", {k: v for k, v in shards.items() if k != "model-00002-of-00003.safetensors"})
    assert client.find("org/part").message == (
        "org/part has no file model-00002-of-00003.safetensors, which its model.safetensors.index.json names: name "
        "another revision, as org/name@revision"
    )


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    first = hub.publish("org/tiny", files, ref="v1")
    pull = hub.publish("org/tiny", files | {"generation_config.json": b'{"a": 1}'}, ref="refs/pr/1")
    main = hub.publish("org/tiny", files | {"generation_config.json": b"{}"})
    names = ["org/tiny", "org/tiny@main", "org/tiny@v1", f"org/tiny@{first}", "org/tiny@refs/pr/1"]
    found = client.find(*names, "org/tiny@v2", "org/tiny@../main", "org/tiny@")
    assert [f.folder.name for f in found[:5]] == [main, main, first, first, pull]
    assert hub.fetched().count("model.safetensors") == 1  # the commits share it
    written = "a model of the hub is written org/name, org/name@revision or org/name:FILE.gguf"
    commits = f"name a branch, a tag or a commit of {hub.endpoint}/org/tiny/commits"
    assert [(f.error, f.message) for f in found[5:]] == [
        ("NotFound", f"org/tiny has no revision 'v2': {commits}"),
        ("NotFound", f"there is no folder org/tiny@../main, and {written}"),
        ("NotFound", f"there is no folder org/tiny@, and {written}"),
    ]


def test_a_branch_that_moved_costs_what_changed(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/tiny", files)
    assert client.find("org/tiny").error is None
    moved = hub.publish("org/tiny", files | {"generation_config.json": b'{"eos_token_id": 7}'})
    found, asked = client.asked("org/tiny")
    assert (found.folder.name, asked) == (moved, ["generation_config.json"])
    assert (found.folder / "generation_config.json").read_bytes() == b'{"eos_token_id": 7}'


def test_a_folder_and_what_looks_like_one_never_reach_the_network(hub: HubServer, client: Client, tiny: Path) -> None:
    hub.publish("org/tiny", tiny)
    (client.home / "some" / "where").mkdir(parents=True)
    there = client.find("some/where", "./some/where", str(tiny), "some", "~/some", {"name": str(tiny), "load": True})
    assert [f.folder for f in there[:2]] == [Path("some/where")] * 2
    assert there[4].folder == client.home / "some"
    missing = ["./org/tiny", "/org/tiny", "~/org/tiny", "../org", "org/tiny/x", "org\\tiny", "tiny", "~nobody-at-all/x"]
    found = client.find(*missing)
    assert not client.loaded
    assert {f.error for f in found} == {"NotFound"}
    assert all(f.message.startswith("there is no folder ") for f in found)
    assert found[0].message == (
        "there is no folder org/tiny: name a model of `forerun models`, a folder that holds config.json, "
        "model.safetensors and tokenizer.json, a GGUF file, or a model of the hub as org/name"
    )
    unlike = ["org/ti ny", "-org/tiny", "org/tiny--x", "org/C:tiny", "org/C:../a.gguf", "org/C:"]
    for name, nothing in zip(unlike, client.find(*unlike), strict=True):
        what = "file" if name.endswith(".gguf") else "folder"
        assert nothing.message.startswith(f"there is no {what} {name}, and a model of the hub is written")
    assert not hub.requests


# ---------------------------------------------------------------------------------------------------------- GGUF files


@pytest.mark.parity
def test_a_gguf_file_of_a_repository_by_its_name_or_its_type(hub: HubServer, client: Client, tmp_path: Path) -> None:
    path = write_random(tmp_path / "a.gguf", replace(tiny_config("llama"), vocab_size=258))
    data = path.read_bytes()
    files = {"tiny-Q4_K_M.gguf": data, "tiny-Q8_0.gguf": b"8", "sub/tiny-f16.gguf": b"16", "README.md": b"text"}
    files |= {piece.name.replace("a-", "sub/tiny-BF16-"): piece.read_bytes() for piece in split(path, 8)}
    files |= {"tiny-F32-00002-of-00002.gguf": b"32"}
    commit = hub.publish("org/tiny-GGUF", files)
    found, asked = client.asked({"name": "org/tiny-GGUF:tiny-Q4_K_M.gguf", "load": True})
    assert (found.error, asked) == (None, ["tiny-Q4_K_M.gguf"])
    assert found.files == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    again, asked = client.asked("org/tiny-GGUF@main:q4_k_m")
    assert (again.folder.name, again.folder.parent.name, asked) == ("tiny-Q4_K_M.gguf", commit, [])
    sub, asked = client.asked("org/tiny-GGUF:F16")
    assert (sub.folder.name, asked) == ("tiny-f16.gguf", ["sub/tiny-f16.gguf"])
    names = [f"sub/tiny-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole, asked = client.asked(f"org/tiny-GGUF:{names[1]}")
    assert (whole.folder.name, asked) == (Path(names[0]).name, names)
    by_type, loaded = client.find("org/tiny-GGUF:bf16", {"name": "org/tiny-GGUF:bf16", "load": True})
    assert (by_type.folder, loaded.error, loaded.files) == (whole.folder, None, found.files)
    names = [f"org/tiny-GGUF:{kind}" for kind in ("Q4_K_M", "Q8_0", "BF16")]
    offline = client.find(*names, env={"HF_HUB_OFFLINE": "1"})
    assert (offline[0].folder.name, offline[1].error) == ("tiny-Q4_K_M.gguf", "NotFound")
    assert "HF_HUB_OFFLINE forbids to fetch it" in offline[1].message
    assert offline[2].folder == whole.folder
    before = len(hub.fetched())
    found = client.find("org/tiny-GGUF", "org/tiny-GGUF:Q5_0", "org/tiny-GGUF:f32", "org/tiny-GGUF:none.gguf")
    assert [f.error for f in found] == ["UnsupportedModel", *["NotFound"] * 3]
    first = "sub/tiny-BF16-00001-of-00003.gguf"
    some = f"{first}, sub/tiny-f16.gguf, tiny-F32-00001-of-00002.gguf"
    one_of = f"name one of {some}, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"
    assert [f.message.removeprefix("org/tiny-GGUF has ") for f in found] == [
        f"weights in {some} and 2 more only: name one such file, as org/tiny-GGUF:{first}",
        f"no GGUF files named Q5_0: {one_of}",
        "no file tiny-F32-00001-of-00002.gguf, one of 2 pieces: name another file",
        f"no GGUF files named none.gguf: {one_of}",
    ]
    assert len(hub.fetched()) == before


# -------------------------------------------------------------------------------------------------- the whole command


def test_the_command_says_what_it_says_with_folders(hub: HubServer, client: Client, tiny: Path) -> None:
    hub.publish("org/target", tiny)
    helper = write_tiny(client.home / "helper", seed=1)
    hub.publish("org/helper", helper, ref="v1")
    params = SamplingParams(max_tokens=12, temperature=0)
    (wanted,) = LLM(str(tiny), draft=str(helper), spec_length=5).generate("abc", params)
    tail = ("abc", "--max-tokens", "12", "--temperature", "0", "--spec-length", "5", "--json")
    out, err = client.forerun("generate", "--target", "org/target", "--draft", "org/helper@v1", *tail)
    said = json.loads(out)
    assert (said["token_ids"], err) == (wanted.token_ids, "")
    assert said["report"]["num_drafted"] == wanted.report.num_drafted > 0
    assert [set(hub.fetched()), len(hub.fetched())] == [set(ALL), 2 * len(ALL)]
    out, err = client.forerun("generate", "--target", "org/target", "--draft", "org/none", *tail, code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: there is no model org/none on 127.0.0.1")


def test_progress_is_shown_on_a_terminal_only(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/tiny", files)
    command = [sys.executable, "-c", LOCATE, '[{"name": "org/tiny"}]']

    def shown(**env: str) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
        subprocess.run(command, env=client.environ(**env), stdout=subprocess.PIPE, stderr=theirs, check=True)
        os.write(theirs, b"end")
        return os.read(ours, 1 << 16).decode().removesuffix("end")

    text = shown()
    assert "model.safetensors: 100%" in text
    assert "97.0k/97.0k" in text
    assert shown(HF_HOME=str(client.home / "quiet"), HF_HUB_DISABLE_PROGRESS_BARS="1") == ""
    assert client.run(command, {"HF_HOME": str(client.home / "pipe")})[1] == ""


# ------------------------------------------------------------------------------------------------- without the network


def test_offline(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    offline = {"env": {"HF_HUB_OFFLINE": "1"}}
    way_out = (
        f" is not in the cache, {client.home / 'hub'}, or not completely, and HF_HUB_OFFLINE forbids to fetch it: "
        "unset HF_HUB_OFFLINE, or run `hf download org/tiny` where there is a network"
    )
    hub.publish("org/tiny", files)
    assert client.find("org/tiny", **offline).message == "org/tiny" + way_out
    assert client.find("org/tiny@v1", **offline).message == "org/tiny@v1" + way_out
    assert not hub.requests
    config = client.find({"name": "org/tiny", "config_only": True})
    partly = client.find({"name": "org/tiny", "config_only": True}, "org/tiny", **offline)
    assert (partly[0], partly[1].message) == (config, "org/tiny" + way_out)
    whole = client.find("org/tiny")
    num_requests = len(hub.requests)
    assert client.find("org/tiny", **offline) == whole
    assert client.find(f"org/tiny@{whole.folder.name}", **offline) == whole
    assert len(hub.requests) == num_requests


@pytest.mark.parity
def test_a_complete_cache_needs_no_server(hub: HubServer, client: Client, shards: dict[str, bytes]) -> None:
    hub.publish("org/tiny", shards)
    whole = client.find("org/tiny")
    for hub.status in (429, 503):
        assert client.find("org/tiny") == whole
    hub.status = None
    hub.stop()
    found = client.find("org/tiny", "org/tiny@v1", "org/else")
    assert found[0] == whole
    assert [(f.error, f.code) for f in found[1:]] == [("NotFound", 2)] * 2
    assert found[2].message == (
        f"the connection to 127.0.0.1:{hub.port} failed while org/else was fetched ([Errno 111] Connection refused): "
        "check the network and the proxy settings, or name a folder"
    )
    (whole.folder / "model-00002-of-00003.safetensors").unlink()
    assert client.find("org/tiny").message.startswith(f"the connection to 127.0.0.1:{hub.port} failed while org/tiny")


# ------------------------------------------------------------------------------------------------------ access, faults


def test_a_gated_model_and_the_token(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/gated", files, gated=True, readers={"hf_reader"})
    page = f"{hub.endpoint}/org/gated"
    assert client.find("org/gated").message == (
        f"org/gated is gated: accept its licence on {page}, then log in with `hf auth login` or set HF_TOKEN"
    )
    assert {asked.token for asked in hub.requests} == {None}
    assert client.find("org/gated", env={"HF_TOKEN": "hf_other"}).message == (
        f"org/gated is gated and your account has no access yet: accept its licence on {page}, or log in with an "
        "account that has access"
    )
    hub.requests.clear()
    assert client.find("org/gated", env={"HF_TOKEN": "hf_reader"}).error is None
    # The store of large files gets no token.
    assert {(asked.host, asked.token) for asked in hub.requests} == {("127.0.0.1", "hf_reader"), ("localhost", None)}


def test_missing_private_and_bad_token(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/own", files, readers={"hf_reader"})
    for name, env in [("org/none", {}), ("org/own", {}), ("org/own", {"HF_TOKEN": "hf_other"})]:
        found = client.find(name, env=env)
        assert (found.error, found.message) == (
            "NotFound",
            f"there is no model {name} on 127.0.0.1:{hub.port}, or it is private, and no folder of that name here: "
            "check the name, or log in with `hf auth login` or set HF_TOKEN",
        )
    assert client.find("org/own", env={"HF_TOKEN": "hf_reader"}).error is None
    assert client.find("org/own", env={"HF_TOKEN": "hf_nonsense"}).message == (
        f"127.0.0.1:{hub.port} refuses to give org/own (status 401): log in with `hf auth login` or set HF_TOKEN, with "
        "a token that may read it"
    )


@pytest.mark.parity
def test_a_server_in_trouble(hub: HubServer, client: Client) -> None:
    host = f"127.0.0.1:{hub.port}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    said = {
        429: f"{host} had too many requests from here (status 429): wait some minutes, or {login}",
        500: f"{host} answers with status 500 when it is asked for org/a: the server's own fault, so try later",
        200: f"org/a could not be fetched from {host} (Expecting value: line 1 column 1 (char 0)): try again, or fetch "
        "it with hf download",
        418: f"{host} answers with status 418 when it is asked for org/a: check HF_ENDPOINT and the name",
    }
    for hub.status, sentence in said.items():
        assert client.find("org/a").message == sentence


def test_what_arrives_incomplete(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/tiny", files)
    size = len(files["model.safetensors"])
    hub.short = {"model.safetensors"}
    assert client.find("org/tiny").message == (
        f"model.safetensors of org/tiny was cut short on its way, {size // 2} of {size} bytes: start again"
    )
    hub.short, hub.broken = set(), {"model.safetensors"}
    found, asked = client.asked("org/tiny", env={"HF_HOME": str(client.home / "again")})
    assert (found.folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert sorted(asked) == sorted([*ALL, "model.safetensors"])  # only what broke was fetched again


# ----------------------------------------------------------------------------------------------------------- the disk


def test_more_than_the_disk_holds_is_not_begun(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/huge", files)
    hub.sizes = {"model.safetensors": 10**16}
    found, asked = client.asked("org/huge")
    assert (found.error, found.code) == ("CapacityError", 3)
    before, _, after = found.message.partition(" and ")
    assert before == "org/huge needs 10000000.0 GB on the disk,"
    assert after.startswith(f"{client.home / 'hub'} has ")
    assert after.endswith(" GB free: make room there, or set HF_HOME to a folder on a larger disk")
    assert "model.safetensors" not in asked
    hub.sizes = None  # a mirror that does not say how large its files are
    assert client.find("org/huge").error is None


FULL = 'mount -t tmpfs -o size=64k tmpfs "$HF_HOME" && exec "$@"'


def in_a_full_disk() -> dict[str, Any]:
    within = ("unshare", "-rm", "sh", "-c", FULL, "sh")
    probe = subprocess.run([*within, "true"], env=os.environ | {"HF_HOME": "/tmp"}, capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine allows no process to mount a file system; the limit on file sizes is tested instead")
    return {"within": within}


def with_a_file_size_limit() -> dict[str, Any]:
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))}


@pytest.mark.parametrize(
    ("limit", "reason"),
    [(in_a_full_disk, "No space left on device"), (with_a_file_size_limit, "File too large")],
)
def test_a_disk_that_fills_up(
    hub: HubServer, client: Client, files: dict[str, bytes], limit: Callable[[], dict[str, Any]], reason: str
) -> None:
    hub.publish("org/tiny", files)
    hub.sizes = None
    found = client.find("org/tiny", **limit())
    assert (found.error, found.code) == ("CapacityError", 3)
    assert found.message == (
        f"org/tiny does not fit on the disk of {client.home / 'hub'} ({reason}): make room there, or set HF_HOME to a "
        "folder on a larger disk"
    )


def test_a_cache_that_may_not_be_written_to(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.publish("org/tiny", files)
    found = client.find("org/tiny", env={"HF_HOME": "/sys/cache"})
    assert found.error == "NotFound"
    assert found.message.startswith("org/tiny cannot be written to /sys/cache (")
    assert found.message.endswith("): set HF_HOME to a folder that may be written to")
