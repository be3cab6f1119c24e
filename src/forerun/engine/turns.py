"""Lets the engines of a process that share one device step in turn, and see each other's streams.

Each engine has a seat, which is a record that the other engines read. A seat has the number of the engine's streams,
the usual time of the engine's steps, their time limits, and whether the engine has prompts to run. So the prompt chunks
of one engine respect the time limits of the streams of all engines (fair.py).

On a CPU all engines share the same threads. So the engines step one at a time, in the order in which they asked for the
turn. A lock of the operating system alone might give the next turn to the same engine again and again. On a GPU the
steps of several engines overlap, and the engines share only the seats.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from weakref import WeakSet

LAST_TURNS = 8  # an engine takes another one for absent if that took no turn during its own last so many turns


@dataclass(eq=False)
class Seat:
    """Holds the facts about one engine that other engines read.

    stretch, max_itl_s: the time limits of steps in which the engine's requests decode, as in Fair. num_streams: the
    number of the engine's requests that decode. usual_s: the usual time of a step with `num_streams` streams; None =
    not known yet. is_reading: whether the engine has prompts to run.
    """

    stretch: float | None
    max_itl_s: float | None
    num_streams: int = 0
    usual_s: float | None = None
    is_reading: bool = False
    turns: deque[int] = field(default_factory=lambda: deque(maxlen=LAST_TURNS))  # the serial numbers of its last turns

    @property
    def promises(self) -> bool:
        """Whether the engine's decoding steps have a time limit."""
        return self.stretch is not None or self.max_itl_s is not None

    def limit_s(self, usual_s: float) -> float:
        """Return the time limit, in seconds, of a step that usually takes `usual_s` seconds."""
        limits = [] if self.max_itl_s is None else [self.max_itl_s]
        return min(limits if self.stretch is None else [*limits, self.stretch * usual_s])


class Turns:
    """Manages the turns and the seats of the engines on one device.

    is_exclusive: whether only one engine may step at a time.
    """

    def __init__(self, *, is_exclusive: bool = True) -> None:
        self.is_exclusive = is_exclusive
        self._seats, self._num_turns = WeakSet[Seat](), 0
        self.renew()

    def renew(self) -> None:
        """Free the turn and remove all waiting engines.

        This is needed in a child of fork(2), which has no copy of the threads that hold the turn or wait.
        """
        self._lock = threading.Lock()
        self._waiting, self._is_taken = deque[threading.Lock](), False

    def join(self, seat: Seat) -> Seat:
        """Make an engine's seat visible to the other engines, until the seat is garbage-collected. Returns the seat."""
        with self._lock:
            self._seats.add(seat)
        return seat

    def beside(self, seat: Seat) -> Seq[Seat]:
        """Return the seats of the other engines that have recently taken a turn.

        Recently means: during the last LAST_TURNS turns of the engine that has the seat `seat`.
        """
        since = seat.turns[0] if len(seat.turns) == LAST_TURNS else 0
        with self._lock:
            return [other for other in self._seats if other is not seat and other.turns and other.turns[-1] >= since]

    @contextmanager
    def turn(self, seat: Seat) -> Iterator[None]:
        """Return a context manager that waits for the engines that asked earlier, and then holds the turn.

        The turn ends when the context ends. If `is_exclusive` is False, there is no waiting.
        """
        self._take()
        try:
            seat.turns.append(self._num_turns)
            self._num_turns += 1
            yield
        finally:
            self._hand_on()

    def _take(self) -> None:
        own = threading.Lock()
        with self._lock:
            if not self.is_exclusive or not self._is_taken:
                self._is_taken = True
                return
            own.acquire()
            self._waiting.append(own)
        try:
            own.acquire()  # waits until another engine releases it, which hands on the turn
        except BaseException:  # Ctrl-C, in a thread that itself steps an engine
            with self._lock:
                has_left = own in self._waiting
                if has_left:
                    self._waiting.remove(own)
            if not has_left:
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


@cache
def turns_on(device: str) -> Turns:
    """Return the turns of all engines of this process on a device, such as "cpu" or "cuda:0"."""
    turns = Turns(is_exclusive=device == "cpu")
    os.register_at_fork(after_in_child=turns.renew)
    return turns
