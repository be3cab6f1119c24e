"""Computes a fingerprint of a target's weights, which is stored in files that depend on the weights."""

from __future__ import annotations

import hashlib

import numpy as np

from forerun.blocks import weight_shapes
from forerun.ops.model import LoadedModel


def fingerprint(model: LoadedModel) -> str:
    """Return a hexadecimal hash of some embeddings, the final norm and the middle layer of a model.

    The hash covers the values with which the model computes. A layer is included, because a fine-tuned model may have
    the same embeddings and norms as its base model.
    """
    ones = model.rows.from_host(np.ones((1, model.config.hidden_size), np.float32))
    embedded = model.embed(range(min(64, model.config.vocab_size)))
    some = [model.rows.to_host(rows) for rows in (embedded, model.norm(ones))]
    model.wait()
    digest = hashlib.sha256(b"".join(rows.astype(np.float32).tobytes() for rows in some))
    at = f"model.layers.{model.config.num_layers // 2}."
    for name in weight_shapes(model.config):
        if name.startswith(at):
            digest.update(model.weight(name).tobytes())
    return digest.hexdigest()
