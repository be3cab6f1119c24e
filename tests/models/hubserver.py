"""A hub of models on this machine: a real HTTP server that speaks what huggingface_hub asks for.

Like the real one it lists a repository, answers HEAD with X-Repo-Commit and ETag, sends large files from an address of
their own (another origin, where no token may arrive), honours Range, and says in X-Error-Code what is wrong. What was
asked is in `requests`; what it does wrong on purpose is set by the attributes of HubServer.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import processes

SOURCE = Path(__file__).parents[2] / "src"
LISTING = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
LARGE = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class Asked:
    """One request. file: the name of the file, None for a listing and whatever else; token: None = not logged in."""

    method: str
    path: str
    file: str | None
    token: str | None
    range: str | None
    host: str


@dataclass
class Repo:
    """commits: files by commit; refs: commit by branch or tag. readers: tokens that may read it, None = all."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None
    gated: bool = False


class HubServer:
    """A server in a thread of this process, from `start` to `stop`.

    status: answered to every request, where it is set. sizes: what listings say instead of the truth, by file name;
    None = they say nothing. short: files of which only the first half exists when they are fetched. broken: files
    whose connection breaks once in the middle.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Asked] = []
        self.status: int | None = None
        self.sizes: Mapping[str, int | None] | None = {}
        self.short: set[str] = set()
        self.broken: set[str] = set()
        self.blobs: dict[str, tuple[str, bytes]] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.port = self._http.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def publish(self, hub_id: str, files: Path | Mapping[str, bytes], ref: str = "main", **access: Any) -> str:
        """A new commit, which `ref` means from now on. files: a folder, or contents by name. Returns the commit."""
        if isinstance(files, Path):
            files = contents(files)
        repo = self.repos.setdefault(hub_id, Repo(**access))
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        commit = hashlib.sha1(hub_id.encode() + content).hexdigest()
        repo.commits[commit] = dict(files)
        repo.refs[ref] = commit
        for name, data in files.items():
            self.blobs[hashlib.sha256(data).hexdigest()] = name, data
        return commit

    def fetched(self) -> list[str]:
        """Names of the files whose contents were asked for, in order."""
        return [asked.file for asked in self.requests if asked.method == "GET" and asked.file is not None]

    def listings(self) -> list[str]:
        """Paths of the listings that were asked for, in order."""
        return [asked.path for asked in self.requests if LISTING.fullmatch(asked.path)]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        blob = self.hub.blobs.get(path.removeprefix("/cdn/")) if path.startswith("/cdn/") else None
        file, listing = FILE.fullmatch(path), LISTING.fullmatch(path)
        name = blob[0] if blob else unquote(file["name"]) if file and not listing else None
        if not (blob or file or listing):
            return self._send(404)  # what the library asks for on its own account is none of the tests' business
        token = self.headers.get("Authorization")
        token = token.removeprefix("Bearer ") if token else None
        host = self.headers.get("Host", "").partition(":")[0]
        self.hub.requests.append(Asked(self.command, path, name, token, self.headers.get("Range"), host))
        if self.hub.status is not None:
            self._send(self.hub.status)
        elif blob is not None:
            self._send_file(*blob)
        else:
            self._send_from_repo(listing, file, token)
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_from_repo(self, listing: re.Match[str] | None, file: re.Match[str] | None, token: str | None) -> None:
        asked = listing or file
        repo = self.hub.repos.get(asked["id"])
        if token == "hf_nonsense":
            return self._fail(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.readers is not None and not repo.gated and token not in repo.readers):
            return self._fail(401 if token is None else 404, "RepoNotFound", "Repository not found")
        if repo.gated and file and token not in repo.readers:
            return self._fail(
                401 if token is None else 403, "GatedRepo", f"Access to model {asked['id']} is restricted"
            )
        revision = unquote(asked["revision"] or "main")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if listing:
            return self._send_listing(asked["id"], commit, repo.commits[commit])
        data = repo.commits[commit].get(unquote(file["name"]))
        if data is None:
            return self._fail(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        return self._send_place(unquote(file["name"]), data, commit)

    def _send_listing(self, hub_id: str, commit: str, files: Mapping[str, bytes]) -> None:
        sizes, siblings = self.hub.sizes, []
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name}
            if "blobs" in urlsplit(self.path).query and sizes is not None:
                entry |= {"size": sizes.get(name, len(data)), "blobId": hashlib.sha1(data).hexdigest()}
            siblings.append(entry)
        body = {"id": hub_id, "modelId": hub_id, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send_place(self, name: str, data: bytes, commit: str) -> None:
        """A small file itself; for a large one the address where it lies, on another host."""
        if not name.endswith(LARGE):
            return self._send_file(name, data, {"X-Repo-Commit": commit})
        sha = hashlib.sha256(data).hexdigest()
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{sha}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.hub.port}/cdn/{sha}",
        }
        return self._send(302, b"", headers)

    def _send_file(self, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        own = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
            "Content-Disposition": f'inline; filename="{name}";',
            **(headers or {}),
        }
        if self.command == "GET" and name in self.hub.short:
            data = data[: len(data) // 2]
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if first is None:
            return self._send(200, data, own, breaks=name if name in self.hub.broken else None)
        start, size = int(first[1]), len(data)
        return self._send(206, data[start:], own | {"Content-Range": f"bytes {start}-{size - 1}/{size}"})

    def _fail(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        codes = {"X-Error-Code": code} if code else {}
        self._send(status, b"", {**codes, "X-Error-Message": message, **(headers or {})})

    def _send(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, breaks: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks is not None:
            self.hub.broken.discard(breaks)
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def serve() -> Iterator[HubServer]:
    """For a fixture: a started server, stopped at the end if the test did not do that itself."""
    server = HubServer()
    server.start()
    yield server
    with contextlib.suppress(OSError):
        server.stop()


# --------------------------------------------------------------------------------------------------------- the client


# Locates names one after the other in one process, as the loader does it or on their own.
LOCATE = """
import json, sys
from pathlib import Path
from forerun.errors import ForerunError
from forerun.models.hub import locate
for call in json.loads(sys.argv[1]):
    try:
        if call.pop("load", False):
            from forerun.models.loading import load_checkpoint
            folder = load_checkpoint(call["name"]).folder
        else:
            folder = locate(**call)
        print(json.dumps({"folder": str(folder)}))
    except ForerunError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error), "code": error.exit_code}))
print(json.dumps("huggingface_hub" in sys.modules))
"""


# Runs commands one after the other: most of a command's time is the loading of torch.
COMMANDS = """
import contextlib, io, json, sys
from forerun.cli.main import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code
    print(json.dumps({"out": out.getvalue(), "err": err.getvalue(), "code": code}))
"""


@dataclass(frozen=True)
class Found:
    """What became of one name. files: names in the folder, folders in it included."""

    folder: Path | None
    error: str | None
    message: str
    code: int

    @property
    def files(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if not p.is_dir())


class Client:
    """Processes with a cache of their own, which know the server and nothing else of this machine's settings."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.hub, self.home = hub, home
        self.loaded = False  # whether the last process has imported huggingface_hub

    def environ(self, **more: str) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "TMPDIR", "FORERUN_CACHE_DIR") if key in os.environ}
        own = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.home), "HOME": str(self.home), "NO_PROXY": "*"}
        return {**kept, **own, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **more}

    def run(self, command: list[str], env: Mapping[str, str], code: int = 0, **options: Any) -> tuple[str, str]:
        """Standard output and standard error. Only `python -m ...` is expected to need torch."""
        run = processes.run if command[:2] == [sys.executable, "-m"] or COMMANDS in command else subprocess.run
        done = run(command, capture_output=True, text=True, env=self.environ(**env), timeout=60, check=False, **options)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    def find(self, *calls: str | dict[str, Any], within: tuple[str, ...] = (), env: Any = None, **options: Any) -> Any:
        """Locate names; one Found for one, a list for several. within: a command to run the process by."""
        asked = [{"name": call} if isinstance(call, str) else call for call in calls]
        command = [*within, sys.executable, "-c", LOCATE, json.dumps(asked)]
        out, err = self.run(command, env or {}, cwd=self.home, **options)
        *lines, self.loaded = [json.loads(line) for line in out.splitlines()] or [False]
        assert len(lines) == len(asked), err
        found = [
            Found(Path(x["folder"]) if "folder" in x else None, x.get("error"), x.get("message", ""), x.get("code", 0))
            for x in lines
        ]
        return found[0] if len(found) == 1 else found

    def forerun(self, *arguments: str, code: int = 0, **env: str) -> tuple[str, str]:
        """What the command line prints: standard output and standard error."""
        return self.run([sys.executable, "-m", "forerun", *arguments], env, code)

    def foreruns(self, *commands: Seq[str], **env: str) -> list[dict[str, Any]]:
        """What several commands, run in one process, have printed and returned: out, err, code."""
        out, err = self.run([sys.executable, "-c", COMMANDS, json.dumps(commands)], env)
        assert err == ""
        return [json.loads(line) for line in out.splitlines()]

    def asked(self, call: str | dict[str, Any], **options: Any) -> tuple[Found, list[str]]:
        """`find`, and the files whose contents were asked for meanwhile."""
        before = len(self.hub.fetched())
        return self.find(call, **options), self.hub.fetched()[before:]
