"""Distributions over token ids, and the random decisions (coins) that choose from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forerun.errors import InternalError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Draw:
    """The settings with which a model draws the next tokens of one sequence by itself (`run_ahead`).

    The model draws the same ids as the sampling pipeline, bit for bit.

    filters: (temperature, top_k, log of min_p, top_p, the most ids of a list in Probs), as `sampling.filters_of`
    returns them; temperature 0 = take the likeliest id. shares_noise: whether an id is picked as `Coins.pick` picks.
    Otherwise it is drawn as `Coins.draft` or `Coins.draw` draws, by `purpose`. seed, position, round: as in
    PhiloxCoins.
    """

    filters: tuple[float, int, float, float, int]
    shares_noise: bool
    seed: int
    position: int
    round: int
    purpose: int = 0  # forerun.sampling.random.PURPOSE_DRAFT


@dataclass(frozen=True, slots=True)
class Probs:
    """One exact distribution over V token ids, in one of four forms.

    point: a point mass, which stands for a one-hot vector without storing it. dense: a vector. ids and listed: a list,
    where filters left few ids of a wide vocabulary. afar: a vector on a device, copied to the host when its weights are
    read. Ids beyond a vector, and ids that a list lacks, have probability 0. soft: for a greedy request, the
    distribution at temperature 1, where the verification rule needs it. Vectors and lists may be anything that numpy
    converts to an array; they are kept as arrays over the same memory.
    """

    point: int | None = None  # the id that has probability 1
    dense: npt.NDArray[np.floating[Any]] | None = None  # [V], float32 or wider
    ids: npt.NDArray[np.int64] | None = None  # [n], ascending
    listed: npt.NDArray[np.floating[Any]] | None = None  # [n], float32 or wider: the probabilities of `ids`
    soft: Probs | None = None
    afar: Afar | None = None

    def __post_init__(self) -> None:
        if self.point is not None:
            return
        import numpy as np  # importing this module must not wait for numpy

        for name in ("dense", "ids", "listed"):
            given = getattr(self, name)
            if given is not None and type(given) is not np.ndarray:
                object.__setattr__(self, name, np.asarray(given))

    @staticmethod
    @functools.cache
    def of_point(token: int) -> Probs:
        """Return the distribution in which `token` has probability 1."""
        return Probs(point=token)

    def at(self, token: int) -> float:
        """Return the probability of `token`."""
        if self.point is not None:
            return 1.0 if token == self.point else 0.0
        if self.afar is not None and self.dense is None and token in self.afar.chances:
            return self.afar.chances[token]
        place = token
        if self.ids is not None:
            place = int(self.ids.searchsorted(token))
            if place == len(self.ids) or int(self.ids[place]) != token:
                return 0.0
        return float(self.weights[place]) if 0 <= place < len(self.weights) else 0.0

    @property
    def weights(self) -> npt.NDArray[np.floating[Any]]:
        """The probabilities [n] of `ids`, or else of ids 0 to n - 1. Raises InternalError where there is no vector."""
        weights = self.dense if self.ids is None else self.listed
        if weights is None and self.afar is not None:
            weights = self.afar.weights
        if weights is None:
            raise InternalError("a distribution needs a point or a dense vector, or ids with their probabilities")
        return weights


class Afar:
    """A distribution in the memory of a device, with some probabilities and one drawn id known to the host.

    fetch() -> [V] copies the weights to the host, where they are then kept. chances: the probabilities of some ids.
    draw: the settings with which the device drew an id. token: the drawn id; below 0 = the device could draw no id.
    """

    __slots__ = ("_fetch", "_weights", "chances", "draw", "token")

    def __init__(
        self, fetch: Callable[[], npt.NDArray[np.floating[Any]]], chances: Mapping[int, float], draw: Draw, token: int
    ) -> None:
        self._fetch, self.chances, self.draw, self.token = fetch, chances, draw, token
        self._weights: npt.NDArray[np.floating[Any]] | None = None

    @property
    def weights(self) -> npt.NDArray[np.floating[Any]]:
        """The probabilities of the ids 0 to V - 1, on the host."""
        if self._weights is None:
            self._weights = self._fetch()
        return self._weights


class Coins(Protocol):
    """The random decisions of one sequence in one round, passed in from outside (docs/exactness.md).

    `depth` counts from the first token of the round, so the token that is decided has the absolute index (number of
    committed tokens + depth). `lane` separates several coins at one depth.
    """

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Return True with probability min(1, prob): never for 0, always for 1."""

    def draw(self, probs: Probs, depth: int) -> int:
        """Draw an id from `probs`, as a correction or a bonus token."""

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Draw an id from `probs`, as a drafted token. Several draws at one depth need different lanes."""

    def pick(self, probs: Probs, depth: int) -> int:
        """Return the argmax of log probs + the Gumbel noise of (seed, absolute index).

        Drafter, verifier and plain decoding share this noise.
        """

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Return the `num` ids with the largest log probs + the noise of `pick`, largest first.

        Fewer ids are returned if fewer ids have a probability above 0. The first id is the id that `pick` returns. A
        drafter that wants several children of one node takes these ids.
        """
