"""Who runs in the next step, and with how many tokens.

Requests are ranked by priority, then by arrival. One pass of the target has `max_num_batched_tokens` rows: one for each
decoding request, then prompt chunks (at most `prefill_chunk_tokens` of them), and what is left, drafts. A request is
admitted when the caches have room for its prompt, not for its longest output: where the running ones have grown until
not everybody has room for one more token, the lowest in rank is preempted. It loses its cache, keeps its tokens, and
later runs them again (recomputation); prefix caching makes that cheap where its blocks are still there. Drafts are
granted only what is left after that, so that no draft ever preempts anybody.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.drafters import Drafter
from forerun.engine.request import Request
from forerun.kv.cache import KVCache
from forerun.types import Sequence

MAX_SPEC_LENGTH = 64  # draft nodes of one sequence in one step


@dataclass(frozen=True)
class Plan:
    """One step: prompt chunks (request, tokens), the requests that decode, and the draft nodes that each may have."""

    prefill: list[tuple[Request, int]]
    decode: list[Request]
    draft_limits: list[int] = field(default_factory=list)


class Scheduler:
    """Admits, preempts, and splits prompts into chunks.

    free_kv_tokens is the least of what the caches of target and drafters have free. Slots of both are opened and
    released together.
    """

    def __init__(
        self,
        cache: KVCache,
        drafter: Drafter,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.cache, self.drafter = cache, drafter
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        bisect.insort(self.waiting, request, key=_rank)

    def plan(self) -> Plan:
        """Admit and preempt, then share the rows of one pass."""
        self._admit()
        decode = self._make_room()
        budget = min(self.prefill_chunk_tokens, self.max_num_batched_tokens - len(decode))
        blocks = self._free_blocks() - sum(self._blocks_for_next(request.seq) for request in decode)
        prefill = []
        for request in self.running:
            take = min(self._remaining(request), budget)
            if take > 0:
                take = min(take, self._fits(request.seq, blocks))
                blocks -= self.cache.missing_blocks(request.seq.id, take)
            if take > 0:
                budget -= take
                prefill.append((request, take))
        rows = self.max_num_batched_tokens - len(decode) - sum(take for _, take in prefill)
        return Plan(prefill, decode, self._draft_limits(decode, rows, blocks))

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it held; unknown requests are ignored."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._stop(request)

    def blocks_for(self, seq: Sequence) -> int:
        """Blocks that a sequence may come to need: a draft never reaches beyond its longest output."""
        return -(-seq.max_len // self.cache.block_tokens)

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that fit into all caches."""
        own, drafters = self.cache.free_tokens(), self.drafter.free_tokens()
        return own if drafters is None else min(own, drafters)

    # ------------------------------------------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Let the first in rank in, until one does not fit; one of a better priority takes the place of a worse one."""
        promised = sum(self._blocks_promised(request) for request in self.running)
        while self.waiting:
            request = next((r for r in self.waiting if not r.waits), None)
            if request is None:
                return
            needed = -(-len(request.seq.tokens) // self.cache.block_tokens)
            while self.running and (
                len(self.running) >= self.max_batch_size
                or promised + needed + self._num_growing() > self._free_blocks()
            ):
                last = self.running[-1]
                if last.seq.params.priority <= request.seq.params.priority:
                    return
                promised -= self._blocks_promised(last)
                self._preempt(last)
            self.waiting.remove(request)
            self._start(request)
            promised += self._blocks_promised(request)

    def _start(self, request: Request) -> None:
        seq = request.seq
        found = self.cache.open(seq.id, seq.tokens, seq.params.cache_salt)
        if not request.report.num_preemptions:
            request.report.num_cached_tokens = found
        self.drafter.begin(seq)
        bisect.insort(self.running, request, key=_rank)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.seq.id)
        self.drafter.end(request.seq)

    def _preempt(self, request: Request) -> None:
        self._stop(request)
        self.add(request)
        request.report.num_preemptions += 1
        self.num_preemptions += 1

    # --------------------------------------------------------------------------------------------------- room in caches

    def _make_room(self) -> list[Request]:
        """Who decodes, all with room for one more token: until that is so, the last in rank is preempted."""
        while True:
            decode = [request for request in self.running if self._remaining(request) == 0]
            needed = sum(self._blocks_for_next(request.seq) for request in decode)
            stuck = not decode and not any(self._fits(r.seq, self._free_blocks()) for r in self.running)
            if len(self.running) <= 1 or (needed <= self._free_blocks() and not stuck):
                return decode
            self._preempt(self.running[-1])

    def _remaining(self, request: Request) -> int:
        """Tokens to run before a request decodes."""
        return len(request.seq.tokens) - 1 - self.cache.length(request.seq.id)

    def _free_blocks(self) -> int:
        return self.free_kv_tokens // self.cache.block_tokens

    def _num_growing(self) -> int:
        """One block for each running request that may need one more: who would soon be preempted is not let in."""
        tables = ((self.cache.num_reserved_tokens(r.seq.id), r.seq.max_len) for r in self.running)
        return sum(reserved < max_len for reserved, max_len in tables)

    def _blocks_promised(self, request: Request) -> int:
        """Blocks that a running request's prompt, or tokens to recompute, will still take."""
        return self.cache.missing_blocks(request.seq.id, max(0, self._remaining(request)) + 1)

    def _blocks_for_next(self, seq: Sequence) -> int:
        return self.cache.missing_blocks(seq.id, 1)

    def _fits(self, seq: Sequence, num_blocks: int) -> int:
        """Tokens that a sequence can take with that many more blocks."""
        return self._slack(seq) + max(0, num_blocks) * self.cache.block_tokens

    def _slack(self, seq: Sequence) -> int:
        """Tokens that a sequence can take with the blocks it has."""
        return self.cache.num_reserved_tokens(seq.id) - self.cache.length(seq.id)

    def _draft_limits(self, decode: Seq[Request], num_rows: int, num_blocks: int) -> list[int]:
        """Nodes that each may have, so that all could have them together: rows and blocks are shared out evenly."""
        if not decode:
            return []
        rows = max(0, num_rows) // len(decode)
        block, share = self.cache.block_tokens, max(0, num_blocks) // len(decode)
        limits = []
        for request in decode:
            seq = request.seq
            own = self._slack(seq) + (self._blocks_for_next(seq) + share) * block - 1
            limits.append(max(0, min(MAX_SPEC_LENGTH, rows, own, seq.max_len - len(seq.tokens) - 1)))
        return limits


def _rank(request: Request) -> tuple[int, int]:
    """Lower comes first: priority, then arrival."""
    return request.seq.params.priority, request.seq.id
