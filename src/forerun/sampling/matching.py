"""A llguidance matcher that follows the committed tokens of a sequence and the paths of its drafts.

llguidance can roll a matcher back by a number of tokens, but the matcher's masks are wrong afterwards
(docs/development/log.md). So no matcher is ever rolled back. One matcher stays at the end of the committed tokens, and
a copy of this matcher reads each new path of drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matching:
    """Holds a llguidance matcher that has read a sequence's committed tokens, and possibly a path of drafted tokens.

    begin(): returns a new matcher at the beginning of the grammar. num_prompt_tokens: the number of committed tokens
    before the text that must follow the grammar.
    """

    def __init__(self, begin: Callable[[], LLMatcher], num_prompt_tokens: int) -> None:
        self._begin, self._num_prompt_tokens = begin, num_prompt_tokens
        self.begin_again()

    def begin_again(self) -> None:
        """Replace the matcher with a new matcher that has read no tokens. A failed matcher cannot be used again."""
        self.matcher = self._begin()
        # Never asked for a mask: a matcher keeps its answers, and its copies keep them, too, even on another path.
        self._sure = self._begin()
        self._read: list[int] = []
        self.num_sure = 0  # tokens that were read and are committed

    def go(self, committed: Seq[int], drafted: Seq[int]) -> bool:
        """Move the matcher to the end of `committed` and `drafted`, and return whether the grammar allows these tokens.

        Between calls, tokens may be appended to `committed`, but its earlier tokens must not change.
        """
        read, first, had = self._read, self._num_prompt_tokens, self.num_sure
        wanted = [*committed[first + had :], *drafted]  # the tokens after those that are sure already
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
