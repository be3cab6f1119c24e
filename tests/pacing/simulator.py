"""A simulated machine: StepReports for given cost curves and acceptances, and the best fixed length for them.

A policy is judged without noise, by expected tokens and mean seconds of what it granted. The reports that it sees have
noise.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.pacing import Pacing
from forerun.pacing.auto import Options, build
from forerun.pacing.cost import Costs
from forerun.pacing.pass_time import WIDTHS, PassTime
from forerun.params import SamplingParams
from forerun.theory import formulas
from forerun.types import DraftStep, Sequence, SequenceStep, StepReport

Curve = Callable[[float], float]


def points(*pairs: tuple[float, float]) -> Curve:
    """Linear between measured points, and beyond the last one."""

    def curve(n: float) -> float:
        i = next((i for i in range(1, len(pairs)) if n <= pairs[i][0]), len(pairs) - 1)
        (a, low), (b, high) = pairs[i - 1], pairs[i]
        return low + (high - low) * (n - a) / (b - a)

    return curve


# Seconds of a target pass by rows, in units of one row.
CPU = points((1, 1.0), (4, 1.02), (8, 1.05), (12, 1.12), (16, 1.46), (32, 2.65), (64, 5.2))
PER_ROW = points((1, 1.0), (6, 1.7), (512, 72.0))  # no width for nothing
GPU = points((1, 1.0), (256, 1.1), (512, 2.1))
COMPUTE_BOUND = points((1, 1.0), (512, 512.0))


@dataclass(frozen=True)
class Machine:
    """Costs in seconds. draft_row: of a pass of the draft model, what each further sequence adds, relative."""

    curve: Curve = CPU
    row_s: float = 0.02
    pass_s: float = 0.001
    draft_row: float = 0.02
    per_sequence_s: float = 1e-4
    per_context_s: float = 0.0
    catchup_s: float = 2e-5

    def draft_s(self, lengths: list[int]) -> float:
        """Passes one after another, each over the sequences that still draft."""
        counts = [sum(k > d for k in lengths) for d in range(max(lengths, default=0))]
        return sum(self.pass_s * (1 + self.draft_row * (n - 1)) for n in counts)

    def step_s(self, lengths: list[int], num_context: int, num_prompt: int = 0) -> float:
        """A step in which these nodes were drafted, without what the prompt chunk takes by itself."""
        chunk = self.row_s * (self.curve(len(lengths) + num_prompt) - self.curve(len(lengths)))
        return self.draft_s(lengths) + self.pass_side_s(lengths, num_context, num_prompt) - chunk

    def pass_side_s(self, lengths: list[int], num_context: int, num_prompt: int = 0) -> float:
        """Target pass, verdict and commit."""
        num = len(lengths)
        rows = self.row_s * self.curve(num + sum(lengths) + num_prompt)
        return rows + self.per_sequence_s * num + self.per_context_s * num_context


@dataclass
class Noise:
    """What a measured second differs by: noise, slow drift, and bursts of many slow steps."""

    sigma: float = 0.1
    drift: float = 0.001  # per step: a factor of 2 in 700 steps, up and down
    burst: float = 0.002  # probability that a burst begins
    burst_steps: int = 20
    burst_factor: float = 2.0


QUIET = Noise(0.0, 0.0, 0.0)


@dataclass
class Track:
    """Expected tokens and mean seconds of each step, and the lengths that were granted."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    granted: list[list[int]] = field(default_factory=list)

    def rate(self, first: int = 0) -> float:
        """Tokens per second from a step on."""
        return sum(self.tokens[first:]) / sum(self.seconds[first:])

    def num_changes(self, b: int, first: int) -> int:
        """How often the length of one sequence changed from a step on."""
        return sum(p != q for p, q in itertools.pairwise(granted[b] for granted in self.granted[first:]))


Alpha = Callable[[int, int], float]  # (step, sequence) -> acceptance of one token
Found = Callable[[int, int], bool]  # (step, sequence) -> whether the drafter finds anything


@dataclass
class World:
    """Requests that never end on a machine; `alpha` and `found` say how good their drafter is."""

    alpha: Alpha
    num_sequences: int = 1
    machine: Machine = field(default_factory=Machine)
    noise: Noise = field(default_factory=Noise)
    found: Found = lambda step, b: True
    seed: int = 0
    max_len: int = 10**6
    prompt_tokens: int = 100
    draft: str = "model"
    limit: int = 64
    num_prompt_rows: Callable[[int], int] = lambda step: 0
    batch: Callable[[int], range] | None = None  # step -> sequences that are there
    prompt_chunk: int = 0  # rows of a pass that runs nothing but prompts, before the first step; 0 = there is none

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.seqs: dict[int, Sequence] = {}
        self.uncached_tokens: dict[int, int] = {}
        self.speed, self.left = 1.0, 0

    def auto(self) -> Pacing:
        """The policy with the curve of this machine, as a calibration would have found it."""
        curve, draft_row = self.machine.curve, self.machine.draft_row
        costs = Costs(PassTime(WIDTHS, [curve(n) for n in WIDTHS]))
        if self.draft == "model":
            costs.drafts["model"] = PassTime((1, 2), (1.0, 1 + draft_row), self.machine.pass_s)
        return build(Options(), None, costs)

    def paced(self, num_steps: int) -> Track:
        """What auto makes of it."""
        return self.run(self.auto(), num_steps)

    def sequence(self, b: int, **params: object) -> Sequence:
        if b not in self.seqs:
            tokens = [0] * self.prompt_tokens
            self.seqs[b] = Sequence(b, tokens, len(tokens), SamplingParams(**params), 0, self.max_len, draft=self.draft)
            self.uncached_tokens[b] = 0
        return self.seqs[b]

    def run(self, pacing: Pacing, num_steps: int) -> Track:
        track = Track()
        self.run_prompts(pacing)
        for step in range(num_steps):
            present = range(self.num_sequences) if self.batch is None else self.batch(step)
            for b in [b for b in self.seqs if b not in present]:
                pacing.end(self.seqs.pop(b))
            self.one(pacing, [self.sequence(b) for b in present], step, track)
        return track

    def run_prompts(self, pacing: Pacing) -> None:
        """The prompts of the first requests, in chunks."""
        left = self.num_sequences * self.prompt_tokens if self.prompt_chunk else 0
        while left:
            num = min(left, self.prompt_chunk)
            left -= num
            assert pacing.budget([], []) == []
            report = StepReport(num_prefill_tokens=num, num_rows=num)
            report.score_s = self.machine.row_s * self.machine.curve(num) * self._slowness(0) * self._jitter()
            pacing.observe(report)

    def one(self, pacing: Pacing, seqs: list[Sequence], step: int, track: Track) -> StepReport:
        """One step: budget, what it does, observe."""
        num_prompt = self.num_prompt_rows(step)
        limits = [min(self.limit, s.max_len - len(s.tokens) - 1) for s in seqs]
        granted = pacing.budget(seqs, limits)
        assert all(0 <= k <= limit for k, limit in zip(granted, limits, strict=True))
        lengths = [k if k and self.found(step, s.id) else 0 for k, s in zip(granted, seqs, strict=True)]
        num_context = sum(len(s.tokens) for s in seqs)
        catchup = sum(self.uncached_tokens[s.id] for s, k in zip(seqs, granted, strict=True) if k)
        report = self.report(seqs, lengths, granted, step, num_prompt, catchup)
        track.granted.append(granted)
        alphas = [self.alpha(step, s.id) for s in seqs]
        track.tokens.append(sum(formulas.expected_tokens(a, k) for a, k in zip(alphas, lengths, strict=True)))
        track.seconds.append(self.machine.step_s(lengths, num_context, num_prompt) + catchup * self.machine.catchup_s)
        pacing.observe(report)
        return report

    def report(
        self, seqs: list[Sequence], lengths: list[int], granted: list[int], step: int, num_prompt: int, catchup: int
    ) -> StepReport:
        """What the policy is told, with noise."""
        num_context = sum(len(s.tokens) for s in seqs)
        rng, machine, slow = self.rng, self.machine, self._slowness(step)
        report = StepReport(num_decoding=len(seqs), num_prefill_tokens=num_prompt, num_context_tokens=num_context)
        report.num_rows = len(seqs) + sum(lengths) + num_prompt
        for s, k, g in zip(seqs, lengths, granted, strict=True):
            alpha = self.alpha(step, s.id)
            accepted = next((i for i in range(k) if rng.random() >= alpha), k)
            report.num_drafted += k
            report.num_emitted += accepted + 1
            report.sequences.append(SequenceStep(s.id, s.draft, k, min(accepted + 1, k), tuple(range(accepted))))
            s.tokens.extend([0] * (accepted + 1))
            if s.draft == "model":
                self.uncached_tokens[s.id] = 0 if g else self.uncached_tokens[s.id] + accepted + 1
        pass_s = machine.pass_side_s(lengths, num_context, num_prompt) * slow * self._jitter()
        report.score_s, report.judge_s, report.commit_s = pass_s * 0.98, pass_s * 0.01, pass_s * 0.01
        if any(granted):
            catchup_s = catchup * machine.catchup_s * slow * self._jitter()
            draft_s = machine.draft_s(lengths) * slow * self._jitter() + catchup_s
            num = sum(k > 0 for k in lengths)
            report.drafts[self.draft] = DraftStep(
                draft_s, num, sum(lengths), max(lengths), max(lengths), catchup, catchup_s
            )
            report.draft_s = draft_s
        return report

    def _jitter(self) -> float:
        return max(0.5, 1 + self.noise.sigma * self.rng.gauss(0, 1))

    def _slowness(self, step: int) -> float:
        noise = self.noise
        self.speed *= 1 + (noise.drift if step // 700 % 2 == 0 else -noise.drift)
        if self.left:
            self.left -= 1
        elif self.rng.random() < noise.burst:
            self.left = noise.burst_steps
        return self.speed * (noise.burst_factor if self.left else 1.0)


def fixed_rate(world: World, length: int, first: int, end: int) -> float:
    """Tokens per second of one length for all requests in steps first .. end - 1 of a world without context costs."""
    tokens = seconds = 0.0
    for step in range(first, end):
        present = range(world.num_sequences) if world.batch is None else world.batch(step)
        lengths = [min(length, world.limit) if world.found(step, b) else 0 for b in present]
        tokens += sum(formulas.expected_tokens(world.alpha(step, b), k) for b, k in zip(present, lengths, strict=True))
        seconds += world.machine.step_s(lengths, 0, world.num_prompt_rows(step))
    return tokens / seconds


def oracle(world: World, first: int, end: int, max_length: int = 16) -> float:
    """Tokens per second of the best fixed length, 0 included."""
    return max(fixed_rate(world, k, first, end) for k in range(max_length + 1))
