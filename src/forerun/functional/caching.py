"""Cut the caches of Hugging Face modules: tuples of tensors, DynamicCache, and the pair of an encoder-decoder.

Only what the decoder attends to of itself is cut. The keys and values of the encoder's output stay whole: in a layer of
four tensors they are the last two, in an EncoderDecoderCache the second cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forerun.errors import BadOption, shown

Layer = tuple[Tensor, ...] | None


def prune_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """Remove the last tokens of a cache of any kind; None stays None.

    A tuple is left as it is and a shorter one returned; an object is shortened in place and returned. Raises BadOption
    for another kind, and for a number below 0 or beyond what the cache holds; 0 removes nothing.
    """
    if cache is None:
        return None
    if isinstance(cache, tuple | list):
        return prune_tuple_cache(tuple(cache), num_tokens_to_discard)
    return prune_dynamic_cache(cache, num_tokens_to_discard)


def prune_tuple_cache(cache: tuple[Layer, ...] | None, num_tokens_to_discard: int) -> tuple[Layer, ...] | None:
    """Remove the last tokens of a tuple of layers (keys, values[, encoder's keys, values]), [B, heads, tokens, dim]."""
    if cache is None:
        return None
    _check(num_tokens_to_discard, cached_tokens(cache))
    return tuple(
        None if layer is None else (*(_shortened(t, num_tokens_to_discard) for t in layer[:2]), *layer[2:])
        for layer in cache
    )


def prune_dynamic_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """Remove the last tokens of a DynamicCache, or of the decoder's own part of an EncoderDecoderCache."""
    if cache is None:
        return None
    if not hasattr(cache, "crop"):
        raise BadOption(
            f"a cache of the type {shown(type(cache).__name__)} cannot be cut: use a tuple of layers or a "
            "DynamicCache, or use_cache=False"
        )
    _check(num_tokens_to_discard, cached_tokens(cache))
    if num_tokens_to_discard:
        cache.crop(-num_tokens_to_discard)
    return cache


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache of any kind holds; 0 for None."""
    if cache is None:
        return 0
    if isinstance(cache, tuple | list):
        return next((int(layer[0].shape[2]) for layer in cache if layer is not None), 0)
    return int(cache.get_seq_length())


def _shortened(tensor: Tensor, num: int) -> Tensor:
    return tensor[:, :, : tensor.shape[2] - num, :]  # by its new length: -0 would be its beginning


def _check(num: int, held: int) -> None:
    if not 0 <= num <= held:
        raise BadOption(f"num_tokens_to_discard={num} is not possible: the cache holds {held} tokens")
