// AVX-512: an F16 is one register; pairs of bfloat16 (BF16) and of bytes by fours (VNNI) are multiplied in one
// instruction.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "denormals.h"
#include "x86.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int LANES = 16;
constexpr bool WIDE_REGISTERS = true;  // whether an F16 is one register
constexpr bool ROUNDS_ONCE = true;     // whether an instruction rounds a product and its sum once

struct F16 {
    __m512 v;
};
inline F16 f16(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 madd(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where a is NaN the result is b, as with the processor's instruction.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 less_than(F16 a, F16 b, F16 then, F16 otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
// Converts a to an integer and shifts it left by 23 bits, into the exponent field of the returned float.
inline F16 shift_to_exponent(F16 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))}; }
inline F16 add_bits(F16 a, F16 b) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
inline bool any_at_least(F16 a, float bound) {  // or NaN
    return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(bound), _CMP_NLT_UQ) != 0;
}
inline F16 load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// Sixteen floats as bfloat16, rounded to nearest, ties to even; denormals become zero, as they do in products.
inline void narrow(F16 a, uint16_t* out) {
    const __m256bh half = _mm512_cvtneps_pbh(a.v);
    std::memcpy(out, &half, 32);
}

inline __m256 half_sum(F16 a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
inline float sum(F16 a) { return sum_of_eight(half_sum(a)); }
inline float largest(F16 a) {
    return largest_of_eight(_mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}

// The first n words of 32 bits, and zeros behind.
inline F16 first_words(const void* p, int n) {
    return {
        _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(n >= LANES ? 0xffffu : (1u << n) - 1), p))};
}

// Transposes 16 x 16 floats in place.
inline void transpose(F16 (&x)[LANES]) {
    __m512 t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
    }
    for (int i = 0; i < LANES; i += 4) {
        const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
        const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
        x[i].v = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        x[i + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        x[i + 2].v = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        x[i + 3].v = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    for (int i = 0; i < 4; ++i) {  // quarters of four registers each
        const __m512 even = _mm512_shuffle_f32x4(x[i].v, x[i + 4].v, 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(x[i].v, x[i + 4].v, 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(x[i + 8].v, x[i + 12].v, 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(x[i + 8].v, x[i + 12].v, 0xdd);
        t[i] = _mm512_shuffle_f32x4(even, even2, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(even, even2, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
    for (int i = 0; i < LANES; ++i) x[i].v = t[i];
}

// ------------------------------------------------------------------------------------------------- pairs of bfloat16

constexpr bool PAIR_PRODUCTS = true;  // whether there is an instruction

using Pairs = __m512bh;
inline Pairs load_pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pairs spread_pair(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
inline F16 add_pairs(F16 acc, Pairs w, Pairs x) { return {_mm512_dpbf16_ps(acc.v, w, x)}; }

inline F16 low_halves(const void* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F16 high_halves(const void* p) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask))};
}

// ------------------------------------------------------------------------------------------------- quantised numbers

constexpr bool BYTE_TILES = true;  // whether byte_tiles.h is there

struct I16 {
    __m512i v;
};
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F16 nmadd(F16 a, F16 b, F16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
inline F16 load_halves(const char* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline __m128i load_bytes(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline F16 load_signed(const char* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)))}; }
inline F16 load_unsigned(const char* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(p)))}; }

// The exponents of floats that are powers of two, or 0.
inline F16 load_powers(const char* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(load_bytes(p)), 23))};
}

inline __m512i spread_table(const int8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// The codes of word j of sixteen outputs, or what they stand for in a table; of 8 bits they are less 128.
template <class CODES>
inline __m512i signed_codes(const char* codes, int j, __m512i table) {
    constexpr int BITS = CODES::BITS;
    const auto line = [&](int i) {
        const __m256i* lines = reinterpret_cast<const __m256i*>(codes) + i;
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(lines)), _mm256_loadu_si256(lines + BITS),
                                  1);
    };
    if constexpr (BITS == 8) {
        return line(j);
    } else {
        constexpr int LOW = num_low_bits(BITS), PER_LINE = 8 / LOW;
        const __m512i several = line(j / PER_LINE);
        const __m512i low = _mm512_and_si512(j % PER_LINE ? _mm512_srli_epi16(several, LOW * (j % PER_LINE)) : several,
                                             _mm512_set1_epi8((1 << LOW) - 1));
        if constexpr (CODES::LOOKED_UP) return _mm512_shuffle_epi8(table, low);
        if constexpr (BITS == LOW) return low;
        constexpr int HIGH = BITS - LOW > 0 ? BITS - LOW : 1, PER_BYTE = 8 / HIGH;
        const __m512i plane = line(LOW + j / PER_BYTE);
        const int shift = LOW - HIGH * (j % PER_BYTE);
        const __m512i shifted = shift > 0 ? _mm512_slli_epi16(plane, shift) : _mm512_srli_epi16(plane, -shift);
        return _mm512_or_si512(low, _mm512_and_si512(shifted, _mm512_set1_epi8(((1 << HIGH) - 1) << LOW)));
    }
}

inline __m512i more_by_128(__m512i numbers) { return _mm512_xor_si512(numbers, _mm512_set1_epi8(-128)); }
// Without a sign, as the product of bytes takes them; 128 more where they have one. table: its numbers likewise.
template <class CODES>
inline __m512i weight_codes(const char* codes, int j, __m512i table) {
    const __m512i found = signed_codes<CODES>(codes, j, table);
    return CODES::BITS == 8 ? more_by_128(found) : found;
}

// Sixteens of outputs that are taken at once: two share each input that is loaded, and so many sums stand side by side
// that none waits for the one before it. Two groups of scales in a unit make shorter sums, and leave no registers for
// more.
template <int GROUPS>
constexpr int SIXTEENS = GROUPS == 1 ? 2 : 1;
constexpr bool SMALL_TABLES = false;  // whether there is another `dot` for them
template <class CODES>
constexpr bool UNPACKS = false;  // whether many rows have Operands of their own
template <class CODES>
constexpr int MOST_ROWS = 8;  // that share decoded codes

// The exact sums over words [FIRST, LAST) of N sixteens of outputs, for ROWS rows; of codes of 8 bits less 128.
template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* codes, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    const __m512i numbers = CODES::LOOKED_UP ? more_by_128(spread_table(table)) : _mm512_setzero_si512();
    for (int r = 0; r < ROWS; ++r) {
        const float sum_x = LAST - FIRST == UNIT_WORDS ? x[r].sum : x[r].halves[FIRST > 0];
        const __m512i begin =
            CODES::SIGNED ? _mm512_set1_epi32(-128 * static_cast<int>(sum_x)) : _mm512_setzero_si512();
        for (int n = 0; n < N; ++n) sums[n][r].v = begin;
    }
#pragma GCC unroll 8
    for (int j = FIRST; j < LAST; ++j) {
        __m512i code[N];
        for (int n = 0; n < N; ++n) code[n] = weight_codes<CODES>(codes + n * 2 * CODES::BITS * UNIT, j, numbers);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t word;
            std::memcpy(&word, x[r].codes + 4 * j, 4);
            const __m512i input = _mm512_set1_epi32(word);
            for (int n = 0; n < N; ++n) sums[n][r].v = _mm512_dpbusd_epi32(sums[n][r].v, code[n], input);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- fours of bytes

inline I16 no_sums() { return {_mm512_setzero_si512()}; }
inline I16 load_fours(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
// Adds the products of four codes without a sign and sixteen fours of codes.
inline I16 add_fours(I16 sums, int32_t weights, I16 fours) {
    return {_mm512_dpbusd_epi32(sums.v, _mm512_set1_epi32(weights), fours.v)};
}
inline void put_bytes(F16 a, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Puts sums of what `put_fours` has made into the order of the dimensions.
inline void order_sums(I16 (&sums)[2]) {
    const __m512i a = sums[0].v, b = sums[1].v;
    sums[0].v = _mm512_shuffle_i32x4(a, b, 0x88);
    sums[1].v = _mm512_shuffle_i32x4(a, b, 0xdd);
}

// ---------------------------------------------------------------------------------------------------------- sampling

constexpr int VECTOR_BYTES = 64;
typedef int32_t Marks __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Wide __attribute__((vector_size(VECTOR_BYTES)));
FORERUN_INLINE bool any(const Marks& marks) { return _mm512_movepi32_mask((__m512i)marks) != 0; }
// The products of the lower 32 bits of each number.
FORERUN_INLINE void times(const Wide& a, const Wide& b, Wide& out) {
    out = (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
