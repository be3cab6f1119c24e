"""Retrieval from a datastore: find the end of the text in a collection of texts, and draft what followed there (REST).

`forerun train datastore` writes the datastore's file from texts (He et al. 2311.08252). The file has the tokens of the
texts and a suffix array: a list of all positions in the tokens, sorted by the tokens that begin at each position. So a
binary search finds the occurrences of a suffix of the request's text in O(log n). Up to `num_continuations` evenly
spread occurrences are chosen. The tokens that followed these occurrences are merged into a tree with counts. The
likeliest nodes of the tree are drafted.

For sampled outputs, the paper's acceptance rule makes one draw for each path, and another draw for the next token. This
accepts drafted tokens too often. Here every node is a point mass, so the verification rules are exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.shared import artifacts, stores
from forerun.drafters.shared.continuations import SHAPE_HELP, SHAPES, Guess, check_shape, grow
from forerun.drafters.shared.stores import Datastore
from forerun.errors import BadOption
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence


@dataclass(frozen=True)
class Options:
    """The options: the datastore's file, and how guesses are made from the file."""

    path: str | None = option(None, "file that `forerun train datastore` made")
    max_match: int = option(16, "longest suffix looked for, in tokens", min=1, max=255)
    min_match: int = option(1, "shortest suffix looked for, in tokens", min=1, max=255)
    shape: str = option("path", SHAPE_HELP)
    num_continuations: int = option(64, "occurrences of the suffix that are looked at", min=1, max=5000)

    def __post_init__(self) -> None:
        check_shape("datastore", self.shape)
        if self.min_match > self.max_match:
            raise BadOption(
                f"datastore:min_match={self.min_match} is not possible: it must be at most max_match={self.max_match}"
            )


class DatastoreDrafter(Drafter):
    """Drafts by searching one datastore for the end of each text. Requests never change the datastore."""

    draws = "point"
    is_free = True

    def __init__(self, options: Options, store: Datastore) -> None:
        self.options, self.shape, self._store = options, SHAPES[options.shape], store

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        guesses = [self._guess(seq, budget.num_tokens[b]) for b, seq in enumerate(seqs)]
        return Draft.joined([guess.draft(seqs[b], b, budget) for b, guess in enumerate(guesses)])

    def _guess(self, seq: Sequence, most: int) -> Guess:
        o = self.options
        length, places = self._store.longest(seq.tokens[-o.max_match :], o.min_match) if most else (0, range(0))
        rows = self._store.continuations(length, places, o.num_continuations, most)
        return grow(rows, most, self.shape == "tree", end_ids=seq.end_ids)


def needs(options: Options, target: Known) -> Needs:
    """Check the datastore's file, and return empty needs, because the memory plan does not count datastores.

    Raises the errors of `build`. If the target has no tokenizer, only `build` checks the file.
    """
    if target.tokenizer is not None:
        _load(options, target.tokenizer.fingerprint, target.tokenizer.num_ids)
    return Needs()


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from the datastore's file. Raises the errors of `stores.load`, and BadOption without a path."""
    fingerprint = artifacts.fingerprint(target.tokenizer, target.num_ids)
    return DatastoreDrafter(options, _load(options, fingerprint, target.num_ids))


def _load(options: Options, fingerprint: str, num_ids: int) -> Datastore:
    if options.path is None:
        raise BadOption(
            "datastore needs a file: make one with `forerun train datastore --target TARGET --out FILE`, then write "
            "datastore:path=FILE"
        )
    return stores.load(options.path, fingerprint, num_ids)
