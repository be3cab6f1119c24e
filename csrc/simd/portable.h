// Portable C++: an F16 is an array, which a compiler turns into whatever registers it may use.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../inline.h"
#include "../kernels.h"
#include "../scalar.h"
#include "round_once.h"

#if defined(__SSE2__)  // every x86-64 processor has it; two functions of sampling are slow without
#include <emmintrin.h>
#endif

namespace forerun {
namespace FORERUN_ISA {

constexpr int LANES = 16;
constexpr bool WIDE_REGISTERS = false;  // whether an F16 is one register
#if defined(__FP_FAST_FMAF)
constexpr bool ROUNDS_ONCE = true;  // whether an instruction rounds a product and its sum once
#else
constexpr bool ROUNDS_ONCE = false;
#endif

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
// a * b + c by two operations, four floats at a time: left to itself GCC 12 keeps sixteen apart in the loops that add
// products.
typedef float Four __attribute__((vector_size(16), aligned(4)));
FORERUN_INLINE F16 multiply_and_add(const F16& a, const F16& b, const F16& c) {
    F16 out;
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        Four x, y, z;
        std::memcpy(&x, a.v + i, 16), std::memcpy(&y, b.v + i, 16), std::memcpy(&z, c.v + i, 16);
        const Four sum = x * y + z;
        std::memcpy(out.v + i, &sum, 16);
    }
    return out;
}
#if defined(__FP_FAST_FMAF)
inline F16 madd(F16 a, F16 b, F16 c) {
    return lanewise([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
#else
inline F16 madd(F16 a, F16 b, F16 c) {
    F16 out;
    round_once(a.v, b.v, c.v, out.v);
    return out;
}
#endif
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
            // 1.5 * 2^23: the integer in the low bits.
            codes[i] = static_cast<int8_t>(to_bits(x[i] + 12582912.0f) & 0xff);
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
    return madd(lanewise([&](int i) { return -a.v[i]; }), b, c);
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

#if defined(__SSE2__)

// Sixteen bytes of word j: the codes of four outputs, or what they stand for in a table; of 8 bits less 128.
template <class CODES>
inline __m128i weight_codes(const char* codes, int j, const int8_t* table) {
    constexpr int BITS = CODES::BITS;
    const auto load_line = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 32 * i)); };
    if constexpr (BITS == 8) return load_line(j);
    constexpr int LOW = num_low_bits(BITS), PER_LINE = 8 / LOW;
    __m128i low = _mm_and_si128(_mm_srli_epi16(load_line(j / PER_LINE), LOW * (j % PER_LINE)),
                                _mm_set1_epi8(static_cast<char>((1 << LOW) - 1)));
    if constexpr (CODES::LOOKED_UP) {
        int8_t bytes[16];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), low);
        for (int8_t& byte : bytes) byte = table[byte];
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    } else if constexpr (BITS > LOW) {
        constexpr int HIGH = BITS - LOW, PER_BYTE = 8 / HIGH;
        const int shift = LOW - HIGH * (j % PER_BYTE);
        const __m128i plane = load_line(LOW + j / PER_BYTE);
        const __m128i shifted = shift > 0 ? _mm_slli_epi16(plane, shift) : _mm_srli_epi16(plane, -shift);
        low = _mm_or_si128(low, _mm_and_si128(shifted, _mm_set1_epi8(static_cast<char>(((1 << HIGH) - 1) << LOW))));
    }
    return low;
}

// The exact sums over words [FIRST, LAST) of sixteen outputs: codes are widened to 16 bits once for all rows, and two
// products are added by one instruction.
template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* packed, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    constexpr bool SIGNED = CODES::SIGNED;
    const __m128i zero = _mm_setzero_si128();
    __m128i wide[2][LAST - FIRST][4];  // of eight outputs, two in each
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
        for (int j = FIRST; j < LAST; ++j)
#pragma GCC unroll 2
            for (int q = 0; q < 2; ++q) {
                const __m128i codes = weight_codes<CODES>(packed + h * CODES::BITS * UNIT + 16 * q, j, table);
                __m128i* const to = wide[h][j - FIRST] + 2 * q;
                to[0] = SIGNED ? _mm_srai_epi16(_mm_unpacklo_epi8(codes, codes), 8) : _mm_unpacklo_epi8(codes, zero);
                to[1] = SIGNED ? _mm_srai_epi16(_mm_unpackhi_epi8(codes, codes), 8) : _mm_unpackhi_epi8(codes, zero);
            }
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) {
            __m128i totals[4] = {zero, zero, zero, zero};
#pragma GCC unroll 8
            for (int j = FIRST; j < LAST; ++j) {
                int32_t word;
                std::memcpy(&word, x[r].codes + 4 * j, 4);
                const __m128i four = _mm_cvtsi32_si128(word), pairs = _mm_srai_epi16(_mm_unpacklo_epi8(four, four), 8);
                const __m128i inputs = _mm_unpacklo_epi64(pairs, pairs);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    totals[i] = _mm_add_epi32(totals[i], _mm_madd_epi16(wide[h][j - FIRST][i], inputs));
            }
            for (int q = 0; q < 2; ++q) {
                const __m128 a = _mm_castsi128_ps(totals[2 * q]), b = _mm_castsi128_ps(totals[2 * q + 1]);
                const __m128i even = _mm_castps_si128(_mm_shuffle_ps(a, b, 0x88)),
                              odd = _mm_castps_si128(_mm_shuffle_ps(a, b, 0xdd));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(sums[0][r].v + 8 * h + 4 * q), _mm_add_epi32(even, odd));
            }
        }
}

#else

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

#endif

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
    for (int i = 0; i < LANES; ++i)
        to[i] = static_cast<uint8_t>(to_bits(a.v[i] + 12582912.0f) & 0xff);  // as in round_codes
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
