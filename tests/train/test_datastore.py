"""`forerun train datastore`: the file that it writes, and what it refuses."""

from pathlib import Path

import pytest

from drafters.requests import drafted, request
from forerun import drafters
from forerun.cli.main import main
from forerun.engine.opened import SHIPPED_TARGET
from forerun.testing.engines import TARGET, target_for
from forerun.text.tokenizer import Tokenizer
from train.conftest import run_command

TEXT = "def first(values):\n    return values[0]\n"

STORE = "datastore --target shipped --text"


def test_a_text_is_continued_from_the_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "store"
    printed = run_command(f"{STORE} {tmp_path / 'text.py'} --out {out} --quiet")
    tokenizer = Tokenizer.load(SHIPPED_TARGET)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert printed.startswith(f"{len(ids) + 1} tokens, ")
    assert " s\n" in printed
    drafter = drafters.make(f"datastore:path={out}", target_for(TARGET, tokenizer, num_ids=tokenizer.num_ids))
    assert drafted(drafter, request(ids[:4]), 5).tokens == ids[4:9]


@pytest.mark.parametrize("wrong", ["out is a folder", "no text", "empty text"])
def test_what_is_not_possible_is_refused_with_one_sentence(
    tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    text = tmp_path / ("missing.txt" if wrong == "no text" else "empty.txt")
    out = tmp_path if wrong == "out is a folder" else tmp_path / "store"
    with pytest.raises(SystemExit) as end:
        main(["train", *STORE.split(), str(text), "--out", str(out), "--quiet"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "store").exists()
