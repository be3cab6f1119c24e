"""Adds ids to a tokenizer, so that a model with more matrix rows than the tokenizer has ids can use all its rows.

The new tokens are entries of the BPE vocabulary that no merge leads to. So no text is encoded to a new token, and every
text is encoded as before. The new tokens are not *added tokens*, which the library looks for in every text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from forerun.errors import UnsupportedModel


def grow(content: str, num_ids: int, first_id: int = 0) -> str:
    """Add tokens, named like <|unused_4096|>, for new ids below num_ids. Returns the new text of the tokenizer.json.

    content: the text of the tokenizer.json. The new ids begin after the highest old id, but not below first_id. Ids
    between the highest old id and first_id stay without a token. A tokenizer that already has num_ids ids is returned
    unchanged. Raises UnsupportedModel for a tokenizer that is not BPE, and for a tokenizer that would not keep its ids.
    """
    raw = json.loads(content)
    vocabulary = _bpe_vocabulary(raw)
    old = vocabulary | {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    begin = max(first_id, max(old.values(), default=-1) + 1)
    if begin >= num_ids:
        return content
    new = {f"<|unused_{i}|>": i for i in range(begin, num_ids)}
    # The library numbers added tokens from the size of the vocabulary on, unless the vocabulary has them.
    vocabulary.update(old | new)
    grown = json.dumps(raw, ensure_ascii=False, indent=2)
    _check(tokenizers.Tokenizer.from_str(grown), old, new)
    return grown


def _bpe_vocabulary(raw: Mapping[str, Any]) -> dict[str, int]:
    model = raw.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else "none")
    if kind != "BPE":
        raise UnsupportedModel(f"a tokenizer of type {kind} cannot be given more ids: it must be BPE")
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary


def _check(grown: tokenizers.Tokenizer, old: Mapping[str, int], new: Mapping[str, int]) -> None:
    """Raise UnsupportedModel if an old token has changed its id, or if a text is encoded to a new token.

    The option `ignore_merges` of a tokenizer lets texts be encoded to new tokens: any word in the vocabulary becomes
    one token.
    """
    if grown.get_vocab(with_added_tokens=True) != {**new, **old} or old.keys() & new.keys():
        raise UnsupportedModel("this tokenizer cannot be given more ids: its tokens would not keep theirs")
    for name in list(new)[:: max(1, len(new) - 1)]:
        if not new.keys().isdisjoint(grown.encode(name).tokens):
            raise UnsupportedModel(f"this tokenizer cannot be given more ids: it would encode the text {name!r} to one")
