"""`forerun train ngram`: which texts are read, what the file is good for, and what is refused."""

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.train import ngram
from forerun.train.texts import files_of, read_texts
from refusals import refusal
from train.conftest import run_command


def test_texts_are_files_and_what_is_below_folders(tmp_path: Path) -> None:
    for name, data in {"b.txt": b"bb", "a/c.md": b"ccc", "a/picture": b"\x89P\0", "a/.git/x": b"no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert [file.name for file in files_of([tmp_path / "b.txt", tmp_path])] == ["b.txt", "c.md", "picture"]
    assert list(read_texts([tmp_path], 100)) == ["ccc", "bb"]
    assert list(read_texts([tmp_path / "b.txt", tmp_path / "a"], 4)) == ["bb", "cc"]
    assert "picture' is not UTF-8 text" in refusal(BadOption, list, read_texts([tmp_path / "a" / "picture"], 100))
    for path in (tmp_path / "none", tmp_path / "a" / ".git" / "empty"):
        assert "there is no text at" in refusal(NotFound, files_of, [path])


def test_a_text_may_be_cut_inside_a_character(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("aéé", encoding="utf-8")
    assert list(read_texts([tmp_path / "t"], 4)) == ["aé"]
    (tmp_path / "t").write_bytes(b"a\xe9b")
    assert "UTF-8" in refusal(BadOption, list, read_texts([tmp_path / "t"], 100))


@pytest.fixture(scope="module")
def fitted(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "table"
    assert "tokens counted into" in run_command(f"ngram --target shipped --text {sources} --out {out}")
    return out


@pytest.mark.parametrize("draft", ["unigram", "bigram", "bigram:draws=sampled"])
def test_the_drafters_read_the_file_and_change_no_output(fitted: Path, draft: str) -> None:
    """The text is of functions like `def alpha_3(value):`, of which the model goes on with more."""
    prompt = "def alpha_3(value):\n    total = value + 3\n    return total\n\n\ndef alpha_4("
    asked = [SamplingParams(max_tokens=24, temperature=t, seed=5, acceptance="match") for t in (0.0, 0.9)]
    spec = f"{draft}{',' if ':' in draft else ':'}path={fitted}"
    llm = LLM("shipped", draft=spec, spec_length=2, pacing="fixed", max_batch_size=2, max_seq_len=128)
    drafted, plain = (
        llm.generate([prompt] * 2, [SamplingParams(**{**vars(p), "draft": name}) for p in asked])
        for name in (None, "none")
    )
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert sum(out.report.num_drafted for out in drafted) > 10
    if draft != "unigram":
        assert sum(out.report.num_accepted for out in drafted) > 0


def test_a_broken_file_is_refused_before_any_weight_is_read(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.opened.Opened.load", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "cut").write_bytes(fitted.read_bytes()[:-10])
    assert "cut" in refusal(UnsupportedModel, LLM, "shipped", draft=f"bigram:path={tmp_path / 'cut'}")
    assert "train ngram" in refusal(NotFound, LLM, "shipped", extra_drafts=f"unigram:path={tmp_path / 'none'}")


def test_what_the_command_refuses(sources: Path, tmp_path: Path) -> None:
    for given, words in (
        ({"order": 3}, "order=3 is not possible: it must be in 1 .. 2"),
        ({"max_followers": 0}, "max_followers=0 is not possible"),
        ({"out": tmp_path}, "it must be a file in a folder that exists"),
        ({"out": tmp_path / "no" / "table"}, "it must be a file in a folder that exists"),
    ):
        assert words in refusal(BadOption, ngram.train, "shipped", [sources], **{"out": tmp_path / "table", **given})
    (tmp_path / "empty").touch()
    with pytest.raises(NotFound, match="the text has no tokens"):
        ngram.train("shipped", [tmp_path / "empty"], tmp_path / "table")
    assert not (tmp_path / "table").exists()
