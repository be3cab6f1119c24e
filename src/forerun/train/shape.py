"""Defines the sizes of a model to train, which are options of `forerun train lm`. This file does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption
from forerun.registry import check_fields, option

if TYPE_CHECKING:
    from forerun.blocks import Spec

LLAMA = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "max_positions": "max_position_embeddings",
}
# For each family that can be trained: the names of the sizes in its config.json, and in FIXED the other entries.
SIZES: Mapping[str, Mapping[str, str]] = {
    "llama": LLAMA,
    "gpt2": {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "ffn_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
    },
    "qwen3_moe": {
        **LLAMA,
        "ffn_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "num_chosen": "num_experts_per_tok",
    },
    "qwen3_5_text": LLAMA,
}
FIXED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "gpt2": {"layer_norm_epsilon": 1e-5},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "norm_topk_prob": True},
    "qwen3_5_text": {"rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4},
}
# The entries of config.json for the number and size of heads with states; both are as for the query heads.
STATE_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
STATE_DIMS = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
INTERVAL = 4  # layers from one with attention to the next, in a family with states


@dataclass(frozen=True)
class ModelShape:
    """Describes the sizes of a decoder with tied embeddings. An attention head has hidden_size / num_heads elements.

    family: llama, gpt2, qwen3_moe or qwen3_5_text. A gpt2 learns an embedding for each of its max_positions positions,
    and has as many key-value heads as query heads. In a qwen3_moe, each row uses num_chosen of num_experts experts, and
    each expert has the feed-forward width ffn_size. In a qwen3_5_text, every fourth layer has attention. The other
    layers keep a recurrent state, with num_heads heads.
    """

    hidden_size: int = option(512, "width of the residual stream, elements", min=1)
    num_layers: int = option(6, "decoder layers", min=1, flag="--layers")
    num_heads: int = option(8, "query heads, each of hidden-size / heads elements", min=1, flag="--heads")
    num_kv_heads: int = option(2, "key-value heads", min=1, flag="--kv-heads", usual="2, and of gpt2 all heads")
    ffn_size: int = option(1536, "width of the feed-forward block, elements", min=1)
    vocab_size: int = option(
        4096, "token ids; at least 257 if a tokenizer is trained", min=1, usual="the teacher's, else 4096"
    )
    rope_theta: float = 10000.0
    max_positions: int = 2048
    family: str = option(
        "llama",
        "llama; gpt2: layer norms, GELU, biases, learned positions (seq-len-tokens of them); qwen3_moe, a mixture of "
        "experts; or qwen3_5_text, in which every fourth layer has attention and the others keep a state",
        choices=tuple(SIZES),
    )
    num_experts: int = option(0, "of a mixture: experts of a layer, each of ffn-size", flag="--experts")
    num_chosen: int = option(0, "of a mixture: how many of them each token takes", flag="--experts-per-token")

    def __post_init__(self) -> None:
        check_fields(self)
        if "num_experts" in SIZES[self.family]:
            if not 1 <= self.num_chosen <= self.num_experts:
                raise BadOption(
                    f"each row of a {self.family} takes some of its experts, not {self.num_chosen} of "
                    f"{self.num_experts}: give --experts 8 --experts-per-token 2"
                )
        elif self.num_experts or self.num_chosen:
            raise BadOption(f"a {self.family} has no experts: leave those options out, or say --family qwen3_moe")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise BadOption(
                f"{self.num_heads} query heads must divide hidden size {self.hidden_size} and be a multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        if "num_kv_heads" not in SIZES[self.family] and self.num_kv_heads != self.num_heads:
            raise BadOption(
                f"a {self.family} has as many key-value heads as its {self.num_heads} query heads, not "
                f"{self.num_kv_heads}: leave --kv-heads out"
            )

        if self.has_states and self.num_layers < INTERVAL:
            raise BadOption(
                f"every {INTERVAL}th layer of a {self.family} has attention, and {self.num_layers} layers are fewer: "
                f"give --layers {INTERVAL}, or more"
            )

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state in place of keys and values."""
        return self.family == "qwen3_5_text"

    @classmethod
    def given(cls, sizes: Mapping[str, Any], seq_len_tokens: int) -> ModelShape:
        """Return the shape for the sizes that a user gave to a command; other sizes have their defaults.

        sizes: by the names of the fields. A gpt2 gets seq_len_tokens positions, and as many key-value heads as query
        heads, unless `sizes` has other values.
        """
        of_family = {}
        if sizes.get("family") == "gpt2":
            of_family = {"num_kv_heads": sizes.get("num_heads", cls.num_heads), "max_positions": seq_len_tokens}
        return cls(**{**of_family, **sizes})

    def spec(self) -> Spec:
        """Return the spec of a model with this shape, as the model's family defines it."""
        from forerun.models.families import family

        sizes = {key: getattr(self, name) for name, key in SIZES[self.family].items()}
        more = {"model_type": self.family, "tie_word_embeddings": True, **FIXED[self.family]}
        if self.has_states:
            dim = self.hidden_size // self.num_heads
            more |= dict.fromkeys(STATE_HEADS, self.num_heads) | dict.fromkeys(STATE_DIMS, dim)
        return family(self.family).read(sizes | more)

    @property
    def num_parameters(self) -> int:
        """The number of weights, with the tied embedding counted once."""
        return self.spec().num_weights
