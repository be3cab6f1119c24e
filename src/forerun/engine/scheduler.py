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
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter
from forerun.engine.crew import NONE
from forerun.engine.request import Request
from forerun.kv.cache import KVCache
from forerun.types import Sequence

MAX_SPEC_LENGTH = 64  # draft nodes of one sequence in one step


@dataclass(frozen=True)
class Plan:
    """One step: prompt chunks (request, tokens), the requests that decode, and the draft nodes that each may have."""

    prefill: list[tuple[Request, int]]
    decode: list[Request]
    draft_limits: Seq[int] = ()


@dataclass(slots=True)
class _Stand:
    """A running request and its cache. slack: tokens that it can take with the blocks that it has."""

    request: Request
    num_remaining: int  # tokens to run before it decodes
    slack: int
    next_blocks: int  # that one more token takes
    num_left: int  # tokens until its longest output


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
        if self.waiting:
            self._admit()
        stands = self._make_room()
        decode = [stand for stand in stands if stand.num_remaining == 0]
        budget = min(self.prefill_chunk_tokens, self.max_num_batched_tokens - len(decode))
        blocks = self._free_blocks() - sum([stand.next_blocks for stand in decode])
        prefill = []
        for stand in stands if len(decode) < len(stands) else ():
            take = min(stand.num_remaining, budget)
            if take > 0:
                take = min(take, self._fits(stand, blocks))
                blocks -= self.cache.missing_blocks(stand.request.seq.id, take)
            if take > 0:
                budget -= take
                prefill.append((stand.request, take))
        rows = self.max_num_batched_tokens - len(decode) - sum([take for _, take in prefill])
        return Plan(
            prefill, [stand.request for stand in decode], _Limits(decode, rows, blocks, self.cache.block_tokens)
        )

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

    def _make_room(self) -> list[_Stand]:
        """Who runs, all that decode with room for one more token: until that is so, the last in rank is preempted."""
        while True:
            stands = [self._stand(request) for request in self.running]
            decode, free = [stand for stand in stands if stand.num_remaining == 0], self._free_blocks()
            stuck = not decode and not any(self._fits(stand, free) for stand in stands)
            if len(stands) <= 1 or (sum([stand.next_blocks for stand in decode]) <= free and not stuck):
                return stands
            self._preempt(self.running[-1])

    def _stand(self, request: Request) -> _Stand:
        seq = request.seq
        length, slack, next_blocks = self.cache.room(seq.id)
        num_tokens = len(seq.tokens)
        return _Stand(request, num_tokens - 1 - length, slack, next_blocks, seq.max_len - num_tokens)

    def _remaining(self, request: Request) -> int:
        """Tokens to run before a request decodes."""
        return len(request.seq.tokens) - 1 - self.cache.length(request.seq.id)

    def _free_blocks(self) -> int:
        return self.free_kv_tokens // self.cache.block_tokens

    def _num_growing(self) -> int:
        """One block for each running request that may need one more: who would soon be preempted is not let in."""
        rooms = ((self.cache.room(r.seq.id), r.seq.max_len) for r in self.running)
        return sum(room.length + room.slack < max_len for room, max_len in rooms)

    def _blocks_promised(self, request: Request) -> int:
        """Blocks that a running request's prompt, or tokens to recompute, will still take."""
        return self.cache.missing_blocks(request.seq.id, max(0, self._remaining(request)) + 1)

    def _fits(self, stand: _Stand, num_blocks: int) -> int:
        """Tokens that a sequence can take with that many more blocks."""
        return stand.slack + max(0, num_blocks) * self.cache.block_tokens


class _Limits(Seq[int]):
    """Nodes that each may have, so that all could have them together: rows and blocks are shared out evenly.

    None for a request that wants no drafter. Computed when somebody asks: in most plain steps, nobody does.
    """

    def __init__(self, decode: Seq[_Stand], num_rows: int, num_blocks: int, block_tokens: int) -> None:
        self._decode, self._num_rows, self._num_blocks = decode, num_rows, num_blocks
        self._block_tokens = block_tokens
        self._limits: list[int] | None = None

    def __len__(self) -> int:
        return len(self._decode)

    def __getitem__(self, b):  # type: ignore[no-untyped-def]
        return self._all()[b]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def _all(self) -> list[int]:
        if self._limits is None:
            num = max(1, len(self._decode))
            rows = max(0, min(MAX_SPEC_LENGTH, self._num_rows // num))
            share = max(0, self._num_blocks) // num
            self._limits = [self._limit(stand, rows, share) for stand in self._decode]
        return self._limits

    def _limit(self, stand: _Stand, rows: int, share: int) -> int:
        if stand.request.seq.draft == NONE:
            return 0
        own = stand.slack - 1 + (stand.next_blocks + share) * self._block_tokens
        return max(0, min(own, stand.num_left - 1, rows))


def _rank(request: Request) -> tuple[int, int]:
    """Lower comes first: priority, then arrival."""
    return request.seq.params.priority, request.seq.id
