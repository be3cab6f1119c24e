"""Log-probabilities in the two forms of the OpenAI API, and the texts that they call tokens by.

A token reads as in the text: with the space before it where it has one. One that is a part of a character alone is
called by its bytes, as in bytes:\\xe2\\x80; control tokens are called by their names.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from forerun.text.tokenizer import BYTES, REPLACEMENT

if TYPE_CHECKING:
    from forerun.engine.request import RequestOutput
    from forerun.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what the API says for probabilities of 0: JSON has no infinity


def chat_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """{"content": one entry per token, each with the likeliest ones}, of an output with log-probabilities."""
    left, entries = output.prompt_ids[-1], []
    for position in output.logprobs or ():
        top = [_entry(tokenizer, token, logprob, left) for token, logprob in position.top]
        entries.append({**_entry(tokenizer, position.token_id, position.logprob, left), "top_logprobs": top})
        left = position.token_id
    return {"content": entries, "refusal": None}


def completion_logprobs(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """Four lists with one entry per token. text_offset: where it begins in the choice's text, in characters.

    top_logprobs: of the likeliest tokens and of the token itself, by their texts; of two ids that read the same the
    likelier one's.
    """
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    left, offset, decoder = output.prompt_ids[-1], 0, codecs.getincrementaldecoder("utf-8")("replace")
    for position in output.logprobs or ():
        token = position.token_id
        raw = token_bytes(tokenizer, token, left)
        likeliest: dict[str, float] = {}
        for other, logprob in (*position.top, (token, position.logprob)):
            likeliest.setdefault(_shown(token_bytes(tokenizer, other, left)), max(logprob, LOWEST))
        made["tokens"].append(_shown(raw))
        made["token_logprobs"].append(max(position.logprob, LOWEST))
        made["top_logprobs"].append(likeliest)
        made["text_offset"].append(min(offset, len(output.text)))
        offset += len(decoder.decode(raw))
        left = token
    return made


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
