"""The tests of the engine run twice: with speculation off and with speculation auto.

The conftest.py of tests/engine and of tests/serve take the fixture and the hook from here, so that every test in
those folders runs once per mode. Where a test does not ask for a drafter or a pacing itself, the mode is what its
engine gets: `llm_options` for an LLM, `environment` for a process, `pacing_of` and `draft_of` for the small engines of
support.py and engine/load.py. Tests about drafts themselves are marked:

    @pytest.mark.speculation("fixed", "auto")   asks for its own drafters: fixed lengths, and auto
    @pytest.mark.once("why")                    runs once, with what it asks for; the reason must be given

The mark closest to a test counts. The last line of a run says how many tests ran in which modes.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import pacing
from forerun.pacing import Pacing

MODES = ("off", "auto")  # of a test that does not say otherwise
FIXED_LENGTH = 4  # tokens per step, where the test names no number

_now: list[str | None] = [None]  # the mode of the test that runs; None = it runs once


def mode() -> str | None:
    """Return the mode of the current test; None = it runs once, with the options that it names."""
    return _now[0]


def llm_options() -> dict[str, Any]:
    """Return the options of an LLM in a test that does not set how to draft."""
    return {"draft": "none" if mode() == "off" else "auto"} | ({"spec_length": 5} if mode() == "fixed" else {})


def environment() -> dict[str, str]:
    """Return the same options as variables of a process."""
    return {"FORERUN_USE_SPECULATIVE_DECODING": "false"} if mode() == "off" else {}


def draft_of(asked: str | None) -> str:
    """Return the drafter of a small engine: the named one, else the mode's."""
    return asked or ("model" if mode() == "auto" else "none")


def pacing_of(spec_length: int | None) -> Pacing:
    """Return the pacing of a small engine. spec_length: with auto the most that is granted."""
    return pacing.make("auto", spec_length) if mode() == "auto" else pacing.make("fixed", spec_length or FIXED_LENGTH)


@pytest.fixture(scope="module", autouse=True)
def speculation(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Set the mode for all engines that the test makes."""
    before, _now[0] = _now[0], getattr(request, "param", None)
    yield mode()
    _now[0] = before


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once per mode."""
    mark = next((m for m in metafunc.definition.iter_markers() if m.name in ("once", "speculation")), None)
    if mark is not None and mark.name == "once":
        if not (mark.args and str(mark.args[0]).strip()):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: pytest.mark.once needs a reason")
        return
    modes = MODES if mark is None else mark.args
    ids = [f"speculation={name}" for name in modes]
    metafunc.parametrize("speculation", modes, indirect=True, ids=ids, scope="module")


def summary(node_ids: list[str]) -> str | None:
    """One line about these passed tests: how many of them ran in which modes. None where there are none."""
    by_test: dict[str, list[str]] = {}
    for node_id in node_ids:
        if found := re.search(r"speculation=(\w+)", node_id):
            by_test.setdefault(node_id.replace(found[0], ""), []).append(found[1])
    counts: dict[str, int] = {}
    for modes in by_test.values():
        name = " and ".join(sorted(modes, reverse=True))
        counts[name] = counts.get(name, 0) + 1
    if not counts:
        return None
    each = ", ".join(f"{num} with {name}" for name, num in sorted(counts.items(), key=lambda item: -item[1]))
    return f"speculation: {len(by_test)} tests of the engine ran in more than one mode: {each}"
