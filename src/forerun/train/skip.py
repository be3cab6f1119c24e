"""Searches for the set of a target's layers that drafts best for the target (Draft & Verify, arXiv 2309.08168).

The command is `forerun train skip`. Two numbers are measured for a set of layers: the share of positions in a text at
which the set and the whole target have the same likeliest token, and the bytes that a pass through the set reads, as a
fraction of the bytes of a target pass. Equation (1) of Leviathan et al. 2023 gives the speed-up over plain decoding
from both numbers.

The paper uses Bayesian optimisation. The search here has three stages. First, each layer alone is left out. Second, the
2, 3, ... layers whose absence reduced the agreement least are left out together. Third, random single layers are added
to the best set, or removed from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.blocks import weight_shapes
from forerun.drafters.shared import artifacts
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner
from forerun.ops.model import LoadedModel
from forerun.theory.formulas import optimal_gamma, speedup

KIND = "skip"  # of the file that early_exit reads
SLOT = 0
MOST_DRAFTED = 16  # tokens of a round
WINDOW = 128  # tokens of a text that are run as one sequence
FLIPS = 20  # random tries for each set that may be scored


@dataclass(frozen=True)
class Scored:
    """Holds a set of layers and its score.

    agreement: the share of positions at which the set and the whole target have the same likeliest token. speedup: the
    speed-up over plain decoding by equation (1), with the best draft length. Overhead and the higher cost of passes
    with several rows are not counted.
    """

    layers: tuple[int, ...]
    agreement: float
    speedup: float


class Scorer:
    """Scores sets of layers of one model on texts.

    windows: pieces of the texts, as ids; each piece is run as one sequence. Raises BadOption for a model in which some
    layers read the attention keys of other layers.
    """

    def __init__(self, model: LoadedModel, windows: Seq[Seq[int]]) -> None:
        config = model.config
        if any(b.attention is not None and b.attention.shares_kv_of is not None for b in config.blocks):
            raise BadOption("layers of this model read the keys of others, so that none of them may be left out")
        self.num_layers, self.windows = config.num_layers, windows
        longest = max(map(len, windows))
        sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": longest, "prefix_caching": False}
        self.model = model
        self.cache = BlockCache.of(model, "contiguous", **sizes)
        shapes = weight_shapes(config).items()
        in_layers = sum(math.prod(shape) for name, shape in shapes if name.startswith("model.layers."))
        head = config.vocab_size * config.hidden_size
        self._layer_share = in_layers / self.num_layers / (in_layers + head)
        self._wanted = self._choices(None)

    def cost(self, layers: Seq[int]) -> float:
        """Return the bytes that a pass through `layers` reads, as a fraction of the bytes of a target pass."""
        return 1 - self._layer_share * (self.num_layers - len(layers))

    def score(self, layers: Seq[int]) -> Scored:
        """Run the windows through `layers`, and return the score of this set of layers."""
        agreement = float(np.mean(self._choices(layers) == self._wanted))
        cost = self.cost(layers)
        length = max(1, optimal_gamma(agreement, cost, MOST_DRAFTED))
        return Scored(tuple(layers), agreement, speedup(agreement, length, cost))

    def _choices(self, layers: Seq[int] | None) -> npt.NDArray[np.int64]:
        """Return the likeliest next token at each position of all windows. layers: None = all layers."""
        runner = Runner(self.model, self.cache, layers=layers)
        best: list[int] = []
        for window in self.windows:
            self.cache.open(SLOT)
            scores = runner.forward([Run(SLOT, window, best_only=runner.finds_best)])
            best += scores.best[0] if runner.finds_best else scores.logits[0].argmax(axis=-1).tolist()
            self.cache.release(SLOT)
        return np.array(best)


def windows_of(ids: Seq[int], num_tokens: int, length: int) -> list[Seq[int]]:
    """Cut the first `num_tokens` ids into windows of at most `length` ids. Windows of one id are left out.

    Raises BadOption where the text has fewer than two tokens.
    """
    kept = ids[:num_tokens]
    windows = [kept[first : first + length] for first in range(0, len(kept), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise BadOption("the text has fewer than two tokens: name a longer one")
    return windows


def search(
    scorer: Scorer,
    evaluations: int,
    seed: int = 0,
    say: Callable[[Scored], None] = lambda s: None,
    progress: Callable[[int], None] = lambda num_scored: None,
) -> Scored:
    """Search for the set of layers with the largest speed-up, and return the best set that was found.

    Every scored set lacks at least one layer, so the largest speed-up may be below 1. The same arguments give the same
    set. evaluations: the largest number of sets to score, at least 1. say: called with each set that is better than all
    earlier sets. progress: called after each set with the number of scored sets. Raises BadOption for a model with one
    layer.
    """
    everything = tuple(range(scorer.num_layers))
    if len(everything) < 2:
        raise BadOption("the target has one layer, so none can be left out: name another target")
    best = Scored((), 0.0, 0.0)
    scored: dict[tuple[int, ...], Scored] = {}

    def score(layers: Iterable[int]) -> None:
        nonlocal best
        chosen = tuple(sorted(layers))
        if chosen in ((), everything) or chosen in scored or len(scored) >= evaluations:
            return
        scored[chosen] = scorer.score(chosen)
        progress(len(scored))
        if scored[chosen].speedup > best.speedup:
            best = scored[chosen]
            say(best)

    def without(layers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({*everything} - {*layers}))

    for layer in everything:
        score(without([layer]))
    alone = {i: scored[without([i])].agreement for i in everything if without([i]) in scored}
    least_missed = sorted(alone, key=lambda i: -alone[i])
    for num in range(2, len(everything)):
        score(without(least_missed[:num]))
    rng = random.Random(seed)
    for _ in range(FLIPS * evaluations):  # more tries than sets to score, because many hit a set that is scored already
        score({*best.layers} ^ {rng.choice(everything)})
    return best


def fit(checkpoint: Checkpoint, text: str, out: Path, *, num_tokens: int, evaluations: int, seed: int = 0,
        say: Callable[[Scored], None] = lambda s: None,
        progress: Callable[[int], None] = lambda num_scored: None) -> Scored:  # fmt: skip
    """Search for the best set of layers on a text, write it to the file `out`, and return it.

    The drafter `early_exit:path=FILE` reads the file. num_tokens: the number of tokens of the text to use. say,
    progress: see `search`. Raises BadOption where the text is too short or the checkpoint has no tokenizer.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise BadOption("a search for layers needs the target's tokenizer: load the checkpoint with it")
    scorer = Scorer(checkpoint.model, windows_of(tokenizer.encode(text), num_tokens, WINDOW))
    best = search(scorer, evaluations, seed, say, progress)
    facts = {
        "num_layers": str(scorer.num_layers),
        "agreement": f"{best.agreement:.4f}",
        "speedup": f"{best.speedup:.3f}",
        "num_tokens": str(num_tokens),
        "evaluations": str(evaluations),
    }
    layers = {"layers": np.array(best.layers, dtype=np.int64)}
    num_ids = min(tokenizer.num_ids, checkpoint.model.config.vocab_size)
    artifacts.save(out, KIND, layers, artifacts.fingerprint(tokenizer, num_ids), facts)
    return best
