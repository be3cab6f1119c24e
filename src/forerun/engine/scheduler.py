"""Decides which requests run in the next step, and with how many tokens.

Requests are ranked by priority, then by arrival. One pass of the target has `max_num_batched_tokens` rows: one for each
decoding request, then prompt chunks (at most `prefill_chunk_tokens` rows), then drafts. Among prompts of the same
priority, the prompt with the fewest unread tokens goes first, so that no request waits for a long prompt. To let a long
prompt advance as well, the first prompt in rank is owed one token for every three tokens of other prompts.

A request is admitted when the caches have room for its prompt; room for its longest output is not required. When the
running requests have grown so much that not all of them have room for one more token, the last request in rank is
preempted. A waiting request may also preempt requests of a worse priority, if it then fits. A preempted request loses
its cache rows, keeps its tokens, and later runs these tokens again. This is cheap if the prefix cache still has the
blocks. Drafts get only the remaining rows and blocks, so a draft never preempts a request.

Cache rows that are being read from disk for a waiting request take blocks, too. Such a request is ranked together with
the running requests, and the last request in rank gives up its blocks first. A request without room runs later. No
request is ended to make room for another.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from forerun.drafters import Drafter
from forerun.engine.fair import Allowance, Fair
from forerun.engine.request import Request
from forerun.engine.router import NONE
from forerun.kv import KVCache, Room, fetch_slot
from forerun.kv.cache import BlockCache
from forerun.kv.keeping import Fetch
from forerun.models.sources import Sources
from forerun.types import Sequence

MAX_SPEC_LENGTH = 64  # draft nodes of one sequence in one step
MOST_SCORED_TOKENS = 32  # of a prompt in one step, where log-probabilities are wanted: a row of logits is large
OVERTAKING_TOKENS = 3  # for so many tokens of other prompts, the first in rank is owed one token


@dataclass(frozen=True)
class Plan:
    """Holds the requests and tokens of one step.

    prefill: the prompt chunks, each a request and a number of tokens. decode: the requests that decode. draft_limits:
    the largest number of draft nodes of each decoding request. sources: the requests whose input the encoder runs
    before the pass. A request that waits for the encoder in a later step is in no list.
    """

    prefill: list[tuple[Request, int]]
    decode: list[Request]
    draft_limits: Seq[int] = ()
    sources: Seq[Request] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to run.

        Then each request waits for rows from disk, or has run its prompt and asks for no output tokens.
        """
        return not (self.prefill or self.decode or self.sources)


_Stand = tuple[Request, Room]  # a running request, and what its cache holds


class _Fetching(NamedTuple):
    """Holds a waiting request, and the fetch that reads its rows from disk into a cache."""

    request: Request
    cache: BlockCache
    fetch: Fetch


class Scheduler:
    """Admits and preempts the requests of an engine, and splits prompts into chunks.

    A request's slots in the caches of target and drafters are opened and released together. sources: the inputs of the
    encoder in an encoder-decoder; None for other models. The encoder runs the source of a request before the decoder
    runs the request's tokens. A step runs at least one waiting source, and more sources while their tokens fit into the
    budget of prompt tokens. fair: limits the number of prompt tokens in a step; if requests decode, the limit may be 0.
    message_end_ids: the token ids that end the messages of a chat.
    """

    def __init__(
        self,
        cache: KVCache,
        drafter: Drafter,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        max_num_batched_tokens: int,
        sources: Sources | None = None,
        fair: Fair | None = None,
        message_end_ids: Collection[int] = (),
    ) -> None:
        self.fair = fair or Fair()
        self.message_end_ids = message_end_ids
        self.cache, self.drafter, self.sources = cache, drafter, sources
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.num_preemptions = 0
        self._fetching: list[_Fetching] = []
        self._owed: tuple[int, float] = -1, 0.0  # the id of a sequence, and the prompt tokens that it is owed
        self._is_full = False  # a pass found less room than was counted: the next plan lets nobody in

    def add(self, request: Request) -> None:
        """Add a request to the waiting requests, by rank."""
        bisect.insort(self.waiting, request, key=_rank)

    def plan(self) -> Plan:
        """Plan a step: admit and preempt requests, then divide the rows of one pass among the running requests."""
        if self._fetching:
            self._collect()
        if self.waiting and not self._is_full:
            self._admit()
        self._is_full = False
        stands, decode, blocks = self._make_room()
        num_rows = sum([request.num_rows for request, _ in decode])
        budget = min(self.prefill_chunk_tokens, self.max_num_batched_tokens - num_rows)
        is_reading = len(decode) < len(stands)
        self.fair.plan(len(decode), is_reading=is_reading)
        allowance, begun = Allowance(budget), list[Request]()
        if self.sources is not None:  # an encoder reads a whole source at once
            begun, held_up, budget = self._begin(stands, budget)
            # The prompts of requests that wait cannot run yet either: the decoder attends to the encoder's rows.
            stands, decode = ([stand for stand in some if stand[0] not in held_up] for some in (stands, decode))
            allowance = Allowance(budget)
        elif is_reading:
            allowance = self.fair.allowance(budget)
        blocks -= sum([self._next_blocks(*stand) for stand in decode])
        prefill = list[tuple[Request, int]]()
        if prompts := [(request, room) for request, room in stands if len(request.seq.tokens) > room.length + 1]:
            prefill, blocks = self._share(prompts, allowance, blocks, is_quiet=not decode)
        rows = self.max_num_batched_tokens - num_rows - sum([take for _, take in prefill])
        return Plan(prefill, [request for request, _ in decode], self._draft_limits(decode, rows, blocks), begun)

    def _share(
        self, prompts: Seq[_Stand], allowance: Allowance, blocks: int, *, is_quiet: bool
    ) -> tuple[list[tuple[Request, int]], int]:
        """Divide the prompt tokens of a step among prompts. Returns the chunks, and the number of remaining blocks.

        prompts: in order of rank. blocks: the number of free blocks. is_quiet: whether no request decodes. If so, and
        if the step finishes a prompt, the step runs no prompts that it cannot finish, because they would delay the
        first token of the finished prompt. Tokens that are owed to the first prompt in rank are an exception.
        """
        takes = {request: 0 for request, _ in prompts}
        has_ended = False
        offers = self._offers(prompts)
        for request, room, most in offers:
            had = takes[request]
            left = len(request.seq.tokens) - 1 - room.length
            available = blocks + self.cache.missing_blocks(request.seq.id, had)
            take = min(most, had + allowance.fitting(room.length + had), self._fits(room, available))
            if take <= had or (is_quiet and has_ended and take < left):
                continue
            allowance.take(take - had, room.length + had)
            takes[request], blocks = take, available - self.cache.missing_blocks(request.seq.id, take)
            has_ended |= take == left
        self._note_owed(offers, takes)
        return [(request, take) for request, take in takes.items() if take], blocks

    def _offers(self, prompts: Seq[_Stand]) -> list[tuple[Request, Room, int]]:
        """Return the prompts in the order of prefill, each with the largest number of tokens that it may run.

        One more entry comes first: the first prompt in rank, with the number of tokens that it is owed.
        """
        offers = []
        for request, room in prompts:
            left = len(request.seq.tokens) - 1 - room.length
            offers.append((request, room, min(left, MOST_SCORED_TOKENS) if request.scores_prompt else left))
        first, room, most = offers[0]
        owed = int(self._owed[1]) if self._owed[0] == first.seq.id else 0
        offers.sort(key=lambda offer: (offer[0].seq.params.priority, len(offer[0].seq.tokens) - offer[1].length))
        return [(first, room, min(owed, most)), *offers]

    def _note_owed(self, offers: Seq[tuple[Request, Room, int]], takes: Mapping[Request, int]) -> None:
        """Record how many tokens the first prompt in rank is owed.

        The number grows by one token for every three tokens that other prompts run in this step, and falls by the
        tokens that the first prompt runs. It is 0 if the first prompt runs as many tokens as it may. offers: the result
        of `_offers`. takes: the number of prompt tokens that each request runs in this step.
        """
        first = offers[0][0]
        most = next(most for request, _, most in offers[1:] if request is first)
        before = self._owed[1] if self._owed[0] == first.seq.id else 0.0
        overtaking = sum([take for request, take in takes.items() if request is not first])
        owed = before + overtaking / OVERTAKING_TOKENS - takes[first] if takes[first] < most else 0.0
        self._owed = first.seq.id, max(0.0, owed)

    def _begin(self, stands: Seq[_Stand], budget: int) -> tuple[list[Request], set[Request], int]:
        """Choose the requests whose encoder input runs in this step.

        Returns these requests, the requests whose encoder input runs later, and the remaining budget of tokens. stands:
        the running requests, each with the Room of its slot. budget: how many tokens the encoder may run.
        """
        assert self.sources is not None
        begun, held_up = list[Request](), set[Request]()
        for request, _ in stands:
            num = self.sources.num_unrun(request.seq.id)
            if num and (num <= budget or not begun) and not held_up:
                begun.append(request)
                budget -= num
            elif num:
                held_up.add(request)
        return begun, held_up, max(0, budget)

    def finish(self, request: Request) -> None:
        """Remove a waiting or running request, and free its cache rows. Unknown requests are ignored."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._give_up(request)
        if request in self.running:
            self._stop(request)
        if self._owed[0] == request.seq.id:
            self._owed = -1, 0.0

    def blocks_for(self, seq: Sequence) -> int:
        """Return the largest number of blocks that a sequence may need in the target's cache.

        Drafts need no further blocks, because no draft reaches beyond the sequence's longest output.
        """
        return -(-self.most_tokens(seq) // self.cache.block_tokens) + self._source_blocks(seq)

    def _source_blocks(self, seq: Sequence) -> int:
        """Return how many blocks the encoder input of a sequence takes if no equal input is in the cache."""
        return 0 if self.sources is None else self.sources.num_blocks(len(seq.source_ids))

    def most_tokens(self, seq: Sequence) -> int:
        """Return the largest number of tokens that a sequence may hold.

        In a beam search, the tokens after the prompt count once for each beam, because beams may share only the prompt.
        """
        num_more = 0 if seq.hypotheses is None else seq.params.num_beams - 1
        return seq.max_len + num_more * (seq.max_len - seq.num_prompt_tokens)

    @property
    def free_kv_tokens(self) -> int:
        """The number of tokens for which each cache still has room: the target's cache and the drafters' caches."""
        return self._free_blocks() * self.cache.block_tokens

    # ------------------------------------------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Admit waiting requests in order of rank, until a request does not fit.

        A waiting request may preempt running requests of a worse priority.
        """
        claims: dict[int, int] = {}  # by sequence id
        while request := next((waiting for waiting in self.waiting if not waiting.waits), None):
            victims = self._victims(request, claims)
            if victims is None:
                return
            if not request.is_sought and self._fetch(request):
                continue
            for victim in victims:
                self._preempt(victim)
                claims.pop(victim.seq.id, None)
            self.waiting.remove(request)
            self._start(request)

    def _victims(self, request: Request, claims: dict[int, int]) -> Seq[Request] | None:
        """Return the running requests to preempt so that the waiting request `request` fits.

        Only requests of a worse priority are preempted: as few as possible, the last in rank first. Returns None if
        `request` would not fit even if all requests of a worse priority were preempted. A request that runs alone
        always fits. Blocks into which rows are being read from disk for another request count as taken if the other
        request ranks before `request`. Otherwise these blocks count as free, because the other request would give them
        up. claims: the results of `_claim` so far, by sequence id; missing results are added when the batch has a
        place.
        """
        needed = -(-(len(request.seq.tokens) - 1 + request.num_unrun) // self.cache.block_tokens)
        needed += self._source_blocks(request.seq)
        num_worse = sum([other.seq.params.priority > request.seq.params.priority for other in self.running])
        fetching = {one.request for one in self._fetching}
        behind = [fetch_slot(other.seq.id) for other in fetching if _rank(other) > _rank(request)]

        def fits(num_victims: int) -> bool:
            num_kept = len(self.running) - num_victims
            places = sum([other.num_places for other in self.running[:num_kept]]) + request.num_places
            if num_kept == 0 and len(behind) == len(fetching):
                return True
            if num_kept and places > self.max_batch_size:
                return False
            for other in self.running[:num_kept]:
                if other.seq.id not in claims:
                    claims[other.seq.id] = self._claim(other)
            claimed = sum([claims[other.seq.id] for other in self.running[:num_kept]])
            return claimed + needed <= self._free_blocks([*behind, *(r.seq.id for r in self.running[num_kept:])])

        if not fits(num_worse):
            return None
        return self.running[len(self.running) - next(filter(fits, range(num_worse + 1))) :]

    def _fetch(self, request: Request) -> bool:
        """Start to read the rows of a request that are on disk but in no cache. Returns whether any rows are read."""
        request.is_sought = True
        if request.scores_prompt:
            return False
        seq = request.seq
        for cache in (self.cache, *self.drafter.caches(seq)):
            if not isinstance(cache, BlockCache):
                continue
            if (fetch := cache.fetch(fetch_slot(seq.id), seq.tokens, seq.salt)) is not None:
                self._fetching.append(_Fetching(request, cache, fetch))
                request.num_fetching += 1
        return request.num_fetching > 0

    def await_rows(self) -> None:
        """Wait for the oldest fetch from disk, if there is one. The engine calls this when a plan is empty."""
        if self._fetching:
            self._fetching[0].fetch.wait()

    def _collect(self) -> None:
        """End the complete fetches, so that the cache has their rows when the requests are admitted."""
        for one in [one for one in self._fetching if one.fetch.is_over]:
            self._end(one)

    def _give_up(self, request: Request) -> None:
        """Stop fetching rows for a request. The request will use the rows that arrived, and run its other tokens."""
        for one in [one for one in self._fetching if one.request is request]:
            one.fetch.give_up()
            self._end(one)

    def _end(self, one: _Fetching) -> None:
        self._fetching.remove(one)
        one.request.num_fetching -= 1
        num_tokens = one.cache.arrived(one.fetch)
        if one.cache is self.cache:
            one.request.num_fetched = num_tokens

    def _start(self, request: Request) -> None:
        seq = request.seq
        bisect.insort(self.running, request, key=_rank)  # first, so that the request is ended if anything below fails
        num_cached = self.cache.open(seq.id, seq.tokens, seq.salt)
        if self.sources is not None:
            self.sources.open(seq.id, seq.source_ids, seq.params.cache_salt)
        least = 0 if request.scores_prompt else self.drafter.resumes_from(seq, num_cached)
        if least < num_cached:
            num_cached = self.cache.truncate_to(seq.id, least)
        if isinstance(self.cache, BlockCache):
            self.cache.mark(seq.id, self._message_ends(seq))
        if not request.report.num_preemptions:
            request.report.num_cached_tokens, request.report.scheduled_at_s = num_cached, time.monotonic()
            request.report.num_disk_tokens = min(num_cached, request.num_fetched)
        self.drafter.begin(seq)

    def _message_ends(self, seq: Sequence) -> list[int]:
        """Return the positions at which later sequences will probably begin to differ from `seq`.

        The positions are the end of each message, and the end of the sequence without its last token.
        """
        ends = [i for i, token in enumerate(seq.tokens, 1) if token in self.message_end_ids]
        return [*ends, len(seq.tokens) - 1]

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.seq.id)
        if self.sources is not None:
            self.sources.release(request.seq.id)
        request.restart()
        self.drafter.end(request.seq)
        self.fair.left(len(self.running))

    def give_way(self) -> bool:
        """Free the blocks of the last request in rank that runs or waits for rows from disk.

        A running request is preempted. For a waiting request, no more rows are read from disk. Returns False where a
        single running request holds all blocks.
        """
        last = max((*self.running, *(one.request for one in self._fetching)), key=_rank)
        if last not in self.running:
            self._give_up(last)
        elif len(self.running) + len(self._fetching) > 1:
            self._preempt(last)
        else:
            return False
        return True

    def recover(self) -> bool:
        """Make room after a pass found fewer free blocks than were counted. Returns False where no room can be made.

        The next plan admits no request, because the request that gave way could otherwise come back at once.
        """
        self._is_full = True
        return self.give_way()

    def _preempt(self, request: Request) -> None:
        self._stop(request)
        request.is_sought = False
        self.add(request)
        request.report.num_preemptions += 1
        self.num_preemptions += 1

    # --------------------------------------------------------------------------------------------------- room in caches

    def _make_room(self) -> tuple[list[_Stand], list[_Stand], int]:
        """Make room in the cache for the next rows of every decoding request: one row, or one row for each beam.

        While there is no room, the last request in rank gives way (`give_way`). Returns the running requests, the
        decoding requests, and the number of blocks that are free before the next rows are written.
        """
        while True:
            stands = [(request, self.cache.room(request.seq.id)) for request in self.running]
            read = [stand for stand in stands if len(stand[0].seq.tokens) == stand[1].length + 1]
            decode = [stand for stand in read if not stand[0].seq.is_only_read]
            free = self._free_blocks() - sum([self._unrun_blocks(request.seq) for request in self.running])
            # No prompt is read to its end, and none has room for a token: unless one gives way, nothing will ever run.
            stuck = not read and not any(self._fits(room, free) for _, room in stands)
            needed = sum([self._next_blocks(*stand) for stand in decode])
            if not stands or (needed <= free and not stuck) or not self.give_way():
                return stands, decode, free

    def _claim(self, request: Request) -> int:
        """Return how many more blocks a running request needs for the tokens that have no cache rows yet.

        One block is added if the request may grow further. Without this block, another request would be admitted only
        to be preempted soon.
        """
        seq, room = request.seq, self.cache.room(request.seq.id)
        num_remaining = len(seq.tokens) - 1 - room.length
        blocks = self.cache.missing_blocks(seq.id, max(0, num_remaining) + request.num_unrun)
        grows = room.length + room.slack < seq.max_len and not seq.is_only_read
        return blocks + grows + self._unrun_blocks(seq)

    def _unrun_blocks(self, seq: Sequence) -> int:
        """Return how many more blocks the encoder input of a running request will take."""
        return 0 if self.sources is None else self.sources.missing_blocks(seq.id)

    def _free_blocks(self, without: Collection[int] = ()) -> int:
        """Return the number of free blocks in the fullest cache: the smallest number over all caches.

        without: ids of sequences whose blocks count as free, as if they were preempted.
        """
        slots = without if self.sources is None else self.sources.slots(without)
        target, drafters = self.cache.free_tokens(slots), self.drafter.free_tokens(without)
        return (target if drafters is None else min(target, drafters)) // self.cache.block_tokens

    def _draft_limits(self, decode: Seq[_Stand], num_rows: int, num_blocks: int) -> list[int]:
        """Return how many draft nodes each decoding request may have. A request without a drafter gets 0.

        Each request gets an equal share of the remaining `num_rows` rows and `num_blocks` blocks, so that all drafts
        fit.
        """
        num = max(1, len(decode))
        most = max(0, min(MAX_SPEC_LENGTH, num_rows // num))
        share = max(0, num_blocks) // num
        limits = []
        for request, room in decode:
            seq = request.seq
            blocks = self._next_blocks(request, room) + share
            fitting = room.slack - request.num_rows + blocks * self.cache.block_tokens
            # A pass emits one token more than it accepts, and max_len must have room for all of them.
            left = seq.max_len - len(seq.tokens) - 1 if seq.hypotheses is None else most
            limits.append(0 if seq.draft == NONE else max(0, min(fitting, left, most)))
        return limits

    def _next_blocks(self, request: Request, room: Room) -> int:
        """Return how many more blocks a decoding request needs for its next pass if nothing is drafted."""
        return (
            room.next_blocks if request.num_rows == 1 else self.cache.missing_blocks(request.seq.id, request.num_rows)
        )

    def _fits(self, room: Room, num_blocks: int) -> int:
        """Return by how many tokens a sequence can grow with `num_blocks` more blocks. room: the sequence's slot."""
        return room.slack + max(0, num_blocks) * self.cache.block_tokens


def _rank(request: Request) -> tuple[int, int]:
    """Return the sort key of a request: priority, then arrival. A lower key comes first."""
    return request.seq.params.priority, request.seq.id
