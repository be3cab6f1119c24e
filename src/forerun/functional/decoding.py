"""Generation with modules that are given as objects: speculative, autoregressive, with n-grams, and by beam search.

The signatures follow a published toolkit for speculative decoding. The engine does the work, with its step, rules,
sampling pipeline and policies. modules.py gives a module the engine's interface for models.

The toolkit's errors are mended. With use_cache=True only the tokens that the cache lacks are run, and the cache is cut
to the accepted tokens. An end id inside a draft ends the output there. The draft never depends on the length of an
encoder's input. The acceptance rate is accepted / drafted, which is not alpha (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun import pacing
from forerun.engine.engine import philox_coins
from forerun.errors import BadOption, PromptTooLong, shown
from forerun.functional.engines import (
    AfterTheFirst,
    Assembly,
    CoinsOf,
    as_ids,
    assembled,
    num_ids_of,
    several,
    warn_biased,
)
from forerun.functional.modules import ModuleModel
from forerun.functional.printing import DebugPrinter
from forerun.functional.processors import Draws, GreedyProcessor, LogitsProcessor, SampledCoins
from forerun.pacing import Pacing
from forerun.types import Coins, SamplingParams, Sequence

MAX_GAMMA = 64
UNADJUSTED = "lenience:l=1,correction=target"
Ids = list[int] | list[list[int]]


def speculative_generate(
    inputs: Seq[int] | Seq[Seq[int]],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008 - it has no state
    max_gen_len: int = 40,
    eos_tokens_id: int | Seq[int] | None = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    coins: CoinsOf | None = None,
) -> tuple[Any, Any]:
    """Generate from `target` with the drafts of `drafter` (Leviathan et al. 2023; Chen et al. 2023).

    The output has exactly the distribution of `target` with this processor. Greedy output is the target's greedy
    output.

    Args:
        inputs: token ids, or a list of such lists. Each list has an output of its own.
        drafter: a module with config.vocab_size. It is causal or an encoder-decoder, as the target is.
        target: the module that the output comes from. Target and drafter may be on different devices.
        tokenizer: a tokenizer of transformers. It spells tokens for `debug`, and tells how many ids have a token, where
            the vocabulary of the modules is padded.
        gamma: the number of tokens drafted per round, 1 to 64; fewer near the end of the output.
        use_egag: set the draft length by the entropy of the drafter's first distribution (forerun/pacing/entropy.py),
            from gamma_min to gamma_max tokens. gamma_max=None stands for gamma. egag_ema_beta smooths the entropy over
            the rounds.
        logits_processor: how a token is drawn, by drafter and target alike.
        max_gen_len: the most tokens to generate; fewer where the target has too few positions.
        eos_tokens_id: the ids that end the output; None = no id ends it. The output keeps the id that ended it.
        pad_token_id: the first token of an encoder-decoder's output, if its configuration names no start token. It is
            never used as padding.
        use_cache: keep keys and values between passes. The output is the same up to the rounding of the module.
        skip_sample_adjustment: draw corrections from the target's distribution and not from the residual. This biases
            the output, and causes a warning.
        first_target: draw the first token from the target before anything is drafted.
        debug: print every round.
        coins: a function from a sequence to the random decisions of its next round (docs/exactness.md); None = Philox,
            with a seed drawn by torch's global generator.

    Returns (ids, acceptance rate), or for several inputs a list of ids and a list of rates. The rate is 0.0 where
    nothing was drafted. Raises UserError for arguments that cannot be honoured, before anything runs.
    """
    call = _Call(logits_processor, max_gen_len, eos_tokens_id, pad_token_id, use_cache, tokenizer, debug, coins)
    drafted = call.module(drafter, "drafter")
    policy = _egag(gamma, gamma_min, gamma_max, egag_ema_beta) if use_egag else _fixed(gamma)
    if skip_sample_adjustment:
        warn_biased()
    policy = AfterTheFirst(policy) if first_target else policy
    target = call.module(target, "target")
    return _Task(call, target, policy, "model", drafted, is_unadjusted=skip_sample_adjustment).run(inputs)


def autoregressive_generate(
    inputs: Seq[int] | Seq[Seq[int]],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008 - it has no state
    eos_tokens_id: int | Seq[int] | None = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    tokenizer: Any = None,
    coins: CoinsOf | None = None,
) -> Any:
    """Generate token by token, without drafts. Returns the ids, or a list of outputs for several inputs.

    The arguments are as in `speculative_generate`.
    """
    call = _Call(logits_processor, max_gen_len, eos_tokens_id, pad_token_id, use_cache, tokenizer, debug, coins)
    ids, _ = _Task(call, call.module(model, "model"), _fixed(1)).run(inputs)
    return ids


def ngram_assisted_speculative_generate(
    inputs: Seq[int] | Seq[Seq[int]],
    target: Any,
    tokenizer: Any = None,
    ngram: int = 4,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008 - it has no state
    max_gen_len: int = 40,
    eos_tokens_id: int | Seq[int] | None = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    coins: CoinsOf | None = None,
) -> tuple[Any, Any]:
    """Generate with drafts from the n-grams of the text so far (forerun/drafters/ngram.py), without a second module.

    ngram: the length of the longest n-gram, 2 to 16 tokens: a context and the token after it. filler_top_k: how many of
    the target's likeliest tokens at each place are stored in n-grams, too, 0 to 16. A draft ends where its context is
    not known. For an encoder-decoder, n-grams come from the input and from the output. Other arguments, results and
    errors are as in `speculative_generate`.
    """
    policy = _fixed(gamma)
    policy = AfterTheFirst(policy) if first_target else policy
    call = _Call(logits_processor, max_gen_len, eos_tokens_id, pad_token_id, use_cache, tokenizer, debug, coins)
    spec = f"ngram:max_n={ngram},filler_top_k={filler_top_k}"
    return _Task(call, call.module(target, "target"), policy, spec).run(inputs)


def beam_search_generate(
    inputs: Seq[int] | Seq[Seq[int]],
    model: Any,
    max_gen_len: int = 40,
    num_beams: int = 4,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    drafter: Any = None,
    draft_beams: int | None = None,
    gamma: int = 2,
    eos_tokens_id: int | Seq[int] | None = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    tokenizer: Any = None,
) -> Any:
    """Generate by beam search, as transformers defines it, with drafts if there is a drafter (docs/methods/beam.md).

    Args:
        num_beams: the number of beams, 1 to 64. num_return_sequences: how many of the best beams are returned.
        length_penalty: a beam's score is the sum of its log-probabilities / length^length_penalty.
        early_stopping: True = stop at num_beams finished beams. False and "never" = go on while a better beam may come.
        drafter: a module that searches ahead, `gamma` tokens per pass of the target (Leviathan et al. 2023, appendix
            A.4); None = no drafts. The output is the same.
        draft_beams: the number of beams in the drafter's search, at least num_beams; None = num_beams.

    Other arguments are as in `speculative_generate`. Returns the ids of the best beam. Where num_return_sequences is
    more than 1, returns a list of the best beams. For several inputs, returns a list of such results.
    """
    if drafter is None and draft_beams is not None:
        raise BadOption(f"draft_beams={shown(draft_beams)} belongs to a drafter: give one, or drop it")
    if not 1 <= num_return_sequences <= num_beams:
        raise BadOption(f"num_return_sequences={shown(num_return_sequences)} is not in 1 .. num_beams={num_beams}")
    call = _Call(GreedyProcessor(), max_gen_len, eos_tokens_id, pad_token_id, use_cache, tokenizer)
    target = call.module(model, "model")
    draft = None if drafter is None else call.module(drafter, "drafter")
    beams = {
        "num_beams": num_beams,
        "draft_beams": num_beams if draft_beams is None else draft_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "n": num_return_sequences,
    }
    texts, _ = _Task(call, target, _fixed(gamma), "none" if draft is None else "model", draft, beams=beams).run(inputs)
    return texts


def _fixed(gamma: int) -> Pacing:
    if not isinstance(gamma, int) or not 1 <= gamma <= MAX_GAMMA:
        raise BadOption(
            f"gamma={shown(gamma)} is not possible: it must be 1 to {MAX_GAMMA}; autoregressive_generate drafts nothing"
        )
    return pacing.make("fixed", gamma)


def _egag(gamma: int, gamma_min: int, gamma_max: int | None, beta: float) -> Pacing:
    _fixed(gamma)
    most = "" if gamma_max is None else f",gamma_max={gamma_max}"
    return pacing.make(f"entropy:gamma_min={gamma_min}{most},ema_beta={beta}", gamma)


@dataclass(frozen=True)
class _Call:
    """The arguments that every function here takes."""

    processor: LogitsProcessor
    max_gen_len: int
    eos: int | Seq[int] | None
    pad_token_id: int
    use_cache: bool
    tokenizer: Any
    debug: bool = False
    coins: CoinsOf | None = None

    def module(self, module: Any, role: str) -> ModuleModel:
        num_ids = num_ids_of(self.tokenizer)
        draws = Draws.of(self.processor)
        return ModuleModel(module, role, uses_cache=self.use_cache, num_ids=num_ids, draws=draws)


@dataclass
class _Task:
    """One call of a function in this file: the function's arguments, models, pacing policy and drafter."""

    call: _Call
    target: ModuleModel
    policy: Pacing
    spec: str = "none"
    draft: ModuleModel | None = None
    is_unadjusted: bool = False
    beams: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of a beam search

    def run(self, inputs: Any) -> tuple[Any, Any]:
        """Generate, and return the token ids and the acceptance rate; for several inputs, a list of each."""
        draws = Draws.of(self.call.processor)
        if draws.sample is not None and self.is_unadjusted:
            raise BadOption(
                "skip_sample_adjustment=True is not possible with a processor that has a `sample` of its own: no "
                "correction is drawn then; inherit the `sample` of MultinomialProcessor"
            )
        many = several(inputs)
        texts = [as_ids(each) for each in inputs] if many else [as_ids(inputs)]
        rooms = [self._room(ids) for ids in texts]
        assembly = assembled(
            self.target,
            self.spec,
            self.draft,
            self.policy,
            end_ids=self._end_ids(),
            coins=self._coins(draws),
            pad_token_id=self.call.pad_token_id,
        )
        results = [self._generate(assembly, *each, draws) for each in zip(texts, rooms, strict=True)]
        return ([ids for ids, _ in results], [rate for _, rate in results]) if many else results[0]

    def _room(self, inputs: list[int]) -> int:
        """Return the number of tokens that may be generated. Raises UserError for an input that a model cannot take."""
        for model in (self.target, *([self.draft] if self.draft is not None else [])):
            model.check(inputs)
        room = self.target.max_positions - len(self.target.start_ids(self.call.pad_token_id) or inputs)
        if room < 0:
            raise PromptTooLong(
                f"inputs has {len(inputs)} tokens, and the {self.target.role} has {self.target.max_positions} "
                "positions: shorten it"
            )
        if self.call.max_gen_len < 0:
            raise BadOption(f"max_gen_len={self.call.max_gen_len} is not possible: it must be at least 0")
        return min(room, self.call.max_gen_len)

    def _generate(self, assembly: Assembly, inputs: list[int], num: int, draws: Draws) -> tuple[Any, float]:
        rule = UNADJUSTED if self.is_unadjusted else "ratio"
        if draws.sample is not None:
            rule = "match"
        how = self.beams or {"acceptance": rule}
        params = SamplingParams(max_tokens=max(num, 1), seed=int(torch.randint(2**62, ())), **draws.params, **how)
        if num == 0:
            return self._one_or_many([[] for _ in range(params.n)]), 0.0
        with assembly.request(inputs, params) as requests:
            end = None
            if self.call.debug:
                end = assembly.engine.listen(DebugPrinter(self.call.tokenizer, requests[0].seq), detail=True)
            try:
                assembly.run(requests)
            finally:
                if end is not None:
                    end()
            rate = requests[0].report.acceptance_rate or 0.0
            return self._one_or_many([request.seq.output_ids for request in requests]), rate

    def _one_or_many(self, outputs: list[list[int]]) -> Any:
        return outputs if self.beams.get("n", 1) > 1 else outputs[0]

    def _end_ids(self) -> frozenset[int]:
        ids = frozenset(as_ids([self.call.eos] if isinstance(self.call.eos, int) else self.call.eos or ()))
        if wrong := [i for i in ids if not 0 <= i < self.target.vocab_size]:
            raise BadOption(
                f"eos_tokens_id={shown(wrong[0])} is not possible: the ids of the {self.target.role} are 0 .. "
                f"{self.target.vocab_size - 1}; None = no id ends the output"
            )
        return ids

    def _coins(self, draws: Draws) -> CoinsOf:
        usual, sample = self.call.coins or philox_coins, draws.sample
        if sample is None:
            return usual

        def coins(seq: Sequence) -> Coins:
            return SampledCoins(usual(seq), sample, self.target.vocab_size)

        return coins
