"""Examples as ids, and batches of them that hold texts of nearly one length."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.t5.examples import Example
from benchmarks.t5.tokenizer import END_ID, PAD_ID
from forerun.train import batches

POOL = 8192  # examples among which those of one length are found


@dataclass(frozen=True)
class Batch:
    """Padded ids: sources [S, L], where they are filled, what the decoder reads [S, M], and what follows it [S, M]."""

    sources: Tensor
    filled: Tensor
    texts: Tensor
    following: Tensor  # -1 where nothing follows

    @property
    def learned(self) -> Tensor:
        """Which rows have something to learn, [S * M]."""
        return (self.following >= 0).flatten()


@dataclass(frozen=True)
class Encoded:
    """Examples as ids, each text with its end, one behind the other."""

    sources: Seq[NDArray[np.uint16]]
    targets: Seq[NDArray[np.uint16]]

    @classmethod
    def joined(cls, parts: Seq[Encoded]) -> Encoded:
        """Return all of several, one behind the other."""
        return cls([own for part in parts for own in part.sources], [own for part in parts for own in part.targets])

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each source and target, [N, 2]."""
        return np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)]).reshape(-1, 2)

    def batch(self, chosen: Seq[int]) -> Batch:
        """Return these examples, padded."""
        sources = _padded([self.sources[i] for i in chosen], PAD_ID)
        following = _padded([self.targets[i] for i in chosen], -1)
        begun = torch.full((len(following), 1), PAD_ID, dtype=torch.int64)
        texts = torch.cat((begun, following[:, :-1].clamp(min=0)), 1)
        lengths = torch.from_numpy(self.lengths[list(chosen), 0])
        return Batch(sources, torch.arange(sources.shape[1]) < lengths[:, None], texts, following)

    def cut(self, order: Iterable[int], tokens: int) -> Iterator[list[int]]:
        """Cut examples, in this order, into batches of so many tokens at most, padding included."""
        own: list[int] = []
        longest = np.zeros(2, dtype=np.int64)
        for i in order:
            grown = np.maximum(longest, self.lengths[i])
            if own and int(grown.sum()) * (len(own) + 1) > tokens:
                yield own
                own, grown = [], self.lengths[i]
            own.append(i)
            longest = grown
        if own:
            yield own


def _padded(rows: Seq[NDArray[np.uint16]], fill: int) -> Tensor:
    made = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for row, own in zip(made, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(made)


@dataclass
class PairBatches:
    """An endless sequence of batches of examples of nearly one length; each epoch has all of them in a new order."""

    examples: Encoded
    tokens: int
    seed: int
    _epochs: list[int] = field(default_factory=list)  # batches of each, as far as known
    _last: tuple[int, list[list[int]]] = (-1, [])

    def batch(self, step: int) -> Batch:
        """Return the batch of one step."""
        for epoch in range(step + 1):
            num = self._epochs[epoch] if epoch < len(self._epochs) else len(self._epoch(epoch))
            self._epochs[epoch:] = [num]
            if step < num:
                return self.examples.batch(self._epoch(epoch)[step])
            step -= num
        raise AssertionError("every epoch has a batch")

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._last[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(len(self.examples))
            lengths = self.examples.lengths
            pools = (order[first : first + POOL] for first in range(0, len(order), POOL))
            found = [
                batch
                for pool in pools
                for batch in self.examples.cut(pool[np.lexsort(lengths[pool].T[::-1])].tolist(), self.tokens)
            ]
            self._last = epoch, [found[i] for i in rng.permutation(len(found))]
        return self._last[1]


def encode(found: Seq[Example], tokenizer: Tokenizer, longest: int) -> Encoded:
    """Return examples as ids. A longer source loses its end; an example with a longer target is left out."""
    sources, targets, dtype = list[NDArray[np.uint16]](), list[NDArray[np.uint16]](), batches.id_type(tokenizer)
    for first in range(0, len(found), 10_000):
        part = found[first : first + 10_000]
        ids = [
            [e.ids for e in tokenizer.encode_batch(texts)]
            for texts in zip(*((e.source, e.target) for e in part), strict=True)
        ]
        for source, target in zip(*ids, strict=True):
            if len(target) <= longest:
                sources.append(np.array(source if len(source) <= longest else [*source[: longest - 1], END_ID], dtype))
                targets.append(np.array(target, dtype))
    return Encoded(sources, targets)


def fingerprint(found: Iterable[Example]) -> str:
    """Return the SHA-256 of examples in their order."""
    digest = hashlib.sha256()
    for example in found:
        digest.update(f"{example.source}\0{example.target}\0".encode())
    return digest.hexdigest()
