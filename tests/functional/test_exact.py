"""Sampled output has the target's distribution: every outcome of every coin is taken, through the public functions."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import sampling
from forerun.errors import BadOption
from forerun.functional import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculate,
    speculative_generate,
)
from forerun.functional.processors import spelled_out
from forerun.models.toy import ToyModel, ToyTable
from forerun.testing import Branching, enumerate_outcomes, plain, total_variation
from forerun.types import SamplingParams
from functional.modules import ToyModule

EXACT = 1e-12
V, HORIZON = 3, 3
PROMPT = (0, 1, 2, 0, 1)  # what follows its end occurred before, for n-grams
TOY = ToyModel(V, 1)
TARGET, DRAFTER = ToyModule(TOY), ToyModule(ToyModel(V, 2, ToyTable(distance=0.7), near=TOY))
Outputs = Mapping[tuple[int, ...], float]


def own_coins(way: Branching) -> dict[str, Any]:
    """The option that gives a function its coins."""
    return {"coins": lambda seq: way.at(len(seq.tokens))}


def spoken(
    function: Callable[..., Any],
    *modules: Any,
    draws_of: Callable[[Branching], dict[str, Any]] = own_coins,
    **options: Any,
) -> tuple[Outputs, set[float]]:
    """The probability of each output of a function, and the acceptance rates that occurred."""
    outputs: dict[tuple[int, ...], float] = defaultdict(float)
    rates = set()

    def run(way: Branching) -> Any:
        given = {"max_gen_len": HORIZON, "eos_tokens_id": None, **options}
        return function(list(PROMPT), *modules, **draws_of(way), **given)

    for weight, found in enumerate_outcomes(run):
        ids, rate = found if isinstance(found, tuple) else (found, 0.0)
        outputs[tuple(ids)] += weight
        rates.add(rate)
    return outputs, rates


def law_of(table: Callable[[Tensor], Tensor], end: int | None = None) -> Outputs:
    """The probability of each output by the target alone. table: logits [V] -> probabilities [V]."""
    outputs = plain(lambda said: table(toys_logits(TOY, [*PROMPT, *said])).numpy(), HORIZON)
    cut: dict[tuple[int, ...], float] = defaultdict(float)
    for output, weight in outputs.items():
        cut[output if end is None or end not in output else output[: output.index(end) + 1]] += weight
    return cut


def toys_logits(toy: ToyModel, history: Seq[int]) -> Tensor:
    return torch.from_numpy(toy.logits_after(history))


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


@pytest.mark.parametrize("first_target", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_draws_of_the_softmax(use_cache: bool, first_target: bool) -> None:
    options = {"logits_processor": MultinomialProcessor(1.0), "use_cache": use_cache, "first_target": first_target}
    outputs, rates = spoken(speculative_generate, DRAFTER, TARGET, gamma=2, **options)
    assert total_variation(outputs, law_of(softmax)) < EXACT
    assert rates == {0.0, 1.0} if first_target else {0.0, 1.0} < rates  # one token is drafted, or two


@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_lengths_by_entropy(beta: float) -> None:
    lengths = {"gamma": 3, "use_egag": True, "gamma_min": 1, "egag_ema_beta": beta, "first_target": False}
    processor = MultinomialProcessor(0.8)
    outputs, _ = spoken(speculative_generate, DRAFTER, TARGET, logits_processor=processor, **lengths)
    assert total_variation(outputs, law_of(lambda z: (z / 0.8).softmax(-1))) < EXACT


def test_an_end_inside_a_draft() -> None:
    options = {"gamma": 2, "logits_processor": MultinomialProcessor(), "eos_tokens_id": 2}
    outputs, _ = spoken(speculative_generate, DRAFTER, TARGET, **options)
    assert total_variation(outputs, law_of(softmax, end=2)) < EXACT


def test_the_other_functions() -> None:
    draws = {"logits_processor": MultinomialProcessor()}
    alone, _ = spoken(autoregressive_generate, TARGET, **draws)
    with_ngrams, rates = spoken(ngram_assisted_speculative_generate, TARGET, gamma=2, first_target=False, **draws)
    for outputs in (alone, with_ngrams):
        assert total_variation(outputs, law_of(softmax)) < EXACT
    assert {0.0, 1.0} <= rates


# ------------------------------------------------------------------------------------------------------- processors


class Biased(MultinomialProcessor):
    """Adds to the logits, and excludes an id; in place, as published code does."""

    def _process(self, logits: Tensor) -> Tensor:
        logits += torch.tensor([0.5, 0.0, -0.25], dtype=logits.dtype)
        logits[..., 2] = -1e20
        return logits


class BiasedGreedy(GreedyProcessor):
    def _process(self, logits: Tensor) -> Tensor:
        return -logits


class Escort(MultinomialProcessor):
    """Makes the distribution by itself."""

    def __call__(self, logits: Tensor) -> Tensor:
        squared = logits.softmax(-1) ** 2
        return squared / squared.sum(-1, keepdim=True)


def biased(logits: Tensor) -> Tensor:
    changed = logits + torch.tensor([0.5, 0.0, -0.25])
    changed[2] = -torch.inf
    return (changed / 0.7).softmax(-1)


def squares(logits: Tensor) -> Tensor:
    return (2 * logits).softmax(-1)


@pytest.mark.parametrize(
    ("processor", "table"),
    [
        pytest.param(Biased(0.7), biased, id="own _process"),
        pytest.param(Escort(), squares, id="own call"),
        pytest.param(BiasedGreedy(), lambda z: torch.eye(V, dtype=z.dtype)[z.argmin()], id="own _process, greedy"),
    ],
)
def test_what_a_subclass_makes_of_logits(processor: LogitsProcessor, table: Callable[[Tensor], Tensor]) -> None:
    outputs, _ = spoken(speculative_generate, DRAFTER, TARGET, gamma=2, logits_processor=processor)
    assert total_variation(outputs, law_of(table)) < EXACT


class Sampled(LogitsProcessor):
    """A sample of its own, which takes all outcomes in turn; it prefers the first id, whatever the probabilities."""

    way: Branching
    num = 0

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        assert probs.shape == (1, V)
        self.num += 1
        weights = probs[0] * torch.tensor([2.0, 1.0, 1.0])
        from forerun.testing import dense

        return torch.tensor([[self.way.draw(dense((weights / weights.sum()).numpy()), self.num)]])


def test_a_sample_of_a_subclass_is_what_draws() -> None:
    """Every token is what it returns, so that even one that does not follow the probabilities is kept exactly."""
    processor = Sampled()

    def draws_of(way: Branching) -> dict[str, Any]:
        processor.way, processor.num = way, 0
        return {}

    options = {"gamma": 2, "max_gen_len": 2, "first_target": False, "logits_processor": processor}
    outputs, rates = spoken(speculative_generate, DRAFTER, TARGET, draws_of=draws_of, **options)

    def preferring(said: tuple[int, ...]) -> Any:
        weights = softmax(toys_logits(TOY, [*PROMPT, *said])) * torch.tensor([2.0, 1.0, 1.0])
        return (weights / weights.sum()).numpy()

    assert total_variation(outputs, plain(preferring, 2)) < EXACT
    assert {0.0, 1.0} <= rates


def test_a_sample_that_draws_nothing_possible_is_refused() -> None:
    class Wrong(Sampled):
        def sample(self, probs: Tensor) -> Tensor:
            return torch.tensor([[V]])

    with pytest.raises(BadOption, match="sample returned"):
        speculative_generate([0], DRAFTER, TARGET, logits_processor=Wrong())


LAWS = {
    "greedy": (GreedyProcessor(), {"temperature": 0.0}),
    "multinomial": (MultinomialProcessor(0.6), {"temperature": 0.6}),
    "top_k": (TopKProcessor(0.9, 2), {"temperature": 0.9, "top_k": 2}),
    "nucleus": (NucleusProcessor(1.3, 0.7), {"temperature": 1.3, "top_p": 0.7}),
    "both": (TopKNucleusProcessor(1.3, 3, 0.8), {"temperature": 1.3, "top_k": 3, "top_p": 0.8}),
}


@pytest.mark.parametrize("name", LAWS)
def test_processors_are_the_pipeline(name: str) -> None:
    """Also where they are called by themselves, on rows of several dimensions, which stay as they were."""
    processor, law = LAWS[name]
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round(decimals=0)
    before = logits.clone()
    probs = processor(logits)
    assert torch.equal(logits, before)
    for row, found in zip(logits.reshape(-1, 7), probs.reshape(-1, 7), strict=True):
        wanted = spelled_out(sampling.probs(row, SamplingParams(**law)), 7).double()
        assert torch.allclose(found, wanted, atol=1e-15)
    drawn = processor.sample(probs)
    assert drawn.shape == (2, 3, 1)
    assert bool((probs.gather(-1, drawn) > 0).all())


@pytest.mark.parametrize("name", [name for name in LAWS if name != "greedy"])
def test_processors_through_both_models(name: str) -> None:
    processor, law = LAWS[name]
    outputs, _ = spoken(speculative_generate, DRAFTER, TARGET, gamma=2, logits_processor=processor)
    params = SamplingParams(**law)
    assert total_variation(outputs, law_of(lambda z: spelled_out(sampling.probs(z, params), V))) < EXACT


def test_greedy_is_no_softmax() -> None:
    """Of p = (.40, .35, .25) and q = (.30, .45, .25), ratio of softmax vectors would keep token 1 with 0.78."""
    p, q = (ToyModel(V, 1, ToyTable(order=0)) for _ in range(2))
    p._table[()], q._table[()] = (torch.tensor(w).double().log() for w in ([0.40, 0.35, 0.25], [0.30, 0.45, 0.25]))
    ids, rate = speculative_generate([1], ToyModule(q), ToyModule(p), max_gen_len=6, eos_tokens_id=None)
    assert (ids, rate) == ([0] * 6, 0.0)


# --------------------------------------------------------------------------------------------------- biased on purpose


def test_the_option_without_adjustment_is_biased_and_says_so() -> None:
    """The first drafted token has the law min(p, q) + (1 - beta) p."""
    options = {"gamma": 1, "logits_processor": MultinomialProcessor(), "first_target": False}
    with pytest.warns(UserWarning, match="biased"):
        outputs, _ = spoken(speculative_generate, DRAFTER, TARGET, skip_sample_adjustment=True, **options)
    assert total_variation(outputs, law_of(softmax)) > 0.01
    p, q = (softmax(toys_logits(module.toy, PROMPT)) for module in (TARGET, DRAFTER))
    kept = torch.minimum(p, q)
    for token, wanted in enumerate(kept + (1 - kept.sum()) * p):
        found = sum(weight for output, weight in outputs.items() if output[0] == token)
        assert found == pytest.approx(float(wanted), abs=EXACT)


def test_that_option_cannot_go_with_a_sample_of_its_own() -> None:
    with pytest.warns(UserWarning, match="biased"), pytest.raises(BadOption, match="no correction is drawn"):
        speculative_generate([0], DRAFTER, TARGET, logits_processor=Sampled(), skip_sample_adjustment=True)


# ------------------------------------------------------------------------------------------ two functions side by side


@functools.cache
def policy(x: tuple[int, ...], seed: int) -> Any:
    return softmax(toys_logits(ToyModel(V, seed), x)).numpy()


@pytest.mark.parametrize("guess_seed", [1, 2])
def test_two_functions_draw_what_they_would_one_after_the_other(guess_seed: int) -> None:
    """Each step's f and guess look at what g made of the steps before."""
    outputs: dict[tuple[int, ...], float] = defaultdict(float)
    rates = set()

    def run(way: Branching) -> Any:
        f, guess = (functools.partial(policy, seed=seed) for seed in (1, guess_seed))
        return speculate(f, lambda x, y: (*x, y), guess, 3, start=(), coins=way.at)

    for weight, found in enumerate_outcomes(run):
        assert found.result == tuple(choice.drawn for choice in found.choices)
        outputs[found.result] += weight
        rates.add(found.acceptance_rate)
    assert total_variation(outputs, plain(lambda said: policy(said, 1), 3)) < EXACT
    assert rates == {1.0} if guess_seed == 1 else {0.0, 1.0} < rates
