"""The list of wrong changes fits the package as it is; `make parity` makes them, and each must fail a test.

So whoever shortens or speeds up tests sees what they no longer show.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from house import wrong_changes
from house.wrong_changes import ROOT, SOURCE, changes


def test_every_change_is_still_one() -> None:
    """Its old text stands once in the package, and its tests are there; else write it for what stands there now."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    lost = [c.about for c in changes() if sum(text.count(c.old) for text in texts) != 1 or c.old == c.new]
    assert not lost, f"in {wrong_changes.LIST.name} there is no place any more, or more than one, for: {lost}"
    assert not [test for c in changes() for test in c.tests if not (ROOT / test.partition("::")[0]).is_file()]
    assert len({c.about for c in changes()}) == len(changes()) >= 60


@pytest.mark.parity
def test_every_change_fails_a_test() -> None:
    done = subprocess.run(
        [sys.executable, wrong_changes.__file__], capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
