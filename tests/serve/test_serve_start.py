"""The server starts by each way that the papers of the house show, with every variable that they name."""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.registry import flag_of
from forerun.serve import server
from forerun.serve.options import LabOptions, Limits, ServerOptions
from serve.running import serving

pytestmark = pytest.mark.once("nothing is drafted")
ROOT = Path(__file__).parents[2]
PAPERS = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "deploy").iterdir(), *(ROOT / "docs").rglob("*.md")]
NO_VARIABLE = ("FORERUN_END_OF_MESSAGE",)  # a word that a template is asked with
# What Kubernetes tells a pod that runs beside a Service called forerun.
SERVICE_LINKS = {
    "FORERUN_PORT": "tcp://10.96.0.7:80",
    "FORERUN_PORT_80_TCP": "tcp://10.96.0.7:80",
    "FORERUN_PORT_80_TCP_PROTO": "tcp",
    "FORERUN_SERVICE_HOST": "10.96.0.7",
    "FORERUN_SERVICE_PORT_HTTP": "80",
    "FORERUN_SERVE_SVC_SERVICE_PORT": "8000",
}


def variables() -> list[str]:
    """Every variable of ours that a paper, a manifest or a line of the source names."""
    files = [*PAPERS, *(ROOT / "src" / "forerun").rglob("*.py")]
    found = {name for file in files for name in re.findall(r"\bFORERUN_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8"))}
    return sorted(found.difference(NO_VARIABLE))


def test_every_variable_that_is_named_is_known(monkeypatch: pytest.MonkeyPatch, written: Any) -> None:
    names = variables()
    assert {"FORERUN_API_KEY", "FORERUN_CACHE_DIR", "FORERUN_CONFIG", "FORERUN_NUM_THREADS"} <= set(names)
    for name in names:
        monkeypatch.setenv(name, "1")
    for name, value in {"FORERUN_CONFIG": written("spec_length = 3\n", "forerun.toml"), **SERVICE_LINKS}.items():
        monkeypatch.setenv(name, value)
    assert EngineConfig.from_sources({}).spec_length == 1, "a variable goes before the file"
    monkeypatch.delenv("FORERUN_SPEC_LENGTH")
    assert EngineConfig.from_sources({}).spec_length == 3
    monkeypatch.setenv("FORERUN_PORT", "8000")
    with pytest.raises(BadOption, match="there is no FORERUN_PORT"):
        EngineConfig.from_sources({})


def commands() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words behind `forerun` of each command that starts a server, and the variables beside it."""
    for paper in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in re.findall(r"^\$ (.*\bforerun (?:serve|lab)\b.*)$", paper.read_text(encoding="utf-8"), re.M):
            yield _words(re.split(r" (?:>|&|;)", line)[0]), {}
    unit = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    [start] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    yield _words(start), dict(found.split("=", 1) for found in re.findall(r"^Environment=(.*)$", unit, re.M))
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    [command] = re.findall(r"^CMD (.*)$", image, re.M)
    [variable] = re.findall(r"docker run .*-e (\w+)=", image)
    yield json.loads(command)[1:], {variable: "secret"}
    yield pod()


def _words(line: str) -> list[str]:
    words = shlex.split(line)
    return words[next(i for i, word in enumerate(words) if Path(word).name == "forerun") + 1 :]


def pod() -> tuple[list[str], dict[str, str]]:
    """What the manifest of Kubernetes starts; secrets are "secret"."""
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))
    [spec] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    [container] = spec["containers"]
    assert spec["enableServiceLinks"] is False
    return container["args"][1:], {one["name"]: one.get("value", "secret") for one in container["env"]}


def test_every_command_that_is_shown_starts_a_server(
    any_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, written: Any
) -> None:
    """Up to the model: options and variables are read, and the key that a variable holds is asked for."""
    started: list[ServerOptions] = []
    file = written('[models.small]\ntarget = "shipped"\n', "models.toml")  # which the page has

    def run(configs: list[EngineConfig], options: ServerOptions, pages: Any, *_: Any) -> int:
        server.check(options)
        started.append(options)
        return 0

    monkeypatch.setattr(server, "run", run)
    shown = list(commands())
    assert len(shown) >= 8
    for words, given in shown:
        done = any_cli(*(file if word == "models.toml" else word for word in words), **given)
        assert done.returncode == 0, (words, given, done.stderr)
        assert started.pop().api_key == given.get("FORERUN_API_KEY"), words


def test_an_option_of_the_server_is_one_field(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field with a help text is a flag that reaches the server; what is not given has the field's default."""
    started: list[ServerOptions] = []
    monkeypatch.setattr(server, "run", lambda config, options, *_: started.append(options) or 0)
    line = (
        "--host 0.0.0.0 --port 0 --api-key k --allow-host a --allow-host b --allow-origin https://a "
        "--served-model-name x --ignore-unsupported --metrics-prefix vllm --log-format json --log-level debug "
        "--log-texts --max-queue 0 --max-body-bytes 9 --request-timeout-s 1.5 --body-timeout-s 2 --stall-timeout-s 3"
    )
    words = line.split()
    limits = Limits(0, 9, 1.5, 2.0, 3.0)
    lists: dict[str, Any] = {"allow_origins": ("https://a",), "allow_hosts": ("a", "b"), "served_names": ("x",)}
    options = ServerOptions("0.0.0.0", 0, "k", **lists, ignore_unsupported=True, metrics_prefix="vllm", limits=limits)
    options = dataclasses.replace(options, log_format="json", log_level="debug", log_texts=True)
    for command, expected in (
        (["serve", "shipped", *words], options),
        (["serve", "shipped"], ServerOptions()),
        (["lab", "shipped"], LabOptions()),
        (["lab", "shipped", "--port", "0", "--allow-host", "a"], LabOptions(port=0, allow_hosts=("a",))),
    ):
        assert cli(*command).returncode == 0, command
        assert started.pop() == expected
    asked = {flag_of(one) for kind in (Limits, ServerOptions) for one in dataclasses.fields(kind) if one.metadata}
    assert asked == {word for word in words if word.startswith("--")}
    assert cli("serve", "shipped", FORERUN_API_KEY="").returncode == 0
    assert started.pop().api_key is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_queue": -1}, "--max-queue=-1 is not possible: it must be at least 0"),
        ({"body_timeout_s": 0.0}, "--body-timeout-s=0.0 is not possible: it must be above 0"),
        ({"stall_timeout_s": float("nan")}, "--stall-timeout-s=nan is not possible: it must be above 0"),
        ({"log_level": "loud"}, "--log-level='loud' is not possible: it must be debug, info, warning or error"),
        ({"log_format": "xml"}, "--log-format='xml' is not possible: it must be text or json"),
    ],
)
def test_an_option_is_inside_of_its_range(given: dict[str, Any], sentence: str) -> None:
    kind = Limits if given.keys() <= Limits.__dataclass_fields__.keys() else ServerOptions
    with pytest.raises(BadOption, match=f"^{re.escape(sentence)}$"):
        kind(**given)


def test_a_pod_asks_for_the_key_of_its_secret(checkpoints: Path) -> None:
    """What the manifest starts, with a tiny model, beside a Service that is called as it."""
    (command, target, *options), variables = pod()
    tiny = str(checkpoints / "llama") if target == "shipped" else target
    variables |= {"FORERUN_NUM_THREADS": "1", **SERVICE_LINKS}
    with serving(*options, target=tiny, command=command, **variables) as running:
        url = running.url.replace("0.0.0.0", "127.0.0.1")
        body = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=key).status_code == 200
