"""`benchmarks.kv_disk`: a whole run on a tiny model; the counts are known."""

from pathlib import Path
from typing import Any

from tiny import write_tiny


def test_restarts_find_what_was_read_and_rates_are_measured(record_of: Any, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", max_positions=512)
    sizes = ("--tokens", "200", "--repeats", "2", "--folder", str(tmp_path))
    drafts = ("--draft", str(write_tiny(tmp_path / "draft", max_positions=512, seed=1)), "--spec-length", "2")
    record = record_of("kv_disk", "--target", str(model), *sizes, *drafts)
    lines = record["lines"]
    assert [line["start"] for line in lines] == ["cold", "restart 1", "restart 2"]
    assert [line["num_disk_tokens"] for line in lines] == [0, 192, 192]
    assert len(record["kept_tokens"]) == 2, "the draft model has read the prompt, too"
    assert all(num >= 192 for num in record["kept_tokens"])
    assert all(line["is_same"] for line in lines)
    assert all(record[name] > 0 for name in ("restored_new", "read_new", "part_new", "restored", "read", "part"))
