"""Assigns indices to the states of recurrent layers, and to the rows of inputs that come after a state.

A recurrent layer cannot be cut back, because the effect of a token on a state cannot be undone. So a state is only
written when its tokens are known to stay. The inputs of later tokens are kept raw, one row for each token. A sequence
*stands on* a state: each of its passes begins with this state, runs the kept inputs again in order, and then runs its
own rows. A rejection only drops rows. States are written at whole blocks of STATE_TOKENS tokens. Once one more block of
tokens is committed, the next pass writes the state at the end of the block while it runs the block's inputs again. So a
pass reads one state, and each block's state is written once, however many tokens were drafted.

    [0, start)                          in the state
    [start, length)                     rows of kept tokens: an incomplete block, and the tokens of the last pass
    [length, length + p), then the run  as in kv/tables.py

A run in which no token can be rejected, such as a prompt's run, writes the state at the end of its last whole block in
the same pass. Only the inputs after that state get rows. A state is always written to an unused index. The sequence
moves to the new state when the rows of that pass are kept. So a pass has changed nothing if it fails or if none of its
rows are kept.

States that other sequences may begin with are *published* under the key of their tokens' last block (kv/prefix.py).
These are the states at marked positions, such as the ends of messages, and the last state of a sequence that ends. When
an index is needed, a published state that no sequence stands on is evicted, the longest unused one first.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forerun.blocks import STATE_TOKENS
from forerun.errors import CapacityError, InternalError
from forerun.kv import SCRATCH_SLOT, Held
from forerun.kv.prefix import Key
from forerun.types import RaggedBatch
from forerun.types.batch import bits

if TYPE_CHECKING:
    from forerun.kv.keeping import Keeper

NOWHERE = -1  # in place of a state: no tokens yet, so zeros; in place of a row: the input is not kept
MOST_JUDGED = 128  # rows of a run in which tokens may be rejected; a longer run is kept as a whole
MOST_CUT = 80  # the most kept tokens that may be taken back: a draft model's guesses
ROWS_EACH = STATE_TOKENS + MOST_CUT + 2 * 65  # rows of one sequence: not in a state yet, kept by one pass, and a run


class StateRun(NamedTuple):
    """The states and rows that recurrent layers read and write for one run.

    first: the state that the run begins with; NOWHERE = zeros. before: the rows of the kept tokens after that state, in
    order. pending: the rows of the pending tokens. rows: the rows that the run's inputs are written to; NOWHERE = the
    input is not kept. paths: for each row of a tree, the indices of the tokens before it on its path. The indices count
    the pending tokens first, then the tokens of the run (as in RaggedBatch.ancestors). () = the run is a chain after
    all other tokens. saves: for each state that the run writes, the number of tokens since `first`, and the state's
    index.
    """

    first: int
    before: Seq[int]
    pending: Seq[int]
    rows: Seq[int]
    paths: Seq[Seq[int]]
    saves: Seq[tuple[int, int]]


def runs_alone(batch: RaggedBatch) -> list[StateRun]:
    """Return the StateRuns of a pass without a cache. Each run begins without earlier tokens, and no state is kept."""
    return [StateRun(NOWHERE, (), (), [NOWHERE] * len(batch.run(b)), (), ()) for b in range(len(batch.slots))]


@dataclass(slots=True)
class _Line:
    """The states and rows of one sequence.

    state: the state that the sequence stands on. start: the number of tokens in that state. rows: the rows of kept
    tokens after `start`. pending: the rows of pending tokens. run: the rows of the run that is being written. saves:
    the states that the run writes, by position. snapshots: by position, the states that will be published once the
    prefix keys of their blocks are known. marks: the positions whose states are to be published. sure: the number of
    tokens that are known to be final, in whole blocks of STATE_TOKENS. ends: maps the positions `start` and `sure` to
    the tokens of the block that ends at the position.
    """

    state: int = NOWHERE
    start: int = 0
    rows: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    marks: set[int] = field(default_factory=set)
    sure: int = 0
    ends: dict[int, Seq[int]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of kept tokens."""
        return self.start + len(self.rows)


class StateTables:
    """The indices of the states and input rows of all sequences of one model. It holds indices, and no tensors.

    copy: copies input rows to other rows, in all recurrent layers. block_tokens: the number of tokens of a block;
    states are published under the prefix keys of blocks. keeper: the Keeper to notify of states that are published,
    found and withdrawn. For the keeper, a state is a block of kind `kind`.
    """

    def __init__(
        self, block_tokens: int, num_states: int, num_rows: int, copy: Callable[[list[int], list[int]], None]
    ) -> None:
        self.block_tokens, self.num_states, self.num_rows = block_tokens, num_states, num_rows
        self.keeper: Keeper | None = None
        self.kind = 0
        self._unit = math.lcm(block_tokens, STATE_TOKENS)  # published states have a multiple of so many tokens
        self._copy = copy
        self._free = list(range(num_states - 1, -1, -1))
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_users: Counter[int] = Counter()  # of each state: lines that stand on it, or hold it for later
        self._lines: dict[int, _Line] = {}
        self._state_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    # ------------------------------------------------------------------------------------------------ life of a slot

    def num_found(self, keys: Seq[Key], others: Collection[Key] = ()) -> int:
        """Return the largest n such that a sequence can begin with the blocks of `keys[:n]`; 0 if there is none.

        A state must be published under the last of these prefix keys. others: further prefix keys whose states count as
        published.
        """
        for num in range(len(keys), 0, -1):
            if keys[num - 1] in self._state_of or keys[num - 1] in others:
                return num
        return 0

    def begin(self, slot: int, keys: Seq[Key], tokens: Seq[int] = ()) -> None:
        """Begin a sequence with the state that is published under the last of `keys`.

        keys: the prefix keys of the sequence's first blocks. Without keys, the sequence begins without a state. tokens:
        the tokens of the sequence.
        """
        if slot in self._lines:
            raise InternalError(f"slot {slot} of recurrent states is open already")
        self._lines[slot] = line = _Line()
        if keys:
            state = self._state_of[keys[-1]]
            self._stand(line, state, len(keys) * self.block_tokens)
            line.sure = line.start
            line.ends[line.start] = tokens[line.start - self.block_tokens : line.start]
            self._used(state, keys[-1], line.ends[line.start])

    def mark(self, slot: int, positions: Collection[int]) -> None:
        """Have states published at or shortly before these positions, once the sequence has reached them.

        Each position is rounded down to a common multiple of `block_tokens` and STATE_TOKENS.
        """
        line = self._lines[slot]
        whole = {position // self._unit * self._unit for position in positions}
        line.marks |= {position for position in whole if position > line.start}

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence in `new_slot` with the state and the kept rows of `slot`.

        Raises CapacityError where too few rows are free.
        """
        line = self._lines[slot]
        copies = self._take_rows(len(line.rows))
        self.begin(new_slot, ())
        new = self._lines[new_slot]
        self._stand(new, line.state, line.start)
        new.rows, new.sure = copies, min(line.sure, line.start)
        if copies:
            self._copy(line.rows, copies)

    def publish(self, slot: int, tokens: Seq[int], keys: Seq[Key]) -> None:
        """Record that these tokens are final, and publish the marked states that lie within them.

        Later sequences can begin from published states. tokens: the committed tokens, from the beginning. keys: the
        prefix keys of the sequence's published blocks, from the first block on.
        """
        line = self._lines[slot]
        line.sure = max(line.sure, min(len(tokens), line.length) // STATE_TOKENS * STATE_TOKENS)
        for position in [position for position in line.snapshots if position <= line.sure]:
            state = line.snapshots.pop(position)
            self._publish(state, position, keys, tokens[position - self.block_tokens : position])
            self._leave(state)
        line.ends = {at: line.ends[at] for at in line.ends if at == line.start}
        for position in {line.start, line.sure} - {0}:
            if position <= len(tokens):
                line.ends[position] = tokens[position - self.block_tokens : position]

    def _publish(self, state: int, num_tokens: int, keys: Seq[Key], last: Seq[int]) -> None:
        """Publish a state of `num_tokens` tokens if the prefix keys of its blocks are known.

        keys: the known prefix keys, from the first block on. last: the tokens of the state's last block.
        """
        num_blocks = num_tokens // self.block_tokens
        if num_tokens % self._unit or not 0 < num_blocks <= len(keys):
            return
        key = keys[num_blocks - 1]
        if state not in self._key_of and key not in self._state_of:
            self._state_of[key], self._key_of[state] = state, key
        self._used(self._state_of.get(key, state), key, last)

    def _used(self, state: int, key: Key, last: Seq[int]) -> None:
        if self.keeper is not None:
            self.keeper.used(self.kind, state, key, last)

    def release(self, slot: int, keys: Seq[Key] = ()) -> None:
        """End a sequence, and publish the state that it stands on. Unknown slots are ignored.

        keys: the prefix keys of the sequence's published blocks. Without a key for its last block, the state is not
        published.
        """
        line = self._lines.pop(slot, None)
        if line is None:
            return
        if line.state != NOWHERE and line.start in line.ends:
            self._publish(line.state, line.start, keys, line.ends[line.start])
        self._forget_run(line)
        self._free_rows += [*line.rows, *line.pending]
        for state in line.snapshots.values():
            self._leave(state)
        self._leave(line.state)

    def clear(self) -> None:
        """Withdraw every published state."""
        for state in list(self._key_of):
            self._withdraw(state)

    # -------------------------------------------------------------------------------------- states that come from disk

    def holds(self, key: Key) -> bool:
        """Return whether a state is published under a prefix key."""
        return key in self._state_of

    @property
    def has_place(self) -> bool:
        """Whether there is room for one more state: a free index, or an index whose state can be evicted."""
        return bool(self._free or self._evictable)

    def await_state(self, slot: int, key: Key) -> int | None:
        """Let a slot hold the state that is published under a prefix key, and return None.

        If no such state is published, take a free index for it and return the index. The caller writes the state at
        this index, then calls `publish_awaited`.
        """
        if slot in self._lines:
            raise InternalError(f"slot {slot} of recurrent states is open already")
        self._lines[slot] = line = _Line()
        if key in self._state_of:
            self._stand(line, self._state_of[key], 0)
            return None
        line.state = self._take()
        return line.state

    def publish_awaited(self, slot: int, states: Mapping[Key, int]) -> None:
        """Publish the state that a slot awaited, and end the slot. If no state was written, only end the slot.

        states: the index of the written state (see `await_state`), by prefix key; empty if no state was written.
        """
        for key, state in states.items():
            if key not in self._state_of:
                self._state_of[key], self._key_of[state] = state, key
        self.release(slot)

    # ------------------------------------------------------------------------------------------------------ one pass

    def plan(self, batch: RaggedBatch, counts: Seq[int] | None = None) -> list[StateRun]:
        """Return the states and rows that each run reads and writes. Raises CapacityError if rows or states run out.

        Rows that an earlier run of the same slot has written are dropped, unless they were kept. counts: for a model
        that drafts several tokens in one call, the number of given tokens at the beginning of each run, before the
        drafted tokens. The rows of given tokens are kept. Drafted tokens may be rejected.
        """
        for slot in batch.slots:
            self._forget_run(self._line(slot))
        return [self._planned(batch, b, None if counts is None else counts[b]) for b in range(len(batch.slots))]

    def _planned(self, batch: RaggedBatch, b: int, count: int | None) -> StateRun:
        line = self._line(batch.slots[b])
        num = len(batch.run(b))
        is_tree = batch.is_tree(b)
        length = line.length
        if batch.cached[b] + batch.num_pending(b) != length + len(line.pending):
            raise InternalError(
                f"slot {batch.slots[b]} holds {length} tokens in recurrent layers, the batch says {batch.cached[b]}"
            )
        is_whole = count is not None or b in batch.silent or num > MOST_JUDGED
        end = max(min(line.sure, length), length - MOST_CUT)
        if is_whole and not line.pending and not is_tree:
            end = length + (num if count is None else count)
        end -= end % STATE_TOKENS
        line.run = self._take_rows(num if end <= length else length + num - end)
        if end > length:
            line.run = [NOWHERE] * (end - length) + line.run
        self._save(line, end)
        before, pending = list(line.rows), list(line.pending)
        paths: list[list[int]] = []
        if is_tree:
            paths = [bits(batch.ancestors[row])[:-1] for row in batch.run(b)]
        else:
            before, pending = before + pending, []
        saves = [(position - line.start, state) for position, state in sorted(line.saves.items())]
        return StateRun(line.state, before, pending, list(line.run), paths, saves)

    def _save(self, line: _Line, end: int) -> None:
        """Take indices for the states that a pass writes: at position `end`, and at each mark before that position.

        If indices run out, the remaining marks get no state.
        """
        if end <= line.start:
            return
        line.saves[end] = self._take()
        for position in sorted((p for p in line.marks if line.start < p < end), reverse=True):
            if not self._free and not self._evictable:
                return
            line.saves[position] = self._take()

    def _forget_run(self, line: _Line) -> None:
        for state in line.saves.values():
            self._leave(state)
        self._free_rows += [row for row in line.run if row != NOWHERE]
        line.saves, line.run = {}, []

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held]) -> list[int]:
        """Keep some of the pending rows and of the rows just written, as KVCache.keep does.

        The states that the pass wrote are kept, too. Returns the slots that have reached the end of a block of
        STATE_TOKENS tokens.
        """
        reached = list[int]()
        for slot, rows in kept.items():
            line = self._line(slot)
            if slot == SCRATCH_SLOT and not line.run and rows:  # a measuring pass: it follows no real tokens
                line.start += len(rows)
                continue
            all_rows, before = [*line.pending, *line.run], line.length
            chosen = [all_rows[row] for row in rows]
            others = [all_rows[row] for row in held[slot].rows] if slot in held else []
            if NOWHERE in line.run and (list(rows) != list(range(len(rows))) or NOWHERE in line.run[len(rows) :]):
                raise InternalError(
                    f"slot {slot} cannot keep {len(rows)} rows of a run of {len(line.run)}: those in no row "
                    "but a state belong together"
                )
            stay = {*chosen, *others}
            self._free_rows += [row for row in all_rows if row != NOWHERE and row not in stay]
            line.pending, line.run = others, []
            line.rows += chosen
            self._arrive(line)
            if line.length // STATE_TOKENS > before // STATE_TOKENS:
                reached.append(slot)
        return reached

    def _arrive(self, line: _Line) -> None:
        """Move a sequence to the last state that its pass wrote.

        States at marked positions are kept, to be published later under the prefix keys of their blocks.
        """
        for position, state in sorted(line.saves.items()):
            if position in line.marks:
                line.marks.discard(position)
                line.snapshots[position] = state
                self._num_users[state] += 1
        if line.saves:
            start = max(line.saves)
            num_passed = start - line.start
            self._free_rows += [row for row in line.rows[:num_passed] if row != NOWHERE]
            del line.rows[:num_passed]
            self._stand(line, line.saves[start], start)
        for state in line.saves.values():
            self._leave(state)
        line.saves = {}

    def hold(self, slot: int, num_rows: int) -> None:
        """Make the rows of the run just written pending, after earlier pending rows."""
        line = self._line(slot)
        if len(line.run) != num_rows or NOWHERE in line.run:
            raise InternalError(f"slot {slot} cannot hold {num_rows} rows of a run of {len(line.run)}")
        line.pending += line.run
        line.run = []
        self._arrive(line)

    def cut_length(self, slot: int, length: int, keys: Seq[Key], can_cut: Callable[[int], bool]) -> int:
        """Return the largest length, at most `length`, to which a slot can be cut.

        It is `length` itself, or a length with a published state, or 0. keys: the prefix keys of the slot's published
        blocks. can_cut: returns whether the other layers can be cut to a length.
        """
        if self._line(slot).start <= length and can_cut(length):
            return length
        ends = range(length // self.block_tokens, 0, -1)
        here = (num * self.block_tokens for num in ends if num <= len(keys) and keys[num - 1] in self._state_of)
        return next(filter(can_cut, here), 0)

    def truncate_to(self, slot: int, length: int, keys: Seq[Key]) -> None:
        """Keep only the first `length` tokens, and drop pending rows.

        length: a result of `cut_length`. keys: the prefix keys of the slot's published blocks, as for `cut_length`.
        """
        line = self._line(slot)
        self._forget_run(line)
        self._free_rows += line.pending
        line.pending = []
        num_rows = max(0, length - line.start)
        self._free_rows += line.rows[num_rows:]
        del line.rows[num_rows:]
        if line.start > length:
            num_blocks = length // self.block_tokens
            self._stand(line, self._state_of[keys[num_blocks - 1]] if length else NOWHERE, length)
        line.sure = min(line.sure, line.length)
        for position in [position for position in line.snapshots if position > line.length]:
            self._leave(line.snapshots.pop(position))

    def _line(self, slot: int) -> _Line:
        if slot not in self._lines:
            raise InternalError(f"slot {slot} of recurrent states is not open")
        return self._lines[slot]

    # --------------------------------------------------------------------------------------------------------- places

    def _take_rows(self, num: int) -> list[int]:
        if num > len(self._free_rows):
            raise CapacityError(
                f"recurrent layers have {len(self._free_rows)} free rows for inputs and {num} are needed: lower "
                "max_batch_size"
            )
        return [self._free_rows.pop() for _ in range(num)]

    def _take(self) -> int:
        """Take an index for a state, and count one user of it.

        If no index is free, the published state that has been unused for the longest time is evicted. Raises
        CapacityError if there is no such state.
        """
        if not self._free and self._evictable:
            self._withdraw(next(iter(self._evictable)))
        if not self._free:
            raise CapacityError("there is no place for one more state of recurrent layers: lower max_batch_size")
        state = self._free.pop()
        self._num_users[state] = 1
        return state

    def _withdraw(self, state: int) -> None:
        if self.keeper is not None:
            self.keeper.withdrawn(self.kind, state)
        del self._state_of[self._key_of.pop(state)]
        if state in self._evictable:
            del self._evictable[state]
            self._free.append(state)

    def _stand(self, line: _Line, state: int, start: int) -> None:
        """Move a sequence to a state of `start` tokens. The state gains a user, and the earlier state loses one."""
        before, line.state, line.start = line.state, state, start
        if state != NOWHERE:
            self._num_users[state] += 1
            self._evictable.pop(state, None)
        self._leave(before)

    def _leave(self, state: int) -> None:
        """Remove one user of a state. A state without users becomes evictable if it is published, else free."""
        if state == NOWHERE:
            return
        self._num_users[state] -= 1
        if not self._num_users[state]:
            del self._num_users[state]
            if state in self._key_of:
                self._evictable[state] = None
            else:
                self._free.append(state)

    # ------------------------------------------------------------------------------------------------------ integrity

    @property
    def num_published(self) -> int:
        """The number of states that other sequences may begin with."""
        return len(self._key_of)

    def check_integrity(self) -> None:
        """Raise InternalError where a state or a row is lost, or has two owners."""
        users: Counter[int] = Counter()
        rows = list(self._free_rows)
        for line in self._lines.values():
            users.update(
                [state for state in (line.state, *line.saves.values(), *line.snapshots.values()) if state >= 0]
            )
            rows += [row for row in (*line.rows, *line.pending, *line.run) if row != NOWHERE]
            if NOWHERE in line.rows:
                raise InternalError("a kept token of a recurrent layer is in no state and in no row")
        if users != self._num_users:
            raise InternalError("recurrent states have other users than are counted")
        if sorted([*users, *self._free, *self._evictable]) != list(range(self.num_states)):
            raise InternalError("a recurrent state was lost, or is there twice")
        if sorted(rows) != list(range(self.num_rows)):
            raise InternalError("a row of a recurrent layer's inputs was lost, or is there twice")
        if {state: key for key, state in self._state_of.items()} != self._key_of:
            raise InternalError("a recurrent state is published under a key that is not its own")
        if any(state not in self._key_of for state in self._evictable):
            raise InternalError("a recurrent state waits to be evicted and is not published")
