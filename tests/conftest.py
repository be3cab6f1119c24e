"""Fixtures of all tests: the marks of speculation.py, and its line at the end of a run."""

import asyncio
import gc
import importlib.util
import inspect
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest

from ops import interpreter
from speculation import summary


def pytest_configure(config: pytest.Config) -> None:
    # The times of passes are measured once for all tests, and kept in a folder of their own.
    if "FORERUN_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="forerun-tests-")
        os.environ["FORERUN_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
    # Messages name programs of this environment as where a shell finds them.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    # Where a shell runs the tests in its background, SIGINT is ignored here and in every process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Triton's own functions are made for a card or for its interpreter when they are imported, which transformers does.
    if importlib.util.find_spec("triton") is not None:
        import torch

        with pytest.MonkeyPatch.context() as patch:
            if not torch.cuda.is_available():
                patch.setenv("TRITON_INTERPRET", "1")
            importlib.import_module("triton.language")
            interpreter.patch_once()
        interpreter.multiply_in_order()
    config.addinivalue_line("markers", "drafter_fails: it makes a drafter raise, which fails other tests")
    config.addinivalue_line("markers", "once(reason): not once per mode of speculation (tests/speculation.py)")
    config.addinivalue_line("markers", "speculation(*modes): the modes, where not off and auto (tests/speculation.py)")


@pytest.fixture(autouse=True)
def _no_measuring_beside_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that live on would measure passes beside other tests; tests/pacing/test_cost.py has those that do."""
    monkeypatch.setattr("forerun.engine.loop.PAUSE_S", 1e6)


def pytest_collection() -> None:
    gc.disable()  # a million objects are made, and none is garbage


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True)
def _no_drafter_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """An engine goes on without a drafter that raises, with the right texts, so that no other test would show it."""
    errors, logger = _Errors(), logging.getLogger("forerun.engine.router")
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    assert not errors.messages or request.node.get_closest_marker("drafter_fails"), "\n".join(errors.messages)


@pytest.fixture(scope="module", autouse=True)
def _spared() -> None:
    """What is there when a file's tests begin is looked through no more for circles.

    Closing an engine collects garbage, and pytest's own objects of all tests are a million: 0.5 s each time.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = summary([report.nodeid for report in terminalreporter.stats.get("passed", [])])
    if line is not None:
        terminalreporter.write_line(line)
    # What is not here is said, one line for each reason: tests that are left out without a word look like tests.
    skipped = [each.longrepr for each in terminalreporter.stats.get("skipped", []) if not hasattr(each, "wasxfail")]
    reasons = Counter(place[2].removeprefix("Skipped: ") for place in skipped if isinstance(place, tuple))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"left out: {count} test{'s' * (count != 1)}, {reason}")
