"""The roofline against counts made by hand, and its limits."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.blocks import Experts, Mlp, Plain, weight_shapes
from forerun.theory import formulas, roofline
from forerun.theory.landscape import landscape
from forerun.theory.roofline import MACHINES, SHAPES, Machine, Precision, Step

TINY = Plain("llama", 10, 4, 2, 2, 1, 2, 6, 1e-5, 64).spec
H100, ONE_B, EIGHT_B = MACHINES["h100"], SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]


def test_counts_by_hand():
    """A layer: q 4x4, k 2x4, v 2x4, o 4x4, three of 6x4 = 120 weights; two of them and a head of 40: 280."""
    assert roofline.weights_read(TINY) == 280
    assert roofline.cache_elements(TINY) == 2 * 2 * 2
    work = roofline.pass_work(TINY, Step(rows=3, batch=2, context=5), Precision(2.0, 4.0))
    assert work.products == (560, 2 * 280 * 6)
    # Keys and values of 5 old and 3 new positions are read and the new ones written, for two sequences.
    assert work.attention.bytes == 2 * (5 + 3 + 3) * 8 * 4
    # Rows see 6, 7 and 8 keys; a key takes 2 x 2 operations for its score, and as many for its value, in 2 heads.
    assert work.attention.operations == 2 * (6 + 7 + 8) * 2 * 2 * 4 * 2
    machine = Machine(bytes_per_s=100.0, operations_per_s=1000.0)
    assert work.seconds(machine) == pytest.approx(max(5.6, 3.36) + max(7.04, 1.344))


def test_weights_are_those_of_the_decoder():
    config = Plain("llama", 128256, 2048, 16, 32, 8, 64, 8192, 1e-5, 131072, tied=True).spec
    matrices = sum(int(np.prod(shape)) for shape in weight_shapes(config).values() if len(shape) == 2)
    assert roofline.weights_read(config) == roofline.weights_read(ONE_B) == matrices


def test_experts_by_hand():
    """A layer: attention 48, router 4 x 4, two of four experts of 3 x 6 x 4 = 72 and one more of 24, gated by 4."""
    experts = Experts(4, 2, Mlp(6), shared=Mlp(2), shared_gate=True)
    mixture = replace(TINY, blocks=tuple(replace(block, mlp=None, experts=experts) for block in TINY.blocks))
    one = 40 + 2 * (48 + 16 + 2 * 72 + 24 + 4)
    assert roofline.weights_read(mixture) == one
    # Of two rows each chooses two of four: 4 (1 - 1/2^2) = 3 on average. Each is multiplied by those of its own.
    work = roofline.pass_work(mixture, Step(rows=2)).products
    assert work == (2 * (one + 2 * 72), 2 * one * 2)
    assert roofline.pass_work(mixture, Step(rows=2, overlap=1.0)).products == (2 * one, 2 * one * 2)
    assert roofline.pass_work(mixture, Step(batch=2, overlap=0.5)).products.bytes == 2 * (one + 72)


@pytest.mark.parametrize(
    ("name", "all_weights", "used"), [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("gpt-oss-20b", 20.9e9, 3.6e9)]
)
def test_mixtures_are_those_that_their_makers_describe(name, all_weights, used):
    """Weights in all, and those of a token, which one of the two counts with its embedding."""
    shape = SHAPES[name]
    assert shape.num_weights == pytest.approx(all_weights, rel=2e-3)
    embedding = shape.vocab_size * shape.hidden_size if name.startswith("qwen") else 0
    assert roofline.weights_read(shape) + embedding == pytest.approx(used, rel=0.02)


def test_what_pays_goes_by_the_experts_that_rows_share():
    """Without overlap a mixture pays less than a dense decoder does that reads as much for one row, with it as much."""
    machine, draft = MACHINES["cpu-2-cores"], SHAPES["smollm2-135m"]

    def best(overlap: float) -> float:
        target, step = SHAPES["qwen3-30b-a3b"], Step(overlap=overlap)
        ratios = roofline.verify_ratios(target, step, machine, 8)
        return float(landscape([0.8], 8, roofline.cost_ratio(draft, target, step, machine), ratios).best_speedups[0])

    gains = [best(overlap) for overlap in (0.0, 0.5, 1.0)]
    assert gains == sorted(gains)
    assert gains[0] < 1.2 < 2 < gains[-1]


def test_a_window_ends_what_a_row_sees():
    """Of a context of 5 keys, rows of a layer with a window of 4 see 4 each; old keys are read as far."""
    first, second = TINY.blocks
    windowed = replace(first, attention=replace(first.attention, window=4))
    work = roofline.pass_work(replace(TINY, blocks=(windowed, second)), Step(rows=3, context=5), Precision(2.0, 4.0))
    assert work.attention.bytes == ((4 + 3 + 3) + (5 + 3 + 3)) * 4 * 4
    assert work.attention.operations == (3 * 4 + 6 + 7 + 8) * 2 * 2 * 4


def test_the_ridge():
    """Below it rows are free, far beyond it each costs its arithmetic."""
    ridge = roofline.ridge_rows(H100)
    assert ridge == pytest.approx(989.4e12 / 3.35e12)
    free = roofline.verify_ratios(EIGHT_B, Step(), H100, 15)
    assert free[0] == 1
    assert free[-1] == pytest.approx(1, abs=1e-3)
    bound = roofline.verify_ratios(EIGHT_B, Step(batch=round(4 * ridge)), H100, 3)
    assert bound == pytest.approx([1, 2, 3, 4], rel=1e-3)


def best_speedup(batch: int, context: int) -> float:
    step = Step(batch=batch, context=context)
    c = roofline.cost_ratio(SHAPES["llama-3.2-1b"], EIGHT_B, step, H100)
    return float(landscape([0.8], 8, c, roofline.verify_ratios(EIGHT_B, step, H100, 8)).best_speedups[0])


def test_a_large_batch_takes_the_gain_away():
    """Bound by arithmetic it never pays: gamma + 1 rows give at most gamma + 1 tokens."""
    gains = [best_speedup(batch, 0) for batch in (1, 64, 256, 1024)]
    assert gains[0] > 1.7
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == 1.0


def test_long_contexts_pay_in_large_batches_too():
    """Each sequence has a cache of its own, which a round reads once for all of its rows."""
    assert 1 < best_speedup(1024, 500) < best_speedup(1024, 8000) < 2


def test_cost_ratio_is_that_of_the_bytes_at_batch_one():
    weights = roofline.weights_read(ONE_B) / roofline.weights_read(EIGHT_B)
    assert roofline.cost_ratio(ONE_B, EIGHT_B, Step(), H100) == pytest.approx(weights, rel=1e-3)
    four_bit = roofline.cost_ratio(ONE_B, EIGHT_B, Step(), H100, Precision(0.5625))
    assert four_bit == pytest.approx(weights * 0.5625 / 2, rel=1e-3)


@pytest.mark.parametrize("context", [0, 1, 100, 10_000])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_round_is_bound_by_one_run_of_an_encoder(rows, context):
    """Section 3.4 of the paper, without the runs of the draft model."""
    step = Step(rows=rows, context=context)
    operations = roofline.pass_work(ONE_B, step).total.operations
    assert operations <= roofline.encoder_operations(ONE_B, context + rows)


def test_impossible_steps():
    with pytest.raises(ValueError, match="rows and batch are at least 1"):
        roofline.pass_work(TINY, Step(rows=0))


def test_break_even():
    alpha = formulas.break_even_alpha(4, 0.1, 1.2, 0.05)
    assert formulas.speedup(alpha, 4, 0.1, 1.2, 0.05) == pytest.approx(1)
    assert formulas.break_even_alpha(2, 1.0) == pytest.approx(1)
    assert formulas.break_even_alpha(2, 1.1) is None
