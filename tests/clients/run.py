"""`make clients`: the clients of other projects, as their packages are, against a real server with a real model.

    python tests/clients/run.py [NAME ...] [--model TARGET] [--url URL] [--install]

Each is installed into a folder of its own below build/clients, with the versions of versions.toml, and runs what its
function in clients.py does. It prints one line for each: version, ok or the reason, seconds, and what was done. The
exit status is 1 where one fails or none could run; one that cannot be installed is named with the reason.

The model is --model, else the variable CLIENTS_MODEL, else qwen2.5-coder-1.5b: its template must know tools.
The output of the server and of each client is in build/clients/logs.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

import clients

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build" / "clients"
LOGS = PLACE / "logs"
CACHED = Path("~/.cache/forerun-models/qwen2.5-coder-1.5b.gguf").expanduser()
MODEL, NAME = "qwen2.5-coder-1.5b", "served"
INSTALL_S, START_S, RUN_S = 900, 900, 1800
NODE = "node"


class NotHere(Exception):
    """A client that cannot be installed, and why."""


def versions() -> dict[str, dict[str, list[str]]]:
    """The packages of each client, by the program that installs them."""
    return tomllib.loads((HERE / "versions.toml").read_text(encoding="utf-8"))


def _logged(command: Seq[str], log: Path, timeout_s: float, env: Mapping[str, str] | None = None) -> None:
    """Run it; its output goes to a file. Raises OSError, CalledProcessError, TimeoutExpired."""
    with log.open("w", encoding="utf-8") as out:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=True,
        )


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


def installed(name: str, wanted: Mapping[str, Seq[str]]) -> Path:
    """The folder of a client's packages, made anew where they are not those of the table. Raises NotHere."""
    folder, log = PLACE / name, LOGS / f"install-{name}.txt"
    ready, text = folder / "ready", repr(sorted(wanted.items()))
    if ready.exists() and ready.read_text(encoding="utf-8") == text:
        return folder
    env = _with_node() if "npm" in wanted else {}
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if "pip" in wanted:
            _logged([sys.executable, "-m", "venv", str(folder)], log, INSTALL_S)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
            _logged([*pip, *wanted["pip"]], log, INSTALL_S)
        if "npm" in wanted:
            folder.mkdir(parents=True)
            npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--save-exact"]
            _logged([*npm, *wanted["npm"]], log, INSTALL_S, env)
    except (OSError, subprocess.SubprocessError) as error:
        said = _last_line(log) if log.exists() else str(error)
        raise NotHere(f"cannot be installed: {said}") from error
    ready.write_text(text, encoding="utf-8")
    return folder


def _with_node() -> dict[str, str]:
    """The environment of programs that need node and npm. Raises NotHere."""
    folder = installed(NODE, versions()[NODE])
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server of this checkout, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", LOGS / "server.txt"
    command = [sys.executable, "-m", "forerun", "serve", model, "--served-model-name", NAME, "--port", str(port)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server has not started: {_last_line(log)}\n{log} has all that it said")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def used(name: str, folder: Path, wanted: Mapping[str, Seq[str]], url: str) -> str | None:
    """Run one client. Returns None, or the reason why it has failed."""
    log = LOGS / f"{name}.txt"
    python = str(folder / "bin/python")
    env = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    if "npm" in wanted:
        python = sys.executable
        env = {**env, **_with_node(), "CLIENTS_NODE": str(folder)}
    try:
        _logged([python, str(HERE / "clients.py"), name, url, NAME], log, RUN_S, env)
    except subprocess.TimeoutExpired:
        return f"not at its end behind {RUN_S} s; {log}"
    except subprocess.CalledProcessError:
        return f"{_last_line(log)}; {log}"
    return None


def main() -> int:
    """Run the clients that are named, or all. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; all if none is named")
    cached = str(CACHED) if CACHED.exists() else MODEL
    parser.add_argument("--model", default=os.environ.get("CLIENTS_MODEL") or cached)
    parser.add_argument("--url", help="a server that runs already, with a model that is called served")
    parser.add_argument("--install", action="store_true", help="install, and run none")
    given = parser.parse_args()
    if unknown := set(given.names) - set(clients.CLIENTS):
        parser.error(f"there is no client {min(unknown)}: it must be one of {', '.join(clients.CLIENTS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    table = versions()
    folders: dict[str, Path] = {}
    for name in given.names or clients.CLIENTS:
        try:
            folders[name] = installed(name, table[name])
        except NotHere as error:
            _say(name, table[name], f"left out: {error}")
    if given.install:
        return 0
    if given.url:
        failed = _run_all(folders, table, given.url)
    else:
        with served(given.model) as url:
            failed = _run_all(folders, table, url)
    print(f"{len(folders) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not folders else 0


def _run_all(folders: Mapping[str, Path], table: Mapping[str, Mapping[str, Seq[str]]], url: str) -> list[str]:
    """The names of those that have failed."""
    failed = []
    for name, folder in folders.items():
        began_s = time.monotonic()
        reason = used(name, folder, table[name], url)
        if reason is not None:
            failed.append(name)
        done = (clients.CLIENTS[name].__doc__ or "").partition("\n")[0]
        _say(name, table[name], f"{reason or 'ok'} ({time.monotonic() - began_s:.0f} s): {done}")
    return failed


def _say(name: str, wanted: Mapping[str, Seq[str]], what: str) -> None:
    packages = ", ".join(package for packages in wanted.values() for package in packages)
    print(f"{name:17} {packages}: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
