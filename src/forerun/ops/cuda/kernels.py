"""The kernels of the CUDA backend, in Triton. Each also runs under Triton's interpreter on a CPU.

Three rules fix the bits of a row. First, a product runs over tiles of 16, 32 or 64 rows. If there are fewer rows, a
tile is padded, so that every row takes the same instructions. The dimension over which a product sums (K) is cut into
parts. The number of parts depends on the matrix alone, and the parts are added in order. Second, attention walks the
keys of a row in the order of their logical positions, in parts that begin at multiples of SPLIT_KEYS, and adds the
parts in order. The place of a key in the cache does not matter. Third, everything else is computed row by row. Sums are
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.ops.cuda import packed as cuda_packed

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _begun(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait until the previous kernel has ended.

    EARLY: whether kernels are launched before the previous kernel has ended (programmatic dependent launch). A kernel
    waits here before it reads the results of other kernels, so it ends after all earlier kernels.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _erf(x):
    """Compute erf by Numerical Recipes' series of erfc, with an error below 1.2e-7.

    Abramowitz and Stegun's formula 7.1.26 is too coarse.
    """
    z = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * z)
    poly = 1.48851587 + t * (-0.82215223 + t * 0.17087277)
    poly = -0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * poly))
    poly = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * poly)))
    erfc = t * tl.exp(-z * z + poly)
    return tl.where(x >= 0, 1.0 - erfc, erfc - 1.0)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACT == "gelu":
        return 0.5 * x * (1.0 + _erf(x * 0.7071067811865476))
    if ACT == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACT == "relu":
        return tl.maximum(x, 0.0)
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc plus the matrix product of a and b.

    PRECISION "widened" is for the interpreter, which cannot multiply bfloat16. Products are then computed in float32,
    which holds them exactly.
    """
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _multiplied(
    xs, ws, acc, is_row, is_out, first, num_in,
    INS: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return acc plus the matrix product over PART inputs, from input `first` on.

    xs [ROWS, INS], ws [INS, OUTS]: pointers to the first INS inputs of the rows and of the weights.
    """
    for start in range(0, PART, INS):
        if EVEN:
            w = tl.load(ws + start)
            a = tl.load(xs + start, mask=is_row, other=0.0).to(w.dtype)
        else:
            inside = first + start + tl.arange(0, INS) < num_in
            w = tl.load(ws + start, mask=is_out & inside[:, None], other=0.0)
            a = tl.load(xs + start, mask=is_row & inside[None, :], other=0.0).to(w.dtype)
        acc = _dot(a, w, acc, PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x, weight, bias, out, num_rows, num_out, num_in, x_stride, weight_stride,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply x [num_rows, I] by weight [O, I] -> out [SPLITS, num_rows, O]; each part sums over PART inputs.

    ROWS: the number of rows of a tile, 16, 32 or 64. A row has the same bits with each of these numbers
    (docs/development/gpu.md). EVEN: whether parts of PART inputs fill I, and OUTS divides O. LINES: the number of cache
    lines that are prefetched for each output before the previous kernel has ended. LINE: the number of weights in a
    cache line.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES > 0:
            asked = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
            at = asked[:, None].to(tl.int64) * weight_stride + tl.program_id(2) * PART
            lines = weight + at + (tl.arange(0, LINES) * LINE)[None, :]
            # A prefetch has no result, but inline assembly needs one: a 0 that nobody reads.
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * ROWS
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    rows = first + tl.arange(0, ROWS)
    ins = split * PART + tl.arange(0, INS)
    is_row, is_out = rows[:, None] < num_rows, outs[None, :] < num_out
    xs = x + rows[:, None] * x_stride + ins[None, :]
    ws = weight + outs[None, :].to(tl.int64) * weight_stride + ins[:, None]
    acc = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    acc = _multiplied(xs, ws, acc, is_row, is_out, split * PART, num_in, INS, PART, EVEN, PRECISION)
    if BIAS:
        added = tl.load(bias + outs, mask=outs < num_out, other=0.0).to(tl.float32)
        acc += added[None, :]
    to = out + (split * num_rows + rows[:, None]).to(tl.int64) * num_out + outs[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_row & is_out)


TILE = tl.constexpr(cuda_packed.TILE)
CODES_STEP = tl.constexpr(cuda_packed.STEP)
LESS_128 = tl.constexpr(-0x3CFF3D00)  # the words of 32 bits that hold -128 twice, as bfloat16
TWICE = tl.constexpr(0x10001)  # times a number of 16 bits = the number in both halves of a word

# Bit operations turn codes into exact bfloat16 numbers, two at a time. 0x4300 is 128 in bfloat16, and its 7 mantissa
# bits add 0 to 127. Each text takes words of codes ($8, or $4) and gives the numbers of a word's codes, in order.
INT4_TEXT = tl.constexpr(
    """{
    .reg .b32 a<4>, t<4>, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 a0, $8, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t1, $8, 4;
    lop3.b32 a1, t1, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t2, $8, 8;
    lop3.b32 a2, t2, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t3, $8, 12;
    lop3.b32 a3, t3, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 a0, a0, one, $9;
    fma.rn.bf16x2 a1, a1, one, $9;
    fma.rn.bf16x2 a2, a2, one, $10;
    fma.rn.bf16x2 a3, a3, one, $10;
    mov.b32 {$0, $1}, a0;
    mov.b32 {$2, $3}, a1;
    mov.b32 {$4, $5}, a2;
    mov.b32 {$6, $7}, a3;
    }"""
)
# A signed byte is its low 7 bits, less 128 if its sign bit is set. 0x4380 is 256 in bfloat16.
INT8_TEXT = tl.constexpr(
    """{
    .reg .b32 a<2>, b<2>, t1, less;
    mov.b32 less, 0xbf80bf80;
    lop3.b32 a0, $4, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b0, $4, 0x00800080, 0x43004300, 0xea;
    shr.u32 t1, $4, 8;
    lop3.b32 a1, t1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b1, t1, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 a0, b0, less, a0;
    fma.rn.bf16x2 a1, b1, less, a1;
    mov.b32 {$0, $1}, a0;
    mov.b32 {$2, $3}, a1;
    }"""
)
# The 4 exponent bits and 3 mantissa bits of e4m3, put in the places of bfloat16's own, give 2 ** -120 times the number.
# This also holds below the least normal number.
FP8_TEXT = tl.constexpr(
    """{
    .reg .b32 a<2>, t<2>, up, none;
    mov.b32 up, 0x7b807b80;
    mov.b32 none, 0x80008000;
    shl.b32 t0, $4, 8;
    shl.b32 a0, $4, 4;
    and.b32 a0, a0, 0x07f007f0;
    lop3.b32 a0, t0, 0x80008000, a0, 0xea;
    shr.u32 a1, $4, 4;
    and.b32 a1, a1, 0x07f007f0;
    lop3.b32 a1, $4, 0x80008000, a1, 0xea;
    fma.rn.bf16x2 a0, a0, up, none;
    fma.rn.bf16x2 a1, a1, up, none;
    mov.b32 {$0, $1}, a0;
    mov.b32 {$2, $3}, a1;
    }"""
)


@triton.jit
def _part(words, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Return column INDEX of words [N, COUNT] -> [N]. Each thread has all columns of its rows, so no data moves."""
    num: tl.constexpr = words.shape[0]
    if COUNT == 1:
        part = tl.reshape(words, (num,))
    else:
        low, high = tl.split(tl.permute(tl.reshape(words, (num, 2, COUNT // 2)), (0, 2, 1)))
        if INDEX < COUNT // 2:
            part = _part(low, INDEX, COUNT // 2)
        else:
            part = _part(high, INDEX - COUNT // 2, COUNT // 2)
    return part


@triton.jit
def _numbers(at, COUNT: tl.constexpr):
    """Load one value, such as a scale, for each of COUNT groups and each output of a tile -> COUNT tensors [TILE].

    The numbers stay in memory order, see _by_output.
    """
    if COUNT == 1:
        groups = (tl.load(at),)
    else:
        groups = _numbers(at, COUNT // 2) + _numbers(at + COUNT // 2 * TILE, COUNT // 2)
    return groups


@triton.jit
def _by_output(numbers):
    """Reorder numbers [TILE] from memory order to the order of outputs.

    In memory, outputs i and i + 8 of every 16 are neighbours.
    """
    return tl.reshape(tl.permute(tl.reshape(numbers, (4, 8, 2)), (0, 2, 1)), (TILE,))


@triton.jit
def _nibbles(words, zeros, ZERO: tl.constexpr, ZEROS: tl.constexpr, PRECISION: tl.constexpr):
    """Unpack words [4, 8, 4, N] of 4-bit codes into weights [4, 2, 8, N, 2, 4, 2], which are codes less zero points.

    ZEROS: whether each output has its own zero point, in `zeros` [TILE]. Otherwise every zero point is ZERO.
    """
    if PRECISION == "widened":
        less, more = ZERO, ZERO
        if ZEROS:
            less, more = tl.split(tl.reshape(zeros.to(tl.int32), (4, 8, 2)))
            less, more = less[:, :, None, None], more[:, :, None, None]
        a0, a1 = ((words & 15) - less).to(tl.float32), (((words >> 16) & 15) - less).to(tl.float32)
        a2, a3 = (((words >> 4) & 15) - less).to(tl.float32), (((words >> 20) & 15) - less).to(tl.float32)
        a4, a5 = (((words >> 8) & 15) - more).to(tl.float32), (((words >> 24) & 15) - more).to(tl.float32)
        a6, a7 = (((words >> 12) & 15) - more).to(tl.float32), (((words >> 28) & 15) - more).to(tl.float32)
    else:
        if ZEROS:
            less, more = tl.split(tl.reshape(zeros.to(tl.int32) * TWICE + LESS_128, (4, 8, 2)))
            less = tl.broadcast_to(less[:, :, None, None], words.shape)
            more = tl.broadcast_to(more[:, :, None, None], words.shape)
        else:
            less = tl.full(words.shape, ZERO * TWICE + LESS_128, tl.int32)
            more = less
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            INT4_TEXT,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [words, less, more],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    low = tl.join(tl.join(a0, a1), tl.join(a2, a3))
    high = tl.join(tl.join(a4, a5), tl.join(a6, a7))
    return tl.permute(tl.join(low, high), (0, 6, 1, 3, 5, 2, 4))


@triton.jit
def _bytes(words, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Unpack words [4, 8, 4, N, 2], each of four 8-bit numbers, into weights [4, 2, 8, N, 2, 4, 2].

    KIND: "int8" = signed integers; otherwise e4m3 floats. PRECISION: "widened" = float32 weights; otherwise bfloat16.
    """
    if PRECISION == "widened":
        a0, a1 = _byte(words << 24, KIND), _byte(words << 8, KIND)
        a2, a3 = _byte(words << 16, KIND), _byte(words, KIND)
    else:
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            INT8_TEXT if KIND == "int8" else FP8_TEXT,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=1,
        )
    weights = tl.join(tl.join(a0, a1), tl.join(a2, a3))
    return tl.permute(weights, (0, 4, 1, 3, 6, 2, 5))


@triton.jit
def _byte(words, KIND: tl.constexpr):
    """Return the float32 number that the highest byte of each word stands for."""
    if KIND == "int8":
        return (words >> 24).to(tl.float32)
    exponent = (words >> 27) & 15
    mantissa = ((words >> 24) & 7).to(tl.float32)
    size = tl.where(exponent == 0, mantissa / 8, 1.0 + mantissa / 8) * tl.exp2(
        tl.maximum(exponent, 1).to(tl.float32) - 7.0
    )
    return tl.where(words < 0, -size, size)


@triton.jit
def _asked(lines, COUNT: tl.constexpr):
    """Prefetch COUNT cache lines of 128 bytes, beginning at `lines`, a pointer to 32-bit words."""
    at = lines + tl.arange(0, COUNT) * 32
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _codes_multiplied(
    rows, is_row, words, scales, zeros, minimums, supers, super_minimums, tile, first, last, steps, num_in,
    ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, SUPER_MINIMUMS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the steps `first` to `last` - 1 of a tile of codes -> [TILE, ROWS].

    rows [ROWS]: pointers to the first input of each row. words: the pointer to the codes of the first step. See
    product_of_codes for the other arguments.
    """
    num_words: tl.constexpr = CODES_STEP * TILE // (8 if KIND == "int4" else 4)
    count: tl.constexpr = CODES_STEP // GROUP if GROUP < CODES_STEP else 1
    each: tl.constexpr = CODES_STEP // count  # inputs of a product
    span: tl.constexpr = GROUP // CODES_STEP if GROUP > CODES_STEP else 1  # steps of a group
    super_span: tl.constexpr = SUPER // CODES_STEP if SUPER > 0 else 1
    own_words: tl.constexpr = num_words // 128 // count  # words of a group in one thread
    ins = tl.arange(0, each)
    xs = rows[:, None] + ins[None, :]
    cs = words + tl.arange(0, num_words)
    at = tile.to(tl.int64) * tl.cdiv(steps, span) * count * TILE + tl.arange(0, TILE)
    super_at = tile.to(tl.int64) * tl.cdiv(steps, super_span) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, ROWS), dtype=tl.float32)
    # The numbers of groups (scales, zeros, minimums) are loaded a step ahead.
    next_at = at + first // span * count * TILE
    next_super = super_at + first // super_span * TILE
    next_scales = _numbers(scales + next_at, count)
    if ZEROS:
        next_zeros = _numbers(zeros + next_at, count)
    if MINIMUMS:
        next_minimums = _numbers(minimums + next_at, count)
        ones = tl.full((TILE, each), 1.0, tl.float32 if PRECISION == "widened" else tl.bfloat16)
    if SUPER > 0:
        next_factor = tl.load(supers + next_super)
        if SUPER_MINIMUMS:
            next_second = tl.load(super_minimums + next_super)
    for step in tl.range(first, last, num_stages=STAGES):
        c = tl.load(cs + (step - first) * num_words)
        c = tl.permute(tl.reshape(c, (num_words // 512, 128, 4)), (1, 0, 2))
        c = tl.reshape(tl.permute(tl.reshape(c, (128, count, own_words)), (0, 2, 1)), (128 * own_words, count))
        ahead = tl.minimum(step + 1, last - 1)
        next_at = at + ahead // span * count * TILE
        next_super = super_at + ahead // super_span * TILE
        own_scales = next_scales
        next_scales = _numbers(scales + next_at, count)
        if ZEROS:
            own_zeros = next_zeros
            next_zeros = _numbers(zeros + next_at, count)
        if MINIMUMS:
            own_minimums = next_minimums
            next_minimums = _numbers(minimums + next_at, count)
        if SUPER > 0:
            factor = next_factor
            next_factor = tl.load(supers + next_super)
            if SUPER_MINIMUMS:
                second = next_second
                next_second = tl.load(super_minimums + next_super)
        for i in tl.static_range(count):
            start = step * CODES_STEP + i * each
            if EVEN:
                a = tl.load(xs + start, mask=is_row[:, None], other=0.0)
            else:
                a = tl.load(xs + start, mask=is_row[:, None] & (start + ins < num_in)[None, :], other=0.0)
            if KIND == "int4":
                w = _nibbles(
                    tl.reshape(_part(c, i, count), (4, 8, 4, own_words)),
                    own_zeros[i] if ZEROS else ZERO,
                    ZERO,
                    ZEROS,
                    PRECISION,
                )
            else:
                w = _bytes(tl.reshape(_part(c, i, count), (4, 8, 4, own_words // 2, 2)), KIND, PRECISION)
            w = tl.reshape(w, (TILE, each))
            a = tl.trans(a)
            none = tl.zeros((TILE, ROWS), dtype=tl.float32)
            scale = _by_output(own_scales[i].to(tl.float32))
            if SUPER > 0:
                scale *= _by_output(factor.to(tl.float32))
            acc += _dot(w, a, none, PRECISION) * scale[:, None]
            if MINIMUMS:
                least = _by_output(own_minimums[i].to(tl.float32))
                if SUPER_MINIMUMS:
                    least *= _by_output(second.to(tl.float32))
                acc -= _dot(ones, a, none, PRECISION) * least[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_out", "num_in", "steps", "part"])
def product_of_codes(
    x, codes, scales, zeros, minimums, supers, super_minimums, bias, out, num_rows, num_out, num_in, steps, part,
    x_stride,
    ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, SUPER_MINIMUMS: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply x [num_rows, I], bfloat16, by a packed matrix (packed.Packed) -> out [splits, num_rows, O].

    steps: the number of all steps, with CODES_STEP inputs each. part: the number of steps that one program takes; the
    third axis of the grid counts the parts. GROUP: the number of inputs that share a scale. SUPER: the number of inputs
    that share a factor of scales; 0 = there is no such factor. EVEN: whether whole steps fill I.

    The weights are the left operand, out = W x^T. A thread multiplies the weights that it loads, in the order of
    ops/cuda/packed.py, so nothing goes through shared memory twice. Codes are multiplied as exact bfloat16 numbers, and
    the scale and minimum of a group are applied in float32 to the group's sum. A row of x is a column of the right
    operand. The bits of such a column depend only on the order in which its inputs are summed. This order, in steps of
    16 inputs, is the same for 16, 32 and 64 columns.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile, split = tl.program_id(1), tl.program_id(2)
    num_words: tl.constexpr = CODES_STEP * TILE // (8 if KIND == "int4" else 4)
    first = split * part
    last = tl.minimum(first + part, steps)
    words = codes + (tile.to(tl.int64) * steps + first) * num_words
    if EARLY:
        if LINES > 0:
            _asked(words, LINES)
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    acc = _codes_multiplied(
        x + rows * x_stride, is_row, words, scales, zeros, minimums, supers, super_minimums, tile, first, last, steps,
        num_in, ROWS, KIND, GROUP, SUPER, ZERO, ZEROS, MINIMUMS, SUPER_MINIMUMS, EVEN, PRECISION, STAGES,
    )  # fmt: skip
    outs = tile * TILE + tl.arange(0, TILE)
    is_out = outs < num_out
    if BIAS:
        acc += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    to = out + (split * num_rows + rows[None, :]).to(tl.int64) * num_out + outs[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_out[:, None])


@triton.jit
def _summed(parts, at, stride, mask, SPLITS: tl.constexpr):
    total = tl.load(parts + at, mask=mask, other=0.0)
    for i in tl.static_range(1, SPLITS):
        total += tl.load(parts + at + i * stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def summed(
    parts, bias, out, num_rows, num_out,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum parts [SPLITS, num_rows, O] and add a bias [O] -> out [num_rows, O]."""
    _begun(EARLY)
    row = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outs < num_out
    total = _summed(parts, row.to(tl.int64) * num_out + outs, num_rows.to(tl.int64) * num_out, inside, SPLITS)
    if BIAS:
        total += tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_out + outs, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def activated(
    parts, bias, out, num_rows, size,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sum parts [SPLITS, num_rows, O], add a bias [O], and apply the activation -> out [num_rows, size].

    GATED: whether the sums are [gate | up] and the result is act(gate) * up; otherwise the result is act(sums).
    """
    _begun(EARLY)
    row = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outs < size
    width = size * 2 if GATED else size
    stride = num_rows.to(tl.int64) * width
    at = row.to(tl.int64) * width + outs
    gate = _summed(parts, at, stride, inside, SPLITS)
    if BIAS:
        gate += tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _summed(parts, at + size, stride, inside, SPLITS)
        if BIAS:
            up += tl.load(bias + size + outs, mask=inside, other=0.0).to(tl.float32)
        if ACT == "clamped_silu":
            gate = tl.minimum(gate, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        gate = _activated(gate, ACT) * up
    else:
        gate = _activated(gate, ACT)
    tl.store(out + row.to(tl.int64) * size + outs, gate.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(
    x, weight, bias, at, inside, width, eps, offset, KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):
    """Apply a norm to a row of `width` numbers. x [BLOCK]: the row, and 0 beyond its end.

    inside [BLOCK]: whether an entry of `x` lies before the end. at [BLOCK]: the indices of the entries in weight and
    bias. offset: added to the weight.
    """
    if KIND == "layer":
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps))
    if WEIGHT:
        x = x * (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset)
    if BIAS:
        x = x + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def added(
    x, parts, parts_bias, post_weight, post_bias, pre_weight, pre_bias, sums, out, num_rows, width, scale, post_eps,
    post_offset, pre_eps, pre_offset,
    SPLITS: tl.constexpr, PARTS_BIAS: tl.constexpr, POST: tl.constexpr, POST_WEIGHT: tl.constexpr,
    POST_BIAS: tl.constexpr, AT_SUM: tl.constexpr, PRE: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    HAS_SUMS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add a branch to rows x [num_rows, width] and norm the sums for the next product.

    parts [SPLITS, num_rows, width]: the partial sums of the branch; SPLITS = 0: there is no branch. POST: the kind of
    the branch's norm. AT_SUM: whether this norm is applied to the sum instead of the branch. sums: receives the new
    residual stream. PRE: the kind of the norm that makes `out` from the sums.
    """
    _begun(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    stream = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        branch = _summed(parts, row * width + at, num_rows.to(tl.int64) * width, inside, SPLITS)
        if PARTS_BIAS:
            branch += tl.load(parts_bias + at, mask=inside, other=0.0).to(tl.float32)
        if POST != "none" and not AT_SUM:
            branch = _normed(
                branch, post_weight, post_bias, at, inside, width, post_eps, post_offset, POST, POST_WEIGHT, POST_BIAS
            )
        stream += branch * scale
        if POST != "none" and AT_SUM:
            stream = _normed(
                stream, post_weight, post_bias, at, inside, width, post_eps, post_offset, POST, POST_WEIGHT, POST_BIAS
            )
    if HAS_SUMS:
        tl.store(sums + row * width + at, stream, mask=inside)
    if PRE != "none":
        stream = _normed(
            stream, pre_weight, pre_bias, at, inside, width, pre_eps, pre_offset, PRE, PRE_WEIGHT, PRE_BIAS
        )
    tl.store(out + row * width + at, stream.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def heads_of(
    parts, bias, q_norm, k_norm, table, positions, writes, queries, keys, values, num_rows, q_eps, q_offset, k_eps,
    k_offset,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, ADJACENT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Make queries, keys and values from the partial sums of their product: add the bias, norm, and rotate.

    parts: [SPLITS, num_rows, (HEADS + 2 KV_HEADS) DIM]. queries: receives the queries, [num_rows, HEADS, DIM]. writes:
    for each row, the pool row that receives its keys and values; -1 = they are not written. table [positions, 2,
    TURNED]: cos and sin; the first half of sin is negated. TURNED: the number of dimensions of a head that are rotated;
    0 = none.
    """
    _begun(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    width = (HEADS + 2 * KV_HEADS) * DIM
    stride = num_rows.to(tl.int64) * width
    start = row.to(tl.int64) * width + head * DIM
    head_row = _summed(parts, start + at, stride, inside, SPLITS)
    if BIAS:
        head_row += tl.load(bias + head * DIM + at, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inverse = 1.0
    if Q_NORM != "none" or K_NORM != "none":
        eps = tl.where(is_query, q_eps, k_eps)
        if not is_value:
            inverse = 1.0 / tl.sqrt_rn(tl.sum(head_row * head_row, 0) / DIM + eps)
            head_row = (
                head_row
                * inverse
                * _norm_weight(q_norm, k_norm, at, inside, is_query, q_offset, k_offset, Q_NORM, K_NORM)
            )
    if TURNED > 0:
        if not is_value:
            half: tl.constexpr = TURNED // 2
            turns = at < TURNED
            if ADJACENT:
                place = at // 2 + (at % 2) * half
                other = at ^ 1
            else:
                place = at
                other = tl.where(at < half, at + half, at - half)
            other = tl.where(turns, other, at)
            partner = _summed(parts, start + other, stride, inside, SPLITS)
            if BIAS:
                partner += tl.load(bias + head * DIM + other, mask=inside, other=0.0).to(tl.float32)
            if Q_NORM != "none" or K_NORM != "none":
                partner = (
                    partner
                    * inverse
                    * _norm_weight(q_norm, k_norm, other, inside, is_query, q_offset, k_offset, Q_NORM, K_NORM)
                )
            angles = table + tl.load(positions + row).to(tl.int64) * (2 * TURNED) + place
            cos = tl.load(angles, mask=turns, other=1.0)
            sin = tl.load(angles + TURNED, mask=turns, other=0.0)
            head_row = head_row * cos + partner * sin
    if is_query:
        tl.store(queries + (row * HEADS + head) * DIM + at, head_row, mask=inside)
    else:
        to = tl.load(writes + row).to(tl.int64)
        if to >= 0:
            if is_value:
                place_v = values + (to * KV_HEADS + head - HEADS - KV_HEADS) * DIM + at
                tl.store(place_v, head_row.to(values.dtype.element_ty), mask=inside)
            else:
                place_k = keys + (to * KV_HEADS + head - HEADS) * DIM + at
                tl.store(place_k, head_row.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _norm_weight(q_norm, k_norm, at, inside, is_query, q_offset, k_offset, Q_NORM: tl.constexpr, K_NORM: tl.constexpr):
    """Return the norm weights for a head of queries or keys.

    at: the indices of the dimensions of a head. inside: whether each index is below the head size. is_query: whether
    the head belongs to the queries.
    """
    weight = tl.full(at.shape, 1.0, tl.float32)
    if Q_NORM == "weight":
        weight = tl.where(is_query, tl.load(q_norm + at, mask=inside, other=0.0).to(tl.float32) + q_offset, weight)
    if K_NORM == "weight":
        weight = tl.where(is_query, weight, tl.load(k_norm + at, mask=inside, other=0.0).to(tl.float32) + k_offset)
    return weight


@triton.jit
def written(rows, new_keys, new_values, keys, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Write keys and values [n, WIDTH] into the pool rows `rows`; -1 = keys and values are not written."""
    _begun(EARLY)
    row = tl.program_id(0)
    to = tl.load(rows + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    if to >= 0:
        k = tl.load(new_keys + row.to(tl.int64) * WIDTH + at, mask=inside, other=0.0)
        v = tl.load(new_values + row.to(tl.int64) * WIDTH + at, mask=inside, other=0.0)
        tl.store(keys + to * WIDTH + at, k.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + to * WIDTH + at, v.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _seen(lengths, places, row, window, WINDOW: tl.constexpr, SEES_ALL: tl.constexpr):
    """Return three key indices: a row's own key, the first key that the row sees, and the end of the keys it sees."""
    length = tl.load(lengths + row)
    own, lowest = length - 1, 0
    if SEES_ALL:
        own = tl.load(places + row)
    if WINDOW:
        lowest = tl.maximum(own + 1 - window, 0)
        if SEES_ALL:
            length = tl.minimum(length, own + window)
    return own, lowest, length


@triton.jit
def attended(
    queries, keys, values, lengths, seen, runs, tails, tables, places, biases, sinks, parts, stats, out, tails_stride,
    tables_stride, block_tokens, window, reach, scale, softcap, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SEES_ALL: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with one row's query heads that share a key head, over one part of the row's keys.

    Row t sees the first lengths[t] keys. If i is below seen[t], the block table of the row's run gives the place of key
    i. Otherwise key i lies in cache row tails[t, i - seen[t]]. SEES_ALL: whether a row also sees later keys than its
    own key. If so, row t's own key has the index places[t]. Otherwise row t's own key is the last key that it sees.
    biases [HEADS, 2 reach + 1]: the biases of distances from a row back to a key, from -reach to reach. Distances
    beyond this range have the biases of its ends. parts [T, HEADS, splits, DIM] receives the weighted sums of values.
    stats [T, HEADS, splits, 2] receives the largest scores and the sums of weights. DIRECT: whether there is only one
    part; if so, the result is written to `out`.
    """
    _begun(EARLY)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    own_place, lowest, length = _seen(lengths, places, row, window, WINDOW, SEES_ALL)
    group: tl.constexpr = HEADS // KV_HEADS
    heads = tl.arange(0, GROUP)
    dims = tl.arange(0, BLOCK)
    is_head, is_dim = heads < group, dims < DIM
    first = split * SPLIT_KEYS
    last = tl.minimum(first + SPLIT_KEYS, length)
    if DIRECT or ((first < length) & (first + SPLIT_KEYS > lowest)):
        whole = (row * HEADS + kv_head * group + heads).to(tl.int64)
        q_mask = is_head[:, None] & is_dim[None, :]
        q = tl.load(queries + whole[:, None] * DIM + dims[None, :], mask=q_mask, other=0.0)
        q = (q * scale).to(keys.dtype.element_ty)
        num_seen = tl.load(seen + row)
        table = tables + tl.load(runs + row) * tables_stride
        tail = tails + row * tails_stride - num_seen
        largest = tl.full((GROUP,), -float("inf"), tl.float32)
        mass = tl.zeros((GROUP,), dtype=tl.float32)
        acc = tl.zeros((GROUP, BLOCK), dtype=tl.float32)
        begin = tl.maximum(first, lowest) // KEYS * KEYS
        for start in range(begin, last, KEYS):
            i = start + tl.arange(0, KEYS)
            is_key = (i < last) & (i >= lowest)
            in_table = i < num_seen
            block = tl.load(table + i // block_tokens, mask=is_key & in_table, other=0)
            beyond = tl.load(tail + i, mask=is_key & (i >= num_seen), other=0)
            place = tl.where(in_table, block * block_tokens + i % block_tokens, beyond).to(tl.int64)
            at = (place * KV_HEADS + kv_head) * DIM
            k = tl.load(keys + at[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
            v = tl.load(values + at[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
            scores = _dot(q, k, tl.zeros((GROUP, KEYS), dtype=tl.float32), PRECISION)
            if SOFTCAP:
                scores = softcap * _tanh(scores / softcap)
            if BIAS:
                distance = tl.minimum(tl.maximum(own_place - i, -reach), reach) + reach
                at_bias = (kv_head * group + heads)[:, None] * (2 * reach + 1) + distance[None, :]
                scores += tl.load(biases + at_bias, mask=is_head[:, None] & is_key[None, :], other=0.0)
            scores = tl.where(is_key[None, :], scores * LOG2E, -float("inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            shrunk = tl.exp2(largest - new)
            weights = tl.exp2(scores - new[:, None])
            mass = mass * shrunk + tl.sum(weights, 1)
            acc = acc * shrunk[:, None]
            acc = _dot(weights.to(v.dtype), v, acc, PRECISION)
            largest = new
        if DIRECT:
            if SINKS:
                sink = tl.load(sinks + kv_head * group + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2E
                new = tl.maximum(largest, sink)
                shrunk = tl.exp2(largest - new)
                mass = mass * shrunk + tl.exp2(sink - new)
                acc = acc * shrunk[:, None]
            result = tl.where((mass > 0)[:, None], acc / mass[:, None], 0.0)
            tl.store(out + whole[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=q_mask)
        else:
            part = whole * num_splits + split
            tl.store(parts + part[:, None] * DIM + dims[None, :], acc, mask=q_mask)
            tl.store(stats + part * 2, largest, mask=is_head)
            tl.store(stats + part * 2 + 1, mass, mask=is_head)


@triton.jit
def parts_joined(
    parts, stats, sinks, lengths, places, out, window, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SEES_ALL: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of `attended` in the order of their keys -> out [T, HEADS, DIM]."""
    _begun(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1)
    _, lowest, length = _seen(lengths, places, row, window, WINDOW, SEES_ALL)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < DIM
    whole = (row * HEADS + head).to(tl.int64)
    largest = -float("inf")
    mass = 0.0
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(lowest // SPLIT_KEYS, tl.cdiv(length, SPLIT_KEYS)):
        part = whole * num_splits + split
        part_largest = tl.load(stats + part * 2)
        new = tl.maximum(largest, part_largest)
        shrunk, share = tl.exp2(largest - new), tl.exp2(part_largest - new)
        mass = mass * shrunk + tl.load(stats + part * 2 + 1) * share
        acc = acc * shrunk + tl.load(parts + part * DIM + dims, mask=is_dim, other=0.0) * share
        largest = new
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new = tl.maximum(largest, sink)
        shrunk = tl.exp2(largest - new)
        mass = mass * shrunk + tl.exp2(sink - new)
        acc = acc * shrunk
    result = tl.where(mass > 0, acc / mass, 0.0)
    tl.store(out + whole * DIM + dims, result.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def advanced(
    next_ids, fed, step, ids, positions, writes, lengths, seen, runs, limits, tables, tables_stride, block_tokens,
    num_rows,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Make the ids `next_ids` the input of the next pass of `run_ahead`. One program runs for each row.

    fed [steps, num_rows]: all ids so far, in order; -1 = the largest logit was NaN or infinite. step [num_rows]: the
    number of passes so far. limits [num_rows]: a row is written to the cache only below this position.
    """
    _begun(EARLY)
    row = tl.program_id(0)
    id_ = tl.load(next_ids + row).to(tl.int32)
    num = tl.load(step + row)
    tl.store(fed + num * num_rows + row, id_)
    tl.store(step + row, num + 1)
    tl.store(ids + row, tl.maximum(id_, 0))
    position = tl.load(positions + row) + 1
    length = tl.load(lengths + row) + 1
    at = length - 1
    is_live = (length > 1) & (at < tl.load(limits + row))
    block = tl.load(tables + tl.load(runs + row) * tables_stride + at // block_tokens, mask=is_live, other=0)
    tl.store(positions + row, tl.where(is_live, position, 0))
    tl.store(lengths + row, tl.where(is_live, length, 0))
    tl.store(seen + row, tl.where(is_live, length, 0))
    tl.store(writes + row, tl.where(is_live, block * block_tokens + at % block_tokens, -1))


@triton.jit
def largest_in_parts(logits, values, ids, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Find the largest logit and its id in each part of BLOCK ids of each row; NaN counts as infinity."""
    _begun(EARLY)
    row = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row.to(tl.int64) * width + at, mask=at < width, other=-float("inf"))
    scores = tl.where(scores != scores, float("inf"), scores)
    value, place = tl.max(scores, 0, return_indices=True)
    tl.store(values + row * num_parts + part, value)
    tl.store(ids + row * num_parts + part, part * BLOCK + place)


@triton.jit
def largest_of_parts(values, ids, pairs, best, num_parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Find the largest logit of each row from the largest of its parts; on ties, the lowest id.

    pairs: float32 [2, T], the ids and the values. best: int32 [T], the ids, or -1 where the value is infinite.
    """
    _begun(EARLY)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    maxima = tl.load(values + row * num_parts + at, mask=at < num_parts, other=-float("inf"))
    value, place = tl.max(maxima, 0, return_indices=True)
    id_ = tl.load(ids + row * num_parts + place)
    is_number = (value < float("inf")) & (value > -float("inf"))
    tl.store(pairs + row, id_.to(tl.float32))
    tl.store(pairs + num_rows + row, value)
    tl.store(best + row, tl.where(is_number, id_, -1))
