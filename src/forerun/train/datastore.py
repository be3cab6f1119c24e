"""Writes the file of the drafter `datastore`: the tokens of texts, and a suffix array (REST, arXiv 2311.08252)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.drafters.shared import artifacts
from forerun.drafters.shared.continuations import END_OF_TEXT
from forerun.drafters.shared.stores import KIND
from forerun.errors import NotFound
from forerun.train.texts import encoded_texts, refuse_out

Ints = npt.NDArray[np.int32]


def train(
    target: str | None,
    texts: Seq[Path],
    out: Path,
    *,
    max_text_bytes: int = 10**8,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> int:
    """Encode texts for a target, write them to `out` as a datastore, and return the number of tokens.

    target: as for LLM; None = the default target. texts, max_text_bytes: as in `read_texts`. progress: called after
    each text, with the number of tokens so far. Raises UserError for wrong options, if possible before a text is read.
    """
    refuse_out(out)
    ids, num_ids, fingerprint = encoded_texts(target, texts, max_text_bytes)
    tokens = joined(ids, num_ids, progress)
    save(tokens, out, fingerprint)
    return len(tokens)


def joined(texts: Iterable[Seq[int]], num_ids: int, progress: Callable[[int], None] = lambda num_tokens: None) -> Ints:
    """Return the ids of all texts in one array [n], with END_OF_TEXT after each text. Ids from num_ids on are left out.

    progress: called after each text, with the number of ids so far. Raises NotFound where the texts have no token.
    """
    parts: list[Ints] = []
    num_tokens = 0
    for ids in texts:
        text = np.array([*ids, END_OF_TEXT], dtype=np.int32)
        parts.append(text[text < num_ids])  # the model never writes an id that it has no row for
        num_tokens += len(parts[-1])
        progress(num_tokens)
    if num_tokens == len(parts):
        raise NotFound("the text has no tokens: name files or folders with text")
    return np.concatenate(parts)


def save(tokens: Ints, out: Path, fingerprint: str) -> None:
    """Write the file that the drafter `datastore` reads. tokens: the result of `joined`."""
    artifacts.save(out, KIND, {"tokens": tokens, "suffixes": suffix_array(tokens)}, fingerprint)


def suffix_array(tokens: Ints) -> Ints:
    """Return the starts of all suffixes of `tokens` [n] in lexicographic order of the suffixes.

    A suffix comes before all longer suffixes that begin with it. The suffixes are sorted by prefix doubling
    (Manber, Myers 1993). Sorting by the first h tokens gives each suffix a rank. Then suffixes with equal ranks are
    sorted by the rank of the suffix that begins h tokens later. So all suffixes are sorted by their first 2 h tokens.
    """
    num = len(tokens)
    order = np.argsort(tokens, kind="stable")
    ranks, slots = np.empty(num, np.int64), np.arange(num)  # slots: the places of `order` that are not settled
    keys, length = tokens[order].astype(np.int64), 0
    while True:
        begins = np.append(True, keys[1:] != keys[:-1])  # a group of equal suffixes begins here
        ranks[order[slots]] = np.maximum.accumulate(np.where(begins, slots, 0))
        slots = slots[~(begins & np.append(begins[1:], True))]
        if not len(slots):
            return order.astype(np.int32)
        length = 2 * length or 1
        suffixes = order[slots]
        behind = np.where(suffixes + length < num, ranks[np.minimum(suffixes + length, num - 1)], -1)
        keys = ranks[suffixes] * (num + 1) + behind + 1
        by_key = np.argsort(keys, kind="stable")
        order[slots], keys = suffixes[by_key], keys[by_key]
