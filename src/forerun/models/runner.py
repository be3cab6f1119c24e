"""Runs a model: packs new tokens of sequences into a ragged batch, computes a pass, and returns the logits.

The class Runner serves target and draft models. The new tokens of one sequence are a `Run`: a chunk of a prompt, one
token of a plain step, a draft to verify, or the committed tokens that a draft model has not run yet. All of these are
the same operation.
"""

from __future__ import annotations

import itertools
import math
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import CapacityError, InternalError
from forerun.kv import SCRATCH_SLOT, KVCache
from forerun.kv.cache import BlockCache
from forerun.models.sources import Sources
from forerun.ops.model import DrawsRows, FindsBest, Model, RunsAhead
from forerun.ops.passes import RanAhead
from forerun.sampling.largest import Rows
from forerun.types import Draw, Probs, RaggedBatch, Stop, ancestor_words

NO_NUMBERS = -1  # in place of the largest logit's id, where logits are not finite


class Run(NamedTuple):
    """New tokens of one sequence, to run in one pass.

    parents [n]: the index of each token's parent row. Indices count the slot's pending rows (written, not committed)
    first, and then the rows of the run; -1 = the parent is the last committed row. None = the tokens are a chain after
    all rows of the slot. pending: whether the rows of the run become pending (KVCache.hold), so that the slot's next
    run continues after them. Otherwise the slot's next run overwrites the rows, unless `keep` is called before.

    logits: the wanted rows, whose logits are returned: every row ("all"), the last row ("last"), or no row ("none").
    best_only: return only the id of the largest logit of each wanted row; the runner must have `finds_best`. draws: how
    the device is to draw a token from each wanted row; the runner must have `draws_rows`. asked: for each draw, further
    ids whose probabilities are returned. vectors: maps the index of a row in the run to the vector [H] that the first
    layer gets in place of the token's embedding. Such a row still needs a valid token id.
    """

    slot: int
    tokens: Seq[int]
    logits: str = "all"  # "all" | "last" | "none"
    parents: Seq[int] | None = None
    best_only: bool = False
    pending: bool = False
    vectors: Mapping[int, Any] | None = None
    draws: Seq[Draw] = ()
    asked: Seq[Seq[int]] = ()

    def behind(self, num_pending: int) -> Seq[int]:
        """Return the index of each token's parent row, counted as in `parents`.

        Where `parents` is None, each token's parent is the row before it. num_pending: the slot's number of pending
        rows.
        """
        return range(num_pending - 1, num_pending - 1 + len(self.tokens)) if self.parents is None else self.parents


@dataclass(frozen=True)
class Scores:
    """Holds the results of one pass.

    hidden: the hidden states [T, H] after the final norm. rows[b]: the indices in `hidden` of the rows of run b.
    logits[b] [wanted rows, ids]: the logits of run b, on the host. best[b] [wanted rows]: for a run with best_only,
    instead of logits, the token ids of the largest logits, or NO_NUMBERS where logits are not finite. drawn[b] [wanted
    rows]: for a run with draws, the distributions; best[b] then has the ids of the largest logits.

    forward_s: the duration of the pass in seconds. taps: for each layer k of Runner.taps, the residual stream of every
    row before layer k, float32 [T, H]. runs: the runs of the pass. num_experts: the number of experts that were
    chosen for at least one row, averaged over the layers with experts; 0 = no layer has experts.
    """

    hidden: Any
    rows: list[range]
    logits: list[Rows]
    best: list[list[int]]
    forward_s: float
    taps: Mapping[int, Any] = field(default_factory=dict)
    runs: Seq[Run] = ()
    num_experts: float = 0.0
    drawn: Seq[Seq[Probs]] = ()


class Runner:
    """Runs a model with its KV cache, for a vocabulary of `num_ids` token ids.

    num_ids: None = one id for each row of the LM head; rows beyond num_ids are padding. holes: ids below num_ids that
    stand for no token. Padding and holes get probability 0: the logits of padding are cut off, and the logits of holes
    are set to -inf. A draft model's LM head may have fewer rows than the target has ids. Then a row of logits has one
    entry for each row of the LM head, and higher ids have probability 0.

    layers: the layers to run, ascending; None = all. The final norm and the LM head read the output of the last layer
    in `layers`, so a model with only some of its layers can draft for the whole model. taps: layer indices; each pass
    also returns the residual stream before each of these layers. This attribute may be changed later. head_rows: the
    number of LM head rows to compute, from the first on; None = all. has_experts: whether some layer has experts.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        num_ids: int | None = None,
        holes: Seq[int] = (),
        *,
        layers: Seq[int] | None = None,
        taps: Seq[int] = (),
        head_rows: int | None = None,
    ) -> None:
        self.model, self.cache, self.layers, self.taps = model, cache, layers, taps
        self._finder = model if isinstance(model, FindsBest) else None
        self._drawer = model if isinstance(model, DrawsRows) else None
        self._ahead = model if isinstance(model, RunsAhead) else None
        self.sources = None if model.config.encoder is None else Sources(model, cache)
        self._ends_early = layers is not None and model.config.cache_shape.num_layers - 1 not in layers
        self.has_experts = model.config.has_experts
        self.num_ids = model.config.vocab_size if num_ids is None else num_ids
        self._all_holes = holes
        self._random = random.Random(0)  # draws tokens for passes that measure
        self.narrow(head_rows)

    def narrow(self, head_rows: int | None) -> None:
        """Limit later passes to the logits of the first `head_rows` ids; None = the logits of all ids."""
        self.head_rows = head_rows
        self.width = min(self.num_ids, head_rows or self.num_ids, self.model.config.vocab_size)  # of a row of logits
        self._none: Rows = np.empty((0, self.width), np.float32)
        self.holes = [i for i in self._all_holes if i < self.width]

    def forward(self, runs: Seq[Run]) -> Scores:
        """Compute the tokens of all `runs` in one pass, and return the results.

        The pass reserves cache rows for the tokens and writes them; only `cache.keep` commits them. Raises
        CapacityError where the cache has too few free rows.
        """
        with self.model.ops.inference():
            return self._forward(runs)

    def _forward(self, runs: Seq[Run]) -> Scores:
        started = time.perf_counter()
        for run in runs:
            self.cache.reserve(run.slot, len(run.tokens))
        batch = pack(runs, self.cache, self.sources)
        # Before the pass, which evicts the interpreter's code from the processor's caches.
        rows = list(itertools.starmap(range, itertools.pairwise(batch.run_starts)))
        full, few, drawn = list[int](), list[int](), list[int]()
        for run_rows, run in zip(rows, runs, strict=True):
            wanted = run_rows if run.logits == "all" else run_rows[-1:] if run.logits == "last" else ()
            (drawn if run.draws else few if run.best_only else full).extend(wanted)
        passed = self.model.forward(batch, self.cache, self.layers, self._inputs(runs, batch), self.taps)
        hidden = self.model.norm(passed.hidden) if self._ends_early else passed.hidden
        for run in runs:
            if run.pending:
                self.cache.hold(run.slot, run.behind(len(self.cache.pending(run.slot))))
        logits, best = _by_run(runs, self._logits(hidden, full), self._best(hidden, few), self._none)
        probs = self._drawn(hidden, drawn, runs, best) if drawn else ()
        self.model.wait()
        num_experts = sum(passed.num_experts) / max(1, len(passed.num_experts))
        return Scores(hidden, rows, logits, best, time.perf_counter() - started, passed.taps, runs, num_experts, probs)

    def _drawn(self, hidden: Any, rows: list[int], runs: Seq[Run], best: list[list[int]]) -> list[Seq[Probs]]:
        """Draw a token on the device from each row in `rows`, the wanted rows of the runs with draws.

        Returns each run's distributions, and writes the likeliest token ids into `best`.
        """
        draws = [draw for run in runs for draw in run.draws]
        asked = [ids for run in runs for ids in run.asked or [()] * len(run.draws)]
        assert self._drawer is not None
        distributions, likeliest = self._drawer.draw(hidden, rows, self.width, draws, asked)
        probs, at = list[Seq[Probs]](), 0
        for b, run in enumerate(runs):
            probs.append(distributions[at : at + len(run.draws)])
            if run.draws:
                best[b] = likeliest[at : at + len(run.draws)]
            at += len(run.draws)
        return probs

    @property
    def finds_best(self) -> bool:
        """Whether the model can return the id of the largest logit without returning the logits."""
        return not self.holes and self._finder is not None

    @property
    def draws_rows(self) -> bool:
        """Whether the device can draw tokens from output rows, so that their logits stay off the host."""
        return not self.holes and self._drawer is not None

    @property
    def tells_confidence(self) -> bool:
        """Whether `run_ahead` accepts `stops`, because the model tells the probability of each likeliest token id."""
        return self.finds_best and self._ahead is not None and self._ahead.tells_confidence

    @property
    def draws_ahead(self) -> bool:
        """Whether `run_ahead` can draw tokens at random, that is, accepts `draws`."""
        return self.finds_best and self._ahead is not None and self._ahead.draws_ahead

    def run_ahead(
        self, runs: Seq[Run], lengths: Seq[int], stops: Seq[Stop] = (), layer_rows: Seq[Any] = (), draws: Seq[Draw] = ()
    ) -> RanAhead:
        """Return a continuation of several tokens for each run, in one call. The runner must have `finds_best`.

        The model runs the tokens of run b, and then generates `lengths[b]` new tokens one by one. It runs every new
        token but the last. This method reserves the cache rows, and does not commit them. stops: for each run, the rule
        that may end its continuation earlier; () = no rules. layer_rows: for a draft head, the target's hidden states
        [T, H] after each layer that the head reads, from which the head makes the vectors of the runs; () = the runs
        have their vectors already. draws: how to draw the tokens of each run, for a runner that `draws_ahead`; () =
        take the likeliest tokens.

        Raises CapacityError where the cache has too few free rows, InternalError where logits are not finite, or where
        the pending rows of a slot are a tree.
        """
        if not runs:
            return RanAhead([])
        for run, length in zip(runs, lengths, strict=True):
            self.cache.reserve(run.slot, len(run.tokens) + length - 1)
        batch = pack(runs, self.cache, self.sources)
        if batch.ancestors:
            raise InternalError("a pending tree cannot be run ahead of: keep a path of it first")
        hidden = self._inputs(runs, batch)
        assert self._ahead is not None
        where = batch, list(lengths), self.cache, self.width, self.layers, hidden
        ahead = self._ahead.run_ahead(*where, stops=stops, layer_rows=layer_rows, draws=draws)
        if ahead is None:
            raise InternalError("the model returned logits that are no numbers")
        return ahead

    @property
    def fingerprint(self) -> str:
        """A text with all facts on which the time of a pass depends.

        The facts are the processor, the operators, the number of threads, the model's sizes and layers, the dtype of
        the weights, the device, and the number of bytes that a pass reads, which differs for rounded weights.
        """
        model, info = self.model, Path("/proc/cpuinfo")
        lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else [platform.processor()]
        processor = next((line for line in lines if line.startswith("model name")), lines[0])
        ops, shape = (model.ops.build, model.ops.num_threads), (model.config, self.layers, self.head_rows)
        weights = (model.weight_dtype, model.bytes_per_pass)
        return repr((processor, *ops, *shape, *weights, model.device))

    def try_pass(self, num_rows: int, num_behind: int = 0) -> None:
        """Run a pass over `num_rows` new rows, and drop the rows. Raises as `scratch`.

        num_behind: the number of earlier cache rows that the new rows attend to. Their content does not matter.
        """
        with self.scratch(num_behind) as run:
            run(num_rows, True)

    @contextmanager
    def scratch(self, num_behind: int = 0) -> Iterator[Callable[[int, bool], float]]:
        """Yield a function `run(num_rows, is_alike)`, which runs a pass over new rows and drops the rows.

        num_behind: the number of earlier cache rows that the new rows attend to. Their content does not matter, except
        in a model with experts. In such a model the earlier rows are set to zeros, because memory may hold NaN, and
        with NaN the first experts would be chosen for all rows.

        is_alike: whether all rows are the same random token. Otherwise each row is another random token, as in a text.
        In a model without experts, all rows are token 0. `run` returns the number of experts that were chosen for its
        rows, averaged over the layers with experts; 0 where no layer has experts. This method and `run` raise
        CapacityError where the cache has too few free rows, or the model too few positions.
        """
        self.cache.open(SCRATCH_SLOT)
        try:
            if self.sources is not None:
                self.sources.open(SCRATCH_SLOT, [0], None)
                if self.sources.num_unrun(SCRATCH_SLOT):
                    self.sources.run([SCRATCH_SLOT])
            if num_behind:
                self._check_position(num_behind)
                self.cache.reserve(SCRATCH_SLOT, num_behind)
                self.cache.keep({SCRATCH_SLOT: range(num_behind)})
            if num_behind and self.has_experts and isinstance(self.cache, BlockCache):
                rows = self.cache.rows(SCRATCH_SLOT, 0, num_behind)
                self.cache.pools.clear(rows)

            def run(num_rows: int, is_alike: bool) -> float:
                self._check_position(num_behind + num_rows)
                tokens = [0] * num_rows
                if self.has_experts:
                    ids = range(self.model.config.vocab_size)
                    tokens = (self._random.choices(ids, k=1 if is_alike else num_rows) * num_rows)[:num_rows]
                return self.forward([Run(SCRATCH_SLOT, tokens, "all", None, self.finds_best)]).num_experts

            yield run
        finally:
            self.cache.release(SCRATCH_SLOT)
            if self.sources is not None:
                self.sources.release(SCRATCH_SLOT)

    def _check_position(self, num_positions: int) -> None:
        if num_positions > self.model.config.max_positions:
            raise CapacityError(f"the model has {self.model.config.max_positions} positions, {num_positions} asked")

    def _inputs(self, runs: Seq[Run], batch: RaggedBatch) -> Any:
        """Return the inputs of the first layer [T, H]: embeddings and the runs' vectors; None if no run has vectors."""
        if not any(run.vectors for run in runs):
            return None
        rows = self.model.embed(batch.ids()[0])
        for run, start in zip(runs, batch.run_starts, strict=False):
            for i, vector in (run.vectors or {}).items():
                if not 0 <= i < len(run.tokens):
                    raise InternalError(f"a run of {len(run.tokens)} rows has no row {i} to give a vector to")
                rows[start + i] = vector
        return rows

    def _best(self, hidden: Any, rows: list[int]) -> list[int]:
        """Return the id of each row's largest logit, the lowest id on ties; NO_NUMBERS where logits are not finite."""
        if not rows:
            return []
        assert self._finder is not None
        ids, values = self._finder.best(hidden, rows, self.width)
        if all(map(math.isfinite, values)):
            return ids
        return [id_ if math.isfinite(value) else NO_NUMBERS for id_, value in zip(ids, values, strict=True)]

    def _logits(self, hidden: Any, rows: list[int]) -> Rows:
        if not rows:
            return self._none
        wanted = hidden if len(rows) == len(hidden) else self.model.rows.take(hidden, rows)
        logits = self.model.logits(wanted, self.head_rows)[:, : self.width]
        if self.holes:
            logits[:, self.holes] = -math.inf
        return self.model.rows.to_host(logits)


def float_type(model: Model) -> type[np.floating[Any]]:
    """Return the dtype of a model's logits: float64 if its activations are float64, as in a toy, otherwise float32."""
    return np.float64 if str(model.activation_dtype).endswith("float64") else np.float32


def _by_run(runs: Seq[Run], logits: Rows, best: list[int], none: Rows) -> tuple[list[Rows], list[list[int]]]:
    """Split the logits and the likeliest ids of the wanted rows by run, as in `Scores`.

    none: the empty logits of a run without logits.
    """
    some_logits, some_best = list[Rows](), list[list[int]]()
    at = at_best = 0
    for run in runs:
        num = len(run.tokens) if run.logits == "all" else run.logits == "last"
        if run.draws:
            some_best.append([])
            some_logits.append(none)
        elif run.best_only:
            some_best.append(best[at_best : at_best + num])
            some_logits.append(none)
            at_best += num
        else:
            some_best.append([])
            some_logits.append(logits[at : at + num] if num else none)
            at += num
    return some_logits, some_best


def pack(runs: Seq[Run], cache: KVCache, sources: Sources | None = None) -> RaggedBatch:
    """Pack `runs` into one ragged batch without padding. sources: the encoder inputs of an encoder-decoder."""
    starts, tokens, positions = [0], list[int](), list[int]()
    cached, trees = list[int](), dict[int, list[int]]()
    for b, run in enumerate(runs):
        past = cache.length(run.slot)
        pending = cache.pending(run.slot)
        tree = [*pending, *run.behind(len(pending))] if pending or run.parents is not None else None
        if tree is None or _is_chain(tree):
            past += len(pending)
            positions += range(past, past + len(run.tokens))
        else:
            trees[b] = ancestor_words(tree)
            positions += [past + word.bit_count() - 1 for word in trees[b][len(pending) :]]
        cached.append(past)
        tokens += run.tokens
        starts.append(len(tokens))
    slots = [run.slot for run in runs]
    silent = frozenset(b for b, run in enumerate(runs) if run.logits == "none")
    of_runs = () if sources is None else sources.of(slots)
    if not trees:
        return RaggedBatch(tokens, positions, starts, slots, cached, sources=of_runs, silent=silent)
    num_pending, ancestors = [0] * len(runs), [0] * len(tokens)
    for b, words in trees.items():
        num_pending[b] = len(words) - len(runs[b].tokens)
        ancestors[starts[b] : starts[b + 1]] = words[num_pending[b] :]
    return RaggedBatch(tokens, positions, starts, slots, cached, num_pending, ancestors, of_runs, silent)


def _is_chain(parents: list[int]) -> bool:
    return parents == list(range(-1, len(parents) - 1))
