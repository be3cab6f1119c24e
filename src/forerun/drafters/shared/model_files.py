"""Helpers for drafters whose weights are in the files of a model: the block of mtp, and an assistant.

Their weights are rounded as the target's are. If the vocabulary is large, they draft only its first ids, as many as the
current texts need (short_vocab.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import numpy.typing as npt

from forerun.blocks import Spec
from forerun.config import AUTO, Quantization
from forerun.drafters import Known
from forerun.drafters.shared.short_vocab import LARGE, ShortVocabulary
from forerun.host_tensor import HostTensor
from forerun.models.loading import packed_schemes
from forerun.models.quantising import QuantisingSource
from forerun.models.source import Source
from forerun.models.weights import StoredWeights
from forerun.ops import load_model
from forerun.ops.model import LoadedModel, Model
from forerun.ops.passes import Lent
from forerun.ops.quantised import QuantisedMatrix
from forerun.sampling.arithmetic import Row

AS_TARGET = {"help": "int8 or int4[:group=N], none, or auto: as the target's weights"}


def rounded(source: Source, spec: Spec, option: str, target: Known) -> Source:
    """Return `source`, with its matrices rounded as `option` says. Raises BadOption if the rounding is impossible."""
    said = target.config.quantization if option == AUTO else option
    if said in (None, "none", AUTO):
        return source
    return cast(Source, QuantisingSource(source, spec, Quantization.parse(str(said))))


def head_of(weights: Mapping[str, HostTensor | QuantisedMatrix], spec: Spec, target: Model) -> LoadedModel:
    """Load a head. It uses the target's embedding and LM head if its spec has none."""
    lent = Lent(target, list(range(spec.vocab_size)))
    return load_model(spec, weights, target.ops, device=target.device, lent=lent)


def stored_for(source: Source, target: Model) -> StoredWeights:
    """Return the weights of a source in the target's dtype, in the form that the target's operators take."""
    return StoredWeights(source, target.weight_dtype, packed_schemes(target.ops, target.weight_dtype))


def short_vocabulary(model: Model, spec: Spec, num_ids: int) -> ShortVocabulary | None:
    """Return the object that chooses how many ids are drafted; None for a small vocabulary.

    model: the target. spec: the drafter's spec. The time of a pass is assumed to be proportional to the number of
    weights that the pass reads. If the drafter has no LM head, the target's LM head is counted.
    """
    if num_ids <= LARGE or not isinstance(model.config, Spec):
        return None
    num_head = num_ids * spec.hidden_size
    num_read = spec.num_weights + (0 if spec.head else num_head)
    tables = 0 if model.config.tied else model.config.vocab_size * model.config.hidden_size
    return ShortVocabulary(num_ids, num_head / num_read, num_read / (model.config.num_weights - tables))


def spread(logits: Row, num_ids: int, dtype: npt.DTypeLike) -> Row:
    """Return the logits of all ids, [num_ids]: `logits` for the first ids, and -inf for all other ids."""
    whole: Row = np.full(num_ids, -np.inf, dtype)
    whole[: len(logits)] = logits[:num_ids]
    return whole
