"""A state of llguidance that goes to and fro between the paths of a sequence's drafts.

llguidance can lead a state back by so many tokens, but what it says then is wrong (docs/development/log.md). So no
state is ever led back: one stands behind the committed tokens, and a copy of it is led along each other path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matching:
    """One matcher behind the committed tokens of a sequence, or behind some path of a draft.

    begin: makes a matcher at the beginning of the grammar. num_prompt_tokens: committed tokens before its text.
    """

    def __init__(self, begin: Callable[[], LLMatcher], num_prompt_tokens: int) -> None:
        self._begin, self._num_prompt_tokens = begin, num_prompt_tokens
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was read, and start with a new matcher, as one that has failed must."""
        self.matcher = self._begin()
        self._sure = self._begin()  # it is asked nothing: answers are kept, and copied, though the path be another
        self._read: list[int] = []
        self.num_sure = 0  # tokens that were read and are committed

    def go(self, committed: Seq[int], drafted: Seq[int]) -> bool:
        """Move the matcher behind these tokens, and return whether the grammar takes them.

        Committed tokens stay what they are, and more are added to them.
        """
        read, first, had = self._read, self._num_prompt_tokens, self.num_sure
        wanted = [*committed[first + had :], *drafted]  # behind those that are sure already
        same = had
        while same < len(read) and same - had < len(wanted) and read[same] == wanted[same - had]:
            same += 1
        if same < len(read):
            self.matcher, same = self._sure.deep_copy(), had
            del read[had:]
        if rest := wanted[same - had :]:
            read += rest[: self.matcher.try_consume_tokens(rest)]
        self.num_sure = min(len(committed) - first, len(read))
        if self.num_sure > had:
            self._sure.try_consume_tokens(read[had : self.num_sure])
        return len(read) == len(committed) - first + len(drafted)
