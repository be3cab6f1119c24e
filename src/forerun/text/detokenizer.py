"""Converts token ids to text piece by piece. The joined pieces are exactly the whole text, however the ids are grouped.

Decoding each token alone and joining the results would be wrong for three reasons:

* *A token's text depends on the text before it* (a leading space is dropped at the beginning of a text only). So
  decoding always starts at an earlier *solid* token, and the text of this token is cut off. A token is solid if its
  text alone consists of whole characters.
* *A character may be spread over several tokens.* Text that a later token can still change is held back: a trailing
  U+FFFD, and with byte fallback (`<0xE2>`) the bytes after the last whole character. Whole characters are not held
  back, although the library would turn them into U+FFFD, too, if a bad byte followed (`Tokenizer.decode_so_far`).
* *A stop string may be spread over several tokens and rounds.* The longest tail of the text that may still become a
  stop string is held back. This tail is at least one character shorter than the longest stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PushResult:
    """The text that one `push` made final, and the stop string that it completed.

    text: the characters that have become final. stop: the stop string that was completed, if any. stopped_at: the index
    of the token that completed the stop string, within the pushed ids. The ids after this token were not read, and are
    no part of the output.
    """

    text: str
    stop: str | None = None
    stopped_at: int | None = None


class Detokenizer:
    """Decodes the output of one sequence, as the output grows.

    The output's text is the part of decode(prompt + output) after decode(prompt). So a leading space survives, and a
    character that the prompt began and the output completed belongs to the output. The stop string that is complete
    first ends the text. If two stop strings are complete at once, the string that begins first ends the text.

    Args:
        prompt_ids: the ids before the output; their text is not emitted.
        stop: texts that end the output and are cut off from it; no text may be empty.
        num_free: the least number of tokens of the output; stop strings that end within these tokens do not count.
        skip_special_ids: ids that make no text; None = the tokenizer's special ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Seq[int],
        stop: Seq[str] = (),
        skip_special_ids: Collection[int] | None = None,
        num_free: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_ids is None else frozenset(skip_special_ids)
        self._stops, self._num_free = tuple(stop), num_free
        self._num_free_chars = 0  # leading characters of `_held` that come from the first `num_free` tokens
        self._held = ""  # certain text that may still become part of a stop string
        self._window = self._left_context(prompt_ids)  # the ids that are decoded, from a solid id on
        text, self._done = tokenizer.decode_so_far(self._window)  # done: leading characters that need no more work
        self._prompt_rest = text[self._done :]  # the prompt's unfinished character, as it looks so far
        self.stop: str | None = None  # the stop string that has ended the text

    def push(self, ids: Seq[int]) -> PushResult:
        """Take the next tokens, in order. Returns the text that became final, and the completed stop string, if any."""
        if not self._stops:
            return PushResult(self._append(ids))
        released = ""
        for index, token in enumerate(ids):
            if self.stop is not None:
                break
            released += self._release(self._append([token]))
            self._num_free = max(0, self._num_free - 1)
            if self.stop is not None:
                return PushResult(released, self.stop, index)
        return PushResult(released)

    def finish(self) -> str:
        """Return the text that was held back, because no token follows. Bytes of an unfinished character become U+FFFD.

        If the held-back text completes a stop string, only the text before the stop string is returned, and `stop` is
        set.
        """
        if self.stop is not None:
            return ""
        text, _ = self._tokenizer.decode_so_far(self._window)
        released = self._release(self._advance(text, len(text)))
        if self.stop is None:
            released += self._held
        self._held, self._window, self._done = "", [], 0
        return released

    # -------------------------------------------------------------------------------------------------- ids to text

    def _left_context(self, prompt_ids: Seq[int]) -> list[int]:
        """Return the prompt's ids from the last solid token on, or all ids if no token is solid.

        Ids without a text are left out.
        """
        tail: list[int] = []
        for token in reversed(prompt_ids):
            if self._has_text(token):
                tail.append(token)
                if self._tokenizer.is_solid(token):
                    break
        return tail[::-1]

    def _has_text(self, token: int) -> bool:
        return token not in self._skip and self._tokenizer.token_of(token) is not None

    def _append(self, ids: Seq[int]) -> str:
        """Append ids, and return the text that has become final."""
        known = [token for token in ids if self._has_text(token)]
        if not known:
            return ""
        self._window += known
        text, certain = self._tokenizer.decode_so_far(self._window)
        new = self._advance(text, certain)
        solid = next((i for i in range(len(known), 0, -1) if self._tokenizer.is_solid(known[i - 1])), 0)
        if solid:  # no text before the solid token can change any more: start anew there
            self._window = known[solid - 1 :]
            if solid == len(known):
                self._done = len(self._tokenizer.own_text(known[-1]))
            else:
                _, self._done = self._tokenizer.decode_so_far(self._window)
        return new

    def _advance(self, text: str, certain: int) -> str:
        """Return the text that has become final, without the part that belongs to the prompt.

        text: the decoded ids. certain: the number of leading characters of `text` that no later id can change.
        """
        if certain <= self._done:
            return ""
        new = text[self._done : certain]
        self._done = certain
        if self._prompt_rest:
            shared = num_common(self._prompt_rest, new)
            self._prompt_rest = self._prompt_rest[shared:] if shared == len(new) else ""
            new = new[shared:]
        return new

    # -------------------------------------------------------------------------------------------------- stop strings

    def _release(self, new: str) -> str:
        """Take new final text, and return the text that can no longer become part of a stop string.

        If a stop string is complete, `stop` is set to this string, and only the text before the string is returned.
        """
        if not self._stops:
            return new
        text = self._held + new
        free = len(text) if self._num_free else self._num_free_chars
        hit = _first_stop(text, self._stops, free) if new else None
        if hit is not None:
            start, self.stop = hit
            self._held = ""
            return text[:start]
        keep = _open_tail(text, self._stops)
        self._held = text[len(text) - keep :]
        self._num_free_chars = max(0, free - (len(text) - keep))
        return text[: len(text) - keep]


def num_common(a: Seq[Any], b: Seq[Any]) -> int:
    """Return the number of leading characters, or ids, that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_stop(text: str, stops: tuple[str, ...], free: int = 0) -> tuple[int, str] | None:
    """Return (start, stop) of the first stop string that ends after the first `free` characters; None if there is none.

    The first stop string is the string that ends first. Among strings with the same end, it is the string that starts
    first.
    """
    places = ((stop, text.find(stop, max(0, free + 1 - len(stop)))) for stop in stops)
    hits = [(start + len(stop), start, stop) for stop, start in places if start >= 0]
    if not hits:
        return None
    _, start, stop = min(hits)
    return start, stop


def _open_tail(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of a stop string."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
