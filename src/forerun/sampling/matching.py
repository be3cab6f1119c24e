"""A matcher of llguidance that moves between the paths of a sequence's drafts.

llguidance can roll a matcher back by a number of tokens, but the matcher's answers are wrong afterwards
(docs/development/log.md). So no matcher is ever rolled back. One matcher stays at the end of the committed tokens, and
a copy of this matcher moves along each new path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matching:
    """A matcher at the end of a sequence's committed tokens, or at the end of some path of a draft.

    begin: makes a matcher at the beginning of the grammar. num_prompt_tokens: the number of committed tokens before the
    text that must follow the grammar.
    """

    def __init__(self, begin: Callable[[], LLMatcher], num_prompt_tokens: int) -> None:
        self._begin, self._num_prompt_tokens = begin, num_prompt_tokens
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the tokens that were read, and start with a new matcher. A matcher that has failed cannot go on."""
        self.matcher = self._begin()
        # Never asked for a mask: a matcher keeps its answers, and its copies keep them, too, even on another path.
        self._sure = self._begin()
        self._read: list[int] = []
        self.num_sure = 0  # tokens that were read and are committed

    def go(self, committed: Seq[int], drafted: Seq[int]) -> bool:
        """Move the matcher to the end of these tokens, and return whether the grammar takes them.

        From call to call the committed tokens only grow; none of them changes.
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
