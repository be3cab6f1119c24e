// Products of bytes with AVX-VNNI: four are added into 32 bits, which is exact.
#pragma once

#include "avx2.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr bool SMALL_TABLES = false;
template <class CODES>
constexpr bool UNPACKS = false;  // whether many rows have Operands of their own
template <class CODES>
constexpr int MOST_ROWS = 8;  // that share decoded codes

// Adds the products of four codes without a sign and sixteen fours of codes.
inline I16 add_fours(I16 sums, int32_t weights, const I16& fours) {
    for (int i = 0; i < 2; ++i) sums.v[i] = _mm256_dpbusd_avx_epi32(sums.v[i], _mm256_set1_epi32(weights), fours.v[i]);
    return sums;
}

// The exact sums over words [FIRST, LAST) of sixteen outputs, for ROWS rows; of codes of 8 bits less 128. Up to six
// rows take the two registers of outputs at once, more rows one after the other.
template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* codes, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    constexpr int AT_ONCE = ROWS > 6 ? 1 : 2, BITS = CODES::BITS;
    const __m256i sign = _mm256_set1_epi8(-128), numbers = _mm256_xor_si256(spread_table(table), sign);
    for (int from = 0; from < 2; from += AT_ONCE) {
        for (int r = 0; r < ROWS; ++r) {
            const float sum_x = LAST - FIRST == UNIT_WORDS ? x[r].sum : x[r].halves[FIRST > 0];
            const __m256i begin =
                CODES::SIGNED ? _mm256_set1_epi32(-128 * static_cast<int>(sum_x)) : _mm256_setzero_si256();
            for (int n = 0; n < AT_ONCE; ++n) sums[0][r].v[from + n] = begin;
        }
        const RoundedUnit* rows = x;
        if (AT_ONCE == 1) __asm__("" : "+r"(rows));  // as in byte_pairs.h
#pragma GCC unroll 8
        for (int j = FIRST; j < LAST; ++j) {
            __m256i code[AT_ONCE];
            for (int n = 0; n < AT_ONCE; ++n) {
                code[n] = weight_codes<CODES>(codes + (from + n) * BITS * UNIT, j, numbers);
                if (BITS == 8) code[n] = _mm256_xor_si256(code[n], sign);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                int32_t word;
                std::memcpy(&word, rows[r].codes + 4 * j, 4);
                const __m256i input = _mm256_set1_epi32(word);
                for (int n = 0; n < AT_ONCE; ++n) {
                    __m256i& sum = sums[0][r].v[from + n];
                    sum = _mm256_dpbusd_avx_epi32(sum, code[n], input);
                }
            }
        }
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
