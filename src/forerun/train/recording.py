"""Records a target's hidden states while the target generates texts, so that training need not run the texts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun.drafters import Drafter, Seen, Target
from forerun.engine.llm import LLM
from forerun.errors import InternalError
from forerun.train.features import FeatureFile, Features, Recomputed, Stored, best_of, facts_of, features_of
from forerun.train.samples import Samples
from forerun.types import Budget, Coins, Draft, Sequence


class Recorder(Drafter):
    """A drafter that drafts nothing, and stores the features of each sequence until `take` is called for the sequence.

    layers: the layers after which the residual stream is stored, in this order.
    """

    draws = "point"

    def __init__(self, target: Target, layers: Seq[int]) -> None:
        self._model = target.model
        self._layers = layers
        self.hidden_layers = tuple(sorted(set(layers)))
        self._parts: dict[int, list[Features]] = {}

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.empty(len(seqs))

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        return 0

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, own in zip(seqs, seen, strict=True):
            if not len(own.kept):
                continue
            if own.start == 0:  # the first time, or once more, where it had to give way to others
                self._parts[seq.id] = []
            best = own.best
            if len(best) != len(own.kept):  # a prompt's rows were not scored
                best = best_of(self._model, own.hidden)
            taps = [own.layer(k) for k in self._layers]
            self._parts[seq.id].append(features_of(self._model, taps, own.hidden, best))

    def take(self, seq_id: int, num_tokens: int) -> Features:
        """Return the features of a sequence's first `num_tokens` tokens, and forget the sequence.

        If the last token of the sequence was not run, its features are zeros. Raises InternalError where features of
        other tokens are missing.
        """
        seen = Features.joined(self._parts.pop(seq_id))
        rows = [torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[:num_tokens] for tensor in seen.tensors]
        if len(rows[0]) != num_tokens:
            raise InternalError(f"{len(rows[0])} of {num_tokens} tokens of a text were seen while it was written")
        return Features(*rows)


@dataclass
class Recording:
    """Stores the features of samples in a folder, while the samples are written. layers: see Recorder.

    say: called while missing features are computed, with the number of texts that have features, and the number of all
    texts.
    """

    folder: Path
    layers: Seq[int]
    say: Callable[[int, int], None] = lambda num, of: None
    recorder: Recorder | None = field(default=None, init=False)
    file: FeatureFile | None = field(default=None, init=False)

    def make(self, target: Target) -> Drafter:
        """Make the drafter that records features. Pass this method to LLM as the option `draft`."""
        self.recorder = Recorder(target, self.layers)
        return self.recorder

    def begin(self, llm: LLM, samples: Samples) -> None:
        """Open the folder, and compute the missing features of the existing samples `samples`."""
        model = llm.checkpoint.model
        longest = max((len(sample.ids) for sample in samples.samples), default=1)
        facts = facts_of(model, samples.options)
        source = Recomputed(model, self.layers, longest)
        self.file = Stored(self.folder, samples.samples, source, self.layers, facts, self.say).file
        llm.engine.drafter.spares = False  # an error ends the run: no text is stored without its features

    def write(self, start: int, features: Features) -> None:
        """Store the features of the next sample. start: the number of tokens in all samples before it."""
        assert self.file is not None
        self.file.write(start, features)

    def take(self, seq_id: int, num_tokens: int) -> Features:
        """Return the features of a sequence's first `num_tokens` tokens (see `Recorder.take`)."""
        assert self.recorder is not None
        return self.recorder.take(seq_id, num_tokens)
