"""An assistant: a small model that reads its target's keys and values and has none of its own (Gemma 4, 2026).

An assistant runs one row for each guess. The first row joins two vectors: the embedding of the last committed token,
and the target's hidden state (after the final norm) of the token before it. Each block of the assistant reads the KV
cache of one layer of the target: a block with a window reads the target's last layer with a window, and a block without
a window reads the last layer without one. After each guess, the output row is projected to the width of the target's
rows, and joined with the embedding of the guess. This makes the next input row. All rows have the position of the last
committed token, and attend to the tokens that this token attends to. So an assistant never runs a prompt, and needs no
cache.

The smallest assistants have an ordered LM head. The LM head's rows are sorted into groups, and each group has a
centroid. Only the groups whose centroids have the largest products with the hidden state are computed for a guess.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun import blocks
from forerun.blocks import CacheShape, Spec, weight_shapes
from forerun.config import AUTO
from forerun.drafters import WITHOUT_MODEL, Drafter, Known, Needs, Seen, Target
from forerun.drafters.shared.chain import Chain, Row, next_of
from forerun.drafters.shared.head_matrices import beside_of
from forerun.drafters.shared.model_files import AS_TARGET, head_of, rounded, short_vocabulary, spread, stored_for
from forerun.drafters.shared.model_options import VOCAB, head_rows, rounding
from forerun.drafters.shared.searching import SEARCH, SearchingDrafter
from forerun.drafters.shared.short_vocab import ShortVocabulary
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.host_tensor import Floats, HostTensor
from forerun.kv import KVCache
from forerun.kv.cache import BlockCache
from forerun.kv.lent import LentCache
from forerun.models.families import gemma4_assistant, run_by
from forerun.models.loading import check_shapes, stored_shapes
from forerun.models.opened import OpenedCheckpoint
from forerun.models.runner import NO_NUMBERS, float_type
from forerun.models.source import Source
from forerun.ops.model import FindsBest
from forerun.registry import option
from forerun.sampling import takes_the_best
from forerun.sampling.largest import Ids
from forerun.types import Budget, Coins, Draft, Sequence

CENTROIDS, ORDERING = (gemma4_assistant.HEADS + name for name in ("centroids.weight", "token_ordering"))


@dataclass(frozen=True)
class Options:
    """The options: where the assistant is stored, how its weights are kept in memory, and which ids it drafts."""

    path: str | None = option(None, "folder, GGUF file, name or hub id of the assistant")
    quantization: str = field(default=AUTO, metadata=AS_TARGET)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)
    search: str = field(default=WITHOUT_MODEL, metadata=SEARCH)

    def __post_init__(self) -> None:
        rounding(self.quantization)
        head_rows("assistant", self.draft_vocab)


@dataclass(frozen=True)
class OrderedHead:
    """An LM head whose rows are sorted into groups. Only the most promising groups are computed for a guess.

    A group is promising if the product of its centroid and the hidden state is large. centroids [groups, H]. rows
    [groups, n, H]. ids [groups, n]: the token id of each row. num_chosen: how many groups are computed. num_ids: only
    ids below this number are drafted.
    """

    centroids: Floats
    ids: Ids
    rows: HostTensor
    num_chosen: int
    num_ids: int

    def logits(self, row: Floats) -> tuple[Ids, Floats]:
        """Return the token ids in the `num_chosen` most promising groups, ascending, and their logits.

        row [H]: the input of the LM head.
        """
        promises = self.centroids @ row
        best = np.argpartition(-promises, self.num_chosen - 1)[: self.num_chosen]
        ids, logits = self.ids[best].ravel(), (self.rows[best.tolist()].float32() @ row).ravel()
        order = np.argsort(ids)
        order = order[ids[order] < self.num_ids]
        return ids[order], logits[order]


class AssistantDrafter(SearchingDrafter):
    """Drafts with an assistant, which reads the target's keys and values.

    ordered: the ordered LM head; None = the assistant has an LM head without groups, and the logits of the first
    `width` ids are computed. short: the object that chooses `width`; None = the width is fixed.
    """

    drafts_behind = False  # the assistant reads the target's hidden states and cache rows of the last committed tokens
    tells_confidence = True

    def __init__(self, model: Any, target: Target, layers: Seq[int], ordered: OrderedHead | None) -> None:
        self.model, self.ordered = model, ordered
        self.short: ShortVocabulary | None = None
        self.width = min(target.num_ids, model.config.vocab_size)
        self._target, self._num_ids, self._layers = target.model, target.num_ids, layers
        self._cache: LentCache | None = None
        self._rows: dict[int, tuple[int, Any]] = {}  # by sequence: the last token that the target ran, and its row

    def lend(self, cache: KVCache) -> None:
        if isinstance(cache, BlockCache):
            self._cache = LentCache(cache, self._layers)

    def begin(self, seq: Sequence) -> None:
        self._rows.pop(seq.id, None)
        super().begin(seq)

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._rows.pop(seq.id, None)
        if self.short is not None:
            self.short.forget(seq)

    @property
    def num_held(self) -> int:
        """The number of sequences for which a hidden state of the target is stored."""
        return len(self._rows)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Store the target's hidden state of each sequence's last token that was not rejected."""
        for seq, of_seq in zip(seqs, seen, strict=True):
            if len(of_seq.kept):
                row = of_seq.scores.hidden[[of_seq.kept[-1]]]
                self._rows[seq.id] = of_seq.start + len(of_seq.kept) - 1, row

    def num_unread(self, seq: Sequence) -> int:
        return 1

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        if self.short is not None:
            self.short.read(seqs)
            self.width = min(self._num_ids, self.short.best())
        reads_logits = budget.reads_logits or bool(budget.stops)
        limits = [num if self._is_ready(seq) else 0 for seq, num in zip(seqs, budget.num_tokens, strict=True)]
        going, chains = [b for b in range(len(seqs)) if limits[b] > 0], [Chain() for _ in seqs]
        rows = {b: self._rows[seqs[b].id][1] for b in going}
        while going:
            tokens = [(chains[b].tokens or seqs[b].tokens)[-1] for b in going]
            best_only = not reads_logits and all(takes_the_best(seqs[b].params, seqs[b].bad_word_ids) for b in going)
            scored, fed = self._step([seqs[b] for b in going], tokens, [rows[b] for b in going], best_only)
            grown = list[int]()
            for i, b in enumerate(going):
                rows[b] = fed[i : i + 1]
                following = next_of(scored[i], seqs[b], chains[b].tokens)
                may_follow = following is not None and chains[b].grow(*following, seqs[b], b, budget, coins[b])
                if may_follow and len(chains[b].tokens) < limits[b]:
                    grown.append(b)
            going = grown
        return Draft.chains([chain.tokens for chain in chains], [chain.probs for chain in chains])

    def _is_ready(self, seq: Sequence) -> bool:
        """Return whether the target's hidden state of the token before the last committed token is stored."""
        return self._cache is not None and seq.id in self._rows and self._rows[seq.id][0] == len(seq.tokens) - 2

    def _step(self, seqs: Seq[Sequence], tokens: Seq[int], rows: Seq[Any], best_only: bool) -> tuple[list[Row], Any]:
        """Run the assistant on one row for each sequence.

        tokens: the token of each row. rows: for each sequence, the row [1, size] that the call for the token before
        returned, or the target's hidden state. best_only: whether the id of the largest logit is enough. Returns the
        logits or the best id after each row, and the rows for the call for the next token, [n, size].
        """
        model = self.model
        positions = [len(seq.tokens) - 1 for seq in seqs]
        assert self._cache is not None
        with model.ops.inference():
            joined = model.rows.join(list(rows))
            entering = model.features([self._target.embed(tokens), joined])
            batch = self._cache.behind([seq.id for seq in seqs], tokens, positions)
            hidden = model.forward(batch, self._cache, hidden=entering).hidden
            fed = model.fed(hidden)
            if self.ordered is not None:
                scored = [self._ordered(row, best_only) for row in model.rows.to_host(hidden)]
            elif best_only and isinstance(model, FindsBest):
                ids, values = model.best(hidden, list(range(len(seqs))), self.width)
                scored = [i if np.isfinite(value) else NO_NUMBERS for i, value in zip(ids, values, strict=True)]
            else:
                logits = model.rows.to_host(model.logits(hidden, self.width))
                scored = [spread(row, self._num_ids, float_type(model)) for row in logits]
            model.wait()
        return scored, fed

    def _ordered(self, row: Floats, best_only: bool) -> Row:
        """Return the logits after an LM head input `row` [H], or the likeliest id, from the most promising groups."""
        assert self.ordered is not None
        ids, logits = self.ordered.logits(row.astype(np.float32))
        if len(ids) == 0:  # no id in these groups has a token
            return NO_NUMBERS
        if best_only:
            return int(ids[logits.argmax()]) if np.isfinite(logits).all() else NO_NUMBERS
        whole = np.full(self._num_ids, -np.inf, float_type(self.model))
        whole[ids] = logits
        return whole


def needs(options: Options, target: Known) -> Needs:
    """Return the memory needs of the assistant's weights. Raises BadOption if there is no assistant for this target."""
    opened = _opened(options, target)
    tensors = dict(rounded(opened.weights, opened.spec, options.quantization, target).tensors)
    if options.draft_vocab == AUTO and _is_ordered(opened):
        tensors[blocks.HEAD] = replace(opened.weights.tensors[blocks.HEAD], scheme=None)
    return Needs(weights=beside_of(opened.spec, tensors))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises BadOption for an assistant of another target, and on a device other than a CPU."""
    opened, model = _opened(options, target.opened), target.model
    if model.device != "cpu":
        raise BadOption("assistant is built for CPUs alone: leave it out, or choose device='cpu'")
    shape = model.config.cache_shape
    layers = _layers_read(opened.spec, shape, opened.name)
    spec = _windowed(opened.spec, shape, layers)
    ordered = _ordered_head(opened, target.num_ids) if options.draft_vocab == AUTO else None
    spec = replace(spec, head=ordered is None)
    source = rounded(opened.weights, spec, options.quantization, target.opened)
    assistant = head_of(stored_for(source, model), spec, model)
    drafter = AssistantDrafter(assistant, target, layers, ordered)
    drafter.width = min(drafter.width, head_rows("assistant", options.draft_vocab) or drafter.width)
    if options.draft_vocab == AUTO and ordered is None:
        drafter.short = short_vocabulary(model, spec, target.num_ids)
    drafter.search_by(options.search, "assistant", target)
    opened.close()
    return drafter


def _opened(options: Options, target: Known) -> OpenedCheckpoint:
    if options.path is None:
        raise BadOption(
            "assistant needs the checkpoint that was published for its target: name it, as in assistant:path=FOLDER"
        )
    opened = target.open(options.path)
    if opened.spec.features is None or run_by(opened.raw) != "assistant":
        raise BadOption(f"assistant:path={shown(options.path)} is no assistant: name it as draft={shown(options.path)}")
    width, ids = opened.spec.features.size, opened.spec.vocab_size
    if (width, ids) != (target.hidden_size, target.vocab_size):
        raise BadOption(
            f"assistant:path={shown(options.path)} belongs to a target with rows of {width} and {ids} ids, and this "
            f"one has rows of {target.hidden_size} and {target.vocab_size} ids: name the target's own"
        )
    opened.fetch_weights()
    shapes = stored_shapes(opened.weights, opened.spec)
    check_shapes(shapes, weight_shapes(opened.spec), str(opened.path), in_one_file=opened.path.is_file())
    return opened


def _layers_read(spec: Spec, shape: CacheShape, name: str) -> list[int]:
    """Return, for each block of the assistant, the index of the target's layer whose keys and values the block reads.

    A block with a window reads the target's last layer that has a window and stores its own keys. A block without a
    window reads the last layer that has no window and stores its own keys. Raises BadOption if the sizes differ.
    """
    windows = shape.windows or (None,) * shape.num_layers
    last = {windows[layer] is not None: layer for layer in shape.kept}
    layers = list[int]()
    for block in spec.blocks:
        reads = block.attention
        assert reads is not None
        layer = last.get(reads.window is not None)
        if layer is None or shape.size_of(layer) != (reads.kv_heads, reads.head_dim):
            raise BadOption(
                f"{shown(name)} reads keys of {reads.kv_heads} heads of {reads.head_dim}, which no such layer of the "
                "target keeps: name the target's own assistant"
            )
        layers.append(layer)
    return layers


def _windowed(spec: Spec, shape: CacheShape, layers: Seq[int]) -> Spec:
    """Return the spec with every attention window one row shorter.

    An assistant's row has no keys of its own, and is run in the place of the row before it. So a window of full length
    would include one key too many.
    """
    windows = shape.windows or (None,) * shape.num_layers
    narrowed = list[blocks.Block]()
    for block, layer in zip(spec.blocks, layers, strict=True):
        reads, kept = block.attention, windows[layer]
        assert reads is not None
        if reads.window is not None and kept is not None:
            reads = replace(reads, window=max(1, min(reads.window, kept) - 1))
        narrowed.append(replace(block, attention=reads))
    return replace(spec, blocks=tuple(narrowed))


def _ordered_head(opened: OpenedCheckpoint, num_ids: int) -> OrderedHead | None:
    """Return an assistant's ordered LM head; None if the LM head is not ordered.

    The rows keep their stored dtype, but quantised rows are converted to bfloat16. Raises UnsupportedModel if the order
    does not contain each id exactly once.
    """
    if opened.source is None or not _is_ordered(opened):
        return None
    said, tensors = _said(opened), opened.source.tensors
    if not {CENTROIDS, ORDERING} <= tensors.keys():
        raise UnsupportedModel(f"{shown(opened.name)} has no {CENTROIDS} or {ORDERING}: fetch it again")
    groups = int(said[gemma4_assistant.GROUPS])
    centroids = _whole(opened.source, CENTROIDS).float32()
    order = _whole(opened.source, ORDERING).values.astype(np.int64).ravel()
    is_order = np.array_equal(np.sort(order), np.arange(opened.spec.vocab_size))
    if centroids.shape != (groups, opened.spec.hidden_size) or not is_order:
        raise UnsupportedModel(
            f"{shown(opened.name)} has another order of its LM head than of each id once: fetch it again"
        )
    rows = _whole(opened.weights, blocks.HEAD)
    if opened.weights.tensors[blocks.HEAD].scheme is not None:
        rows = rows.to("bfloat16")
    rows = rows[order].reshape(groups, -1, opened.spec.hidden_size)
    return OrderedHead(centroids, order.reshape(groups, -1), rows, int(said[gemma4_assistant.TAKEN]), num_ids)


def _is_ordered(opened: OpenedCheckpoint) -> bool:
    return bool(_said(opened)[gemma4_assistant.ORDERED])


def _said(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Return the assistant's entries of config.json, with default values for missing entries."""
    return {**gemma4_assistant.USUAL, **{key: value for key, value in opened.raw.items() if value is not None}}


def _whole(source: Source, name: str) -> HostTensor:
    return HostTensor.joined([block[:] for block in source.blocks(name)])
