// What the kernels are written in: sixteen floats and their operations, the same for every instruction set.
//
// A file of simd/ defines for its set
//     F16       sixteen floats, with f16, load, store, + - * /, madd, nmadd, max, less_than, shift_to_exponent,
//     add_bits,
//               any_at_least, load_bf16, narrow, sum, largest, first_words, transpose;
//     Pairs     sixteen pairs of bfloat16, with load_pairs, spread_pair, add_pairs, low_halves, high_halves and
//               PAIR_PRODUCTS (simd/float_pairs.h where no instruction multiplies them);
//     I16       sixteen integers, with to_float and dot, and load_halves, load_powers, load_signed, load_unsigned,
//     round_codes, for
//               quantised numbers, and BYTE_TILES, which says whether there is byte_tiles.h;
//     Marks, Wide, VECTOR_BYTES, any and times, for sampling.
// Each file of isa/ includes one of them, its tiles of attention and then the kernels, and is compiled with flags of
// its own. All of it is in a namespace named after the instruction set, so that the linker never confuses two sets. A
// lane always does the same operations in the same order, whatever the other lanes hold; row invariance depends on
// that. `madd` rounds once, by an instruction or without one (ROUNDS_ONCE), so all sets have the same bits
// (docs/development/portable-bits.md).
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"
#include "scalar.h"
#include "simd/denormals.h"

namespace forerun {
namespace FORERUN_ISA {

// What __builtin_prefetch is told: into the second cache where lines are consumed faster than the first can ask for
// them. On a Xeon of 2023 that made products of 1 to 8 rows 5 % faster.
constexpr int NEAR_CACHE = WIDE_REGISTERS ? 2 : 3;

// Loads numbers of either type from memory as floats: a row of weights, keys or values.
inline F16 load(const uint16_t* p) { return load_bf16(p); }

// The first n lanes from memory, zeros behind.
template <class T>
inline F16 load_first(const T* p, int n) {
    if (n >= LANES) return load(p);
    alignas(64) float lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = widen(p[i]);
    return load(lanes);
}

// How a product is added: rounded once, as everywhere.
struct Once {
    FORERUN_INLINE static F16 add(F16 a, F16 b, F16 c) { return madd(a, b, c); }
};
// The same of two bfloat16, whose product a float32 holds: a multiplication and an addition, unless a number leaves the
// range of float32.
struct Exact {
    template <class T>
    FORERUN_INLINE static T add(const T& a, const T& b, const T& c) {
        return multiply_and_add(a, b, c);
    }
};

// Calls compute(how) for sums of products of bfloat16, which it stores and begins anew with each call.
template <class Compute>
FORERUN_INLINE void with_pairs(const Compute& compute) {
    if constexpr (!ROUNDS_ONCE && OutOfRange::IS_TOLD) {
        const OutOfRange out_of_range;
        compute(Exact());
        if (!out_of_range.was_seen()) return;
    }
    compute(Once());
}
// At the end of what it computes, so that no sum is left for later.
template <int N, int M>
FORERUN_INLINE void finish_sums(F16 (&sums)[N][M]) {
    if constexpr (!ROUNDS_ONCE)
        for (int n = 0; n < N; ++n)
            for (int m = 0; m < M; ++m) __asm__ volatile("" : "+m"(sums[n][m]));
}

// Returns e^x, within 2 units in the last place for x < 88.3: x = n ln 2 + r, a polynomial of degree 6 in r (Cephes,
// Moshier 1989), and n in the exponent. It is exactly 0 below -87.3 and infinite above 88.3; NaN stays NaN.
inline F16 exp(F16 x) {
    const F16 magic = f16(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const F16 shifted = madd(x, f16(1.44269504088896341f), magic);
    const F16 n = shifted - magic;
    F16 r = madd(n, f16(-0.693359375f), x);
    r = madd(n, f16(2.12194440e-4f), r);
    F16 poly = f16(1.9875691500e-4f);
    poly = madd(poly, r, f16(1.3981999507e-3f));
    poly = madd(poly, r, f16(8.3334519073e-3f));
    poly = madd(poly, r, f16(4.1665795894e-2f));
    poly = madd(poly, r, f16(1.6666665459e-1f));
    poly = madd(poly, r, f16(5.0000001201e-1f));
    const F16 value = madd(poly, r * r, r + f16(1.0f));
    const F16 scaled = add_bits(value, shift_to_exponent(shifted));
    const F16 in_range = less_than(x, f16(-87.3f), f16(0.0f), scaled);
    return less_than(x, f16(88.3f), in_range, x * f16(__builtin_inff()));  // infinite above, and NaN for NaN
}

// Returns e^x for x <= 0, within 1.3 in 100,000: as above, with a polynomial of degree 4; NaN for what is more than 1,
// and NaN.
inline F16 rough_exp(F16 x) {
    const F16 magic = f16(12582912.0f);
    const F16 shifted = madd(x, f16(1.44269504088896341f), magic);
    const F16 r = madd(shifted - magic, f16(-0.693147180559945f), x);
    F16 poly = f16(4.1801080e-2f);
    poly = madd(poly, r, f16(1.6743095e-1f));
    poly = madd(poly, r, f16(4.9999434e-1f));
    const F16 value = madd(poly, r * r, r + f16(1.0f));
    const F16 found = less_than(x, f16(-87.3f), f16(0.0f), add_bits(value, shift_to_exponent(shifted)));
    return less_than(x, f16(1.0f), found, f16(__builtin_nanf("")));
}

}  // namespace FORERUN_ISA
}  // namespace forerun
