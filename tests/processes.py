"""Processes of Python without the second and a half that torch takes to be imported in each of them.

`Popen` starts `python -m ...` or `python -c ...` as subprocess.Popen does, and `spawn` in a terminal of its own as
pexpect.spawn does: a process with its own arguments, environment, folder, files and signals. But the interpreter is not
started anew. A helper process, one for each process of tests, has imported torch and nothing of forerun; it forks, and
its grandchild becomes a child of the test. What a test says of a start itself, of all memory of a process, or of an
import of torch, it must say of a real start: subprocess.Popen.
"""

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence as Seq
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from typing import Any

SUBREAPER = 36  # of prctl: orphans of this process's children become its own children
MOST_BYTES = 1 << 20  # of what is asked
PRELOADED = ("torch", "numpy", "safetensors.torch", "tokenizers", "jinja2", "typer", "rich.console", "rich.progress")


# --------------------------------------------------------------------------------------------------- asking for one


class _Helper:
    """The helper of this process, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FORERUN_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**kept, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.owner = os.getpid()
        atexit.register(self.close)

    def fork(self, asked: Mapping[str, Any], files: Seq[int]) -> int:
        """The process id of a new child. files: its standard input, output and error."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(SUBREAPER, 1)
        try:
            data = json.dumps(asked).encode()
            socket.send_fds(self._socket, [struct.pack("<Q", len(data))], list(files))
            self._socket.sendall(data)
            (pid,) = struct.unpack("<q", _received(self._socket, 8))
        finally:
            prctl(SUBREAPER, 0)
        return int(pid)

    def close(self) -> None:
        """Let the helper end."""
        if self.owner == os.getpid():
            self._socket.close()
            self._process.wait()


_helpers: list[_Helper] = []


def _helper() -> _Helper:
    if not _helpers or _helpers[0].owner != os.getpid():
        _helpers[:] = [_Helper()]
    return _helpers[0]


def _received(other: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = other.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the helper process has ended")
        data += part
    return data


def _asked(command: Seq[Any], cwd: Any, env: Mapping[str, str] | None, **more: Any) -> dict[str, Any]:
    """What the helper is asked for; None in place of a command that it cannot run."""
    program, kind, what, *arguments = map(os.fspath, command)
    if program != sys.executable or kind not in ("-m", "-c"):
        raise ValueError(f"{command} is not python -m ... or python -c ...: start it with subprocess")
    folder = os.getcwd() if cwd is None else os.fspath(cwd)
    own = dict(os.environ if env is None else env)
    return {"kind": kind, "what": what, "arguments": arguments, "cwd": folder, "env": own, **more}


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen for [sys.executable, "-m" or "-c", ...]; of its options those of streams, text, cwd and env."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _close_fds, _pass_fds, cwd, env, _startupinfo, _creationflags, shell, *streams = rest
        assert not shell
        assert executable is None
        assert preexec_fn is None
        ours = streams[:6]
        _, c2pwrite, errwrite = ours[0], ours[3], ours[5]
        files = [fd if fd != -1 else number for number, fd in enumerate((ours[0], c2pwrite, errwrite))]
        self.pid = _helper().fork(_asked(args, cwd, env), files)
        self._child_created = True
        self._close_pipe_fds(*ours)


def run(command: Seq[Any], *, timeout: float, check: bool = False, input: str | None = None, **options: Any) -> Any:
    """subprocess.run, by Popen."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
        done = subprocess.CompletedProcess(process.args, process.poll() or 0, out, err)
    if check:
        done.check_returncode()
    return done


def spawn(
    command: Seq[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Any = None,
    dimensions: tuple[int, int] = (24, 80),
    echo: bool = True,
    **options: Any,
) -> Any:
    """pexpect.spawn of a command as Popen takes it. options: timeout, encoding.

    Ctrl-C does not discard what the program has just written, as it else does in a race that the kernel may win.
    """
    import pexpect
    import ptyprocess

    class Spawned(pexpect.spawn):
        def _spawnpty(self, args: Seq[str], **_: Any) -> Any:
            master, slave = os.openpty()
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *dimensions, 0, 0))
            settings = termios.tcgetattr(slave)
            settings[3] |= termios.NOFLSH
            settings[3] &= ~(0 if echo else termios.ECHO)
            termios.tcsetattr(slave, termios.TCSANOW, settings)
            pid = _helper().fork(_asked(command, cwd, env, has_terminal=True), [slave] * 3)
            os.close(slave)
            made = ptyprocess.PtyProcess(pid, master)
            made.argv, made.env, made.launch_dir = list(args), env, cwd
            return made

    program, *arguments = command
    return Spawned(program, arguments, dimensions=dimensions, echo=echo, **options)


# ------------------------------------------------------------------------------------------------ the helper process


def _serve(other: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each that asks. Returns what was asked, and its files, in the process that is to do it; else None."""
    while True:
        try:
            head, files, _, _ = socket.recv_fds(other, 8, 3)
            if not head:
                return None
            asked = json.loads(_received(other, struct.unpack("<Q", head)[0]))
        except (OSError, EOFError):
            return None
        told, tell = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.read(wait, 1)  # until its parent has ended, so that it is the test's child
                for fd in (told, tell, wait, go):
                    os.close(fd)
                return asked, files
            os.write(tell, struct.pack("<q", pid))
            os._exit(0)
        os.waitpid(between, 0)
        pid_bytes = os.read(told, 8)
        os.write(go, b".")
        for fd in (*files, told, tell, wait, go):
            os.close(fd)
        other.sendall(pid_bytes)


def _become(asked: Mapping[str, Any], files: Seq[int]) -> None:
    """Take over files, terminal, folder, environment and signals, as a new interpreter would."""
    if asked.get("has_terminal"):
        os.setsid()
        fcntl.ioctl(files[0], termios.TIOCSCTTY, 0)
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    for fd in files:
        if fd > 2:
            os.close(fd)
    os.chdir(asked["cwd"])
    for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        while place and place in sys.path:
            sys.path.remove(place)
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[0:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = sys.__stdin__ = TextIOWrapper(BufferedReader(FileIO(0, closefd=False)), "utf-8")
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = BufferedWriter(FileIO(number, "w", closefd=False))
        stream = TextIOWrapper(raw, "utf-8", errors, line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _main() -> Callable[[], object] | None:
    """Serve until the tests end. Returns what a child has to do."""
    for name in PRELOADED:
        __import__(name)
    import gc

    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as other:
        found = _serve(other)
        if found is None:
            return None
    asked, files = found
    _become(asked, files)
    sys.argv = ["-m" if asked["kind"] == "-m" else "-c", *asked["arguments"]]
    if asked["kind"] == "-m":
        return lambda: runpy.run_module(asked["what"], run_name="__main__", alter_sys=True)
    own = type(sys)("__main__")
    sys.modules["__main__"] = own
    return lambda: exec(compile(asked["what"], "<string>", "exec"), own.__dict__)


if __name__ == "__main__":
    job = _main()
    if job is not None:
        job()
