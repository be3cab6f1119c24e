"""The list of wrong changes fits the package as it is; `make parity` makes them, and each must fail a test.

So whoever shortens or speeds up tests sees what they no longer show.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from house import wrong_changes
from house.wrong_changes import ROOT, Change, Misplaced, changes
from refusals import refusal


def test_every_change_can_be_made() -> None:
    """Else write it for what stands there now."""
    misplaced, texts = list[str](), dict[Path, str]()
    for change in changes():
        path = change.path()
        try:
            change.made(texts.setdefault(path, path.read_text(encoding="utf-8")))
        except (Misplaced, SyntaxError) as error:
            misplaced.append(f"{change.about}: {error}")
    assert not misplaced
    assert not [test for c in changes() for test in c.tests if not (ROOT / test.partition("::")[0]).is_file()]
    assert len({c.about for c in changes()}) == len(changes()) >= 60


def test_a_change_is_made_in_its_function_or_not_at_all() -> None:
    text = (
        "a = 1\nclass A:\n    def f(self):\n        return 1\n    @staticmethod\n    def g():\n        return 1 + 1\n"
    )
    assert Change("", "m:A.f", "1", "2", []).made(text) == text.replace("return 1\n", "return 2\n")
    assert Change("", "m", "a = 1", "a = 3", []).made(text) == text.replace("a = 1", "a = 3")
    assert Change("", "m:A.g", "@staticmethod", "@classmethod", []).made(text).count("@classmethod") == 1
    for place, old, new, why in (
        ("m:A.g", "1", "2", "stands there 2 times"),
        ("m:A.f", "a", "b", "stands there 0 times"),
        ("m:A.h", "1", "2", "there is no 'h'"),
        ("m:A.f", "1", "1", "nothing is changed"),
    ):
        assert why in refusal(Misplaced, Change("", place, old, new, []).made, text)
    with pytest.raises(SyntaxError):
        Change("", "m:A.f", "return 1", "return return", []).made(text)


@pytest.mark.parity
def test_every_change_fails_a_test() -> None:
    done = subprocess.run(
        [sys.executable, wrong_changes.__file__], capture_output=True, text=True, timeout=4 * 3600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
