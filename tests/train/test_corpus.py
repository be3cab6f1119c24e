"""The splits are disjoint, whole modules are held out, prompts come from the bench split alone."""

import ast
import json
from pathlib import Path

import pytest

from forerun.errors import NotFound
from forerun.train import corpus
from forerun.train.corpus import Document, bench_prompts, load_corpus, normalise, write_prompts


@pytest.fixture(scope="module")
def stdlib() -> corpus.Corpus:
    return load_corpus()


def test_splits_are_disjoint_by_module_and_by_text(stdlib: corpus.Corpus) -> None:
    splits = (stdlib.train, stdlib.validation, stdlib.bench)
    modules = [{d.path.split("/")[0] for d in split} for split in splits]
    texts = [{d.text for d in split} for split in splits]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not modules[i] & modules[j]
        assert not texts[i] & texts[j]


def test_every_held_out_module_is_there(stdlib: corpus.Corpus) -> None:
    def names(split: tuple[Document, ...]) -> set[str]:
        return {d.path.split("/")[0].removesuffix(".py") for d in split}

    assert names(stdlib.validation) == corpus.VALIDATION_MODULES
    assert names(stdlib.bench) == corpus.BENCH_MODULES


def test_tests_tables_and_machine_files_stay_out(stdlib: corpus.Corpus) -> None:
    for document in (*stdlib.train, *stdlib.validation, *stdlib.bench):
        assert not {"test", "tests", "site-packages", "encodings", "pydoc_data"} & set(document.path.split("/"))
        assert not document.path.startswith("_sysconfigdata")


def test_normalise_removes_invisible_variation_only() -> None:
    assert normalise("\n\nif x:\r\n\ty = 1  \r\n\n\n\n\nz = 2\f\n\n") == "if x:\n        y = 1\n\n\nz = 2\n"


def test_reading_twice_gives_the_same_fingerprint(sources: Path) -> None:
    first, second = load_corpus(sources), load_corpus(sources)
    assert first == second
    assert first.fingerprint() == second.fingerprint()
    assert [d.path for d in first.bench] == ["heapq.py"]


def test_of_other_text_whole_folders_are_held_out(tmp_path: Path) -> None:
    """Also of a package with a large folder, and of one module beside the packages; the choice is of names alone."""
    for i in range(60):
        (tmp_path / f"package{i % 4}" / f"part{i}").mkdir(parents=True)
        for name in ("one", "two"):
            (tmp_path / f"package{i % 4}" / f"part{i}" / f"{name}.py").write_text(f"value = {i}\n" * (50 + i))
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "all.py").write_text("value = 0\n" * 9000)
    (tmp_path / "alone.py").write_text("this is no Python\n")
    found = load_corpus(tmp_path)
    splits = (found.train, found.validation, found.bench)
    sizes = [sum(len(d.text) for d in split) for split in splits]
    assert all(0.01 <= size / sum(sizes) < 0.06 for size in sizes[1:])
    folders = [{d.path.rpartition("/")[0] for d in split} for split in splits]
    assert all(folders)
    assert sum(map(len, folders)) == len(set().union(*folders)), "none in two splits"
    assert "large" in folders[0]
    assert load_corpus(tmp_path) == found
    assert {d.path.split("/")[0] for d in found.train[:20]} >= {f"package{i}" for i in range(4)}, "a sample"
    (tmp_path / "package0" / "queue.py").write_text("value = 1\n")
    assert load_corpus(tmp_path).validation == found.validation, "such names count at the top alone"


def test_text_that_is_no_python_has_no_prompts() -> None:
    assert bench_prompts((Document("no.py", "def f(:\n" * 50), Document("no.py", "a\0b")), len) == []


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no Python sources"):
        load_corpus(tmp_path)


def test_prompts_lie_in_held_out_modules_and_within_the_token_bounds(stdlib: corpus.Corpus, tmp_path: Path) -> None:
    def words(text: str) -> int:
        return len(text.split())

    prompts = bench_prompts(stdlib.bench, words, limit=50, min_tokens=10, max_tokens=40)
    assert prompts == bench_prompts(stdlib.bench, words, limit=50, min_tokens=10, max_tokens=40)
    assert len(prompts) == len({p.id for p in prompts}) == 50
    source = {d.path: d.text for d in stdlib.bench}
    for prompt in prompts:
        assert 10 <= words(prompt.text) <= 40
        assert prompt.text + "\n" in source[prompt.module]
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == [p.id for p in prompts]
    assert all(set(row) == {"id", "module", "text"} for row in rows)


def test_shipped_prompts_are_held_out() -> None:
    path = Path(corpus.__file__).parent.parent / "data" / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 220
    assert {corpus.split_of(row["module"]) for row in rows} == {"bench"}


def test_sources_parse(sources: Path) -> None:
    for document in load_corpus(sources).train:
        ast.parse(document.text)
