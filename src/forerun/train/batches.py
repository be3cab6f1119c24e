"""Token streams, and the batches that are cut from them. A batch depends on (seed, step) alone.

So a resumed run equals an uninterrupted one: the position in the data is the step number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import BadOption
from forerun.train.corpus import Document
from forerun.train.samples import read_samples, stream

Tokens = NDArray[np.uint16]


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer, end: int, seed: int | None = None) -> Tokens:
    """Return one stream of token ids: every document, followed by the id `end`.

    Documents come in the given order, or shuffled by `seed`. Ids must fit 16 bits.
    """
    order = list(documents)
    if seed is not None:
        random.Random(seed).shuffle(order)
    ids = [i for e in tokenizer.encode_batch([d.text for d in order]) for i in (*e.ids, end)]
    return np.asarray(ids, dtype=np.uint16)


@dataclass(frozen=True)
class WindowStream:
    """An endless sequence of windows of seq_len_tokens + 1 ids from one long stream, shuffled anew in every epoch.

    Each epoch begins at another offset, so that windows of two epochs have different borders.
    """

    tokens: Tokens
    seq_len_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise BadOption(f"{len(self.tokens)} tokens of text are too few for windows of {self.seq_len_tokens} + 1")

    @property
    def num_windows(self) -> int:
        """The number of windows of one epoch."""
        return (len(self.tokens) - 1) // self.seq_len_tokens - 1

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([self.seed, epoch])
        offset = int(rng.integers(self.seq_len_tokens))
        return rng.permutation(self.num_windows) * self.seq_len_tokens + offset

    def rows(self, first: int, count: int) -> Tensor:
        """Return the windows first .. first+count-1 of the endless sequence, int64 [count, seq_len_tokens + 1]."""
        starts: list[int] = []
        while len(starts) < count:
            epoch, index = divmod(first + len(starts), self.num_windows)
            starts += self._epoch(epoch)[index : index + count - len(starts)].tolist()
        return torch.from_numpy(
            np.stack([self.tokens[s : s + self.seq_len_tokens + 1] for s in starts]).astype(np.int64)
        )


@dataclass(frozen=True)
class Mixture:
    """Batches of `num_rows` windows, of which `num_sample_rows` come from a second stream (a target's own text).

    text: None where all come from there.
    """

    text: WindowStream | None
    num_rows: int
    samples: WindowStream | None = None
    num_sample_rows: int = 0

    def batch(self, step: int) -> Tensor:
        """Return the batch of one step, int64 [num_rows, seq_len_tokens + 1]."""
        num_text = self.num_rows - self.num_sample_rows
        wanted = ((self.text, num_text), (self.samples, self.num_sample_rows))
        return torch.cat([stream.rows(step * num, num) for stream, num in wanted if stream is not None and num])


def validation_windows(tokens: Tokens, seq_len_tokens: int, most: int) -> Tensor:
    """Return the first `most` consecutive windows of a stream, int64 [n, seq_len_tokens + 1].

    Raises BadOption where there is none.
    """
    count = min(most, (len(tokens) - 1) // seq_len_tokens)
    if count < 1:
        raise BadOption(
            f"{len(tokens)} held-out tokens are too few for windows of {seq_len_tokens} + 1: give more text"
        )
    rows = [tokens[i * seq_len_tokens : (i + 1) * seq_len_tokens + 1] for i in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def load_samples(path: Path, tokenizer: Tokenizer, end: int, *, held_out: bool = False) -> Tokens:
    """Read a file of `forerun train sample` as one stream, with the id `end` behind each text, uint16 [N].

    held_out: the texts that training must not see. Raises BadOption where its ids are those of another tokenizer, or do
    not fit 16 bits.
    """
    found = read_samples(path)
    num_ids = tokenizer.get_vocab_size()
    if found.options["num_ids"] != num_ids or num_ids > 1 << 16:
        raise BadOption(f"{path} holds ids of {found.options['num_ids']} tokens, and the tokenizer has {num_ids}")
    return stream(found.split(held_out=held_out), end).astype(np.uint16)
