"""An autoregressive draft model with its own cache, batched over requests (Leviathan et al. 2023; Chen et al. 2023).

The draft model's logits go through the same sampling pipeline as the target's. The options draft_temperature and
draft_top_k replace the request's values, but only for draws of drafted tokens. The output's distribution does not
depend on these options, because verification knows the distribution of each drafted token. With draft_vocab only the
first ids of the tokenizer are drafted (shared/short_vocab.py); all other ids have probability 0 in the draft.

shared/model_drafter.py shows how the draft model runs, and shared/feeding.py how its cache follows the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import AUTO
from forerun.drafters import WITHOUT_MODEL, Drafter, Known, Needs, OwnCheckpoint, Target
from forerun.drafters.shared.draft_models import check_pair, holes, loaded, over
from forerun.drafters.shared.model_options import (
    PATH,
    QUANTIZATION,
    TEMPERATURE,
    TOP_K,
    VOCAB,
    check_temperature,
    head_rows,
    rounding,
)
from forerun.drafters.shared.searching import SEARCH
from forerun.text.tokenizer import compare


@dataclass(frozen=True)
class Options:
    """The options: the draft model, how its weights are kept in memory, and how tokens are drawn."""

    path: str | None = field(default=None, metadata=PATH)
    quantization: str = field(default=AUTO, metadata=QUANTIZATION)
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)
    search: str = field(default=WITHOUT_MODEL, metadata=SEARCH)

    def __post_init__(self) -> None:
        rounding(self.quantization)
        head_rows("model", self.draft_vocab)
        check_temperature("model", self.draft_temperature)


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the draft model to load. Raises VocabularyMismatch if its ids stand for other tokens."""
    if options.path is not None and target.tokenizer is not None:
        compare(target.tokenizer, target.open(options.path).text_tokenizer, str(options.path))
    return Needs(loads=OwnCheckpoint(options.path, rounding(options.quantization)))


def build(options: Options, target: Target) -> Drafter:
    """Load the draft model beside the target: same device and dtype, and the best operators for the draft model.

    Raises VocabularyMismatch if an id stands for one token in the target and for another token in the draft model. Ids
    that only one of the two models has are never drafted. End-of-sequence ids may differ, as between a chat model and a
    base model. Only the target's ids end the output. A draft goes on past the end-of-sequence ids of both models.
    """
    checkpoint = loaded("model", options, target)
    check_pair(checkpoint, target)
    drafter = over(checkpoint.model, target, options, holes(checkpoint, target))
    drafter.search_by(options.search, "model", target)
    return drafter
