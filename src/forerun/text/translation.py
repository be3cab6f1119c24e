"""Translates between two vocabularies: maps ids with the same meaning, and encodes a target's text in a draft's ids.

Ids are compared by their token strings. Equal strings mean the same only if both tokenizers spell tokens alike: a
byte-level "Ġ" and a SentencePiece "▁" both stand for a space, and a byte-level "é" stands for a byte, not for a letter.
A text can be passed from any tokenizer to any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.errors import VocabularyMismatch
from forerun.text.detokenizer import Detokenizer, num_common
from forerun.text.tokenizer import Tokenizer

BLOCK_TOKENS = 64  # of the target; after each block, the ids become final, except at the end of the text
TAIL_TOKENS = 32  # ids before a block that are encoded again together with the block
CONTEXT_TOKENS = 16  # tokens before a continuation that are encoded together with it


def shared_ids(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Return a map from ids of the target to ids of the draft with the same token (TLI, arXiv 2502.05202).

    A control token and a text are never the same, even if they are spelled alike. Raises VocabularyMismatch if the
    tokenizers spell tokens in different ways, because equal strings then prove nothing, and if they share no token.
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
    """Encodes the text of a target's tokens in the ids of another tokenizer, as the text grows.

    ids: the ids of the text, as far as later tokens cannot change the text: an unfinished character at the end is left
    out. When the text grows, only its end is encoded anew, so that a step costs the same however long the text is.
    Before this end, `ids` may differ from an encoding of the whole text. The ids depend only on the target's tokens,
    not on how the tokens were cut into pieces. Control tokens that the other tokenizer does not know become their text.
    """

    def __init__(self, target: Tokenizer, other: Tokenizer) -> None:
        self._target, self._other = target, other
        self._detokenizer = Detokenizer(target, (), skip_special_ids=())
        self.ids = other.encode("")  # ids that the tokenizer puts before each text, such as beginning of sequence
        # The text that is encoded anew: the first `_num_skipped` of its ids belong to the text before it, and the
        # others are `ids` from `_start` on.
        self._tail = ""
        self._start, self._num_skipped = len(self.ids), 0
        self._num_read = 0

    def read(self, tokens: Seq[int]) -> int:
        """Read further tokens of the target. Returns the index of the first changed or new id in `ids`.

        tokens: all tokens so far. Tokens that were read before must not have changed.
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
        """Append a text. Returns the index of the first changed or new id in `ids`."""
        self._tail += text
        encoded = self._encoded(self._tail)[self._num_skipped :]
        same = num_common(encoded, self.ids[self._start :])
        self.ids[self._start + same :] = encoded[same:]
        return self._start + same

    def _num_leading(self, tokens: Seq[int]) -> int:
        """Return how many leading ids of `tokens` are ids that the target's tokenizer puts before every text."""
        leading = self._target.encode("")
        return len(leading) if list(tokens[: len(leading)]) == leading else 0

    def _cut(self) -> None:
        """Shorten the text that is encoded anew to the text of the last TAIL_TOKENS ids.

        The first ids of this text, encoded alone, may differ from `ids`, for example by the space that SentencePiece
        puts before a text. So from now on, only the ids that both encodings have in common at the end can change.
        """
        ids = self.ids[max(self._start, len(self.ids) - TAIL_TOKENS) :]
        self._tail = self._other.decode(ids)
        encoded = self._encoded(self._tail)
        same = num_common(encoded[::-1], ids[::-1])
        self._start, self._num_skipped = len(self.ids) - same, len(encoded) - same

    def _encoded(self, text: str) -> list[int]:
        return self._other.encode(text, add_special_tokens=False)


def continuation(tokenizer: Tokenizer, tokens: Seq[int], text: str) -> list[int]:
    """Return the ids with which `text` continues the text of `tokens`, without the last id.

    The last id is left out, because it may change when more text follows. The text of `tokens` is taken only as far as
    later tokens cannot change it. Returns [] if `text` would merge into one token with the text before it.
    """
    context = list(tokens[-CONTEXT_TOKENS:])
    first = next((i for i, token in enumerate(context) if tokenizer.is_solid(token)), 0)
    before, num_certain = tokenizer.decode_so_far(context[first:])
    ids = tokenizer.encode(before[:num_certain] + text, add_special_tokens=False)
    starts = [i for i in range(len(ids)) if tokenizer.decode_so_far(ids[:i])[0] == before]
    # Several starts may fit where tokens end inside a character or make no text. The ids before the chosen start end as
    # the context does.
    start = max(starts, key=lambda i: num_common(ids[:i][::-1], context[::-1]), default=len(ids))
    return ids[start:-1]
