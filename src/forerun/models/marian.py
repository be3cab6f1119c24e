"""Marian: translation models (Opus-MT). BART's layers with positions of sines, and no norm of embeddings."""

from __future__ import annotations

from forerun.blocks import Positions, Spec
from forerun.models import bart, configs
from forerun.models.configs import Raw, size

NAMES = bart.names_of_layers({"lm_head": "lm_head"})
KEYS = bart.KEYS | {"decoder_vocab_size", "share_encoder_decoder_embeddings"}


def read(raw: Raw) -> Spec:
    """config.json -> spec. Raises UnsupportedModel for a key that would change the function."""
    vocab = raw.get("vocab_size")
    configs.require(raw.get("share_encoder_decoder_embeddings", True) is True, raw,
                    "share_encoder_decoder_embeddings", "true")  # fmt: skip
    configs.require(
        raw.get("decoder_vocab_size") in (None, vocab), raw, "decoder_vocab_size", f"{vocab}, as vocab_size"
    )
    positions = Positions(size(raw, "max_position_embeddings"), kind="sinusoidal")
    return bart.spec_of(raw, KEYS, positions, None)


def write(spec: Spec) -> Raw:
    """Spec -> config.json."""
    last = spec.vocab_size - 1  # pads, and begins a text, in all that are published
    ids = {"pad_token_id": last, "decoder_start_token_id": last}
    return {"architectures": ["MarianMTModel"], **bart.sizes_of(spec), **ids}
