"""Functions that shorten the caches of Hugging Face modules: tuples of tensors, DynamicCache, EncoderDecoderCache.

Only the keys and values of the decoder's own tokens are cut. The keys and values of the encoder's output stay whole:
they are the last two tensors of a layer with four, or the second cache of an EncoderDecoderCache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forerun.errors import BadOption, shown

Layer = tuple[Tensor, ...] | None


def prune_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """Remove the last tokens of a cache of any kind. None stays None.

    A tuple is not changed, and a shorter tuple is returned. A cache object is shortened in place and returned. Raises
    BadOption for another type, and for a number below 0 or above the number of cached tokens; 0 removes nothing.
    """
    if cache is None:
        return None
    if isinstance(cache, tuple | list):
        return prune_tuple_cache(tuple(cache), num_tokens_to_discard)
    return prune_dynamic_cache(cache, num_tokens_to_discard)


def prune_tuple_cache(cache: tuple[Layer, ...] | None, num_tokens_to_discard: int) -> tuple[Layer, ...] | None:
    """Remove the last tokens of a tuple of layers.

    A layer is (keys, values) or (keys, values, encoder's keys, encoder's values), each [B, heads, tokens, dim].
    """
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
    """Return the number of tokens in a cache of any kind; 0 for None."""
    if cache is None:
        return 0
    if isinstance(cache, tuple | list):
        return next((int(layer[0].shape[2]) for layer in cache if layer is not None), 0)
    return int(cache.get_seq_length())


def _shortened(tensor: Tensor, num: int) -> Tensor:
    return tensor[:, :, : tensor.shape[2] - num, :]  # not by -num: with num = 0, [:-0] would be empty


def _check(num: int, held: int) -> None:
    if not 0 <= num <= held:
        raise BadOption(f"num_tokens_to_discard={num} is not possible: the cache holds {held} tokens")
