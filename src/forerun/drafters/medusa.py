"""Medusa: heads that guess several tokens ahead from the target's last hidden state (Cai et al. 2024, 2401.10774).

Head k is a residual block on the hidden state of the last token that the target has run, and guesses the token k places
behind the next one, whatever stands between: the draft is a fixed tree, in which the children of a node are the
likeliest ids of the head of their depth. All are point masses, so every rule that judges them is exact; the published
typical acceptance is a rule of its own (docs/methods/typical.md). `forerun train head --method medusa` makes a head.
The rows of the LM head are the target's, of the ids that it writes most often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forerun.drafters import Drafter, Seen, Target, artifacts, head_files
from forerun.errors import BadOption, shown
from forerun.models.configs import size
from forerun.models.runner import Model
from forerun.theory.trees import Node, best_first
from forerun.types import Budget, Coins, Draft, Probs, Sequence

SHARES = (0.5, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)  # of the target's choices, by a head's rank: for the tree


@dataclass(frozen=True)
class Options:
    """Which heads, and the shape of the draft."""

    path: str | None = field(default=None, metadata={"help": "folder that `forerun train head --method medusa` made"})
    shape: str = field(
        default="3x2x1x1", metadata={"help": "children of a node by depth, as in 3x2x1; 1x1x1 = a chain"}
    )

    def __post_init__(self) -> None:
        widths(self.shape)


def widths(shape: str) -> list[int]:
    """Read 3x2x1. Raises BadOption."""
    found = [int(part) if part.isdigit() and len(part) < 3 else 0 for part in shape.split("x")]
    if not all(0 < width <= len(SHARES) for width in found):
        raise BadOption(f"medusa:shape={shown(shape)} is not possible: widths of 1 to {len(SHARES)}, as in 3x2x1")
    return found


Linear = tuple[Any, Tensor | None]  # a matrix, packed where operators pack, and its bias, if it is not packed, too


class Heads(Protocol):
    """Guesses of several tokens ahead, each an own function of the target's last hidden state."""

    num_heads: int

    def outputs(self, hidden: Tensor, num_heads: int) -> list[Tensor]:
        """hidden [B, H] -> of each head, what the LM head reads [B, H]."""


class Guesser:
    """The LM head behind some heads. ids [n]: those that are drafted, ascending."""

    def __init__(self, heads: Heads, ids: Tensor, target: Model) -> None:
        self.num_heads, self._heads, self._ids = heads.num_heads, heads, ids
        self._ops, self._dtype = target.ops, target.activation_dtype
        self._head = _packed(target, target.head(ids.tolist()).to(target.weight_dtype))

    def guesses(self, hidden: Tensor, num_heads: int, num: int) -> list[list[list[int]]]:
        """hidden [B, H] -> by row and head, the `num` likeliest ids, best first."""
        x = hidden.to(self._dtype).clamp(-head_files.LARGEST, head_files.LARGEST)
        logits = self._ops.linear(torch.stack(self._heads.outputs(x, num_heads), 1).flatten(0, 1), self._head)
        best = logits.topk(min(num, logits.shape[-1]), dim=-1).indices
        found: list[list[list[int]]] = torch.unflatten(self._ids[best.cpu()], 0, (len(hidden), -1)).tolist()
        return found


class Blocks:
    """The heads of Medusa: each a few residual blocks."""

    def __init__(self, weights: Mapping[str, Tensor], num_heads: int, num_blocks: int, target: Model) -> None:
        self.num_heads, self._ops = num_heads, target.ops
        self._blocks = [
            [linear_of(weights, f"{head}.{block}.linear.", target) for block in range(num_blocks)]
            for head in range(num_heads)
        ]

    def outputs(self, hidden: Tensor, num_heads: int) -> list[Tensor]:
        """See Heads."""
        rows = []
        for blocks in self._blocks[:num_heads]:
            x = hidden
            for matrix, bias in blocks:
                x = x + torch.nn.functional.silu(self._ops.linear(x, matrix, bias))
            rows.append(x)
        return rows


def linear_of(weights: Mapping[str, Tensor], name: str, target: Model) -> Linear:
    """The matrix `name`weight and its bias, as the target's operators want them."""
    matrix = weights[name + "weight"].to(target.device, target.weight_dtype)
    bias = weights[name + "bias"].to(target.device, target.weight_dtype)
    return (_packed(target, matrix, bias), None) if target.ops.packs else (matrix, bias)


def _packed(target: Model, matrix: Tensor, bias: Tensor | None = None) -> Any:
    return cast(Any, target.ops).pack(matrix, bias) if target.ops.packs else matrix


class MedusaDrafter(Drafter):
    """Keeps the last hidden state of each sequence, and makes a tree of what the heads guess from it."""

    draws = "point"

    def __init__(self, heads: Guesser, widths: Seq[int]) -> None:
        self._heads, self._widths = heads, widths[: heads.num_heads]
        self.shape = "chain" if max(self._widths) == 1 else "tree"
        self._hidden = dict[int, tuple[int, Tensor]]()  # by sequence: the tokens up to that of the row, and the row
        self._nodes: list[Node] = []

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, own in zip(seqs, seen, strict=True):
            if len(own.kept):
                self._hidden[seq.id] = own.start + len(own.kept), own.hidden[-1].clone()

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        ready = [b for b, seq in enumerate(seqs) if budget.num_tokens[b] > 0 and self._is_known(seq)]
        drafts = [Draft.empty(1) for _ in seqs]
        if ready:
            rows = torch.stack([self._hidden[seqs[b].id][1] for b in ready])
            found = self._heads.guesses(rows, len(self._widths), max(self._widths))
            for b, guesses in zip(ready, found, strict=True):
                drafts[b] = self._tree(b, guesses, budget)
        return Draft.joined(drafts)

    def end(self, seq: Sequence) -> None:
        self._hidden.pop(seq.id, None)

    def _is_known(self, seq: Sequence) -> bool:
        """Whether the row is that of the last token but one: the last was not run yet."""
        return self._hidden.get(seq.id, (-1, None))[0] == len(seq.tokens) - 1

    def _tree(self, b: int, guesses: list[list[int]], budget: Budget) -> Draft:
        """The best nodes of the fixed tree, best first, as far as pacing goes on."""
        tokens, parents, places = list[int](), list[int](), dict[int, int]()
        for i, node in enumerate(best_first(SHARES, budget.num_tokens[b], self._widths)):
            ids = guesses[node.depth]
            if (node.parent >= 0 and node.parent not in places) or node.rank >= len(ids):
                continue
            law = Probs.of_point(ids[node.rank])
            if not budget.go_on(b, node.depth, law):
                continue
            places[i] = len(tokens)
            tokens.append(ids[node.rank])
            parents.append(places[node.parent] if node.parent >= 0 else -1)
        return Draft(tokens, parents, [0, len(tokens)], [Probs.of_point(token) for token in tokens])


def _read_config(options: Options, tokenizer: str | None) -> dict[str, Any]:
    return head_files.config_of(options.path, "medusa", tokenizer)


def check(options: Options, tokenizer: Any, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a folder that has no heads, or those of another tokenizer, before any weight is read."""
    _read_config(options, artifacts.fingerprint(tokenizer, tokenizer.num_ids))


def build(options: Options, target: Target) -> Drafter:
    """Read the heads. Raises what head_files.py raises."""
    config = _read_config(options, artifacts.fingerprint(target.tokenizer, target.num_ids))
    assert options.path is not None
    num_heads, num_blocks = size(config, "medusa_num_heads"), size(config, "medusa_num_layers")
    width = target.model.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"d2t": (size(config, "draft_vocab_size"),)}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes |= {f"{head}.{block}.linear.weight": (width, width), f"{head}.{block}.linear.bias": (width,)}
    weights = head_files.read_weights(options.path, shapes, target.model, target.num_ids)
    ids = head_files.draft_ids(options.path, weights.pop("d2t"), target.num_ids)
    heads = Blocks(weights, num_heads, num_blocks, target.model)
    return MedusaDrafter(Guesser(heads, ids, target.model), widths(options.shape))
