"""A demonstration says that other programs were busy, as they make its numbers smaller."""

import dataclasses
import os
from pathlib import Path

from forerun.bench.other_programs import ProcessorTimes

STAT = "cpu  {user} 0 {system} {idle} 0 0 0 {stolen} 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


def moment(path: Path, at_s: float, process_s: float, **seconds: float) -> ProcessorTimes:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    names = dict.fromkeys(("user", "system", "idle", "stolen"), 0) | seconds
    path.write_text(STAT.format(**{name: round(value / tick_s) for name, value in names.items()}))
    read = ProcessorTimes.now(path)
    assert read is not None
    return dataclasses.replace(read, at_s=at_s, process_s=process_s)


def test_other_programs_are_told_where_they_take_what_was_wanted(tmp_path: Path) -> None:
    begun = moment(tmp_path / "stat", 100, 5, user=1000, idle=50)
    for of_all, ours, said in (
        ({"user": 1020, "idle": 50}, 20, None),  # two processors, both ours
        ({"user": 1014, "system": 3, "stolen": 3, "idle": 50}, 10, "1.0 processors"),
        ({"user": 1015, "idle": 55}, 10, None),  # somebody else's work, but some are idle
    ):
        remark = moment(tmp_path / "stat", 110, 5 + ours, **of_all).remark_since(begun)
        assert remark is None if said is None else said in (remark or "")


def test_where_nothing_is_known_nothing_is_told(tmp_path: Path) -> None:
    assert ProcessorTimes.now(tmp_path / "none") is None
    (tmp_path / "stat").write_text("intr 1 2 three\n")
    assert ProcessorTimes.now(tmp_path / "stat") is None
