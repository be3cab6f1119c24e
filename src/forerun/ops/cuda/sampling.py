"""Draws of token ids from logits on the device, with the same bits as the draws of forerun.sampling on the host.

A verification step then copies a few ids and probabilities to the host instead of whole rows. If a token is rejected,
verification fetches the whole row (`types.Probs`).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
import struct
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.sampling.arithmetic import tick_bits
from forerun.sampling.pipeline import most_listed
from forerun.types import Draw

PART_IDS = 2048  # ids that one program looks at
WARPS = 8
NIBBLES = 8  # passes of a search for a threshold
NUMBERS = npt.NDArray[np.int64]
# A fused multiplication and addition rounds once where the host rounds twice.
UNFUSED = {"enable_fp_fusion": False, "num_warps": WARPS}


class Field(enum.IntEnum):
    """The settings of a row's draw, in the order of ops/cuda/sampling_kernels.py. Floats are the bits of a float64."""

    TEMPERATURE = 0
    TOP_K = 1
    LOG_MIN_P = 2
    TOP_P = 3
    MOST_LISTED = 4
    KIND = 5  # 0 = the likeliest id, 1 = by the noise of match, 2 = by the cumulative sum
    SEED = 6
    POSITION = 7
    PURPOSE = 8
    ROUND = 9


@dataclass(frozen=True)
class Cuts:
    """The searches that a pass needs: by count if a row has top_k, by probability mass if a row has top_p."""

    by_number: bool = False
    by_mass: bool = False

    @classmethod
    def of(cls, draws: Seq[Draw], width: int) -> Cuts:
        """Return the searches that at least one of these draws needs. width: the number of ids."""
        filters = [draw.filters for draw in draws if draw.filters[0] > 0]
        return cls(any(0 < top_k < width for _, top_k, *_ in filters), any(top_p < 1 for *_, top_p, _ in filters))


def fill(numbers: NUMBERS, draws: Seq[Draw], width: int) -> None:
    """Write the settings of draws into numbers [fields, R]; rows without a draw take the likeliest id.

    width: the number of ids.
    """
    numbers[Field.KIND, len(draws) :] = 0
    numbers[Field.TOP_K, len(draws) :] = 0
    numbers[Field.TOP_P, len(draws) :] = _bits(1.0)
    numbers[Field.LOG_MIN_P, len(draws) :] = _bits(-math.inf)
    for i, draw in enumerate(draws):
        temperature, top_k, log_min_p, top_p, _ = draw.filters
        kind = 0 if temperature == 0 else 1 if draw.shares_noise else 2
        seed = draw.seed & (2**64 - 1)
        numbers[:, i] = (
            _bits(temperature),
            top_k if 0 < top_k < width else 0,
            _bits(log_min_p),
            _bits(top_p),
            most_listed(width),
            kind,
            seed - (1 << 64) if seed >> 63 else seed,
            draw.position,
            draw.purpose,
            draw.round,
        )


def _bits(value: float) -> int:
    """Return the bits of a float64 as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass(frozen=True)
class Drawn:
    """The results of draws, on the device.

    ids: the drawn ids, int32 [R]; -1 where the largest logit is NaN or infinite. best: the likeliest ids, int32 [R].
    chances: the probabilities of the drawn ids, float32 [R]. probs [R, V]: the distributions, which are 0 for ids that
    filters removed. probs has no meaning in rows that take the likeliest id.
    """

    ids: Tensor
    best: Tensor
    chances: Tensor
    probs: Tensor


class Settings:
    """The settings of a pass's draws in an array of the host, and the device buffer to which they are copied.

    One object serves passes of one shape.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.width = width
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(len(Field), rows, dtype=torch.int64, pin_memory=is_cuda)
        self.device = torch.zeros(len(Field), rows, dtype=torch.int64, device=device)
        self._sent: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, draws: Seq[Draw]) -> None:
        """Copy the settings of these draws to the device, queued after earlier launches."""
        if self._sent is not None:
            self._sent.synchronize()  # the previous copy may not have read the host's array yet
        fill(self._host.numpy(), draws, self.width)
        self.device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


@dataclass
class Sampler:
    """The launcher of the kernels that draw token ids.

    largest(logits, part_ids): returns the values and ids [R, parts] of the largest logit in each part of `part_ids`
    ids.
    """

    largest: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    kernels: Any = dataclasses.field(
        default_factory=lambda: importlib.import_module("forerun.ops.cuda.sampling_kernels")
    )
    part_ids: int = PART_IDS

    def draw(self, logits: Tensor, settings: Tensor, depths: Tensor, cuts: Cuts) -> Drawn:
        """Draw a token id for each row of logits [R, V], float32. settings: int64 [fields, R], see Field.

        depths: int32 [R]; the token of row r is at its draw's position plus depths[r]. The launches do not depend on
        the values in the rows, so a CUDA graph can hold the launches.
        """
        num, width = logits.shape
        values, largest_ids = self.largest(logits, self.part_ids)
        parts = values.shape[1]
        row, every = (num,), (num, parts)
        bits = tick_bits(width)
        cut = {"PART": self.part_ids, "PARTS": 1 << max(parts - 1, 0).bit_length()}
        device = logits.device

        def whole(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        k = self.kernels
        of_row, sizes = (logits, values, settings), (width, num, parts, bits)
        cut_at, counts = whole(num, 2), whole(num, parts, 3)
        if cuts.by_number or cuts.by_mass:
            sums, states, goals = whole(NIBBLES, num, parts, 16), whole(NIBBLES + 1, num, 2), whole(num)
            k.goal_of_number[row](settings, goals, num)
            for step in range(NIBBLES + 1 if cuts.by_number else 0):
                k.searched[every](*of_row, cut_at, sums, states, goals, *sizes, step, BY_MASS=False,
                                  HAS_CUT=False, **cut, **UNFUSED)  # fmt: skip
            k.cut_by_number[row](settings, states, cut_at, num)
            k.counted[every](*of_row, cut_at, counts, *sizes, **cut, **UNFUSED)
            if cuts.by_mass:
                k.goal_of_mass[row](settings, cut_at, counts, goals, num, parts, bits, PARTS=cut["PARTS"], **UNFUSED)
                for step in range(NIBBLES + 1):
                    k.searched[every](*of_row, cut_at, sums, states, goals, *sizes, step, BY_MASS=True,
                                      HAS_CUT=True, **cut, **UNFUSED)  # fmt: skip
                k.cut_by_mass[row](settings, states, goals, cut_at, num, bits, **UNFUSED)
                k.counted[every](*of_row, cut_at, counts, *sizes, **cut, **UNFUSED)
        probs = torch.empty(num, width, dtype=torch.float32, device=device)
        masses, weights = whole(num, parts), whole(num, parts, 2)
        times = torch.empty(num, parts, dtype=torch.float64, device=device)
        ids = torch.empty_like(largest_ids)
        has_cut = cuts.by_number or cuts.by_mass
        k.weighed[every](*of_row, cut_at, counts, probs, weights, *sizes, HAS_CUT=has_cut, **cut, **UNFUSED)
        k.drawn_in_parts[every](settings, depths, probs, weights, times, ids, masses, *sizes, **cut, **UNFUSED)
        drawn, best = (torch.empty(num, dtype=torch.int32, device=device) for _ in range(2))
        chances = torch.empty(num, dtype=torch.float32, device=device)
        k.drawn[row](settings, depths, probs, weights, times, ids, masses, values, largest_ids, drawn, best, chances,
                     *sizes, **cut, **UNFUSED)  # fmt: skip
        return Drawn(drawn, best, chances, probs)
