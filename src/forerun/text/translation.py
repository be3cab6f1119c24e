"""Between two vocabularies: the ids that mean the same in both, and one text in the ids of either.

Ids are compared by their token strings, which say the same only where both tokenizers spell alike: a byte-level "Ġ" and
a SentencePiece "▁" are both a space, and a byte-level "é" is no letter but a byte. Texts can be handed from any
tokenizer to any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.errors import VocabularyMismatch
from forerun.text.detokenizer import Detokenizer, num_common
from forerun.text.tokenizer import Tokenizer

BLOCK_TOKENS = 64  # of the target; behind each block, all but the end of the text gets its final ids
TAIL_TOKENS = 32  # ids before a block that are encoded with it
CONTEXT_TOKENS = 16  # before a continuation, which are encoded with it


def shared_ids(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Return the target's ids that have the same token as an id of the draft, and that id (TLI, arXiv 2502.05202).

    A control token and a text of the same spelling are two things. Raises VocabularyMismatch where the tokenizers spell
    tokens in different ways, so that equal strings prove nothing, and where they share no token.
    """
    if target.spelling != draft.spelling:
        raise VocabularyMismatch(
            f"tokens of the target ({_said(target)}) and of the draft model ({_said(draft)}) are spelled in different "
            "ways and cannot be compared: use how=text"
        )
    ids = {token: token_id for token_id, token in draft.id_to_token.items()}
    shared = {
        token_id: ids[token]
        for token_id, token in target.id_to_token.items()
        if token in ids and (token_id in target.special_ids) == (ids[token] in draft.special_ids)
    }
    if not shared:
        raise VocabularyMismatch("target and draft model share no token: use how=text")
    return shared


def _said(tokenizer: Tokenizer) -> str:
    return " + ".join(sorted(tokenizer.spelling)) or "plain"


class Translation:
    """One growing text of a target's tokens in the ids of another tokenizer.

    ids: of the text as far as it is certain: an unfinished character at its end is left out. Only the end of the text
    is encoded anew when it grows, so that a step costs the same however long the text is. Before that end, `ids` may
    differ from one encoding of the whole text. They depend on the target's tokens alone, not on how these were cut into
    pieces. Control tokens that the other tokenizer does not know become their text.
    """

    def __init__(self, target: Tokenizer, other: Tokenizer) -> None:
        self._target, self._other = target, other
        self._detokenizer = Detokenizer(target, (), skip_special_ids=())
        self.ids = other.encode("")  # what it sets before each text, such as a beginning-of-sequence id
        self._tail = ""  # the text that is encoded anew; the first `_num_skipped` of its ids belong to what is before
        self._start, self._num_skipped = len(self.ids), 0  # `ids` from `_start` on are the others
        self._num_read = 0

    def read(self, tokens: Seq[int]) -> int:
        """Read the target's tokens on. tokens: from the beginning; the ones already read have not changed.

        Returns the index in `ids` from which on they are changed or new.
        """
        changed = len(self.ids)
        if self._num_read == 0:
            self._num_read = self._num_leading(tokens)
        while self._num_read < len(tokens):
            stop = min(len(tokens), (self._num_read // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
            text = self._detokenizer.push(tokens[self._num_read : stop]).text
            self._num_read = stop
            if text:
                changed = min(changed, self._add(text))
            if stop % BLOCK_TOKENS == 0:
                self._cut()
        return changed

    def _add(self, text: str) -> int:
        """Append a text. Returns as `read` does."""
        self._tail += text
        encoded = self._encoded(self._tail)[self._num_skipped :]
        same = num_common(encoded, self.ids[self._start :])
        self.ids[self._start + same :] = encoded[same:]
        return self._start + same

    def _num_leading(self, tokens: Seq[int]) -> int:
        """Return how many of the first ids the target's tokenizer sets before each text; they are no part of it."""
        leading = self._target.encode("")
        return len(leading) if list(tokens[: len(leading)]) == leading else 0

    def _cut(self) -> None:
        """Let the text that is encoded anew begin TAIL_TOKENS before the end.

        An encoding of its end alone differs in its first ids, as by the space that SentencePiece sets before a text:
        only what both encodings end with is encoded anew from now on.
        """
        ids = self.ids[max(self._start, len(self.ids) - TAIL_TOKENS) :]
        self._tail = self._other.decode(ids)
        encoded = self._encoded(self._tail)
        same = num_common(encoded[::-1], ids[::-1])
        self._start, self._num_skipped = len(self.ids) - same, len(encoded) - same

    def _encoded(self, text: str) -> list[int]:
        return self._other.encode(text, add_special_tokens=False)


def continuation(tokenizer: Tokenizer, tokens: Seq[int], text: str) -> list[int]:
    """Return the ids by which `text` goes on behind the certain text of `tokens`, without the last id.

    The last one may be another when more text follows. [] where the text would be one token with what is before it.
    """
    context = list(tokens[-CONTEXT_TOKENS:])
    first = next((i for i, token in enumerate(context) if tokenizer.is_solid(token)), 0)
    before, num_certain = tokenizer.decode_so_far(context[first:])
    ids = tokenizer.encode(before[:num_certain] + text, add_special_tokens=False)
    starts = [i for i in range(len(ids)) if tokenizer.decode_so_far(ids[:i])[0] == before]
    # Several may fit where tokens end inside a character or make no text: the one that ends as the context does.
    start = max(starts, key=lambda i: num_common(ids[:i][::-1], context[::-1]), default=len(ids))
    return ids[start:-1]
