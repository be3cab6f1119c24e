"""Marian: translation models (Opus-MT) with BART's layers, sinusoidal positions, and no norm after the embedding."""

from __future__ import annotations

from forerun.blocks import Positions, Spec
from forerun.models import configs
from forerun.models.configs import Raw, size
from forerun.models.families import bart

NAMES = bart.names_of_layers({"lm_head": "lm_head"})
SHARES = "share_encoder_decoder_embeddings"
AGAIN = {"decoder_vocab_size": "vocab_size"}


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    configs.require(raw.get(SHARES, True) is True, raw, SHARES, "true")
    positions = Positions(size(raw, "max_position_embeddings"), kind="sinusoidal")
    return bart.spec_of({key: value for key, value in raw.items() if key != SHARES}, positions, None, AGAIN)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    last = spec.vocab_size - 1  # pads, and begins a text, in all published checkpoints
    ids = {"pad_token_id": last, "decoder_start_token_id": last}
    return {"architectures": ["MarianMTModel"], **bart.sizes_of(spec), **ids}
