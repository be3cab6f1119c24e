"""The head of the drafter eagle as a model: its sizes, its weights, and the spec that backends compute.

Specs of one form describe the heads of `forerun train head`, of EAGLE-1 and 2, and of EAGLE-3 and 3.1. These heads
differ in a few switches of EagleConfig, and in their norms, biases and matrices. The names of a head's weights show
which norms, biases and matrices the head has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from forerun.blocks import EMBEDDING, HEAD, SIDES, Features, Spec, weight_shapes
from forerun.config import Quantization
from forerun.drafters.shared.head_matrices import Weight, loadable
from forerun.errors import UnsupportedModel, shown
from forerun.host_tensor import HostTensor
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from forerun.ops import load_model
from forerun.ops.model import Model
from forerun.ops.passes import Lent
from forerun.sampling.largest import Ids

OWN_EMBEDDING, OWN_HEAD = "embed_tokens.weight", HEAD  # names of the embedding and LM head that a head may bring along


class HeadModel(Model, Protocol):
    """A model that reads tokens, each together with a row of features made of the target's hidden states.

    feeds_itself: whether `run_ahead` feeds the model's own output rows to its next steps.
    """

    feeds_itself: bool

    def features(self, layer_rows: Seq[Any]) -> Any:
        """Return features [n, H]. layer_rows: the target's rows [n, size] after each layer in EagleConfig.layers."""


@dataclass(frozen=True)
class EagleConfig:
    """The sizes and switches of a head.

    decoder: the head's layers, as the spec of a decoder with tied embeddings over the ids that the head drafts. layers:
    the target's layers after which the head reads the residual stream; () = the head reads the rows after the target's
    final norm. The other fields are for published heads. target_size: the width of the target's rows; None = the head's
    width. norm_before_residual: whether the residual stream begins with the normed features. norm_output: whether the
    next step's features are the rows after the head's final norm (EAGLE 3.1); False = the rows before it.
    """

    decoder: Spec
    layers: tuple[int, ...]
    target_size: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def reads_size(self) -> int:
        """The width of the target's rows."""
        return self.target_size or self.decoder.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return the entries of config.json. As in published EAGLE-3 heads, layer id j means the input of layer j."""
        keys = {"architectures": ["ForerunEagle"], "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return {**config_to_dict(self.decoder), **keys}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Make the config from entries of `to_json`. Raises UnsupportedModel for settings that are not supported."""
        rest = dict(raw)
        layers = rest.pop("eagle_aux_hidden_state_layer_ids", None)
        if not isinstance(layers, list) or not layers or not all(type(k) is int and k >= 0 for k in layers):
            raise UnsupportedModel(
                f"config.json has eagle_aux_hidden_state_layer_ids={shown(str(layers))}: it must list layers"
            )
        config = cls(read_config(rest), tuple(layers))
        if config.decoder.num_layers != 1:
            raise UnsupportedModel(f"config.json has num_hidden_layers={config.decoder.num_layers}: a head has 1")
        return config


def input_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that make the decoder layer's input, by name.

    fc_norm: the norms of the target's rows, before `fc` joins the rows. embedding_norm, hidden_norm: the norms of the
    embedding and of the features, before `input` joins both.
    """
    h, num = config.decoder.hidden_size, len(config.layers)
    norms = {f"{name}.weight": (h,) for name in (*(f"fc_norm.{i}" for i in range(num)), *SIDES)}
    return {**norms, "fc.weight": (h, h * num), "input.weight": (h, 2 * h)}


def layer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of the decoder layer and of the norm after it, by name."""
    return {name: shape for name, shape in weight_shapes(config.decoder).items() if name != EMBEDDING}


def spec_of(config: EagleConfig, weights: Collection[str], target: Model, num_embeddings: int | None) -> Spec:
    """Return the spec of a head: its decoder, and the features from which the decoder's input is made.

    weights: the names of the head's weights, which show the parts that the head has. num_embeddings: the number of rows
    of the head's own embedding; None = the head uses the target's embedding.
    """
    decoder, own_head, first = config.decoder, HEAD in weights, config.decoder.blocks[0]
    features = Features(
        target.config.vocab_size if num_embeddings is None else num_embeddings,
        config.reads_size,
        num=max(1, len(config.layers)),
        joined="fc.weight" in weights,
        row_norms="fc_norm.0.weight" in weights,
        whole_norm="input_norm.weight" in weights,
        side_norms=f"{SIDES[0]}.weight" in weights,
        input="product" if "input.weight" in weights else "read",
        input_bias="input.bias" in weights,
        normed_stream=config.norm_before_residual,
        feeds="normed" if config.norm_output else "stream",
        eps=0.0 if first.pre_mlp is None else first.pre_mlp.eps,
    )
    lends = target.config if not own_head and isinstance(target.config, Spec) else decoder
    return replace(
        decoder,
        tied=False,
        head=own_head,
        own_embedding=num_embeddings is not None,
        embed_scale=1.0,
        logit_scale=lends.logit_scale,
        logit_softcap=lends.logit_softcap,
        features=features,
    )


def make(
    config: EagleConfig,
    weights: Mapping[str, Weight],
    ids: Ids,
    target: Model,
    rounded: Quantization | None,
    *,
    lends_head: bool,
) -> HeadModel:
    """Load a head with the target's operators.

    weights: under our names (`input_shapes`, `layer_shapes`), not under the names of published heads. ids [n]: the
    target's token id for each token id of the head. rounded: the format to which matrices are rounded; None = no
    rounding. lends_head: for a head without an LM head. True = the head uses the target's whole LM head, and then `ids`
    must be 0 to n - 1. False = the head copies the LM head's rows for `ids`.
    """
    named = {EMBEDDING if name == OWN_EMBEDDING else name: weight for name, weight in weights.items()}
    if HEAD not in named and not lends_head:
        named[HEAD] = HostTensor.of(target.head(ids.tolist()))
    embedding = named.get(EMBEDDING)
    spec = spec_of(config, named, target, None if embedding is None else embedding.shape[0])
    lent = Lent(target, ids.tolist())
    ready = loadable(spec, named, target, rounded)
    return cast(HeadModel, load_model(spec, ready, target.ops, device=target.device, lent=lent))
