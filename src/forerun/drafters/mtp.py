"""MTP: the block in the target's own files that guesses further tokens (Gloeckle et al. 2024; DeepSeek-V3, 2.2).

The block joins the target's hidden state of token i, after the final norm, with the embedding of token i+1, and guesses
token i+2. For further guesses the block reads its own output rows, as EAGLE's head does. Apart from the weights,
everything works as in eagle.py. Embedding and LM head are the target's. The LM head is the largest part of the weights
that such a block reads. So only the first ids of a large vocabulary are drafted, as many as the current texts need
(shared/short_vocab.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from forerun.blocks import SIDES, Features, Norm, Spec
from forerun.config import AUTO
from forerun.drafters import WITHOUT_MODEL, Drafter, Known, Needs, OwnModel, Target
from forerun.drafters.eagle import EagleDrafter, cache_of
from forerun.drafters.shared import head_files
from forerun.drafters.shared.eagle_model import EagleConfig, HeadModel
from forerun.drafters.shared.head_matrices import beside_of
from forerun.drafters.shared.model_files import AS_TARGET, head_of, rounded, short_vocabulary, spread, stored_for
from forerun.drafters.shared.model_options import VOCAB, head_rows, rounding
from forerun.drafters.shared.searching import SEARCH
from forerun.drafters.shared.short_vocab import ShortVocabulary
from forerun.errors import BadOption, shown
from forerun.host_tensor import HostTensor
from forerun.models import next_tokens
from forerun.models.next_tokens import NextTokens
from forerun.models.weights import StoredWeights
from forerun.ops.quantised import QuantisedMatrix
from forerun.registry import option
from forerun.sampling.arithmetic import Row as Logits
from forerun.types import Budget, Coins, Draft, Sequence


@dataclass(frozen=True)
class Options:
    """The options: where the block is stored, how its weights are kept in memory, and which ids it drafts."""

    path: str | None = option(
        None,
        "folder or GGUF file that holds the block, such as what `forerun train head --method mtp` made, "
        "where the target's own do not; none = they do",
    )
    quantization: str = field(default=AUTO, metadata=AS_TARGET)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)
    search: str = field(default=WITHOUT_MODEL, metadata=SEARCH)

    def __post_init__(self) -> None:
        rounding(self.quantization)
        head_rows("mtp", self.draft_vocab)


class MtpDrafter(EagleDrafter):
    """Drafts with the block for multi-token prediction, which runs ahead of the target.

    short: the object that chooses how many ids are drafted; None = the number is fixed.
    """

    short: ShortVocabulary | None = None

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        if self.short is not None:
            self.short.read(seqs)
            self.runner.narrow(self.short.best())
        return super().own_draft(seqs, budget, coins)

    def end(self, seq: Sequence) -> None:
        if self.short is not None:
            self.short.forget(seq)
        super().end(seq)

    def _spread(self, logits: Logits) -> Logits:
        return spread(logits, self._num_ids, logits.dtype)


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the spec of the block's layer, and its weights' memory. Raises BadOption without a block."""
    block = _block(options, target)
    spec = spec_of(block)
    beside = beside_of(spec, rounded(block.source, spec, options.quantization, target).tensors)
    return Needs(makes=OwnModel(config=block.decoder), weights=beside)


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from the block's weights. Raises BadOption if there is no block that fits the target."""
    block, model = _block(options, target.opened), target.model
    spec = spec_of(block)
    if options.path is not None:
        head_files.check_target(options.path, model, target.num_ids)
    source = rounded(block.source, spec, options.quantization, target.opened)
    loaded = head_of(_Weights(stored_for(source, model), block.side_offset), spec, model)
    head = cast(HeadModel, loaded)
    config = EagleConfig(block.decoder, (), norm_output=True)
    drafter = MtpDrafter(head, config, np.arange(spec.vocab_size), cache_of(head, target), target.num_ids)
    drafter.runner.narrow(min(target.num_ids, head_rows("mtp", options.draft_vocab) or target.num_ids))
    if options.draft_vocab == AUTO:
        drafter.short = short_vocabulary(model, spec, target.num_ids)
    drafter.search_by(options.search, "mtp", target)
    return drafter


def spec_of(block: NextTokens) -> Spec:
    """Return the spec for loading the block as a head of its target."""
    norm = block.decoder.final_norm or Norm()
    features = Features(
        block.decoder.vocab_size, block.decoder.hidden_size, side_norms=True, feeds="normed", eps=norm.eps
    )
    return replace(block.decoder, embed_scale=1.0, features=features)


@dataclass(frozen=True)
class _Weights(Mapping[str, HostTensor | QuantisedMatrix]):
    """The stored weights of a block, with `offset` added to two norms: `embedding_norm` and `hidden_norm` (SIDES).

    These norms are applied to the token's embedding and to the target's features. The stored norms do not contain the
    offset, but a head's norms must contain it.
    """

    stored: StoredWeights
    offset: float

    def __getitem__(self, name: str) -> HostTensor | QuantisedMatrix:
        weight = self.stored[name]
        if isinstance(weight, HostTensor) and self.offset and name.removesuffix(".weight") in SIDES:
            return HostTensor.of(weight.float32() + np.float32(self.offset)).to(weight.dtype)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _block(options: Options, target: Known) -> NextTokens:
    block = target.next_tokens if options.path is None else next_tokens.find(target.open(options.path))
    if options.path is not None and head_files.is_head(Path(options.path)):
        head_files.read_config(options.path, "mtp", target.fingerprint)
    if block is None and options.path is None:
        raise BadOption(
            "mtp needs a block that guesses further tokens in the target's own files, and they have none: leave draft "
            "out, or name a draft model"
        )
    if block is None:
        raise BadOption(f"mtp:path={shown(options.path)} holds no block that guesses further tokens: leave it out")
    sizes, others = (block.decoder.hidden_size, block.decoder.vocab_size), (target.hidden_size, target.vocab_size)
    if sizes != others:
        raise BadOption(
            f"mtp:path={shown(options.path)} is of a model with rows of {sizes[0]} and {sizes[1]} ids, and the target "
            f"has rows of {others[0]} and {others[1]} ids: name the target's own"
        )
    return block
