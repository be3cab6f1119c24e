"""Exact enumeration of a whole engine on a toy model: every outcome of every coin, with its probability.

`spoken` runs the real engine with Branching coins and sums the probability of each output. `plain_outputs` multiplies
the target's own probabilities, which a second sampling pipeline computes in plain Python. A rule is lossless if both
agree to the last bits of float64 (docs/exactness.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from forerun import pacing
from forerun.config import EngineConfig
from forerun.drafters import Drafter, Target
from forerun.engine.engine import Engine
from forerun.engine.opened import Opened
from forerun.engine.router import Router
from forerun.errors import InternalError
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.opened import OpenedCheckpoint
from forerun.models.runner import Runner
from forerun.models.toy import ToyModel, ToyTable
from forerun.registry import load, make_options
from forerun.testing.coins import Branching, enumerate_outcomes
from forerun.testing.rules import Outputs, total_variation
from forerun.text.tokenizer import Tokenizer
from forerun.types import FORCED, Coins, SamplingParams, Sequence, StepReport

V, HORIZON = 3, 3
PROMPT = (0, 1, 2, 0, 1)  # its last two tokens occurred before, so lookup has a guess
SPACE_TOKENS = 32
TARGET = ToyModel(V, 1)  # shared by most cases: its table is made once

Wrap = Callable[[Coins], Coins]
Ways = list[tuple[float, tuple[tuple[int, ...], list[StepReport]]]]  # probability, (output, reports)
Needs = Callable[[str, Target], Mapping[str, Any]]  # (drafter, target) -> options that the drafter cannot do without


def nothing(drafter: str, target: Target) -> Mapping[str, Any]:
    """Return no options, for a drafter that needs none."""
    return {}


class Letters:
    """A tokenizer in which each id is a letter: 0 is a, 1 is b. Special ids, which end a text, are no letters."""

    def __init__(self, num_ids: int, special_ids: frozenset[int]) -> None:
        self.special_ids = special_ids
        self.token_bytes = [chr(97 + token).encode() for token in range(num_ids)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text's letters. Other characters have no id and are left out."""
        ids = [ord(letter) - 97 for letter in text]
        return [token for token in ids if 0 <= token < len(self.token_bytes) and token not in self.special_ids]


letters = functools.cache(Letters)  # cached, because a grammar is compiled once for each tokenizer


@dataclass(frozen=True)
class Case:
    """The description of one engine and one request.

    params: the request's parameters; a choice of texts is written in the letters of `Letters`. options: the drafter's
    options. near: the draft model, for drafters that need one; None = resembling(target). prompt: the request's prompt;
    for an encoder-decoder, the beginning of the output, because the request's prompt is then the encoder's input
    (`target.source`). bad_words: sequences of ids that must not be completed; a tokenizer would make them from words.
    tokenizers: the tokenizers of target and draft model. unwritten: ids that drafts must not contain. forced: whether
    tokens to which a choice leaves no alternative are drafted, too, before and after the drafter's own tokens. needs: a
    function that returns options without which the drafter cannot be built.
    """

    drafter: str
    params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    target: ToyModel = TARGET
    near: ToyModel | None = None
    gamma: int = 2
    pacing: str = "fixed"
    end_ids: frozenset[int] = frozenset()
    prompt: tuple[int, ...] = PROMPT
    bad_words: tuple[tuple[int, ...], ...] = ()
    tokenizers: tuple[Any, Any] = (None, None)
    unwritten: frozenset[int] = frozenset()
    forced: bool = False
    needs: Needs = nothing


@functools.cache
def resembling(target: ToyModel, seed: int = 2, distance: float = 0.7) -> ToyModel:
    """Return a draft model that agrees with the target most of the time."""
    return ToyModel(
        target.config.vocab_size,
        seed,
        ToyTable(distance=distance),
        near=target,
        dtype=target.weight_dtype,
        source=target.source,
    )


def runner_for(model: ToyModel) -> Runner:
    """Return a runner of a toy model, with a cache whose memory is full of wrong rows at first (`spoil`)."""
    cache = BlockCache.of(model, "paged", max_batch_size=2, max_seq_len=SPACE_TOKENS)
    spoil(cache)
    return Runner(model, cache)


def spoil(cache: Any) -> None:
    """Fill a new cache with -1, because rows of an earlier engine would hide that a row was never written."""
    for part in cache.pools.tensors():
        numbers = part.values if isinstance(part, HostTensor) else part
        numbers[...] = -1


def checkpoint_of(model: Any) -> Checkpoint:
    """Return a checkpoint of a model in memory, as if the model had been loaded."""
    return Checkpoint(OpenedCheckpoint.in_memory(model.config, name="draft"), model)


def target_for(
    model: Any,
    tokenizer: Tokenizer | None = None,
    end_ids: Collection[int] = (),
    num_ids: int | None = None,
    holes: tuple[int, ...] = (),
    loaded_draft: Checkpoint | None = None,
    **options: Any,
) -> Target:
    """Return the Target that drafters get for a model in memory, as if the model had been opened.

    num_ids: the number of ids; None = as Target.of counts them. options: options of the engine. By default, draft
    models get the operators of this model.
    """
    config = EngineConfig(**{"ops": model.ops.name, "max_batch_size": 8, "max_seq_len": 256, **options})
    opened = Opened(config, OpenedCheckpoint.in_memory(model.config, tokenizer, end_ids), loaded_draft is not None)
    if num_ids is None:
        return Target.of(model, opened, loaded_draft)
    return Target(model, opened, num_ids, holes, loaded_draft)


def everyone(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all drafters inside of it."""
    yield drafter
    for member in getattr(drafter, "members", ()):
        yield from everyone(member)


def drafter_for(case: Case) -> Drafter:
    """Build the drafter of a case. A draft model, by itself or inside of another drafter, is a toy model."""
    near = case.near or resembling(case.target)
    size = case.target.config.vocab_size
    texts, own_texts = case.tokenizers
    draft = replace(checkpoint_of(near), tokenizer=own_texts)
    target = target_for(
        case.target, texts, case.end_ids, size, loaded_draft=draft, max_batch_size=2, max_seq_len=SPACE_TOKENS
    )
    module = load("forerun.drafters", case.drafter, "drafter")
    options = make_options(module.Options, {**case.needs(case.drafter, target), **case.options}, case.drafter)
    drafter: Drafter = module.build(options, target)
    for each in everyone(drafter):
        each.clock = _ticking()  # the same coins must lead to the same draft
        if each.runner is not None:
            spoil(each.runner.cache)
    return drafter


def _ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


def steady(policy: pacing.Pacing) -> pacing.Pacing:
    """Make a policy see made-up step times that follow from counts alone, so that equal coins give equal drafts."""
    observe = policy.observe

    def told(report: StepReport) -> None:
        seconds = {name: 1e-4 * (1 + step.num_nodes) for name, step in report.drafts.items()}
        drafts = {name: replace(step, seconds=seconds[name], catchup_s=0.0) for name, step in report.drafts.items()}
        steps_s = sum(seconds.values())
        score_s = 1e-3 * (4 + report.num_rows)
        observe(replace(report, draft_s=steps_s, drafts=drafts, score_s=score_s, judge_s=1e-4, commit_s=1e-4))

    policy.observe = told  # type: ignore[method-assign]
    return policy


def engine_for(case: Case, coins: Callable[[Sequence], Coins]) -> Engine:
    """Return a new engine for the request of a case."""
    members = Router({"drafter": drafter_for(case)})
    if case.forced:
        members.members[FORCED] = drafter_for(replace(case, drafter=FORCED, options={}))
    members.unwritten = case.unwritten
    return Engine(
        runner_for(case.target),
        members,
        steady(pacing.make(case.pacing, case.gamma)),
        end_ids=case.end_ids,
        max_seq_len=SPACE_TOKENS,
        max_batch_size=2,
        coins=coins,
        start_ids=case.prompt if case.target.source else (),
        tokenizer=_letters_of(case),
    )


def _letters_of(case: Case) -> Any:
    """Return the tokenizer of a case with a choice; None for any other case, which needs only ids."""
    return letters(case.target.config.vocab_size, case.end_ids) if case.params.choice else None


def generate(case: Case, coins: Callable[[Sequence], Coins]) -> tuple[tuple[int, ...], list[StepReport]]:
    """Run one request to its end on a new engine. Return the output, and the reports of the steps that decoded.

    Raises the error of a failed request, and InternalError if the drafter failed and the engine went on without a
    drafter.
    """
    engine = engine_for(case, coins)
    drafter = engine.drafter.first
    reports: list[StepReport] = []
    engine.listen(reports.append)
    (request,) = engine.make(case.target.source or case.prompt, case.params)
    request.seq.bad_word_ids = case.bad_words
    engine.queue([request])
    while request.seq.finish_reason is None:
        engine.step()
    if request.error is not None:
        raise request.error
    if engine.drafter.first is not drafter:
        raise InternalError(f"the drafter {case.drafter!r} failed, and its request was decoded plainly")
    return tuple(request.seq.output_ids), [r for r in reports if r.num_decoding]


def as_they_are(coins: Coins) -> Coins:
    """Return the coins unchanged."""
    return coins


def every_way(case: Case, wrap: Wrap = as_they_are) -> Ways:
    """Return (probability, (output, reports)) of the engine for all outcomes of its coins."""

    def run(way: Branching) -> tuple[tuple[int, ...], list[StepReport]]:
        return generate(case, lambda seq: wrap(way.at(len(seq.tokens))))

    return enumerate_outcomes(run)


def spoken(case: Case, wrap: Wrap = as_they_are) -> Outputs:
    """Return the probability of each output of the real engine."""
    return summed(every_way(case, wrap))


def summed(ways: Ways) -> Outputs:
    """Return the probability of each output, from the result of `every_way`."""
    outputs: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, (output, _) in ways:
        outputs[output] += weight
    return outputs


def error(case: Case, wrap: Wrap = as_they_are) -> float:
    """Return the total variation between the outputs of the engine and of plain decoding."""
    return total_variation(spoken(case, wrap), plain_outputs(case))


# ------------------------------------------------------------------------------------------------ the second pipeline


def plain_outputs(case: Case) -> Outputs:
    """Return the probability of each output of plain decoding: the product of the target's probabilities."""
    if case.params.max_tokens is None:
        raise InternalError("outputs without an end cannot be enumerated: give max_tokens")
    outputs: dict[tuple[int, ...], float] = {}
    open_outputs: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_outputs:
        output, weight = open_outputs.pop()
        if (
            len(output) == case.params.max_tokens
            or (output and output[-1] in case.end_ids)
            or is_whole(case.params, output)
        ):
            outputs[output] = weight
            continue
        logits = case.target.logits_after([*case.prompt, *output]).tolist()
        probs = second_pipeline(logits, case.params, case.prompt, output, case.end_ids, case.bad_words)
        open_outputs += [((*output, x), weight * p) for x, p in enumerate(probs) if p > 0]
    return outputs


def is_whole(params: SamplingParams, output: Seq[int]) -> bool:
    """Return whether an output is a text of the choice, and not the beginning of another text of the choice."""
    text = _spelled(output)
    return text in params.choice and not any(one != text and one.startswith(text) for one in params.choice)


def _spelled(output: Seq[int]) -> str:
    return "".join(chr(97 + token) for token in output)


def second_pipeline(
    logits: Seq[float],
    params: SamplingParams,
    prompt: Seq[int],
    output: Seq[int],
    end_ids: Seq[int] | frozenset[int],
    bad_words: Seq[tuple[int, ...]] = (),
) -> list[float]:
    """Return the weights [V] that `forerun.sampling.probs` computes, by separate code with lists and full sorts."""
    if params.forced_eos_token_id is not None and len(output) + 1 == params.max_tokens:
        return [float(x == params.forced_eos_token_id) for x in range(len(logits))]
    z = list(logits)
    for x, bias in (params.logit_bias or {}).items():
        z[x] += bias
    for x in {*prompt, *output}:
        z[x] = z[x] / params.repetition_penalty if z[x] > 0 else z[x] * params.repetition_penalty
    for x in set(output):
        z[x] -= params.presence_penalty + params.frequency_penalty * list(output).count(x)
    said = [*prompt, *output]
    for word in bad_words:
        if said[len(said) - len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -math.inf
    for x in range(len(z)) if params.choice else ():
        text = _spelled(output) + (chr(97 + x) if x not in end_ids else "")
        is_right = text in params.choice if x in end_ids else any(one.startswith(text) for one in params.choice)
        z[x] = z[x] if is_right else -math.inf
    for x in end_ids:
        z[x] = -math.inf if len(output) < params.min_tokens else z[x]
    largest = max(z)
    z = [value - largest for value in z]  # before the sort, as in the pipeline: rounding may tie logits
    order = sorted(range(len(z)), key=lambda x: (-z[x], x))
    if params.temperature == 0:
        return [float(x == order[0]) for x in range(len(z))]
    weight = [math.exp(value / params.temperature) for value in z]
    kept = order[: params.top_k or None]
    kept = [x for x in kept if weight[x] >= params.min_p * weight[order[0]]]
    mass, prefix = 0.0, []
    for x in kept:
        if mass < params.top_p * sum(weight[y] for y in kept) or params.top_p == 1:
            prefix.append(x)
            mass += weight[x]
    return [weight[x] / mass if x in prefix else 0.0 for x in range(len(z))]
