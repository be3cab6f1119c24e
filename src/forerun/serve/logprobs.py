"""Log-probabilities in the two forms of the OpenAI API, and the names of tokens in these forms.

A token is named by its text, including a leading space. A token that is only part of a character is named by its bytes,
as in bytes:\\xe2\\x80. A control token goes by its own name.
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

LOWEST = -9999.0  # the API's value for probabilities of 0: JSON has no infinity


def chat_logprobs(positions: Seq[TokenLogprob], lefts: Seq[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return one entry for each token, in the form of OpenAI's chats, with the likeliest tokens at its position.

    lefts: for each token, the id of the token before it.
    """
    entries = []
    for position, left in zip(positions, lefts, strict=True):
        top = [_entry(tokenizer, token, logprob, left) for token, logprob in position.top]
        entries.append({**_entry(tokenizer, position.token_id, position.logprob, left), "top_logprobs": top})
    return entries


class SaidLogprobs:
    """Makes the log-probabilities of a chat's answer, piece by piece, for the tokens that form the answer's text.

    Tokens of reasoning, tokens of tool calls, tokens of the marks around both, and end tokens are left out. left: the
    id of the prompt's last token.
    """

    def __init__(self, left: int, tokenizer: Tokenizer) -> None:
        self._positions: list[TokenLogprob] = []
        self._ids, self._tokenizer = [left], tokenizer

    def piece(self, positions: Seq[TokenLogprob], said: Seq[int]) -> list[dict[str, Any]]:
        """Return the entries for the tokens that have now become text. positions: the next tokens of the answer.

        said: the indices of the tokens that have now become text, counted from the beginning of the answer.
        """
        self._positions += positions
        self._ids += [position.token_id for position in positions]
        lefts = [self._ids[place] for place in said]
        return chat_logprobs([self._positions[place] for place in said], lefts, self._tokenizer)


def said_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the entries for the tokens that form the text of a whole answer; [] without log-probabilities.

    If the parts of the answer are unknown, return an entry for every token.
    """
    if (positions := output.logprobs) is None:
        return []
    said = range(len(positions)) if output.answer_parts is None else output.answer_parts.said
    return SaidLogprobs(output.prompt_ids[-1], tokenizer).piece(positions, said)


class CompletionLogprobs:
    """Makes log-probabilities in the form of /v1/completions, piece by piece.

    left: the id of the prompt's last token. offset: the index in the choice's text at which the text of the first token
    begins.
    """

    def __init__(self, left: int, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._left, self._tokenizer, self._offset = left, tokenizer, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, positions: Seq[TokenLogprob], num_chars: int | None = None) -> dict[str, Any]:
        """Return four lists with one entry for each token: tokens, token_logprobs, top_logprobs and text_offset.

        text_offset: the index of the token's first character in the choice's text. top_logprobs: the log-probabilities
        of the likeliest tokens and of the token itself, by their texts. If two tokens have the same text, the likelier
        token counts. num_chars: the length of the choice's text, which limits the offsets; None = not known.
        """
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokenizer = self._tokenizer
        for position in positions:
            token, left = position.token_id, self._left
            raw = token_bytes(tokenizer, token, left)
            likeliest: dict[str, float] = {}
            for other, logprob in (*position.top, (token, position.logprob)):
                likeliest.setdefault(_shown(token_bytes(tokenizer, other, left)), max(logprob, LOWEST))
            lists["tokens"].append(_shown(raw))
            lists["token_logprobs"].append(max(position.logprob, LOWEST))
            lists["top_logprobs"].append(likeliest)
            lists["text_offset"].append(self._offset if num_chars is None else min(self._offset, num_chars))
            self._offset += len(self._decoder.decode(raw))
            self._left = token
        return lists


def prompt_logprobs(
    ids: Seq[int], positions: Seq[TokenLogprob | None], num_chars: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the log-probabilities of a prompt in the form of /v1/completions. The first token has no log-probability.

    ids: the prompt's token ids. num_chars: the length of the prompt's text, without the tokens that the tokenizer adds
    at both ends.
    """
    known = [position for position in positions if position is not None]
    rest = CompletionLogprobs(ids[0], tokenizer).piece(known)
    reader = Detokenizer(tokenizer, (), skip_special_ids=())
    offsets = list[int]()
    num_read = 0
    inner = tokenizer.inner(ids)
    for place, token in enumerate(ids):
        offsets.append(min(num_read, num_chars))
        if place in inner:
            num_read += len(reader.push([token]).text)
    first = {"tokens": tokenizer.own_text(ids[0]), "token_logprobs": None, "top_logprobs": None}
    return {**{name: [value, *rest[name]] for name, value in first.items()}, "text_offset": offsets}


def token_bytes(tokenizer: Tokenizer, token: int, left: int) -> bytes:
    """Return the text that a token adds after the token `left`, in UTF-8. token, left: token ids.

    For a token that is only part of a character, return the bytes of that part.
    """
    before = tokenizer.own_text(left)
    text = tokenizer.decode([left, token])
    alone = tokenizer.own_text(token)
    added = text[len(before) :] if text.startswith(before) else alone
    goes_on = REPLACEMENT in before and REPLACEMENT in alone  # both may be parts of one character
    if REPLACEMENT not in added and not goes_on:
        return added.encode()
    name = tokenizer.id_to_token.get(token, added)
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
