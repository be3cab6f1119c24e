"""The certificate's third part: the real models may use only a few ids, so that every output is counted (G-tests)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.certify.checks import ETA, Check, Clock, Test
from forerun.certify.pair import Pair, Source, listed, run
from forerun.sampling import probs
from forerun.theory.significance import g_test, weissman
from forerun.types import SamplingParams

BIAS = 1000.0  # added to the logits of the allowed ids, so that all other ids have probability 0 in float32
SIZES = ((4, 3), (8, 2), (2, 6))  # allowed ids, and tokens of an output: each makes 64 possible outputs, the cells
TEMPERATURES, LENGTHS = (1.0, 0.7, 1.3), (2, 4, 1)
FIRST_SAMPLES, MOST_SAMPLES = 64, 4096  # outputs that one request asks for
LEAST_TESTS, MOST_TESTS = 3, 12


@dataclass(frozen=True)
class Setting:
    """The settings with which the outputs of one test are drawn.

    size: the number of allowed ids, and the number of tokens per output.
    """

    source: Source
    rule: str
    size: tuple[int, int]
    temperature: float
    spec_length: int

    @property
    def about(self) -> str:
        """The setting in words."""
        ids, length = self.size
        how = f"{self.source.name}, {self.rule}, K={self.spec_length}, T={self.temperature:g}"
        return f"{how}, {ids} ids x {length} tokens"

    def params(self, allowed: Seq[int], num: int = 1, seed: int = 0) -> SamplingParams:
        """Return the parameters of a request for `num` outputs. allowed: the allowed ids."""
        return SamplingParams(
            max_tokens=self.size[1],
            temperature=self.temperature,
            logit_bias=dict.fromkeys(allowed, BIAS),
            ignore_eos=True,
            n=num,
            seed=seed,
            acceptance=self.rule,
            draft=self.source.draft,
            spec_length=self.spec_length,
        )


class Sampler:
    """A sampler that draws and counts outputs in one setting. probs: plain decoding's probability of each output."""

    def __init__(self, pair: Pair, setting: Setting, seed: int) -> None:
        self.setting, self._seed = setting, seed
        self.prompt, self._allowed = _least_certain(pair, setting)
        self.probs = dict(pair.plain.outputs(self.prompt, setting.size[1], setting.params(self._allowed)))
        self.counts = Counter[tuple[int, ...]]()
        self.num_drafted = 0
        self.num_tested = 0
        self.num_accepted = 0

    def draw(self, num: int) -> None:
        """Draw more outputs through the engine."""
        params = self.setting.params(self._allowed, num, self._seed)
        self._seed += 1
        for request in run(self.setting.source.llm.engine, [(self.prompt, params)]):
            self.counts[tuple(request.seq.output_ids)] += 1
            self.num_drafted += request.report.num_drafted
            self.num_tested += request.report.num_tested
            self.num_accepted += request.report.num_accepted

    def test(self) -> Test:
        """Compare the counts with plain decoding's probabilities."""
        cells = list(dict.fromkeys([*self.probs, *self.counts]))
        counts = np.array([self.counts[cell] for cell in cells])
        wanted = np.array([self.probs.get(cell, 0.0) for cell in cells])
        num = int(counts.sum())
        tv = float(np.abs(counts / max(1, num) - wanted).sum() / 2)
        ids, length = self.setting.size
        bound = weissman(num, max(len(cells), ids**length), ETA)
        return Test.of(self.setting.about, g_test(counts, wanted), tv, bound)


def check(clock: Clock, pair: Pair, seed: int) -> Check:
    """Draw and test outputs in LEAST_TESTS settings, and in more while there is time. Settings share time evenly."""
    counted = Check(
        "counted outputs",
        "few ids",
        "G-tests (Williams, Holm) of 64 outputs against teacher-forced plain decoding",
        "the pair's own kernels, caches and rules draw what they should, up to the stated total variation, for these "
        "prompts and options; the other ids have probability 0 here",
        unit="outputs",
    )
    settings = list(itertools.islice(_settings(pair), MOST_TESTS))
    silent = list[str]()
    for number, setting in enumerate(settings):
        if not clock.look(setting.about) and number >= LEAST_TESTS:
            break
        until_s = clock.left_s / (len(settings) - number)
        sampler = Sampler(pair, setting, seed + 1_000_000 * number)
        end_s, num = clock.taken_s + until_s, FIRST_SAMPLES
        while True:
            before_s = clock.taken_s
            sampler.draw(num)
            clock.look(f"{number + 1} of {len(settings)}, {setting.source.name}, {setting.rule}")
            rate = num / max(1e-6, clock.taken_s - before_s)
            num = min(MOST_SAMPLES, int(rate * (end_s - clock.taken_s)))
            if num < FIRST_SAMPLES:
                break
        counted.tests.append(sampler.test())
        counted.num_samples += counted.tests[-1].num_samples
        if not sampler.num_drafted:
            silent.append(setting.about)
        counted.facts[setting.about] = [
            f"drafted {sampler.num_drafted}",
            f"tested {sampler.num_tested}",
            f"accepted {sampler.num_accepted}",
        ]
    counted.facts["nothing_drafted"] = silent
    counted.ran = bool(counted.tests)
    counted.result = f"{len(counted.tests)} tests"
    if silent:
        counted.result += f", {len(silent)} of them without a draft"
    return counted


def _settings(pair: Pair) -> Iterator[Setting]:
    """Yield the settings, the user's drafter first.

    Three drafters are tested. The user's drafter, and the target as its own drafter, get a setting for each of their
    rules. A drafter that is nearly always wrong gets `ratio` only. Sizes, temperatures and draft lengths change from
    setting to setting.
    """
    number = 0
    ways: Mapping[Source, list[str]] = {
        pair.own: pair.own.rules(),
        pair.warmer: pair.warmer.rules(),
        pair.bad: ["ratio"],
    }
    for rank in range(max(map(len, ways.values()))):
        for source, rules in ways.items():
            if rank < len(rules):
                yield Setting(
                    source,
                    rules[rank],
                    SIZES[number % len(SIZES)],
                    TEMPERATURES[(number + rank) % len(TEMPERATURES)],
                    LENGTHS[(number + 2 * rank) % len(LENGTHS)],
                )
                number += 1


def _least_certain(pair: Pair, setting: Setting) -> tuple[list[int], list[int]]:
    """Return the prompt after which the next token is least certain, and the ids to allow.

    The ids to allow are the likeliest ids after the prompt. Certainty is measured by the entropy of a draw among them.
    """
    best = (-1.0, list[int](), list[int]())
    for prompt, row in pair.last_rows:
        allowed = sorted(row.argsort(kind="stable")[::-1][: setting.size[0]].tolist())
        target_probs = listed(probs(row, setting.params(allowed)))
        entropy = -sum(p * float(np.log(p)) for p in target_probs.values())
        if entropy > best[0]:
            best = (entropy, prompt, allowed)
    return best[1], best[2]
