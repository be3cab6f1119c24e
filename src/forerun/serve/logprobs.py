"""Log-probabilities in the two forms of the OpenAI API, and the texts that they call tokens by.

A token reads as in the text: with the space before it where it has one. One that is a part of a character alone is
called by its bytes, as in bytes:\\xe2\\x80; control tokens are called by their names.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import BYTES, REPLACEMENT

if TYPE_CHECKING:
    from forerun.engine.request import RequestOutput
    from forerun.text.tokenizer import Tokenizer
    from forerun.types import TokenLogprob

LOWEST = -9999.0  # what the API says for probabilities of 0: JSON has no infinity


def chat_logprobs(positions: Seq[TokenLogprob], lefts: Seq[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return one entry for each token, with the likeliest ones. lefts: the token before each."""
    entries = []
    for position, left in zip(positions, lefts, strict=True):
        top = [_entry(tokenizer, token, logprob, left) for token, logprob in position.top]
        entries.append({**_entry(tokenizer, position.token_id, position.logprob, left), "top_logprobs": top})
    return entries


class SaidLogprobs:
    """The log-probabilities of the tokens that make the text of a chat's answer, piece by piece.

    Those of reasoning, calls, marks and the end are none of them. left: the last token of the prompt.
    """

    def __init__(self, left: int, tokenizer: Tokenizer) -> None:
        self._positions: list[TokenLogprob] = []
        self._ids, self._tokenizer = [left], tokenizer

    def piece(self, positions: Seq[TokenLogprob], said: Seq[int]) -> list[dict[str, Any]]:
        """Take the next tokens; return the entries of those that have become text. said: their places in the answer."""
        self._positions += positions
        self._ids += [position.token_id for position in positions]
        lefts = [self._ids[place] for place in said]
        return chat_logprobs([self._positions[place] for place in said], lefts, self._tokenizer)


def said_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the entries of the tokens that make the text of a whole answer; of all where they are not told apart."""
    if (positions := output.logprobs) is None:
        return []
    said = range(len(positions)) if output.answer_parts is None else output.answer_parts.said
    return SaidLogprobs(output.prompt_ids[-1], tokenizer).piece(positions, said)


class CompletionLogprobs:
    """Log-probabilities in the form of /v1/completions, piece by piece.

    left: the last token of the prompt. offset: where the text of the first position begins.
    """

    def __init__(self, left: int, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._left, self._tokenizer, self._offset = left, tokenizer, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, positions: Seq[TokenLogprob], num_chars: int | None = None) -> dict[str, Any]:
        """Four lists with one entry per token. text_offset: where it begins in the choice's text, in characters.

        top_logprobs: of the likeliest tokens and of the token itself, by their texts; of two ids that read the same the
        likelier one's. num_chars: of the choice's text, if it is known; no offset is behind it.
        """
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokenizer = self._tokenizer
        for position in positions:
            token, left = position.token_id, self._left
            raw = token_bytes(tokenizer, token, left)
            likeliest: dict[str, float] = {}
            for other, logprob in (*position.top, (token, position.logprob)):
                likeliest.setdefault(_shown(token_bytes(tokenizer, other, left)), max(logprob, LOWEST))
            made["tokens"].append(_shown(raw))
            made["token_logprobs"].append(max(position.logprob, LOWEST))
            made["top_logprobs"].append(likeliest)
            made["text_offset"].append(self._offset if num_chars is None else min(self._offset, num_chars))
            self._offset += len(self._decoder.decode(raw))
            self._left = token
        return made


def prompt_logprobs(
    ids: Seq[int], positions: Seq[TokenLogprob | None], num_chars: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Log-probabilities of a prompt in the form of /v1/completions; its first token has none.

    num_chars: of its text, which has nothing of the tokens that the tokenizer adds at both ends.
    """
    known = [position for position in positions if position is not None]
    made = CompletionLogprobs(ids[0], tokenizer).piece(known)
    reader, offsets, num_read = Detokenizer(tokenizer, (), skip_special_ids=()), list[int](), 0
    inner = tokenizer.inner(ids)
    for place, token in enumerate(ids):
        offsets.append(min(num_read, num_chars))
        if place in inner:
            num_read += len(reader.push([token]).text)
    first = {"tokens": tokenizer.own_text(ids[0]), "token_logprobs": None, "top_logprobs": None}
    return {**{name: [value, *made[name]] for name, value in first.items()}, "text_offset": offsets}


def token_bytes(tokenizer: Tokenizer, token: int, left: int) -> bytes:
    """What a token adds to the text behind the token `left`; of a part of a character, its bytes."""
    before, text = tokenizer.own_text(left), tokenizer.decode([left, token])
    alone = tokenizer.own_text(token)
    own = text[len(before) :] if text.startswith(before) else alone
    goes_on = REPLACEMENT in before and REPLACEMENT in alone  # both may be parts of one character
    if REPLACEMENT not in own and not goes_on:
        return own.encode()
    name = tokenizer.id_to_token.get(token, own)
    if token in tokenizer.byte_ids:  # as <0xE2>
        return bytes([int(name[1:-1], 16)])
    return bytes(BYTES[char] for char in name) if all(char in BYTES for char in name) else name.encode()


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, left: int) -> dict[str, Any]:
    raw = token_bytes(tokenizer, token, left)
    return {"token": _shown(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}
