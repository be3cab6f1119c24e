// AVX2: an F16 is two registers. Pairs of bfloat16 are multiplied as floats, and bytes by byte_pairs.h or byte_fours.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../scalar.h"
#include "x86.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int LANES = 16;
constexpr bool WIDE_REGISTERS = false;  // whether an F16 is one register
constexpr bool ROUNDS_ONCE = true;      // whether an instruction rounds a product and its sum once

struct F16 {
    __m256 lo, hi;
};
inline F16 f16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 madd(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 less_than(F16 a, F16 b, F16 then, F16 otherwise) {
    return {_mm256_blendv_ps(otherwise.lo, then.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.hi, then.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline __m256 shift_half(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
inline F16 shift_to_exponent(F16 a) { return {shift_half(a.lo), shift_half(a.hi)}; }
inline __m256 add_half_bits(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline F16 add_bits(F16 a, F16 b) { return {add_half_bits(a.lo, b.lo), add_half_bits(a.hi, b.hi)}; }
inline bool any_at_least(F16 a, float bound) {  // or NaN
    const __m256 b = _mm256_set1_ps(bound);
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, b, _CMP_NLT_UQ), _mm256_cmp_ps(a.hi, b, _CMP_NLT_UQ)));
}
inline __m256 load_half_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load_bf16(const uint16_t* p) { return {load_half_bf16(p), load_half_bf16(p + 8)}; }

// Eight floats as bfloat16 in words, rounded to nearest, ties to even; denormals become zero, as they do in products.
inline __m256i narrow_half(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i half = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));  // of what is no number
    const __m256i numbers = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    const __m256i is_tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    return _mm256_blendv_epi8(numbers, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_tiny);
}
inline void narrow(F16 a, uint16_t* out) {
    const __m256i mixed = _mm256_packus_epi32(narrow_half(a.lo), narrow_half(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(mixed, 0xd8));
}

inline __m256 half_sum(F16 a) { return _mm256_add_ps(a.lo, a.hi); }
inline float sum(F16 a) { return sum_of_eight(half_sum(a)); }
inline float largest(F16 a) { return largest_of_eight(_mm256_max_ps(a.lo, a.hi)); }

// The first n words of 32 bits, and zeros behind.
inline F16 first_words(const void* p, int n) {
    const float* at = static_cast<const float*>(p);
    if (n >= LANES) return load(at);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const auto half = [&](int first) {
        return _mm256_maskload_ps(at + first, _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), lanes));
    };
    return {half(0), half(8)};
}

FORERUN_INLINE void transpose_eight(__m256 (&x)[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2)
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = t[i];
}
// Transposes 16 x 16 floats in place.
inline void transpose(F16 (&x)[LANES]) {
    __m256 a[8], b[8], c[8], d[8];
    for (int i = 0; i < 8; ++i) a[i] = x[i].lo, b[i] = x[i].hi, c[i] = x[i + 8].lo, d[i] = x[i + 8].hi;
    transpose_eight(a), transpose_eight(b), transpose_eight(c), transpose_eight(d);
    for (int i = 0; i < 8; ++i) x[i] = {a[i], c[i]}, x[i + 8] = {b[i], d[i]};
}

// ------------------------------------------------------------------------------------------------- pairs of bfloat16

inline F16 low_halves(const void* p) {
    const __m256i* v = static_cast<const __m256i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(v), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(v + 1), 16))};
}
inline F16 high_halves(const void* p) {
    const __m256i* v = static_cast<const __m256i*>(p);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(v), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(v + 1), mask))};
}

// ------------------------------------------------------------------------------------------------- quantised numbers

constexpr bool BYTE_TILES = false;

struct I16 {
    __m256i v[2];
};
inline F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}; }
inline F16 nmadd(F16 a, F16 b, F16 c) {  // c - a * b
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 load_halves(const char* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m128i load_bytes(const char* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline F16 load_signed(const char* p) {
    return to_float({{_mm256_cvtepi8_epi32(load_bytes(p)), _mm256_cvtepi8_epi32(load_bytes(p + 8))}});
}
inline F16 load_unsigned(const char* p) {
    return to_float({{_mm256_cvtepu8_epi32(load_bytes(p)), _mm256_cvtepu8_epi32(load_bytes(p + 8))}});
}

// The exponents of floats that are powers of two, or 0.
inline __m256 load_half_powers(const char* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(load_bytes(p)), 23));
}
inline F16 load_powers(const char* p) { return {load_half_powers(p), load_half_powers(p + 8)}; }

inline __m256i spread_table(const int8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// The codes of word j of eight outputs, or what they stand for in a table; of 8 bits less 128.
template <class CODES>
inline __m256i weight_codes(const char* codes, int j, __m256i table) {
    constexpr int BITS = CODES::BITS;
    const __m256i* lines = reinterpret_cast<const __m256i*>(codes);
    if constexpr (BITS == 8) return _mm256_loadu_si256(lines + j);
    constexpr int LOW = num_low_bits(BITS), PER_LINE = 8 / LOW;
    const __m256i line = _mm256_loadu_si256(lines + j / PER_LINE);
    const __m256i low = _mm256_and_si256(j % PER_LINE ? _mm256_srli_epi16(line, LOW * (j % PER_LINE)) : line,
                                         _mm256_set1_epi8(static_cast<char>((1 << LOW) - 1)));
    if constexpr (CODES::LOOKED_UP) {
        return _mm256_shuffle_epi8(table, low);
    } else if constexpr (BITS == LOW) {
        return low;
    } else {
        constexpr int HIGH = BITS - LOW, PER_BYTE = 8 / HIGH;
        const __m256i plane = _mm256_loadu_si256(lines + LOW + j / PER_BYTE);
        const int shift = LOW - HIGH * (j % PER_BYTE);
        const __m256i shifted = shift > 0 ? _mm256_slli_epi16(plane, shift) : _mm256_srli_epi16(plane, -shift);
        return _mm256_or_si256(low, _mm256_and_si256(shifted, _mm256_set1_epi8(((1 << HIGH) - 1) << LOW)));
    }
}

template <int GROUPS>
constexpr int SIXTEENS = 1;  // of outputs that are taken at once

// ---------------------------------------------------------------------------------------------------- fours of bytes

inline I16 no_sums() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
inline I16 load_fours(const int8_t* p) {
    const __m256i* fours = reinterpret_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(fours), _mm256_loadu_si256(fours + 1)}};
}
inline void put_bytes(F16 a, uint8_t* to) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i shorts = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
// Puts sums of what `put_fours` has made into the order of the dimensions.
inline void order_sums(I16 (&sums)[2]) {
    const __m256i a = sums[0].v[0], b = sums[0].v[1], c = sums[1].v[0], d = sums[1].v[1];
    sums[0] = {{_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(c, d, 0x20)}};
    sums[1] = {{_mm256_permute2x128_si256(a, b, 0x31), _mm256_permute2x128_si256(c, d, 0x31)}};
}

// ---------------------------------------------------------------------------------------------------------- sampling

constexpr int VECTOR_BYTES = 32;
typedef int32_t Marks __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Wide __attribute__((vector_size(VECTOR_BYTES)));
FORERUN_INLINE bool any(const Marks& marks) { return _mm256_movemask_epi8((__m256i)marks) != 0; }
// The products of the lower 32 bits of each number.
FORERUN_INLINE void times(const Wide& a, const Wide& b, Wide& out) {
    out = (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}

}  // namespace FORERUN_ISA
}  // namespace forerun

#include "float_pairs.h"
