"""One server and one browser for all tests of the page. Where there is no browser they are skipped, with a sentence."""

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from serve.running import Running, serving

KEY = "Сезам, открой"  # in UTF-8, wherever a header has it
REFUSED = "status of 401"  # what a console says of the first request, which had no key
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")  # names of the system's browser


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """`forerun serve` with the shipped pair and an API key; the lab is under /lab, and its page asks for the key."""
    with serving("--extra-drafts", "suffix", "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, driven by playwright, for the tests of one file.

    Until it is closed an event loop runs in this thread, in which `asyncio.run` is not possible: tests that need it are
    in other files.
    """
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("the lab is tested in Chromium, which is not installed here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="the lab is tested with playwright, which is not installed")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


def until(page: Any, condition: str, limit_s: float = 60.0) -> None:
    """Wait until a condition in JavaScript holds. (playwright's own way is forbidden by the page's security policy.)"""
    ends = time.monotonic() + limit_s
    while not page.evaluate(condition):
        assert time.monotonic() < ends, f"it did not come about: {condition}"
        time.sleep(0.02)


class Pages:
    """Opens the page; every page must have loaded nothing from elsewhere, and reported no error."""

    def __init__(self, browser: Any, root: str) -> None:
        self._browser, self._root = browser, root
        self.problems: list[str] = []

    def open(self, hash_: str = "", *, width: int = 1280, height: int = 800, theme: str = "light") -> Any:
        """The page with these settings behind #, when all of its widgets have been mounted."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("dialog", lambda dialog: dialog.accept(KEY))
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda asked: self._look(asked.url))
        page.goto(f"{self._root}/lab/{hash_}")
        page.wait_for_selector("html[data-ready]")
        return page

    def _hear(self, said: Any) -> None:
        if said.type in ("error", "warning") and REFUSED not in said.text:
            self.problems.append(said.text)

    def _look(self, url: str) -> None:
        if not url.startswith((self._root, "data:", "blob:")):
            self.problems.append(f"{url} was asked for, which is elsewhere")


@pytest.fixture
def pages(server: Running, browser: Any) -> Iterator[Pages]:
    """Makes pages, and checks in the end what their consoles have said."""
    made = Pages(browser, server.url)
    yield made
    for context in browser.contexts:
        context.close()
    assert not made.problems, made.problems
