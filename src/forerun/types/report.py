"""The records of one step, for listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forerun.types.draft import FORCED
from forerun.types.verdict import AcceptanceTest


class Toss(NamedTuple):
    """One coin of a round: the probability to accept, and the uniform number that had to be below this probability.

    depth and lane: as in `Coins.accept`. coin: the uniform number. None if no coin was tossed, because the probability
    was 0 or 1. Also None if the round's decisions do not come from random numbers.
    """

    depth: int
    lane: int
    prob: float
    coin: float | None
    is_accepted: bool


@dataclass
class RoundDetail:
    """One round of one sequence, for listeners that ask for detail. All probabilities belong to drafted tokens."""

    sequence_id: int
    position: int  # absolute index of the first token of this round
    tokens: list[int]  # drafted
    parents: list[int]  # within this round; -1 = the last committed token
    draft_probs: list[float]
    target_probs: list[float | None]  # None after a rejection, where the rule did not ask for the row
    tests: list[AcceptanceTest]  # nodes counted within this round
    accepted: list[int]  # node indices within this round
    next_token: int
    granted: int  # the pacing policy's budget
    tosses: Seq[Toss] = ()  # by the rule, in order; a rule that compares draws tosses none
    pacing: Mapping[str, float] = field(default_factory=dict)  # the policy's facts about the round


class SequenceStep(NamedTuple):
    """The result of one step for one decoding sequence.

    Where a stop condition cuts the output, only num_committed is reduced.
    """

    sequence_id: int
    draft: str  # name of the drafter that serves the sequence, or FORCED where all nodes are forced
    num_drafted: int
    num_tested: int
    accepted_ranks: tuple[int, ...]  # indices of the accepted nodes within the sequence's draft
    num_committed: int = 0  # after stop conditions have cut the output
    forced: frozenset[int] = frozenset()  # ranks of nodes that a grammar dictates

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_ranks)

    @property
    def parts(self) -> list[SequenceStep]:
        """The step split in two: a step with the nodes that a grammar forced, and a step with the drafter's nodes.

        A step without nodes is left out. Where no node was forced, the list holds this step alone.
        """
        if not self.forced:
            return [self]
        ranks = tuple([rank for rank in self.accepted_ranks if rank in self.forced])
        forced = SequenceStep(self.sequence_id, FORCED, len(self.forced), len(ranks), ranks, self.num_committed)
        return [forced] if self.draft == FORCED else [forced, self.without_forced]

    @property
    def without_forced(self) -> SequenceStep:
        """The step without forced nodes. Such nodes are never rejected, so nothing can be learned from them."""
        if not self.forced:
            return self
        new_ranks = {rank: i for i, rank in enumerate(r for r in range(self.num_drafted) if r not in self.forced)}
        ranks = tuple([new_ranks[rank] for rank in self.accepted_ranks if rank in new_ranks])
        num_forced = len(self.accepted_ranks) - len(ranks)
        return self._replace(
            num_drafted=len(new_ranks),
            num_tested=self.num_tested - num_forced,
            accepted_ranks=ranks,
            num_committed=max(0, self.num_committed - num_forced),
            forced=frozenset(),
        )


@dataclass
class DraftStep:
    """The work of one drafter in one step.

    depth: the length of the longest path of a draft. passes: the number of consecutive passes of a draft model.
    num_catchup_tokens: the number of committed tokens that the model ran before drafting, without the tokens that the
    previous round left. catchup_s: the part of `seconds` that these tokens took. num_found: the number of nodes that a
    search of the text found, without the model. search_s: the part of `seconds` that this search took. num_searched:
    the number of sequences whose text was searched.
    """

    seconds: float = 0.0
    num_sequences: int = 0  # sequences that got at least one node
    num_nodes: int = 0
    depth: int = 0
    passes: int = 0
    num_catchup_tokens: int = 0
    catchup_s: float = 0.0
    num_found: int = 0
    search_s: float = 0.0
    num_searched: int = 0


@dataclass
class StepReport:
    """The counts and times of one step. Metrics, printers, benchmarks and pacing read this and nothing else."""

    num_prefill_tokens: int = 0
    num_prefill_keys: int = 0  # attention keys that the rows of prompt tokens saw, their own included
    num_decoding: int = 0  # sequences that emitted tokens
    num_rows: int = 0  # of the target pass: rows of prompt chunks, one per decoding sequence, and draft nodes
    num_experts: float = 0.0  # chosen by some row of the pass, on average over the layers with experts; 0 = no experts
    num_context_tokens: int = 0  # of the decoding sequences, in the target's cache before the pass
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_emitted: int = 0  # before stop conditions cut the outputs
    num_committed: int = 0  # after stop conditions have cut them
    schedule_s: float = 0.0  # spent in the engine since the last report: listeners, finishing requests, the scheduler
    draft_s: float = 0.0
    score_s: float = 0.0
    judge_s: float = 0.0
    commit_s: float = 0.0
    target_forward_s: float = 0.0  # the part of score_s inside the model
    sequences: list[SequenceStep] = field(default_factory=list)  # one for each sequence that decoded
    drafts: dict[str, DraftStep] = field(default_factory=dict)  # by name, of the drafters that were asked
    rounds: list[RoundDetail] = field(default_factory=list)  # only when a listener wants detail

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return self.schedule_s + self.draft_s + self.score_s + self.judge_s + self.commit_s


Listener = Callable[[StepReport], Any]
