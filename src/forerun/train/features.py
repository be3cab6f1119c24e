"""What a head reads of its target: inner hidden states of texts that are known already, recomputed or stored.

For every token of a text: the residual stream behind some layers, the rows behind the final norm, the likeliest next id
and the logarithm of the sum of all exponentiated logits. They are rounded to bfloat16 in both cases, so that a run on
stored ones is the run on recomputed ones. Stored, a token takes 2 H (layers + 1) + 8 bytes.
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
from forerun.ops.model import Model
from forerun.text.json_files import read_json
from forerun.train.samples import Sample

CHUNK_TOKENS = 128  # of a text, whose logits are in memory at a time
SLOT = 0


@dataclass(frozen=True)
class Features:
    """Of each token of one text. layers [n, k, H] and hidden [n, H] bfloat16; best [n] int64; mass [n] float32.

    mass: the log of the sum of exp of the logits, so that exp(logit - mass) is a probability.
    """

    layers: Tensor
    hidden: Tensor
    best: Tensor
    mass: Tensor


class FeatureSource(Protocol):
    """Where features come from."""

    def of(self, sample: Sample) -> Features:
        """The features of one text."""


class Recomputed:
    """Runs the target over a text whenever its features are asked for.

    layers: how many layers each of the wanted hidden states is behind. longest: tokens of a text at most.
    """

    def __init__(self, model: Model, layers: Seq[int], longest: int) -> None:
        cache = BlockCache.of(
            model,
            "contiguous",
            max_batch_size=1,
            max_seq_len=longest,
            prefix_caching=False,
        )
        self.layers, self._taps = tuple(layers), sorted(set(layers))
        self.width = model.config.hidden_size
        self._runner = Runner(model, cache, taps=self._taps)

    def of(self, sample: Sample) -> Features:
        """See FeatureSource. The rows are those of one pass, in chunks."""
        runner, ids = self._runner, sample.ids.tolist()
        parts: list[Features] = []
        runner.cache.open(SLOT)
        try:
            for start in range(0, len(ids), CHUNK_TOKENS):
                chunk = ids[start : start + CHUNK_TOKENS]
                scores = runner.forward([Run(SLOT, chunk)])
                runner.cache.keep({SLOT: range(len(chunk))})
                logits = torch.from_numpy(scores.logits[0]).float()
                rows = [self._on_host(scores.taps[k]) for k in self.layers]
                taps = torch.stack(rows, 1) if rows else torch.empty(len(chunk), 0, self.width)
                parts.append(
                    Features(
                        taps.bfloat16(),
                        self._on_host(scores.hidden).bfloat16(),
                        logits.argmax(-1),
                        logits.logsumexp(-1),
                    )
                )
        finally:
            runner.cache.release(SLOT)
        return Features(
            *(torch.cat(t) for t in zip(*((p.layers, p.hidden, p.best, p.mass) for p in parts), strict=True))
        )

    def _on_host(self, rows: Any) -> Tensor:
        """Return rows of whatever computes the model as a tensor of the host."""
        return torch.from_numpy(self._runner.model.rows.to_host(rows))


class Stored:
    """Features in a folder: what is missing is computed first, what is there is read.

    samples: in the order in which they are stored. layers: of those that `source` reads, which are wanted. facts: what
    the features depend on; a folder with others is refused. A process that was killed goes on where it was. say: is
    told, after each text that was added, how many there are now, and how many there will be.
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
        self._num, self._width = len(source.layers), source.width
        self._wanted = [source.layers.index(k) for k in layers]
        self._record = np.dtype(
            [
                ("layers", "<u2", (self._num, self._width)),
                ("hidden", "<u2", (self._width,)),
                ("best", "<i4"),
                ("mass", "<f4"),
            ]
        )
        self._starts: dict[int, int] = {}
        end = 0
        for sample in samples:
            self._starts[sample.number] = end
            end += len(sample.ids)
        folder.mkdir(parents=True, exist_ok=True)
        _check_facts(folder / "features.json", {**facts, "layers": list(source.layers), "width": self._width})
        path = folder / "features.bin"
        self._fill(path, samples, source, say)
        self._rows = np.memmap(path, dtype=self._record, mode="r")

    def of(self, sample: Sample) -> Features:
        """See FeatureSource."""
        start = self._starts[sample.number]
        rows = self._rows[start : start + len(sample.ids)]
        return Features(
            _bfloat16(rows["layers"][:, self._wanted]),
            _bfloat16(rows["hidden"]),
            torch.from_numpy(rows["best"].astype(np.int64)),
            torch.from_numpy(rows["mass"].copy()),
        )

    def _fill(self, path: Path, samples: Seq[Sample], source: Recomputed, say: Callable[[int, int], None]) -> None:
        num_there = path.stat().st_size // self._record.itemsize if path.exists() else 0
        with path.open("r+b" if path.exists() else "w+b") as file:
            for num, sample in enumerate(samples, 1):
                start = self._starts[sample.number]
                if start + len(sample.ids) <= num_there:
                    continue
                found = source.of(sample)
                rows = np.empty(len(sample.ids), dtype=self._record)
                rows["layers"], rows["hidden"] = _bits(found.layers), _bits(found.hidden)
                rows["best"], rows["mass"] = found.best.numpy(), found.mass.numpy()
                file.seek(start * self._record.itemsize)
                file.write(rows.tobytes())
                say(num, len(samples))


def stored_layers(folder: Path, wanted: Seq[int]) -> tuple[int, ...]:
    """The layers of a folder, where all that are wanted are among them; else those that are wanted."""
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
