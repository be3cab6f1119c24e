"""An engine around torch modules, assembled from a target, a drafter and a pacing policy."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun import drafters
from forerun.config import EngineConfig
from forerun.drafters import Target
from forerun.engine import router
from forerun.engine.engine import Engine, philox_coins
from forerun.engine.opened import Opened
from forerun.engine.request import Request
from forerun.errors import BadOption, VocabularyMismatch, shown
from forerun.functional.modules import ModuleModel
from forerun.models.loading import Checkpoint
from forerun.models.opened import OpenedCheckpoint
from forerun.models.runner import Runner
from forerun.pacing import Pacing
from forerun.sampling.arithmetic import Row
from forerun.text.tokenizer import Tokenizer
from forerun.types import Coins, Probs, SamplingParams, Sequence, StepReport

PREFILL_TOKENS = 512
CoinsOf = Callable[[Sequence], Coins]


@dataclass(frozen=True)
class Assembly:
    """An engine, and the models inside of it."""

    engine: Engine
    target: ModuleModel
    draft: ModuleModel | None = None
    models: list[ModuleModel] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", [self.target] + ([self.draft] if self.draft is not None else []))

    @contextmanager
    def request(self, inputs: Seq[int], params: SamplingParams) -> Iterator[list[Request]]:
        """Queue one input params.n times, yield the requests, and abort them afterwards.

        Raises UserError for an input or parameters that cannot be honoured.
        """
        for model in self.models:
            model.check(inputs)
        requests = self.engine.add_all(inputs, params)
        try:
            yield requests
        finally:
            for request in requests:
                self.engine.abort(request)

    def run(self, requests: Seq[Request]) -> None:
        """Step until these requests have ended. Raises the error that ended a request."""
        while any(request.seq.finish_reason is None for request in requests):
            self.engine.step()
        for request in requests:
            if request.error is not None:
                raise request.error


def assembled(
    target: ModuleModel,
    spec: str,
    draft: ModuleModel | None,
    pacing: Pacing,
    *,
    tokenizer: Tokenizer | None = None,
    end_ids: frozenset[int] = frozenset(),
    coins: CoinsOf = philox_coins,
    spares: bool = False,
    pad_token_id: int = 0,
) -> Assembly:
    """Make an engine that serves one request at a time.

    spec: a drafter's name with its options. draft: the draft model, for drafters that need one. spares: whether a
    drafter that raises is left out; if False, its errors are raised. pad_token_id: the first token of an
    encoder-decoder's output, where the module names no start token. Raises UserError for a drafter, or a pair of
    modules, that is not possible.
    """
    _check_pair(target, draft)
    config = EngineConfig(ops=target.ops.name, max_batch_size=1, max_seq_len=target.max_positions)
    opened = Opened(config, OpenedCheckpoint.in_memory(target, tokenizer, end_ids), draft is not None)
    wanted = drafters.wanted(spec, opened)
    method = next((drafter.method for drafter in wanted if drafter.needs.has_model), None)
    if draft is None and method is not None:
        raise BadOption(
            f"the drafter {method!r} needs a model of its own: give a module as draft, or a drafter without one, "
            "such as suffix, lookup or ngram"
        )
    holes = () if tokenizer is None else tuple(sorted(tokenizer.holes))
    of_drafters = Target(
        target, opened, target.vocab_size, holes, None if draft is None else _checkpoint(draft, tokenizer)
    )
    members = router.make([spec], of_drafters)
    members.spares = spares
    return Assembly(
        Engine(
            Runner(target, target.own_cache(), target.vocab_size, list(holes)),
            members,
            pacing,
            tokenizer=tokenizer,
            end_ids=end_ids,
            max_seq_len=target.max_positions,
            max_batch_size=1,
            prefill_chunk_tokens=PREFILL_TOKENS,
            max_num_batched_tokens=2 * PREFILL_TOKENS,
            coins=coins,
            start_ids=target.start_ids(pad_token_id),
        ),
        target,
        draft,
    )


def _checkpoint(draft: ModuleModel, tokenizer: Tokenizer | None) -> Checkpoint:
    """Return a draft module as a loaded checkpoint that has the target's tokenizer."""
    return Checkpoint(OpenedCheckpoint.in_memory(draft, tokenizer, name=draft.model_type), draft, tokenizer)  # type: ignore[arg-type]


def _check_pair(target: ModuleModel, draft: ModuleModel | None) -> None:
    """Raise UserError where the draft module cannot draft for the target."""
    if draft is None:
        return
    if target.is_encoder_decoder != draft.is_encoder_decoder:
        kinds = {True: "an encoder-decoder", False: "a causal module"}
        raise BadOption(
            f"the target is {kinds[target.is_encoder_decoder]} and the drafter {kinds[draft.is_encoder_decoder]}: "
            "take two of one kind"
        )
    if target.vocab_size != draft.vocab_size:
        raise VocabularyMismatch(
            f"the drafter has {draft.vocab_size} ids and the target {target.vocab_size}: take a drafter with the "
            "target's vocabulary; where one has padding behind it, give the tokenizer, which knows how many ids there "
            "are"
        )


def num_ids_of(tokenizer: Any) -> int | None:
    """Return 1 + the highest token id of a tokenizer of transformers; None without a tokenizer or a vocabulary."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return max(vocabulary.values()) + 1 if vocabulary else None


def as_ids(inputs: Any) -> list[int]:
    """Return token ids as a list of Python integers. Raises BadOption for anything but token ids."""
    if isinstance(inputs, torch.Tensor):
        inputs = inputs.reshape(-1).tolist()
    try:
        return [operator.index(token) for token in inputs]
    except TypeError:
        raise BadOption(
            f"inputs={shown(inputs)} is not possible: give a list of token ids, or a list of such lists"
        ) from None


def several(inputs: Any) -> bool:
    """Return whether `inputs` is a list of several inputs, and not one input."""
    if isinstance(inputs, torch.Tensor):
        return inputs.dim() > 1
    return bool(len(inputs)) and not isinstance(inputs, str) and hasattr(inputs[0], "__len__")


def warn_biased() -> None:
    """Warn that the output will not have the target's distribution."""
    warnings.warn(
        "skip_sample_adjustment=True is biased: corrections are drawn from the target's distribution and not from the "
        "residual, so that likely tokens become likelier; leave it out for the target's own distribution",
        UserWarning,
        stacklevel=3,
    )


class AfterTheFirst(Pacing):
    """A pacing policy that grants no drafts before the first token of an output. Then another policy decides."""

    def __init__(self, policy: Pacing) -> None:
        self.policy, self.reads_logits = policy, policy.reads_logits

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        granted = [most if seq.num_output_tokens else 0 for seq, most in zip(seqs, limits, strict=True)]
        return self.policy.budget(seqs, granted)

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        return self.policy.go_on(seq, depth, draft_probs, logits)

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        return self.policy.facts(seq)

    def observe(self, report: StepReport) -> None:
        self.policy.observe(report)

    def end(self, seq: Sequence) -> None:
        self.policy.end(seq)
