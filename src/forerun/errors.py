"""Every error that forerun raises on purpose.

    ForerunError
    ├── UserError            the caller can mend it: exit code 2, HTTP 400 or 404
    │   ├── BadOption            an option, parameter or value that cannot be honoured
    │   ├── PromptTooLong        prompt + max_tokens does not fit into max_seq_len
    │   ├── VocabularyMismatch   draft and target model do not share one id-to-token map
    │   ├── UnsupportedModel     a checkpoint that would be computed wrongly, so it is refused
    │   └── NotFound             a file or folder that is not there
    ├── CapacityError        something that does not fit now or on this machine: exit code 3, HTTP 429 or 503
    └── InternalError        a fault in forerun itself, please report it: exit code 1, HTTP 500

Each message says what is wrong, the value, and what would work, in one sentence.
"""

import errno
import itertools
import json
import os
import platform
import re
import reprlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))  # numbers of errors that mean: there is no room
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # of torch
_SHOWN_CHARS = 120
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries written in Rust end their messages


class _Short(reprlib.Repr):
    """The repr of a value for messages, shortened while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlevel = self.maxdict = 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of more than 4300 digits, and takes long for somewhat shorter ones.
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        # reprlib sorts the keys, but a mapping is recognised by the order in which it was written.
        if x and level <= 0:
            return "{...}"
        first = itertools.islice(x.items(), self.maxdict)
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in first]
        return "{" + ", ".join([*items, "..."] if len(x) > self.maxdict else items) + "}"


class _ShortJson(_Short):
    def repr_str(self, x: str, level: int) -> str:
        return json.dumps(x if len(x) <= self.maxstring else f"{x[: self.maxstring - 3]}...", ensure_ascii=False)

    def repr_bool(self, x: bool, level: int) -> str:
        return json.dumps(x)

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802 - reprlib asks by the name of the type
        return json.dumps(x)

    def repr_tuple(self, x: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(x), level)


_IN_PYTHON = _Short()
_WORDS: ContextVar[_Short] = ContextVar("words", default=_IN_PYTHON)


@contextmanager
def echoing_json() -> Iterator[None]:
    """Let `shown` write values in the form of JSON, for messages to a caller who has sent JSON."""
    token = _WORDS.set(_ShortJson())
    try:
        yield
    finally:
        _WORDS.reset(token)


def shown(value: object) -> str:
    """Return a caller's value as messages show it. A text always gets Python's quotes."""
    words = _IN_PYTHON if isinstance(value, str) else _WORDS.get()
    text = " ".join(words.repr(value).splitlines())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


class ForerunError(Exception):
    """The root of forerun's errors; catch it to catch every deliberate error of this package."""

    exit_code = 1


class UserError(ForerunError):
    """An error that the caller can mend."""

    exit_code = 2


class BadOption(UserError, ValueError):
    """An option, parameter or value that cannot be honoured. It is a ValueError, too, as in other libraries.

    option: the name of the option that is at fault, if it is known. The message begins with this name and the value,
    unless it says that the option belongs elsewhere.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class PromptTooLong(UserError):
    """Prompt + max_tokens does not fit into max_seq_len."""


class VocabularyMismatch(UserError):
    """Draft and target model do not share one id-to-token map."""


class UnsupportedModel(UserError):
    """A checkpoint that would be computed wrongly, so it is refused."""


class NotFound(UserError):
    """A file or folder that is not there."""


class CapacityError(ForerunError):
    """Something does not fit now; it would fit at another moment or on a larger machine."""

    exit_code = 3


class InternalError(ForerunError):
    """A fault in forerun itself. Please report it."""


@contextmanager
def raising_os_errors(path: Path) -> Iterator[None]:
    """Raise the OSError that tokenizers, safetensors or torch hide in another exception when a write to `path` fails.

    An OSError that names no file gets the name of `path`.
    """
    handled = sys.exception()  # the context of every error in the block, where it has no other
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:
        reason: BaseException | None = error
        if match := _OS_ERROR.search(str(error)):
            reason = OSError(int(match[1]), os.strerror(int(match[1])))
        elif not isinstance(error, OSError) and error.__context__ is not handled:
            reason = error.__context__
        if not isinstance(reason, OSError):
            raise
        if reason.errno is not None:  # others have a text of their own, which a file name would hide
            reason.filename = reason.filename or str(path)
        raise reason from None


def pip(arguments: str) -> str:
    """Return the pip command for this environment. The pip that a shell finds may belong to another environment."""
    is_found = shutil.which("python") == sys.executable or not sys.executable
    python = "python" if is_found else shlex.quote(sys.executable)
    return f"{python} -m pip {arguments}"


def program(name: str) -> str:
    """Return how a shell starts a program of this environment: by its name where that finds it, else by its path."""
    place = shutil.which(name, path=os.path.dirname(sys.executable or ""))
    if place is None or shutil.which(name) == place:
        return name
    path = Path(place)
    with suppress(OSError):  # the current folder may be removed
        if (here := Path.cwd()) in path.parents[1:]:
            path = path.relative_to(here)
    return shlex.quote(str(path))


def has_card() -> bool:
    """Return whether the device file of a CUDA driver exists. This is quick; asking torch would take a second.

    Windows has no such file, so a card is assumed there.
    """
    return sys.platform == "win32" or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))  # the second under WSL


def pip_for(extra: str) -> str:
    """Return the pip command that installs an extra of pyproject.toml, without building an installed forerun again.

    On Linux without an NVIDIA card, the command takes torch from PyTorch's CPU builds, which are gigabytes smaller,
    unless `extra` is "cuda". If forerun is not installed, the command names forerun's sources, because forerun is on no
    package index yet, and anyone could take its name there.
    """
    packages = _packages(extra)
    if not packages:
        return pip(f"install '.[{extra}]' in the folder of forerun's sources")
    needs_index = any(one.startswith("torch") for one in packages) and not has_card()
    on_a_pc = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    index = f" --extra-index-url {CPU_BUILDS}" if needs_index and on_a_pc and extra != "cuda" else ""
    return pip("install " + " ".join(f"'{one}'" for one in packages) + index)


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra, as the installed forerun states them; [] if forerun is not installed."""
    from importlib import metadata  # whose own imports take time

    try:
        stated = metadata.requires("forerun") or []
    except metadata.PackageNotFoundError:
        return []
    packages = list[str]()
    for requirement, _, marker in (one.partition(";") for one in stated):
        if re.search(rf"extra == ['\"]{extra}['\"]", marker) is None:
            continue
        inner = re.match(r"forerun\[(\w+)\]", requirement)
        packages += [requirement.strip()] if inner is None else _packages(inner[1])
    return packages


def not_installed(what: str, extra: str, package: str | None) -> BadOption:
    """Return the error for missing packages.

    what: the feature that needs the packages. extra: the extra in pyproject.toml that has them. package: a missing
    package.
    """
    return BadOption(f"{what} needs packages that are not here ({package}): {pip_for(extra)}")
