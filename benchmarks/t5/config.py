"""The options of a T5 that is trained: its sizes, and one run."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from forerun.blocks import Spec
from forerun.errors import BadOption
from forerun.models.families import t5
from forerun.registry import REQUIRED, check_fields, inherited, option
from forerun.train.config import LoopConfig, LossName, check_teacher


@dataclass(frozen=True)
class PairShape:
    """The sizes of a T5 of version 1.1, in elements; each part of a layer has `num_heads` heads of `head_size`."""

    hidden_size: int = option(256, "width of the residual stream, elements", min=1)
    encoder_layers: int = option(3, "layers of the encoder", min=1)
    decoder_layers: int = option(6, "layers of the decoder", min=1)
    num_heads: int = option(4, "heads of each attention", flag="--heads", min=1)
    head_size: int = option(64, "elements of a head", min=1)
    ffn_size: int = option(512, "width of the feed-forward blocks, elements", min=1)
    vocab_size: int = option(2048, "token ids; at least 258 if a tokenizer is trained", min=1)

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cache  # noqa: B019
    def spec(self) -> Spec:
        """Return the shape as a list of blocks."""
        return t5.read(
            {
                "d_model": self.hidden_size,
                "num_layers": self.encoder_layers,
                "num_decoder_layers": self.decoder_layers,
                "num_heads": self.num_heads,
                "d_kv": self.head_size,
                "d_ff": self.ffn_size,
                "vocab_size": self.vocab_size,
                "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False,
            }
        )


@dataclass(frozen=True, kw_only=True)
class PairConfig(LoopConfig):
    """One run of `benchmarks.t5 train`."""

    shape: PairShape
    data: tuple[Path, ...] = option(
        REQUIRED, "folder of `benchmarks.t5 examples`; one that is named twice is seen twice as often"
    )
    steps: int = inherited(LoopConfig, "steps", 4000)
    tokens_per_step: int = inherited(
        LoopConfig, "tokens_per_step", 2048, help="tokens of sources and targets of one batch at most, padding included"
    )
    seq_len_tokens: int = inherited(
        LoopConfig, "seq_len_tokens", 96, help="tokens of a source at most, which is cut; longer targets are left out"
    )
    warmup_steps: int = inherited(LoopConfig, "warmup_steps", 150)
    decay_share: float = inherited(LoopConfig, "decay_share", 0.5)
    validate_every_steps: int = inherited(LoopConfig, "validate_every_steps", 250)
    loss: LossName = option(
        "ce", "ce (the targets), kl (the teacher's distribution) or alpha (acceptance)", choices=get_args(LossName)
    )
    teacher: str | None = option(None, "the target model, for kl and alpha: a folder")
    init_from: Path | None = option(None, "checkpoint folder of the same sizes to start from")
    tokenizer: Path | None = option(None, "tokenizer.json to use", usual="the teacher's, else one is trained")
    validation_examples: int = option(400, "held-out examples of each folder in a validation")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_teacher(self.loss, self.teacher)
        if not self.data:
            raise BadOption("there is nothing to learn from: give --data FOLDER, which `benchmarks.t5 examples` makes")
