"""Who runs in the next step: first come, first served, joining at step boundaries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forerun.drafters import Drafter
from forerun.engine.request import Request
from forerun.kv.cache import KVCache
from forerun.types import Sequence


@dataclass(frozen=True)
class Plan:
    """One step: prompt chunks (request, tokens) and the requests that decode."""

    prefill: list[tuple[Request, int]]
    decode: list[Request]


class Scheduler:
    """Admits waiting requests while there is room for all that they may ever need, and splits prompts into chunks.

    Room is reserved by counting, not by holding blocks: a request is admitted when the pool could hold every running
    request at its full length, so that no running request ever has to be preempted.
    """

    def __init__(self, cache: KVCache, drafter: Drafter, *, max_batch_size: int, prefill_chunk_tokens: int) -> None:
        self.cache, self.drafter = cache, drafter
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def plan(self) -> Plan:
        """Admit whom there is room for, then share the prompt budget of one step in order of arrival."""
        self._admit()
        budget, prefill, decode = self.prefill_chunk_tokens, [], []
        for request in self.running:
            remaining = len(request.seq.tokens) - 1 - self.cache.length(request.seq.id)
            if remaining == 0:
                decode.append(request)
            elif budget > 0:
                take = min(remaining, budget)
                budget -= take
                prefill.append((request, take))
        return Plan(prefill, decode)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it held; unknown requests are ignored."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request not in self.running:
            return
        self.running.remove(request)
        self.cache.release(request.seq.id)
        self.drafter.end(request.seq)

    def blocks_for(self, seq: Sequence) -> int:
        """Blocks that a sequence may come to need: a draft never reaches beyond its longest output."""
        return -(-seq.max_len // self.cache.block_tokens)

    def _admit(self) -> None:
        promised = sum(self.blocks_for(r.seq) for r in self.running)
        while self.waiting and len(self.running) < self.max_batch_size:
            promised += self.blocks_for(self.waiting[0].seq)
            if promised > self.cache.num_blocks:
                return
            request = self.waiting.popleft()
            self.cache.open(request.seq.id)
            self.drafter.begin(request.seq)
            self.running.append(request)
