"""Cuts streams of token ids into batches. A batch depends only on the seed and the step number.

So a resumed run gets the same batches as an uninterrupted run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import BadOption, NotFound, shown
from forerun.text import tokenizer as text_tokenizer
from forerun.text.files import unreadable
from forerun.train.corpus import Document
from forerun.train.samples import HELD_OUT_EVERY, read_samples, stream

Tokens = NDArray[np.unsignedinteger[Any]]
AT_ONCE = 256  # documents per call of the tokenizer, whose result takes some hundred bytes for each id


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer, end: int, seed: int | None = None) -> Tokens:
    """Encode documents, and return one stream of token ids [N] in which each document is followed by the id `end`.

    seed: shuffles the documents; None = keep their order.
    """
    order = list(documents)
    if seed is not None:
        random.Random(seed).shuffle(order)
    rows, dtype = list[Tokens](), id_type(tokenizer)
    for first in range(0, len(order), AT_ONCE):
        texts = [document.text for document in order[first : first + AT_ONCE]]
        rows += [np.array([*encoding.ids, end], dtype) for encoding in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype)


def id_type(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    """Return the smallest dtype for the ids of a tokenizer: uint16 for up to 65,536 ids, otherwise uint32."""
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


class Rows(Protocol):
    """An endless sequence of windows of token ids. All windows have the same length."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in one epoch."""

    def rows(self, first: int, count: int) -> Tensor:
        """Return the windows first .. first+count-1, int64 [count, length + 1]."""


@dataclass(frozen=True)
class WindowStream:
    """An endless sequence of windows of seq_len_tokens + 1 ids, cut from one long stream.

    Each epoch has a new order of windows, and a random offset at which the first window begins. So the windows of two
    epochs have different borders.
    """

    tokens: Tokens
    seq_len_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise BadOption(f"{len(self.tokens)} tokens of text are too few for windows of {self.seq_len_tokens} + 1")

    @property
    def num_tokens(self) -> int:
        """The number of tokens in one epoch."""
        return len(self.tokens)

    @property
    def num_windows(self) -> int:
        """The number of windows in one epoch."""
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
class WholeRows:
    """An endless sequence of the rows of a table of ids [N, L + 1], such as images. Each epoch has a new order."""

    ids: NDArray[np.int64]
    seed: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens in one epoch."""
        return self.ids.size

    def rows(self, first: int, count: int) -> Tensor:
        """Return the rows first .. first+count-1 of the endless sequence, int64 [count, L + 1]."""
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, index = divmod(first + len(chosen), len(self.ids))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.ids))
            chosen += order[index : index + count - len(chosen)].tolist()
        return torch.from_numpy(self.ids[chosen])


@dataclass(frozen=True)
class Mixture:
    """Makes batches of `num_rows` windows from two streams.

    samples: windows of texts that a target wrote; a batch has `num_sample_rows` of them. text: the other windows; None
    if all windows come from `samples`.
    """

    text: Rows | None
    num_rows: int
    samples: WindowStream | None = None
    num_sample_rows: int = 0

    def batch(self, step: int) -> Tensor:
        """Return the batch of one step, int64 [num_rows, seq_len_tokens + 1]."""
        num_text = self.num_rows - self.num_sample_rows
        wanted = ((self.text, num_text), (self.samples, self.num_sample_rows))
        return torch.cat([stream.rows(step * num, num) for stream, num in wanted if stream is not None and num])


def validation_windows(tokens: Tokens, seq_len_tokens: int, most: int) -> Tensor:
    """Return the first windows of a stream, at most `most`, int64 [n, seq_len_tokens + 1].

    Consecutive windows share one id: the last of a window is the first of the next. Raises BadOption where the stream
    is too short for one window.
    """
    count = min(most, (len(tokens) - 1) // seq_len_tokens)
    if count < 1:
        raise BadOption(
            f"{len(tokens)} held-out tokens are too few for windows of {seq_len_tokens} + 1: give more text"
        )
    rows = [tokens[i * seq_len_tokens : (i + 1) * seq_len_tokens + 1] for i in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def load_samples(path: Path, tokenizer: Tokenizer, end: int, *, held_out: bool = False) -> Tokens:
    """Read a file of `forerun train sample` as one stream of ids [N], in which each text ends with the id `end`.

    held_out: True = read only the texts that are held out from training; False = read only the other texts. Raises
    BadOption for ids of another tokenizer.
    """
    file = read_samples(path)
    if file.options["tokenizer"] != text_tokenizer.Tokenizer(tokenizer, path).fingerprint:
        raise BadOption(
            f"{shown(str(path))} holds ids of another tokenizer (of {file.options['num_ids']} ids) than the model's "
            f"(of {tokenizer.get_vocab_size()}): let the teacher write its own with `forerun train sample`"
        )
    return stream(file.split(held_out=held_out), end).astype(id_type(tokenizer))


def load_rows(path: Path, vocab_size: int, seq_len_tokens: int) -> NDArray[np.int64]:
    """Read rows of token ids from a .npy file, int64 [N, seq_len_tokens + 1].

    Raises NotFound where there is no file, UnsupportedModel for a file of another kind, and BadOption for rows that do
    not fit the sequence length or the vocabulary.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {shown(str(path))}: name one that numpy.save wrote")
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise unreadable(path, error, "an array that numpy.save wrote") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise BadOption(f"{path} must hold one array of integers with two dimensions, sequences and their token ids")
    if len(ids) < 2 or ids.shape[1] != seq_len_tokens + 1:
        raise BadOption(
            f"{path} holds {len(ids)} sequences of {ids.shape[1]} ids, which needs at least two of them and "
            f"--seq-len-tokens {ids.shape[1] - 1}: all ids of a row but its first are predicted"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        way_out = "no id is negative" if ids.min() < 0 else f"give --vocab-size, such as {ids.max() + 1}"
        raise BadOption(f"{path} holds ids {ids.min()} .. {ids.max()}: {way_out}")
    return ids.astype(np.int64)


def split_rows(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split rows of ids into the rows for training and the held-out rows: the first of every HELD_OUT_EVERY rows."""
    is_held_out = np.arange(len(ids)) % HELD_OUT_EVERY == 0
    return ids[~is_held_out], ids[is_held_out]
