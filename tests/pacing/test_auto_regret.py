"""auto against the best fixed length, plain decoding included, on simulated machines: learning included.

Rates have no noise (expected tokens, mean seconds of what was granted). The reports that the policy sees have 10 %
noise, bursts of slow steps, and a speed that drifts by a factor of two.
"""

import math

import pytest

from pacing.simulator import COMPUTE_BOUND, CPU, GPU, PER_ROW, Curve, Machine, World, fixed_rate, oracle

STEPS = 2000


def check(ratios: list[float], mean: float, least: float) -> None:
    assert math.prod(ratios) ** (1 / len(ratios)) >= mean, ratios
    assert min(ratios) >= least, ratios


def constant(num: int, curve: Curve, alpha: float, pass_s: float = 0.002, seed: int = 0) -> World:
    """Requests whose drafter is always as good."""
    return World(lambda step, b: alpha, num, Machine(curve, pass_s=pass_s), seed=seed)


def test_one_request():
    """2 % regret over all machines and drafters, over 2,000 rounds that begin with nothing known."""
    cases = [(CPU, 0.3, 0.006), (CPU, 0.6, 0.002), (CPU, 0.8, 0.002), (CPU, 0.95, 0.002), (PER_ROW, 0.3, 0.0003)]
    cases += [(PER_ROW, 0.8, 0.002), (GPU, 0.8, 0.0003), (GPU, 1.0, 0.002), (COMPUTE_BOUND, 0.6, 0.002)]
    worlds = [constant(1, *case, seed) for case in cases for seed in range(2)]
    check([world.paced(STEPS).rate() / oracle(world, 0, 1) for world in worlds], mean=0.985, least=0.95)


def test_batches():
    """The same over 800 rounds, of which the first 200 are for learning what wide passes cost."""
    cases = [(2, PER_ROW, 0.8), (4, CPU, 0.8), (8, CPU, 0.5), (8, GPU, 0.5), (16, PER_ROW, 0.5), (32, GPU, 0.8)]
    worlds = [constant(*case, seed=seed) for case in cases for seed in range(1 if case[0] == 32 else 2)]
    check([world.paced(800).rate(200) / oracle(world, 0, 1) for world in worlds], mean=0.98, least=0.93)


@pytest.mark.parametrize(("num", "curve"), [(1, CPU), (1, COMPUTE_BOUND), (8, CPU), (16, GPU)])
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_always_wrong(num, curve, draft):
    """A drafter that is never right costs less than 2 % of plain decoding."""
    world = World(lambda step, b: 0.0, num, Machine(curve, pass_s=0.002), seed=num, draft=draft)
    assert world.paced(STEPS if num == 1 else 500).rate() / fixed_rate(world, 0, 0, 1) >= 0.98


def bursty(step: int, b: int) -> float:
    return 0.9 if step // 150 % 2 else 0.2


def drifting(step: int, b: int) -> float:
    return 0.55 + 0.4 * math.sin(step / 150)


@pytest.mark.parametrize("alpha", [bursty, drifting])
def test_changing_acceptance_beats_every_fixed_length(alpha):
    worlds = [World(alpha, machine=Machine(CPU, pass_s=0.004), seed=seed) for seed in range(8)]
    best = oracle(worlds[0], 0, 1500, max_length=8)
    check([world.paced(1500).rate() / best for world in worlds], mean=1.05, least=1.0)


def test_good_and_bad_requests_side_by_side():
    """Half of the batch is never right, half nearly always: lengths of their own beat any common one."""
    world = World(lambda step, b: 0.9 if b % 2 else 0.0, 4, Machine(CPU, pass_s=0.002))
    track = world.paced(1000)
    assert track.rate() >= 1.05 * oracle(world, 0, 1)
    assert sum(granted[0] == 0 for granted in track.granted[200:]) > 600


@pytest.mark.parametrize(("rate", "alpha"), [(0.2, 0.9), (0.1, 0.3), (0.6, 0.6)])
def test_lookup_that_mostly_finds_nothing(rate, alpha):
    """Finds come in runs, as they do in a text that repeats itself; drafting costs nothing, verifying does."""
    ratios = []
    for seed in range(4):
        world = World(lambda step, b: alpha, machine=Machine(PER_ROW, pass_s=1e-5), draft="lookup", seed=seed)
        world.found = lambda step, b: (step // 8 * 7919 + b) % 100 < 100 * rate
        ratios.append(world.paced(STEPS).rate() / oracle(world, 0, STEPS))
    check(ratios, mean=0.97, least=0.95)


def test_requests_come_and_go():
    """Concurrency changes every 40 steps from 1 to 12, each time with other requests."""

    def batch(step: int) -> range:
        start = step // 40 * 5
        return range(start, start + (1, 4, 12, 2, 8)[step // 40 % 5])

    world = World(lambda step, b: 0.75, machine=Machine(CPU, pass_s=0.002), batch=batch)
    track = world.paced(1600)
    for length in range(8):  # seconds that it takes to emit as much in each stretch
        rates = {first: fixed_rate(world, length, first, first + 1) for first in range(0, 1600, 40)}
        seconds = sum(sum(track.tokens[first : first + 40]) / rate for first, rate in rates.items())
        assert seconds >= 0.98 * sum(track.seconds)


def test_prompts_beside_decoding():
    """Every third step also runs a chunk of 256 prompt rows, in which rows are dear."""
    world = World(lambda step, b: 0.7, 4, Machine(CPU, pass_s=0.002))
    world.num_prompt_rows = lambda step: 256 if step % 3 == 0 else 0
    assert world.paced(1000).rate() >= 0.95 * oracle(world, 0, 999)


def test_the_same_reports_give_the_same_lengths():
    worlds = [World(drifting, 3, Machine(CPU), seed=5) for _ in range(2)]
    assert worlds[0].paced(300).granted == worlds[1].paced(300).granted


@pytest.mark.parity
def test_regret_on_simulated_machines():
    """Seventy runs of 600 steps, of which the first hundred are for learning; the numbers are those of the docs."""
    cases = [(1, CPU, 0.8), (1, PER_ROW, 0.6), (2, PER_ROW, 0.8), (4, CPU, 0.8)]
    cases += [(8, CPU, 0.5), (8, GPU, 0.5), (16, PER_ROW, 0.5)]
    ratios = []
    for case in cases:
        for seed in range(10):
            world = constant(*case, seed=seed)
            ratios.append(world.paced(600).rate(100) / oracle(world, 0, 1))
        num, _, alpha = case
        print(f"{num} at once, acceptance {alpha}: {[round(ratio, 3) for ratio in ratios[-10:]]}")
    print(f"mean {math.prod(ratios) ** (1 / len(ratios)):.4f}, least {min(ratios):.3f}")
    check(ratios, mean=0.985, least=0.93)
