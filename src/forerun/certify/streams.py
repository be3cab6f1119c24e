"""The certificate's fourth part tests unrestricted outputs by the conditional probability integral transform.

Let p be plain decoding's probabilities at an emitted token x, with the ids ordered by p. Let F(x-) be the probability
of all ids before x, and W a uniform random number. Then u = F(x-) + W p(x) is uniform, and independent of the earlier
u, if and only if x was drawn from p given the tokens before it. This holds for every model, so one test serves any
vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.certify.checks import ETA, Check, Clock, Test
from forerun.certify.pair import Pair, Source, run
from forerun.theory.significance import Fit, g_test, independence_test, largest_log_e, poisson_binomial_p, weissman
from forerun.types import Probs, SamplingParams

BINS, COARSE = 64, 8  # bins of u; and bins in each direction of the table of neighbouring tokens
RARE = 1e-4  # the probability below which a token counts as rare
NUM_TOKENS = 48  # of an output
LEAST_BATCHES = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "T=1": {},
    "T=0.8, top-p 0.95, penalties": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
    },
}


@dataclass(frozen=True)
class Setting:
    """The settings that a stream of tokens is drawn with."""

    source: Source
    rule: str
    options: str
    spec_length: int

    @property
    def about(self) -> str:
        """The setting in words."""
        return f"{self.source.name}, {self.rule}, K={self.spec_length}, {self.options}"

    def params(self, seed: int) -> SamplingParams:
        """Return the parameters of one output."""
        return SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            seed=seed,
            acceptance=self.rule,
            draft=self.source.draft,
            spec_length=self.spec_length,
            **OPTIONS[self.options],
        )


@dataclass
class Stream:
    """The statistics of the tokens that are drawn in one setting.

    series: for each output, the numbers u in [0, 1] of its tokens, which are uniform if the draws are right. num_rare:
    the number of rare tokens. rare_probs: for each token, the probability that plain decoding draws a rare token at its
    position.
    """

    setting: Setting
    series: list[list[float]] = field(default_factory=list)
    num_rare: int = 0
    rare_probs: list[float] = field(default_factory=list)
    num_tested: int = 0
    num_accepted: int = 0

    @property
    def bins(self) -> list[int]:
        """The bin of each token's u, in the order of the tokens."""
        return [min(BINS - 1, int(u * BINS)) for series in self.series for u in series]

    def add(self, tokens: Seq[int], each_probs: Seq[Probs], rng: np.random.Generator) -> None:
        """Add an output, with plain decoding's distribution at each of its tokens."""
        series = list[float]()
        for token, target_probs in zip(tokens, each_probs, strict=False):
            u, is_rare, rare_prob = transformed(target_probs, token, float(rng.random()))
            series.append(u)
            self.num_rare += is_rare
            self.rare_probs.append(rare_prob)
        self.series.append(series)

    def pit(self) -> Test:
        """Test whether u is uniform."""
        counts = np.bincount(self.bins, minlength=BINS)
        uniform = np.full(BINS, 1 / BINS)
        tv = float(np.abs(counts / max(1, counts.sum()) - uniform).sum() / 2)
        return Test.of(self.setting.about, g_test(counts, uniform), tv, weissman(int(counts.sum()), BINS, ETA))

    def lag(self) -> Test:
        """Test whether the u of neighbouring tokens are independent."""
        table = np.zeros((COARSE, COARSE))
        for series in self.series:
            for pair in itertools.pairwise(min(COARSE - 1, int(u * COARSE)) for u in series):
                table[pair] += 1
        return Test.of(self.setting.about, independence_test(table))

    def any_time(self) -> Test:
        """Test whether u is uniform, by an e-process, which allows a look after every token."""
        largest = largest_log_e(self.bins, np.full(BINS, 1 / BINS))
        return Test(self.setting.about, math.exp(-largest) if largest < math.inf else 0.0, len(self.bins))

    def rare(self) -> Test:
        """Test whether the number of rare tokens is as expected."""
        p_value = poisson_binomial_p(self.num_rare, self.rare_probs)
        return Test.of(self.setting.about, Fit(float(self.num_rare), 0, p_value, len(self.rare_probs)))


def transformed(target_probs: Probs, token: int, w: float) -> tuple[float, bool, float]:
    """Return the transform u of a token, whether the token is rare, and the probability of drawing a rare token.

    Ids are ordered by their probability, the likeliest first, then by id. A token of probability 0 has u = 1. Such a
    token is rare even where the probability of drawing a rare token is 0. w: the uniform random number W.
    """
    if target_probs.point is not None:
        return (w, False, 0.0) if token == target_probs.point else (1.0, True, 0.0)
    weights = target_probs.weights.astype(np.float64)
    weights = weights / weights.sum()
    ids = np.arange(len(weights)) if target_probs.ids is None else target_probs.ids
    place = np.flatnonzero(ids == token)
    p = float(weights[place[0]]) if len(place) else 0.0
    before = float(weights[(weights > p) | ((weights == p) & (ids < token))].sum()) if p > 0 else 1.0
    return min(1.0, before + w * p), p < RARE, float(weights[weights < RARE].sum())


def checks(clock: Clock, pair: Pair, seed: int) -> list[Check]:
    """Write texts in each setting in turn, as long as there is time, and test the statistics of their tokens."""
    all_checks = [
        Check(
            "u is uniform",
            "pair",
            f"conditional PIT, G-test on {BINS} bins",
            "tokens of the whole vocabulary are drawn from plain decoding's probabilities, up to the stated total "
            "variation of u; tokens that are nearly certain say little",
            unit="tokens",
        ),
        Check(
            "neighbours",
            "pair",
            f"conditional PIT, independence in a table of {COARSE} x {COARSE}",
            "a token's draw says nothing of the next one's, as reused random numbers would",
            unit="pairs",
        ),
        Check(
            "any-time monitor",
            "pair",
            "e-process of u: a Dirichlet mixture over the bins, alarm at 1 / level (Ville)",
            "no moment of the run at which somebody who watches would have raised an alarm",
            unit="tokens",
        ),
        Check(
            "rare tokens",
            "pair",
            f"number of tokens with p < {RARE:g}, Poisson-binomial",
            "the far tail is neither cut off nor raised, which total variation would not show",
            unit="tokens",
        ),
    ]
    streams = [Stream(setting) for setting in _settings(pair)]
    rng, prompts = np.random.default_rng(seed), pair.prompts()
    for number in itertools.count():
        stream = streams[number % len(streams)]
        if not clock.look(stream.setting.about) and number >= LEAST_BATCHES:
            break
        _write(pair, stream, prompts, seed, number, rng)
    seen = [stream for stream in streams if stream.series]
    for check, test in zip(all_checks, (Stream.pit, Stream.lag, Stream.any_time, Stream.rare), strict=True):
        check.tests = [test(stream) for stream in seen]
        check.num_samples = sum(one.num_samples for one in check.tests)
        check.result = f"{len(check.tests)} tests"
    num_rare, wanted = sum(s.num_rare for s in seen), sum(sum(s.rare_probs) for s in seen)
    all_checks[3].facts = {"rare": num_rare, "rare_expected": wanted}
    all_checks[0].facts = {s.setting.about: f"accepted {s.num_accepted} of {s.num_tested}" for s in seen}
    return all_checks


def _write(
    pair: Pair, stream: Stream, prompts: Seq[list[int]], seed: int, number: int, rng: np.random.Generator
) -> None:
    """Write a batch of texts in the setting of a stream, and add the u of their tokens to the stream."""
    llm = stream.setting.source.llm
    size = llm.config.max_batch_size
    jobs = [
        (prompts[(number * size + i) % len(prompts)], stream.setting.params(seed + 10_000_000 + number * size + i))
        for i in range(size)
    ]
    for request in run(llm.engine, jobs):
        seq = request.seq
        each_probs = pair.plain.distributions(seq.tokens[:-1], seq.num_prompt_tokens, seq.params)
        stream.add(seq.output_ids, each_probs, rng)
        stream.num_tested += request.report.num_tested
        stream.num_accepted += request.report.num_accepted


def _settings(pair: Pair) -> Iterator[Setting]:
    """Yield the settings: the user's drafter with up to three rules, and the target as its own drafter with two rules.

    Sampling options and draft lengths alternate.
    """
    ways = [(pair.own, rule) for rule in pair.own.rules()[:3]] + [(pair.warmer, "ratio"), (pair.warmer, "block")]
    for number, (source, rule) in enumerate(ways):
        yield Setting(source, rule, list(OPTIONS)[number % len(OPTIONS)], (4, 2, 7)[number % 3])
