// Portable C++: an F16 is an array, which a compiler turns into whatever registers it may use.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../scalar.h"

#if defined(__SSE2__)  // every x86-64 processor has it; two functions of sampling are slow without
#include <emmintrin.h>
#endif

namespace forerun {
namespace FORERUN_ISA {

constexpr int LANES = 16;
constexpr bool WIDE_REGISTERS = false;  // whether an F16 is one register

struct F16 {
    float v[LANES];
};
template <class Op>
inline F16 lanewise(Op op) {
    F16 out;
    for (int i = 0; i < LANES; ++i) out.v[i] = op(i);
    return out;
}
inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline F16 f16(float x) {
    return lanewise([&](int) { return x; });
}
inline F16 load(const float* p) {
    return lanewise([&](int i) { return p[i]; });
}
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 operator+(F16 a, F16 b) {
    return lanewise([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(F16 a, F16 b) {
    return lanewise([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(F16 a, F16 b) {
    return lanewise([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(F16 a, F16 b) {
    return lanewise([&](int i) { return a.v[i] / b.v[i]; });
}
// Rounded once where it is compiled for a processor that does so, as with AVX2 and AVX-512.
inline float madd(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline F16 madd(F16 a, F16 b, F16 c) {
    return lanewise([&](int i) { return madd(a.v[i], b.v[i], c.v[i]); });
}
inline F16 max(F16 a, F16 b) {
    return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 less_than(F16 a, F16 b, F16 then, F16 otherwise) {
    return lanewise([&](int i) { return a.v[i] < b.v[i] ? then.v[i] : otherwise.v[i]; });
}
inline F16 shift_to_exponent(F16 a) {
    return lanewise([&](int i) { return from_bits(to_bits(a.v[i]) << 23); });
}
inline F16 add_bits(F16 a, F16 b) {
    return lanewise([&](int i) { return from_bits(to_bits(a.v[i]) + to_bits(b.v[i])); });
}
inline bool any_at_least(F16 a, float bound) {  // or NaN
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= !(a.v[i] < bound);
    return any;
}
inline F16 load_bf16(const uint16_t* p) {
    return lanewise([&](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}

inline void narrow(F16 a, uint16_t* out) {
    for (int i = 0; i < LANES; ++i) narrow(a.v[i], out + i);
}

// Sums the lanes by one fixed tree (halves, quarters, ...), so that the order is always the same.
inline float sum(F16 a) {
    alignas(64) float x[LANES];
    store(x, a);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}
inline float largest(F16 a) {
    alignas(64) float x[LANES];
    store(x, a);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}
// The first n words of 32 bits, and zeros behind.
inline F16 first_words(const void* p, int n) {
    F16 found = f16(0.0f);
    std::memcpy(found.v, p, static_cast<size_t>(n < LANES ? n : LANES) * 4);
    return found;
}

// Transposes 16 x 16 floats in place.
inline void transpose(F16 (&x)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) std::swap(x[i].v[j], x[j].v[i]);
}

// ------------------------------------------------------------------------------------------------- pairs of bfloat16

inline F16 low_halves(const void* p) {
    uint32_t words[LANES];
    std::memcpy(words, p, sizeof words);
    return lanewise([&](int i) { return from_bits(words[i] << 16); });
}
inline F16 high_halves(const void* p) {
    uint32_t words[LANES];
    std::memcpy(words, p, sizeof words);
    return lanewise([&](int i) { return from_bits(words[i] & 0xffff0000u); });
}

// ------------------------------------------------------------------------------------------------- quantised numbers

inline void round_codes(const float* x, int8_t* codes, float* sums) {
    for (int h = 0; h < 2; ++h) {
        int sum = 0;
        for (int i = h * UNIT / 2; i < (h + 1) * UNIT / 2; ++i) {
            codes[i] = static_cast<int8_t>(to_bits(x[i] + 12582912.0f) & 0xff);  // 1.5 * 2^23: the integer in the low bits
            sum += codes[i];
        }
        sums[h] = static_cast<float>(sum);
    }
}

constexpr bool BYTE_TILES = false;

struct I16 {
    int32_t v[LANES];
};
inline F16 to_float(I16 a) {
    return lanewise([&](int i) { return static_cast<float>(a.v[i]); });
}
inline F16 nmadd(F16 a, F16 b, F16 c) {
    return lanewise([&](int i) { return madd(-a.v[i], b.v[i], c.v[i]); });
}
inline F16 load_halves(const char* p) {
    return lanewise([&](int i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        return half_to_float(half);
    });
}
inline F16 load_powers(const char* p) {  // the exponents of floats that are powers of two, or 0
    return lanewise([&](int i) { return from_bits(static_cast<uint32_t>(static_cast<uint8_t>(p[i])) << 23); });
}
inline F16 load_signed(const char* p) {
    return lanewise([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
inline F16 load_unsigned(const char* p) {
    return lanewise([&](int i) { return static_cast<float>(static_cast<uint8_t>(p[i])); });
}

template <int GROUPS>
constexpr int SIXTEENS = 1;  // of outputs that are taken at once
constexpr bool SMALL_TABLES = false;
template <class CODES>
constexpr bool UNPACKS = false;  // whether many rows have Operands of their own
template <class CODES>
constexpr int MOST_ROWS = 4;  // that share decoded codes

template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* packed, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    for (int o = 0; o < LANES; ++o) {
        int codes[UNIT];
        for (int k = 4 * FIRST; k < 4 * LAST; ++k) {
            const int code = code_at(CODES::BITS, packed + o / 8 * CODES::BITS * UNIT, k, o % 8);
            codes[k] = CODES::LOOKED_UP ? table[code] : code - (CODES::BITS == 8 ? 128 : 0);
        }
        for (int r = 0; r < ROWS; ++r) {
            int32_t sum = 0;
            for (int k = 4 * FIRST; k < 4 * LAST; ++k) sum += codes[k] * x[r].codes[k];
            sums[0][r].v[o] = sum;
        }
    }
}

// ---------------------------------------------------------------------------------------------------- fours of bytes

inline I16 no_sums() { return {}; }
inline I16 load_fours(const int8_t* p) {
    I16 found;
    std::memcpy(found.v, p, sizeof found.v);
    return found;
}
// Adds the products of four codes without a sign and sixteen fours of codes.
inline I16 add_fours(I16 sums, int32_t weights, const I16& fours) {
    uint8_t w[4];
    std::memcpy(w, &weights, 4);
    for (int i = 0; i < LANES; ++i) {
        int8_t x[4];
        std::memcpy(x, fours.v + i, 4);
        for (int k = 0; k < 4; ++k) sums.v[i] += w[k] * x[k];
    }
    return sums;
}
inline void put_bytes(F16 a, uint8_t* to) {
    for (int i = 0; i < LANES; ++i) to[i] = static_cast<uint8_t>(to_bits(a.v[i] + 12582912.0f) & 0xff);  // as in round_codes
}
// 32 bytes of four rows, byte by byte; order_sums puts sums of them into the order of the dimensions.
inline void put_fours(const int8_t* const* rows, int8_t* to) {
    for (int i = 0; i < UNIT; ++i)
        for (int k = 0; k < 4; ++k) to[4 * i + k] = rows[k][i];
}
inline void order_sums(I16 (&)[2]) {}
// The 8 words from `at` on of 8 rows, word by word: [8 words][8 rows].
inline void turn_words(const int8_t* const* rows, int at, char* to) {
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 8; ++i) std::memcpy(to + 32 * j + 4 * i, rows[i] + at + 4 * j, 4);
}

// ---------------------------------------------------------------------------------------------------------- sampling

constexpr int VECTOR_BYTES = 16;
typedef int32_t Marks __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Wide __attribute__((vector_size(VECTOR_BYTES)));
FORERUN_INLINE bool any(const Marks& marks) {
#if defined(__SSE2__)
    return _mm_movemask_epi8((__m128i)marks) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < VECTOR_BYTES / 4; ++i) found |= marks[i];
    return found != 0;
#endif
}
// The products of the lower 32 bits of each number.
FORERUN_INLINE void times(const Wide& a, const Wide& b, Wide& out) {
#if defined(__SSE2__)
    out = (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    out = (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

}  // namespace FORERUN_ISA
}  // namespace forerun

#include "float_pairs.h"
