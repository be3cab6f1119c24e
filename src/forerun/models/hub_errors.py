"""Turns errors that occur while a model is fetched from the hub into errors whose messages say what would help.

huggingface_hub has changed its HTTP library twice, so transport errors are recognised by the names of their classes.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from forerun.errors import FULL, CapacityError, ForerunError, NotFound, program, shown

FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
TRANSPORT = {"TransportError", "RequestException", "ConnectionError", "TimeoutError"}
FULL_IN_WORDS = re.compile(r"No space left on device|os error 28|quota exceeded", re.IGNORECASE)  # hf-xet has no errno
CUT_SHORT = re.compile(r"should be of size (\d+) but has size (\d+) \((.*)\)")


def _login() -> str:
    return f"log in with `{program('hf')} auth login` or set HF_TOKEN"


def explained(error: BaseException, hub_id: str, revision: str) -> ForerunError:
    """Return the error to raise in place of an error of huggingface_hub, which occurred while a model was fetched."""
    chain = list(_chain(error))
    for explain in (_of_the_disk, _of_access, _of_the_network):
        for link in chain:
            if (explanation := explain(link, hub_id, revision)) is not None:
                return explanation
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return NotFound(
        f"{hub_id} could not be fetched from {_host()} ({first_line}): try again, or fetch it with {program('hf')} "
        "download"
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub could not answer: no network, offline mode, too many requests, or an error of the server."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    def is_one(link: BaseException) -> bool:
        status = _status(link)
        if status is not None:
            return status == 429 or status >= 500
        return isinstance(link, OfflineModeIsEnabled) or _is_transport(link)

    return any(is_one(link) for link in _chain(error))


def is_offline(error: BaseException) -> bool:
    """Whether no server answered at all, as without a network or in offline mode. A second try would fail, too."""
    return is_unreachable(error) and all(_status(link) is None for link in _chain(error))


def cache_folder() -> str:
    """Return the folder of huggingface_hub's cache."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _of_the_disk(error: BaseException, hub_id: str, revision: str) -> ForerunError | None:
    if (isinstance(error, OSError) and error.errno in FULL) or FULL_IN_WORDS.search(str(error)):
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "No space left on device"
        return CapacityError(
            f"{hub_id} does not fit on the disk of {cache_folder()} ({reason}): make room there, or set HF_HOME to a "
            "folder on a larger disk"
        )
    if isinstance(error, OSError) and error.errno in FORBIDDEN:
        return NotFound(
            f"{hub_id} cannot be written to {error.filename or cache_folder()} ({error.strerror}): set HF_HOME to a "
            "folder that may be written to"
        )
    return None


def _of_access(error: BaseException, hub_id: str, revision: str) -> ForerunError | None:
    from huggingface_hub import errors

    page = f"{_endpoint()}/{hub_id}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return NotFound(
            f"{_named(hub_id, revision)} is not in the cache, {cache_folder()}, or not completely, and HF_HUB_OFFLINE "
            f"forbids to fetch it: unset HF_HUB_OFFLINE, or run `{program('hf')} download {hub_id}` where there is a "
            "network"
        )
    if isinstance(error, errors.GatedRepoError):
        if _status(error) == 403:
            return NotFound(
                f"{hub_id} is gated and your account has no access yet: accept its licence on {page}, or log in with "
                "an account that has access"
            )
        return NotFound(f"{hub_id} is gated: accept its licence on {page}, then {_login()}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFound(
            f"there is no model {hub_id} on {_host()}, or it is private, and no folder of that name here: check the "
            f"name, or {_login()}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(
            f"{hub_id} has no revision {shown(revision)}: name a branch, a tag or a commit of {page}/commits"
        )
    if isinstance(error, errors.EntryNotFoundError) and _status(error) == 404:
        return NotFound(f"a file of {_named(hub_id, revision)} has just gone from {_host()}: start again")
    return None


def _of_the_network(error: BaseException, hub_id: str, revision: str) -> ForerunError | None:
    status = _status(error)
    if status in (401, 403):
        return NotFound(
            f"{_host()} refuses to give {hub_id} (status {status}): {_login()}, with a token that may read it"
        )
    if status == 429:
        return NotFound(f"{_host()} had too many requests from here (status 429): wait some minutes, or {_login()}")
    if status is not None:
        fault = "the server's own fault, so try later" if status >= 500 else "check HF_ENDPOINT and the name"
        return NotFound(f"{_host()} answers with status {status} when it is asked for {hub_id}: {fault}")
    if (cut := CUT_SHORT.search(str(error))) is not None:
        wanted, got, name = cut.groups()
        return NotFound(f"{name} of {hub_id} was cut short on its way, {got} of {wanted} bytes: start again")
    if _is_transport(error):
        *_, root = _chain(error)  # what the system said, without the wrappings of the HTTP library
        return NotFound(
            f"the connection to {_host()} failed while {hub_id} was fetched ({str(root) or type(root).__name__}): "
            "check the network and the proxy settings, or name a folder"
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the response that caused an error; None where no response did."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_transport(error: BaseException) -> bool:
    return bool(TRANSPORT & {kind.__name__ for kind in type(error).__mro__})


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _host() -> str:
    return _endpoint().partition("://")[2]


def _named(hub_id: str, revision: str) -> str:
    return hub_id if revision == "main" else f"{hub_id}@{revision}"
