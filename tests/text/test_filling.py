"""Prompts for filling in a text, by the marks that a model has for it."""

from pathlib import Path

import pytest

from forerun.errors import BadOption
from forerun.text.filling import FORMS, filling_ids
from text.test_calls import tokenizer_of

pytestmark = pytest.mark.once("texts alone")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_the_texts_stand_between_the_marks(form: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, [mark for mark in form if mark not in ("prefix", "suffix")])
    texts = {"prefix": "def f(", "suffix": "):\n    pass"}
    ids = filling_ids(tokenizer, texts["prefix"], texts["suffix"])
    assert tokenizer.decode(ids) == "".join(texts.get(mark, mark) for mark in form)
    assert len(ids) == len(form) - 2 + len(texts["prefix"]) + len(texts["suffix"]), "each mark is one token"


def test_a_model_without_marks(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="leave out what stands behind it"):
        filling_ids(tokenizer_of(tmp_path, ["<fim_prefix>"]), "a", "b")
