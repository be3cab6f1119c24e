"""Draft models that guess for beam searches. The beams of a search are run as branches of one tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from forerun.drafters import Seen
from forerun.drafters.shared.feeding import FedModel, Space
from forerun.drafters.shared.model_options import USUAL, Draws
from forerun.models.branches import Branches, settle
from forerun.models.runner import Run, Runner
from forerun.sampling import History, likeliest
from forerun.sampling.arithmetic import Row as Logits
from forerun.types import Next, Sequence


@dataclass(slots=True)
class _Search:
    """The draft model's state for one beam search.

    branches: the cache rows of the search's nodes. logits: by node, the logits of the token after the node.
    """

    branches: Branches = field(default_factory=Branches)
    logits: dict[int, Logits] = field(default_factory=dict)


class BranchingModel(FedModel):
    """A drafter whose model also guesses for beam searches. It runs the beams as branches of one tree."""

    branches = True

    def __init__(self, runner: Runner, options: Draws = USUAL) -> None:
        super().__init__(runner, options)
        self._searches: dict[int, _Search] = {}

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._searches.pop(seq.id, None)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Free the cache rows of rejected tokens and of abandoned beams."""
        super().observe(seqs, seen)
        for seq in seqs if self._searches else ():
            if seq.id in self._searches:
                self._follow(seq)

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        """Run a level of nodes of each search in one pass, together with the ancestors that were not run yet."""
        self.caught_up, self.catchup_s = {}, 0.0
        searches = [self._searches.setdefault(seq.id, _Search()) for seq in seqs]
        read, catchup_tokens = self._read_sources(seqs, catchup_tokens)
        if behind := [seq for seq in read if self.num_held(seq) < len(seq.tokens) - 1]:
            self._catch_up(behind, catchup_tokens)
        room = Space(self.runner.cache)
        runs = list[Run]()
        fed = list[tuple[_Search, list[int]]]()
        for seq, search, level in zip(seqs, searches, levels, strict=True):
            nodes = self._nodes(seq, search.branches, level)
            if nodes and room.take(seq.id, len(nodes)) == len(nodes) and seq.hypotheses is not None:
                runs.append(search.branches.run(seq.id, seq.hypotheses, nodes, seq.tokens[-1])._replace(pending=True))
                fed.append((search, nodes))
        logits = self.runner.forward(runs).logits if runs else []
        for (search, nodes), rows in zip(fed, logits, strict=True):
            search.branches.add(nodes)
            search.logits |= zip(nodes, rows, strict=True)
        return [
            [self._next(seq, node, search.logits.get(node)) for node in level]
            for seq, search, level in zip(seqs, searches, levels, strict=True)
        ]

    def _nodes(self, seq: Sequence, branches: Branches, level: Seq[int]) -> list[int]:
        """Return the nodes to run for a level, parents before children; [] if one of the nodes cannot be run."""
        tree, config = seq.hypotheses, self.runner.model.config
        if tree is None or self.num_unread(seq) > 1:
            return []
        if not branches.rows:
            branches.forget(tree.base)
        paths = [[tree.base, *tree.path(node, tree.base)] for node in level]
        nodes = sorted({node for path in paths for node in path if node not in branches.rows})
        is_known = all(tree.tokens[node] < config.vocab_size for node in nodes if node >= 0)
        deepest = len(seq.tokens) - 1 + max(map(len, paths), default=0)
        return nodes if is_known and deepest <= config.max_positions else []

    def _next(self, seq: Sequence, node: int, row: Logits | None) -> Next | None:
        """Return a `Next` for the tokens after a node, with the target's penalties and masks; None if `row` is None."""
        if row is None or seq.hypotheses is None:
            return None
        history = History.of(seq, seq.hypotheses.text(node, seq.hypotheses.base))
        return partial(likeliest, row, self.params(seq), history)

    def _follow(self, seq: Sequence) -> None:
        """Keep the cache rows of tokens that the search has committed, and free the rows of abandoned beams."""
        search, tree = self._searches[seq.id], seq.hypotheses
        if tree is not None:
            held = self.num_held(seq)
            num_kept = settle(self.runner.cache, seq.id, search.branches, tree)
            self.commit(seq, seq.tokens[held : held + num_kept])
            search.logits = {node: row for node, row in search.logits.items() if node in search.branches.rows}
