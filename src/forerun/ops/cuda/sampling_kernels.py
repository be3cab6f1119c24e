"""The sampling pipeline of rows in Triton, with the same bits as forerun.sampling has on the host.

Everything is computed as sampling/arithmetic.py defines it. exp and log are written out in basic operations. Masses are
whole numbers of ticks, so that their sums do not depend on the order. Divisions round as IEEE 754 says. The kernels
must be compiled without fused multiplications and additions. Under Triton's interpreter they run on a CPU.

A row is cut into parts of PART ids, and each part has its own program. `settings`, int64 [FIELDS, R], says how each row
is drawn (sampling.Field); floats are stored there as the bits of a float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
LOG_MIN_P = tl.constexpr(2)
TOP_P = tl.constexpr(3)
MOST_LISTED = tl.constexpr(4)
KIND = tl.constexpr(5)
SEED = tl.constexpr(6)
POSITION = tl.constexpr(7)
PURPOSE = tl.constexpr(8)
ROUND = tl.constexpr(9)

RACE = tl.constexpr(1)  # a KIND: by the noise of match; 2 = by the cumulative sum; 0 = the likeliest id
SUM = tl.constexpr(2)
MATCH = tl.constexpr(3)  # forerun.sampling.random.PURPOSE_MATCH
NIBBLES = tl.constexpr(8)  # of a sort key; each pass of a threshold search fixes one nibble
LAST_KEY = tl.constexpr(0x7FFFFFFF)
HALF = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds a float64 to a whole number


@triton.jit
def _float_of(settings, field, row, num_rows):
    return tl.load(settings + field * num_rows + row).to(tl.float64, bitcast=True)


@triton.jit
def _int_of(settings, field, row, num_rows):
    return tl.load(settings + field * num_rows + row)


@triton.jit
def _exp(x):
    """Compute exp as arithmetic.exp does, in float32, for x <= 0."""
    clipped = tl.maximum(x, -87.0)
    n = (clipped * 1.44269504088896341 + 12582912.0) - 12582912.0
    r = clipped - n * 0.693359375
    r = r - n * -2.12194440e-4
    out = r * 1.9875691500e-4
    out = out + 1.3981999507e-3
    out = out * r
    out = out + 8.3334519073e-3
    out = out * r
    out = out + 4.1665795894e-2
    out = out * r
    out = out + 1.6666665459e-1
    out = out * r
    out = out + 5.0000001201e-1
    out = out * (r * r)
    out = out + r
    out = out + 1.0
    power = (n.to(tl.int32) + 127) << 23
    out = out * power.to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, out)


@triton.jit
def _log(x):
    """Compute log as arithmetic.log does, in float64, for positive and normal x."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    fraction = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = fraction < 0.70710678118654752440
    f = tl.where(low, fraction + fraction, fraction) - 1.0
    k = (exponent - low.to(tl.int64)).to(tl.float64)
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01) + 3.999999999940941908e-01)
    odd = w * 1.479819860511658591e-01 + 1.818357216161805012e-01
    odd = w * odd + 2.857142874366239149e-01
    odd = z * (w * odd + 6.666666666666735130e-01)
    half_square = f * 0.5 * f
    tail = s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10
    return k * 6.93147180369123816490e-01 - ((half_square - tail) - f)


@triton.jit
def _ticks(weights, bits, exponent):
    """Return weights in whole ticks. 2^bits ticks are 2^exponent, the power of two above the largest weight."""
    scale = ((bits - exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return ((weights.to(tl.float64) * scale + HALF) - HALF).to(tl.int64)


@triton.jit
def _top(values, row, num_parts, PARTS: tl.constexpr):
    """Return the largest logit of a row, from the largest of each part."""
    at = tl.arange(0, PARTS)
    return tl.max(tl.load(values + row * num_parts + at, mask=at < num_parts, other=-float("inf")), 0)


@triton.jit
def _scaled(logits, values, settings, row, part, width, num_rows, num_parts, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return a part's scaled logits, their sort keys, and a mask of the ids that lie within the row.

    Scaled logits are logits less the row's largest, divided by the temperature. Sort keys are whole numbers that grow
    as logits fall.
    """
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * width + at, mask=at < width, other=-float("inf"))
    temperature = _float_of(settings, TEMPERATURE, row, num_rows).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    scaled = tl.div_rn(x - _top(values, row, num_parts, PARTS), tl.zeros((PART,), tl.float32) + temperature)
    keys = scaled.to(tl.int32, bitcast=True) & LAST_KEY
    return scaled, tl.where(at < width, keys, LAST_KEY), at < width


@triton.jit(do_not_specialize=["step"])
def searched(
    logits, values, settings, cuts, sums, states, goals, width, num_rows, num_parts, tick_bits, step,
    BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fix one nibble of the threshold of a row. One call is one pass of the search.

    The threshold is the least sort key (see _scaled) for which the sum over all keys up to it reaches the row's goal.
    BY_MASS: whether ticks are summed; otherwise ids are counted. sums int64 [NIBBLES, R, parts, 16]: the sums of each
    pass, one for each value of the next nibble. An id is included only if its key begins with the known nibbles of the
    threshold. states int64 [NIBBLES + 1, R, 2]: the known nibbles of the threshold, and the sum over lower keys. goals:
    int64 [R]. cuts int64 [R, 2]: with HAS_CUT, ids whose keys are above cuts[row, 0] are left out. step: the number of
    the pass. Pass 0 only sums, and the last pass, NIBBLES, only fixes a nibble.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    step = step.to(tl.int64)
    nibble = tl.arange(0, 16)
    prefix = tl.zeros((), tl.int64)
    below = tl.zeros((), tl.int64)
    if step > 0:
        before = (step - 1) * num_rows + row
        prefix, below = tl.load(states + before * 2), tl.load(states + before * 2 + 1)
        at = tl.arange(0, PARTS)
        nibble_sums = tl.load(
            sums + (before * num_parts + at[:, None]) * 16 + nibble[None, :], mask=at[:, None] < num_parts, other=0
        )
        whole = tl.sum(nibble_sums, 0)
        upto = below + tl.cumsum(whole, 0)
        chosen = tl.sum((upto < tl.load(goals + row)).to(tl.int64), 0)
        chosen = tl.minimum(chosen, 15)
        below += tl.sum(tl.where(nibble < chosen, whole, 0), 0)
        prefix = prefix * 16 + chosen
    if part == 0:
        tl.store(states + (step * num_rows + row) * 2, prefix)
        tl.store(states + (step * num_rows + row) * 2 + 1, below)
    if step < NIBBLES:
        scaled, keys, inside = _scaled(logits, values, settings, row, part, width, num_rows, num_parts, PART, PARTS)
        if HAS_CUT:
            inside = inside & (keys <= tl.load(cuts + row * 2))
        if BY_MASS:
            inside = inside & (scaled >= _float_of(settings, LOG_MIN_P, row, num_rows).to(tl.float32))
            amounts = _ticks(_exp(scaled), tick_bits, 1)
        else:
            amounts = tl.full((PART,), 1, tl.int64)
        shift = (NIBBLES - 1 - step) * 4
        keys = keys.to(tl.int64)
        begin = (keys >> (shift + 4)) == prefix
        amounts = tl.where(inside & begin, amounts, 0)
        next_nibbles = (keys >> shift) & 15
        for i in tl.static_range(16):
            amount = tl.sum(tl.where(next_nibbles == i, amounts, 0), 0)
            tl.store(sums + ((step * num_rows + row) * num_parts + part) * 16 + i, amount)


@triton.jit
def counted(
    logits, values, settings, cuts, sums, width, num_rows, num_parts, tick_bits, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Write three sums for each part: the ticks of ids before the cut, the count of these ids, the count at the cut.

    sums: int64 [R, parts, 3]. cuts int64 [R, 2]: ids with sort keys below cuts[row, 0] stay. Of the ids whose key is
    equal to cuts[row, 0], the first cuts[row, 1] stay.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    scaled, keys, inside = _scaled(logits, values, settings, row, part, width, num_rows, num_parts, PART, PARTS)
    inside = inside & (scaled >= _float_of(settings, LOG_MIN_P, row, num_rows).to(tl.float32))
    cut = tl.load(cuts + row * 2)
    ticks = _ticks(_exp(scaled), tick_bits, 1)
    to = sums + (row * num_parts + part) * 3
    tl.store(to, tl.sum(tl.where(inside & (keys < cut), ticks, 0), 0))
    tl.store(to + 1, tl.sum((inside & (keys < cut)).to(tl.int64), 0))
    tl.store(to + 2, tl.sum((inside & (keys == cut)).to(tl.int64), 0))


@triton.jit
def cut_by_number(settings, states, cuts, num_rows):
    """Set each row's cut from a search by count, so that the top_k likeliest ids stay. One program for each row."""
    row = tl.program_id(0)
    at = (NIBBLES * num_rows + row) * 2
    top_k = _int_of(settings, TOP_K, row, num_rows)
    tl.store(cuts + row * 2, tl.where(top_k > 0, tl.load(states + at), LAST_KEY))
    tl.store(cuts + row * 2 + 1, tl.where(top_k > 0, top_k - tl.load(states + at + 1), 1 << 40))


@triton.jit
def _at_key(key, tick_bits):
    """Return the ticks of an id with this sort key."""
    scaled = (key.to(tl.int32) | -0x80000000).to(tl.float32, bitcast=True)
    return _ticks(_exp(scaled), tick_bits, 1)


@triton.jit
def goal_of_mass(settings, cuts, sums, goals, num_rows, num_parts, tick_bits, PARTS: tl.constexpr):
    """Set each row's goal to top_p times the ticks of its remaining mass, rounded up. One program for each row."""
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    at_part = sums + (row * num_parts + at) * 3
    total = tl.sum(tl.load(at_part, mask=at < num_parts, other=0), 0)
    num_equal = tl.sum(tl.load(at_part + 2, mask=at < num_parts, other=0), 0)
    num_equal = tl.minimum(num_equal, tl.load(cuts + row * 2 + 1))
    total += num_equal * _at_key(tl.load(cuts + row * 2), tick_bits)
    top_p = _float_of(settings, TOP_P, row, num_rows)
    share = top_p * total.to(tl.float64)
    goal = share.to(tl.int64)
    goal += (goal.to(tl.float64) < share).to(tl.int64)
    tl.store(goals + row, goal)


@triton.jit
def cut_by_mass(settings, states, goals, cuts, num_rows, tick_bits):
    """Set each row's cut from a search by mass: the fewest likeliest ids stay whose mass reaches the share top_p."""
    row = tl.program_id(0)
    at = (NIBBLES * num_rows + row) * 2
    key, below = tl.load(states + at), tl.load(states + at + 1)
    tick = tl.maximum(_at_key(key, tick_bits), 1)
    num = (tl.load(goals + row) - below + tick - 1) // tick
    old_key, old_num = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    num = tl.where(key == old_key, tl.minimum(num, old_num), num)
    is_cut = _float_of(settings, TOP_P, row, num_rows) < 1.0
    tl.store(cuts + row * 2, tl.where(is_cut, key, old_key))
    tl.store(cuts + row * 2 + 1, tl.where(is_cut, num, old_num))


@triton.jit
def goal_of_number(settings, goals, num_rows):
    """Set each row's goal to the number of ids that top_k keeps."""
    row = tl.program_id(0)
    tl.store(goals + row, _int_of(settings, TOP_K, row, num_rows))


@triton.jit
def weighed(
    logits, values, settings, cuts, counts, probs, sums, width, num_rows, num_parts, tick_bits,
    HAS_CUT: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write probs [R, V]: for each id that the filters keep, e to the power of its scaled logit; for other ids, 0.

    sums int64 [R, parts, 2]: the ticks of the kept ids, and their number. counts: the sums that `counted` wrote for
    these cuts.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    scaled, keys, inside = _scaled(logits, values, settings, row, part, width, num_rows, num_parts, PART, PARTS)
    kept = inside & (scaled >= _float_of(settings, LOG_MIN_P, row, num_rows).to(tl.float32))
    if HAS_CUT:
        cut, most = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        at = tl.arange(0, PARTS)
        equal = tl.load(counts + (row * num_parts + at) * 3 + 2, mask=at < part, other=0)
        is_equal = kept & (keys == cut)
        rank = tl.sum(equal, 0) + tl.cumsum(is_equal.to(tl.int32), 0)  # counted from 1
        kept = kept & ((keys < cut) | (is_equal & (rank <= most)))
    weights = tl.where(kept, _exp(scaled), 0.0)
    to = row.to(tl.int64) * width + part * PART + tl.arange(0, PART)
    tl.store(probs + to, weights, mask=inside)
    at_part = sums + (row * num_parts + part) * 2
    tl.store(at_part, tl.sum(_ticks(weights, tick_bits, 1), 0))
    tl.store(at_part + 1, tl.sum(kept.to(tl.int64), 0))


@triton.jit
def _mass(sums, row, num_parts, tick_bits, PARTS: tl.constexpr):
    """Return the sum of a row's weights, float32, and the number of ids that the filters kept."""
    at = tl.arange(0, PARTS)
    at_part = sums + (row * num_parts + at) * 2
    total = tl.sum(tl.load(at_part, mask=at < num_parts, other=0), 0)
    num = tl.sum(tl.load(at_part + 1, mask=at < num_parts, other=0), 0)
    unit = ((1 - tick_bits + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (total.to(tl.float64) * unit).to(tl.float32), num


@triton.jit
def _place_bits(settings, num, row, num_rows, tick_bits, width):
    """Return the number of tick bits (see _ticks) for a draw. A short list of ids that filters keep gets more bits.

    num: the number of ids that the filters of the row keep.
    """
    is_listed = num <= _int_of(settings, MOST_LISTED, row, num_rows)
    is_cut = (
        (_int_of(settings, TOP_K, row, num_rows) > 0)
        | (_float_of(settings, TOP_P, row, num_rows) < 1.0)
        | (_float_of(settings, LOG_MIN_P, row, num_rows) > -float("inf"))
    )
    return tl.where(is_listed & is_cut & (num < (1 << 18)), 44, tick_bits)


@triton.jit
def drawn_in_parts(
    settings, depths, probs, sums, times, ids, masses, width, num_rows, num_parts, tick_bits,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Divide weights by their mass, and prepare the draw of each part.

    times float64 [R, parts], ids [R, parts]: for rows that are drawn by the noise of the rule `match`, the shortest
    random time in each part, and the id that has this time. masses int64 [R, parts]: for rows that are drawn by the
    cumulative sum, the ticks of each part.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    mass, num = _mass(sums, row, num_parts, tick_bits, PARTS)
    lanes = part * PART + tl.arange(0, PART)
    inside = lanes < width
    to = row.to(tl.int64) * width + lanes
    divisor = tl.zeros((PART,), tl.float32) + mass
    chances = tl.div_rn(tl.load(probs + to, mask=inside, other=0.0), divisor)
    tl.store(probs + to, chances, mask=inside)
    kind = _int_of(settings, KIND, row, num_rows)
    if kind == RACE:
        position = _int_of(settings, POSITION, row, num_rows) + tl.load(depths + row)
        zero = tl.zeros((PART,), tl.int32)
        w0, w1, w2, w3 = tl.philox(
            _int_of(settings, SEED, row, num_rows), zero + position.to(tl.int32), zero + MATCH, zero, lanes >> 2
        )
        lane = lanes & 3
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        is_in = inside & (chances > 0)
        wide = tl.where(is_in, chances, 1.0).to(tl.float64)
        finished = tl.where(is_in, -_log(uniform) / wide, float("inf"))
        first = tl.min(finished, 0)
        tl.store(times + row * num_parts + part, first)
        tl.store(ids + row * num_parts + part, tl.min(tl.where(finished == first, lanes, 0x7FFFFFFF), 0))
    if kind == SUM:
        largest = tl.div_rn(1.0 + 0.0 * mass, mass)
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 126
        bits = _place_bits(settings, num, row, num_rows, tick_bits, width)
        tl.store(masses + row * num_parts + part, tl.sum(_ticks(chances, bits, exponent), 0))


@triton.jit
def drawn(
    settings, depths, probs, sums, times, ids, masses, values, largest_ids, drawn_ids, best, chances, width, num_rows,
    num_parts, tick_bits,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the drawn id and the likeliest id of each row, int32 [R], and the probability of the drawn id, chances [R].

    The ids are -1 where the row's largest logit is NaN or infinite.
    """
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    is_part = at < num_parts
    kind = _int_of(settings, KIND, row, num_rows)
    tops = tl.load(values + row * num_parts + at, mask=is_part, other=-float("inf"))
    top, place = tl.max(tops, 0, return_indices=True)
    likeliest = tl.load(largest_ids + row * num_parts + place)
    id_ = likeliest
    chance = 1.0
    if kind == RACE:
        part_times = tl.load(times + row * num_parts + at, mask=is_part, other=float("inf"))
        first = tl.min(part_times, 0)
        id_ = tl.min(
            tl.where(
                is_part & (part_times == first),
                tl.load(ids + row * num_parts + at, mask=is_part, other=0x7FFFFFFF),
                0x7FFFFFFF,
            ),
            0,
        )
    if kind == SUM:
        mass, num = _mass(sums, row, num_parts, tick_bits, PARTS)
        largest = tl.div_rn(1.0 + 0.0 * mass, mass)
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 126
        bits = _place_bits(settings, num, row, num_rows, tick_bits, width)
        upto = tl.cumsum(tl.load(masses + row * num_parts + at, mask=is_part, other=0), 0)
        total = tl.max(upto, 0)
        w0, w1, _, _ = tl.philox(
            _int_of(settings, SEED, row, num_rows),
            (_int_of(settings, POSITION, row, num_rows) + tl.load(depths + row)).to(tl.int32),
            _int_of(settings, PURPOSE, row, num_rows).to(tl.int32),
            _int_of(settings, ROUND, row, num_rows).to(tl.int32),
            tl.zeros((), tl.int32),
        )
        uniform = (w0.to(tl.uint64) >> 5) * 67108864 + (w1.to(tl.uint64) >> 6)
        goal = tl.umulhi(uniform << 11, total.to(tl.uint64)).to(tl.int64)
        part = tl.minimum(tl.sum((is_part & (upto <= goal)).to(tl.int32), 0), num_parts - 1)
        before = tl.max(tl.where(is_part & (upto <= goal), upto, 0), 0)
        lanes = part * PART + tl.arange(0, PART)
        weights = tl.load(probs + row.to(tl.int64) * width + lanes, mask=lanes < width, other=0.0)
        reached = before + tl.cumsum(_ticks(weights, bits, exponent), 0)
        id_ = tl.min(tl.where(reached > goal, lanes, 0x7FFFFFFF), 0)
    is_number = (top < float("inf")) & (top > -float("inf"))
    tl.store(best + row, tl.where(is_number, likeliest, -1))
    is_id = is_number & (id_ < width)
    if kind > 0:
        chance = tl.load(probs + row.to(tl.int64) * width + tl.where(is_id, id_, 0))
    tl.store(drawn_ids + row, tl.where(is_id, id_, -1))
    tl.store(chances + row, chance)
