"""The features that a head reads: hidden states of the target on texts.

The features of a token are the residual stream after some layers, the hidden state after the final norm, and the
likeliest next id. They are recorded while the target writes a text, or computed by running the text again. Hidden
states are always rounded to bfloat16, so a run on stored features equals a run on recomputed features. Recorded
features of a text's last token are zeros, but nothing is learned from them. With hidden size H, a stored token takes
2 H (layers + 1) + 4 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import BadOption, shown
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops.model import FindsBest, LoadedModel, Model
from forerun.sampling import largest
from forerun.text.json_files import read_json
from forerun.train.fingerprint import fingerprint
from forerun.train.samples import Sample

CHUNK_TOKENS = 128  # of a text, in one pass
SLOT = 0
VERSION = 2  # of the file


@dataclass(frozen=True)
class Features:
    """Holds the features of the n tokens of one text.

    layers [n, k, H] bfloat16: the residual stream after each of k layers. hidden [n, H] bfloat16: the hidden state
    after the final norm. best [n] int64: the likeliest next id.
    """

    layers: Tensor
    hidden: Tensor
    best: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors, in the order of the fields."""
        return self.layers, self.hidden, self.best

    @classmethod
    def joined(cls, parts: Seq[Features]) -> Features:
        """Join the features of consecutive parts of a text."""
        return cls(*(torch.cat(rows) for rows in zip(*(part.tensors for part in parts), strict=True)))


class FeatureSource(Protocol):
    """A source of features, such as Recomputed or Stored."""

    def of(self, sample: Sample) -> Features:
        """Return the features of one text."""


class Recomputed:
    """A source that runs the target over a text each time the features of the text are requested.

    layers: the numbers k of the wanted residual streams; stream k is the stream after the first k layers. longest: the
    largest number of tokens of a text.
    """

    def __init__(self, model: Model, layers: Seq[int], longest: int) -> None:
        cache = BlockCache.of(model, "contiguous", max_batch_size=1, max_seq_len=longest, prefix_caching=False)
        self.layers, self._taps = tuple(layers), sorted(set(layers))
        self.width = model.config.hidden_size
        self._runner = Runner(model, cache, taps=self._taps)

    def of(self, sample: Sample) -> Features:
        """Return the features of one text. The target runs the text in chunks."""
        runner, ids = self._runner, sample.ids.tolist()
        parts: list[Features] = []
        runner.cache.open(SLOT)
        try:
            for start in range(0, len(ids), CHUNK_TOKENS):
                chunk = ids[start : start + CHUNK_TOKENS]
                scores = runner.forward([Run(SLOT, chunk, "none")])
                runner.cache.keep({SLOT: range(len(chunk))})
                taps = [scores.taps[k] for k in self.layers]
                parts.append(features_of(runner.model, taps, scores.hidden, best_of(runner.model, scores.hidden)))
        finally:
            runner.cache.release(SLOT)
        return Features.joined(parts)


def features_of(model: Model, layers: Seq[Any], hidden: Any, best: Seq[int]) -> Features:
    """Convert arrays of the model's backend to the features of n tokens.

    layers: for each wanted layer, the rows [n, H] of the residual stream. hidden: the rows [n, H] after the final norm.
    best: the likeliest next id of each token.
    """
    rows = [torch.from_numpy(model.rows.to_host(row)).bfloat16() for row in (*layers, hidden)]
    taps = torch.stack(rows[:-1], 1) if layers else torch.empty(*rows[-1].shape[:1], 0, *rows[-1].shape[1:]).bfloat16()
    return Features(taps, rows[-1], torch.tensor(best, dtype=torch.int64))


def best_of(model: Model, hidden: Any) -> list[int]:
    """Return the likeliest next id of each row. hidden [n, H]: the rows after the final norm."""
    if isinstance(model, FindsBest):
        return model.best(hidden, list(range(len(hidden))), model.config.vocab_size)[0]
    return largest.best(model.rows.to_host(model.logits(hidden)))


class Stored:
    """A source that reads features from a folder. Missing features are first computed and added to the folder.

    samples: the samples, in the order in which their features are stored. source: computes missing features. layers:
    the wanted layers; `source` must read all of them. facts: everything that the features depend on; a folder with
    other facts is refused. say: called after each added text, with the number of texts so far and the number of all
    texts. If a process is killed, the next process computes only the features that are still missing.
    """

    def __init__(
        self,
        folder: Path,
        samples: Seq[Sample],
        source: Recomputed,
        layers: Seq[int],
        facts: Mapping[str, Any],
        say: Callable[[int, int], None] = lambda num, of: None,
    ) -> None:
        self.file = FeatureFile(folder, source.layers, source.width, facts)
        self._wanted = [source.layers.index(k) for k in layers]
        self._starts: dict[int, int] = {}
        end = 0
        for num, sample in enumerate(samples, 1):
            self._starts[sample.number] = end
            end += len(sample.ids)
            if end > self.file.num_tokens:
                self.file.write(self._starts[sample.number], source.of(sample))
                say(num, len(samples))
        self._rows: NDArray[Any] = self.file.rows() if samples else np.empty(0)

    def of(self, sample: Sample) -> Features:
        """Return the features of one text."""
        start = self._starts[sample.number]
        rows = self._rows[start : start + len(sample.ids)]
        return Features(
            _bfloat16(rows["layers"][:, self._wanted]),
            _bfloat16(rows["hidden"]),
            torch.from_numpy(rows["best"].astype(np.int64)),
        )


class FeatureFile:
    """A folder that stores the features of texts, one text after the other.

    layers: the layers after which the residual stream is stored. width: the hidden size. facts: everything that the
    features depend on. Raises BadOption for a folder with other facts.
    """

    def __init__(self, folder: Path, layers: Seq[int], width: int, facts: Mapping[str, Any]) -> None:
        record: list[Any] = [("layers", "<u2", (len(layers), width)), ("hidden", "<u2", (width,)), ("best", "<i4")]
        self._record = np.dtype(record)
        self.path = folder / "features.bin"
        folder.mkdir(parents=True, exist_ok=True)
        _check_facts(folder / "features.json", {**facts, "layers": list(layers), "width": width, "version": VERSION})

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose features are completely stored. Features of the last text may be missing."""
        return self.path.stat().st_size // self._record.itemsize if self.path.exists() else 0

    def write(self, start: int, features: Features) -> None:
        """Write the features of a text. start: the number of tokens in all earlier texts."""
        rows = np.empty(len(features.best), dtype=self._record)
        rows["layers"], rows["hidden"] = _bits(features.layers), _bits(features.hidden)
        rows["best"] = features.best.numpy()
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.seek(start * self._record.itemsize)
            file.write(rows.tobytes())

    def rows(self) -> NDArray[Any]:
        """Return the records of all tokens, as a memory-mapped array."""
        return np.memmap(self.path, dtype=self._record, mode="r", shape=(self.num_tokens,))


def facts_of(model: LoadedModel, samples: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the features of texts depend on. samples: the options of the file of texts."""
    return {"weights": fingerprint(model), "precision": model.precision, "samples": dict(samples)}


def stored_layers(folder: Path, wanted: Seq[int]) -> tuple[int, ...]:
    """Return the layers that a folder of features stores, if they include `wanted`. Otherwise return `wanted`."""
    path = folder / "features.json"
    had = read_json(path).get("layers") if path.exists() else None
    return tuple(had) if isinstance(had, list) and set(wanted) <= set(had) else tuple(wanted)


def _check_facts(path: Path, facts: Mapping[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
        return
    had = read_json(path)
    for name in [*facts, *had]:
        if had.get(name) != facts.get(name):
            raise BadOption(
                f"the features in {shown(str(path.parent))} are of {name}={shown(str(had.get(name)))}, and this is "
                f"{shown(str(facts.get(name)))}: name another folder, or remove it"
            )


def _bits(rows: Tensor) -> NDArray[np.uint16]:
    return rows.contiguous().view(torch.int16).numpy().view(np.uint16)


def _bfloat16(rows: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(rows.copy().view(np.int16)).view(torch.bfloat16)
