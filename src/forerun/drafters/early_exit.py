"""Some layers of the target as the draft model: its first layers, or the layers that a search has chosen.

After these layers come the target's final norm and LM head. LayerSkip exits early in this way (Elhoushi et al. 2024,
arXiv 2404.16710), and Draft & Verify skips layers (Zhang et al. 2023, arXiv 2309.08168). The weights are the target's
own, so they take no further memory. The draft model has its own KV cache for the layers that it runs. The target cannot
use these keys and values: skipped layers have none, and layers after a skipped layer compute theirs from inputs that
differ from the target's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.blocks import Spec, missing_keys
from forerun.config import AUTO
from forerun.drafters import Drafter, Known, Needs, OwnModel, Target
from forerun.drafters.shared import artifacts
from forerun.drafters.shared.draft_models import over
from forerun.drafters.shared.model_options import TEMPERATURE, TOP_K, VOCAB, check_temperature, head_rows
from forerun.errors import BadOption, shown
from forerun.registry import option, parse_list

KIND = "skip"  # the kind of the file that `forerun train skip` writes


@dataclass(frozen=True)
class Options:
    """The options: the layers of the draft model, and how tokens are drawn."""

    layers: int | None = option(None, "number of first layers that draft; none = a third", min=1)
    path: str | None = option(None, "file of `forerun train skip` with the layers that draft; none = the first ones")
    skip: str | None = option(None, "layers that do not draft, counted from 0, with + between, as in 3+7+11")
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)

    def __post_init__(self) -> None:
        check_temperature("early_exit", self.draft_temperature)
        head_rows("early_exit", self.draft_vocab)
        given = [f"early_exit:{name}" for name in ("layers", "path", "skip") if getattr(self, name) is not None]
        if len(given) > 1:
            raise BadOption(f"{' and '.join(given)} all choose layers: give one of them")
        if self.skip is not None:
            _skipped(self.skip)


def _skipped(text: str) -> set[int]:
    """Return the layer numbers in a text such as 3+7+11. Raises BadOption for other texts, and for repeated numbers."""
    numbers = [int(part) if re.fullmatch("[0-9]{1,4}", part) else -1 for part in parse_list(text)]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise BadOption(f"early_exit:skip={shown(text)} is not possible: write each layer once, as in 3+7+11")
    return set(numbers)


def chosen(options: Options, num_layers: int, fingerprint: str | None = None) -> Seq[int]:
    """Return the layers that draft, out of a target's `num_layers` layers, as ascending indices.

    fingerprint: the fingerprint of the target's ids that a file must name; None = not compared. Raises the errors of
    `artifacts.load`, and BadOption if a layer does not exist in the target, if no layer is left, or if a file was
    fitted for another number of layers.
    """
    if options.skip is not None:
        skipped = _skipped(options.skip)
        layers = [i for i in range(num_layers) if i not in skipped]
        if not layers or len(layers) + len(skipped) > num_layers:
            raise BadOption(
                f"early_exit:skip={shown(options.skip)} is not possible: the target has the layers 0 to "
                f"{num_layers - 1}, and one of them must draft"
            )
        return layers
    if options.path is None:
        num = max(1, round(num_layers / 3)) if options.layers is None else options.layers
        if num > num_layers:
            raise BadOption(f"early_exit:layers={num} is not possible: the target has {num_layers}")
        return range(num)
    arrays, facts = artifacts.load(options.path, KIND, fingerprint)
    if facts.get("num_layers") != str(num_layers):
        raise BadOption(
            f"{shown(options.path)} was fitted for a target of {facts.get('num_layers')} layers, and this one has "
            f"{num_layers}: fit it again with `forerun train {KIND}` and this target"
        )
    return [int(i) for i in arrays["layers"]]


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: a draft model made of some of the target's layers. Raises the errors of `chosen`."""
    return Needs(makes=OwnModel(layers=tuple(chosen(options, target.num_layers, target.fingerprint))))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises the errors of `chosen`, and BadOption if a layer needs the keys of a left-out layer."""
    fingerprint = artifacts.fingerprint(target.tokenizer, target.num_ids)
    layers = chosen(options, target.model.config.cache_shape.num_layers, fingerprint)
    config = target.model.config
    if isinstance(config, Spec) and (missing := missing_keys(config, layers)):
        layer, other = next(iter(missing.items()))
        raise BadOption(
            f"early_exit cannot draft with these layers: layer {layer} reads the keys of layer {other}, which is not "
            "among them: choose others, or another drafter"
        )
    return over(target.model, target, options, target.holes, layers)
