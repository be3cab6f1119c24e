"""The kernels of mixtures of experts, in Triton. Their launches do not depend on the experts that are chosen.

A pair is a row together with one of the experts that were chosen for it; choice c of a row is pair row * CHOSEN + c.
Pairs are grouped by expert into tiles of a few pairs, so that a pass of a few rows reads each chosen expert once.
Neither a pair's place in a tile nor the order of tiles changes any bits. A pair is multiplied as ops/cuda/kernels.py
multiplies a row, and the results of a row's experts are added in the order in which the experts were chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.ops.cuda.kernels import CODES_STEP, TILE, _begun, _codes_multiplied, _multiplied, _summed

LEAST = tl.constexpr(-3.0e38)  # stands in for a score that is NaN or below all numbers


@triton.jit(do_not_specialize=["num_rows"])
def routed(
    parts, bias, expert_scales, live, ids, shares, order, tiles, counts, num_rows, num_experts, score_scale, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr, SCALED: tl.constexpr,
    LIVE: tl.constexpr, CHOSEN: tl.constexpr, CHOICES: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row from the router's partial sums; on ties, the lowest expert id.

    parts [SPLITS, num_rows, num_experts]: the partial sums. A score is the sum plus the bias (if BIAS), times
    score_scale. ids, shares [num_rows, CHOSEN]: the chosen experts and their weights. A weight is multiplied by `scale`
    and, if SCALED, by the expert's entry in expert_scales. live [num_rows], if LIVE: 0 = the row is padding, and its
    ids are -1. order, tiles, counts [2]: see `grouped`. ALONE: whether there is only one row. If so, this kernel writes
    order, tiles and counts, and `grouped` does not run. Otherwise counts are set to 0 for `grouped`. CHOICES: a power
    of two, at least CHOSEN. BLOCK: a power of two, at least num_experts. EARLY: see `_begun`.
    """
    _begun(EARLY)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < num_experts
    start = row.to(tl.int64) * num_experts
    found = _summed(parts, start + at, num_rows.to(tl.int64) * num_experts, inside, SPLITS)
    if BIAS:
        found += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    found = found * score_scale
    left = tl.where(found > LEAST, found, LEAST)  # an expert whose score is NaN is chosen last, and only once
    left = tl.where(inside, left, -float("inf"))
    if SCORE == "softmax":
        found = tl.where(inside, found, -float("inf"))
        found = tl.exp(found - tl.max(found, 0))
        found = found / tl.sum(found, 0)
    if SCORE == "sigmoid":
        found = 1.0 / (1.0 + tl.exp(-found))
    slots = tl.arange(0, CHOICES)
    weights = tl.full((CHOICES,), -float("inf"), tl.float32)
    chosen = tl.zeros((CHOICES,), tl.int32)
    for c in tl.static_range(CHOSEN):
        _, best = tl.max(left, 0, return_indices=True)
        weights = tl.where(slots == c, tl.sum(tl.where(at == best, found, 0.0), 0), weights)
        chosen = tl.where(slots == c, best, chosen)
        left = tl.where(at == best, -float("inf"), left)
    is_own = slots < CHOSEN
    if SCORE == "softmax_of_chosen":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    elif NORMALISE:
        weights = weights / tl.sum(tl.where(is_own, weights, 0.0), 0)
    weights = weights * scale
    if SCALED:
        weights = weights * tl.load(expert_scales + chosen, mask=is_own, other=0.0).to(tl.float32)
    is_live = True
    if LIVE:
        is_live = tl.load(live + row) > 0
        chosen = tl.where(is_live, chosen, -1)
    pairs = row * CHOSEN + slots
    tl.store(ids + pairs, chosen, mask=is_own)
    tl.store(shares + pairs, weights, mask=is_own)
    if ALONE:
        tl.store(order + slots, slots, mask=is_own)
        tl.store(tiles + slots * 3, chosen, mask=is_own)
        tl.store(tiles + slots * 3 + 1, slots, mask=is_own)
        tl.store(tiles + slots * 3 + 2, tl.full((CHOICES,), 1, tl.int32), mask=is_own)
        num = tl.where(is_live, CHOSEN, 0)
        tl.store(counts, num)
        tl.store(counts + 1, num)
    elif row == 0:
        tl.store(counts, 0)
        tl.store(counts + 1, 0)


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def grouped(
    ids, order, tiles, counts, num_rows, num_pairs, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Collect the pairs of one expert, and cut them into tiles of ROWS pairs. One program runs for each expert.

    ids [num_pairs]: the expert of each pair. order: the collected pairs, with num_rows entries for each expert. tiles
    [most, 3]: for each tile, its expert, its first index in `order`, and its number of pairs. counts: the number of
    tiles, and the number of experts that have pairs.
    """
    _begun(EARLY)
    expert = tl.program_id(0)
    first = expert * num_rows
    num = 0
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = tl.load(ids + at, mask=at < num_pairs, other=-1) == expert
        is_here = here.to(tl.int32)
        tl.store(order + first + num + tl.cumsum(is_here, 0) - is_here, at, mask=here)
        num += tl.sum(is_here, 0)
    if num > 0:
        num_tiles = (num + ROWS - 1) // ROWS
        tile = tl.atomic_add(counts, num_tiles)
        tl.atomic_add(counts + 1, 1)
        for i in range(num_tiles):
            to = tiles + (tile + i) * 3
            tl.store(to, expert)
            tl.store(to + 1, first + i * ROWS)
            tl.store(to + 2, tl.minimum(num - i * ROWS, ROWS))


@triton.jit
def _of_expert(addresses, at, like):
    """Load the address at index `at` as a pointer of the same type as `like`.

    The address must be a multiple of 16 bytes.
    """
    return tl.multiple_of(tl.load(addresses + at).to(like.dtype), 16)


@triton.jit
def _first_bias(biases, expert, outs, num_out, split):
    """Load an expert's bias for the first part of the inputs, and 0 for other parts, so that the bias is added once.

    split: the index of the part. outs: the indices of the outputs.
    """
    at = biases + expert.to(tl.int64) * num_out + outs
    return tl.load(at, mask=outs < tl.where(split == 0, num_out, 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs"])
def product_of_experts(
    x, matrices, biases, order, tiles, counts, out, num_pairs, num_out, num_in, x_stride, weight_stride,
    EACH: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PART: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply each pair by its expert's matrix [O, I] -> out [splits, num_pairs, O], as `product` multiplies rows.

    x [num_pairs / EACH, I]: the inputs; EACH consecutive pairs share a row. matrices: the address of each expert's
    matrix. A matrix has the dtype of x, and begins at a multiple of 16 bytes. biases [experts, O]: added to the first
    part.
    """
    _begun(EARLY)
    tile = tl.program_id(0)
    expert, place, num = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tile >= tl.load(counts):
        return
    slots = tl.arange(0, ROWS)
    is_pair = slots < num
    pairs = tl.load(order + place + slots, mask=is_pair, other=0)
    weight = _of_expert(matrices, expert, x)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    ins = split * PART + tl.arange(0, INS)
    is_row, is_out = is_pair[:, None], outs[None, :] < num_out
    xs = x + (pairs // EACH)[:, None].to(tl.int64) * x_stride + ins[None, :]
    ws = weight + outs[None, :].to(tl.int64) * weight_stride + ins[:, None]
    acc = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    acc = _multiplied(xs, ws, acc, is_row, is_out, split * PART, num_in, INS, PART, EVEN, PRECISION)
    if BIAS:
        acc += _first_bias(biases, expert, outs, num_out, split)[None, :]
    to = out + (split * num_pairs + pairs[:, None]).to(tl.int64) * num_out + outs[None, :]
    tl.store(to, acc, mask=is_row & is_out)


@triton.jit(do_not_specialize=["num_pairs", "num_out", "num_in", "steps", "part"])
def product_of_experts_codes(
    x, addresses, codes, scales, zeros, minimums, supers, super_minimums, biases, order, tiles, counts, out, num_pairs,
    num_out, num_in, steps, part, x_stride,
    EACH: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, SUPER_MINIMUMS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply each pair by its expert's packed matrix -> out [splits, num_pairs, O].

    `product_of_codes` does the same for rows. addresses [experts, 6]: the addresses of each expert's codes, scales,
    zeros, minimums, supers and super_minimums. The arguments with these six names are the tensors of the first expert;
    only their types are used. See product_of_experts for the other arguments.
    """
    _begun(EARLY)
    pair_tile = tl.program_id(0)
    at = tiles + pair_tile * 3
    expert, place, num = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if pair_tile >= tl.load(counts):
        return
    slots = tl.arange(0, ROWS)
    is_pair = slots < num
    pairs = tl.load(order + place + slots, mask=is_pair, other=0)
    own = addresses + expert * 6
    tile, split = tl.program_id(1), tl.program_id(2)
    num_words: tl.constexpr = CODES_STEP * TILE // (8 if KIND == "int4" else 4)
    first = split * part
    words = _of_expert(own, 0, codes) + (tile.to(tl.int64) * steps + first) * num_words
    acc = _codes_multiplied(
        x + (pairs // EACH).to(tl.int64) * x_stride, is_pair, words, _of_expert(own, 1, scales),
        _of_expert(own, 2, zeros), _of_expert(own, 3, minimums), _of_expert(own, 4, supers),
        _of_expert(own, 5, super_minimums), tile, first, tl.minimum(first + part, steps), steps, num_in, ROWS, KIND,
        GROUP, SUPER, ZERO, ZEROS, MINIMUMS, SUPER_MINIMUMS, EVEN, PRECISION, STAGES,
    )  # fmt: skip
    outs = tile * TILE + tl.arange(0, TILE)
    is_out = outs < num_out
    if BIAS:
        acc += _first_bias(biases, expert, outs, num_out, split)[:, None]
    to = out + (split * num_pairs + pairs[None, :]).to(tl.int64) * num_out + outs[:, None]
    tl.store(to, acc, mask=is_pair[None, :] & is_out[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def experts_added(
    parts, ids, shares, shared, shared_bias, gates, out, num_rows, width,
    SPLITS: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, SHARED_BIAS: tl.constexpr, GATES: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up a row's expert outputs, each times its weight, in the order of choice, then the shared expert's output.

    out: [num_rows, width]. ids, shares [num_rows, CHOSEN]: the chosen experts and their weights; id -1 adds nothing.
    parts [SPLITS, num_rows * CHOSEN, width]: partial sums of the chosen experts. shared [SHARED, num_rows, width]:
    partial sums of the expert that all rows share; SHARED = 0: there is no such expert. shared_bias [width], if
    SHARED_BIAS: the bias of the shared expert. gates [GATES, num_rows]: partial sums of the shared expert's gate. The
    output of the shared expert is multiplied by the sigmoid of the gate; GATES = 0: the output is added unchanged.
    EARLY: see `_begun`.
    """
    _begun(EARLY)
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    stride = num_rows.to(tl.int64) * width
    for c in tl.static_range(CHOSEN):
        pair = row * CHOSEN + c
        is_there = at < tl.where(tl.load(ids + pair) >= 0, width, 0)
        given = _summed(parts, pair.to(tl.int64) * width + at, stride * CHOSEN, is_there, SPLITS)
        acc += given * tl.load(shares + pair)
    if SHARED > 0:
        given = _summed(shared, row.to(tl.int64) * width + at, stride, inside, SHARED)
        if SHARED_BIAS:
            given += tl.load(shared_bias + at, mask=inside, other=0.0).to(tl.float32)
        if GATES > 0:
            gate = tl.load(gates + row)
            for i in tl.static_range(1, GATES):
                gate += tl.load(gates + i * num_rows + row)
            given = given * (1.0 / (1.0 + tl.exp(-gate)))
        acc += given
    tl.store(out + row.to(tl.int64) * width + at, acc, mask=inside)
