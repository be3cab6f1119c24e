// Products of bytes with AVX2: two are added into 16 bits, which saturate beyond.
#pragma once

#include "avx2.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr bool SMALL_TABLES = true;

// The rows that share decoded codes. To decode 4 bits again for four more costs less than what four rows gain by loading each
// input once for two registers of outputs.
template <class CODES>
constexpr int MOST_ROWS = CODES::BITS == 4 ? 4 : 8;

// The exact sums over words [FIRST, LAST) of sixteen outputs, for ROWS rows; of codes of 8 bits less 128. Up to four rows take
// the two registers of outputs at once, more rows one after the other.
template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* codes, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    constexpr int BITS = CODES::BITS;
    constexpr bool SIGNED = CODES::SIGNED && !CODES::SMALL;
    constexpr int SPAN = SIGNED ? 1 : CODES::SMALL || BITS == 5 ? 4 : BITS == 6 ? 2 : 8;  // words whose sums fit into 16 bits
    constexpr int AT_ONCE = ROWS > 4 ? 1 : 2;
    __m256i numbers = spread_table(table);
    if (CODES::SMALL) numbers = _mm256_sub_epi8(numbers, _mm256_set1_epi8(LEAST_SMALL));
    for (int from = 0; from < 2; from += AT_ONCE) {
        __m256i pairs[ROWS][AT_ONCE];
        const RoundedUnit* rows = x;
        // Else the compiler keeps the spread inputs for the other half, for which there is no room.
        if (AT_ONCE == 1) __asm__("" : "+r"(rows));
#pragma GCC unroll 8
        for (int j = FIRST; j < LAST; ++j) {
            __m256i code[AT_ONCE];
            for (int n = 0; n < AT_ONCE; ++n) code[n] = weight_codes<CODES>(codes + (from + n) * BITS * UNIT, j, numbers);
            const bool begins = (j - FIRST) % SPAN == 0, ends = (j - FIRST + 1) % SPAN == 0 || j + 1 == LAST;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                int32_t word;
                std::memcpy(&word, rows[r].codes + 4 * j, 4);
                const __m256i input = _mm256_set1_epi32(word);
                for (int n = 0; n < AT_ONCE; ++n) {
                    const __m256i product = SIGNED
                                                ? _mm256_maddubs_epi16(_mm256_abs_epi8(code[n]), _mm256_sign_epi8(input, code[n]))
                                                : _mm256_maddubs_epi16(code[n], input);
                    pairs[r][n] = begins ? product : _mm256_add_epi16(pairs[r][n], product);
                    if (ends) {
                        const __m256i four = _mm256_madd_epi16(pairs[r][n], _mm256_set1_epi16(1));
                        sums[0][r].v[from + n] = j - FIRST < SPAN ? four : _mm256_add_epi32(sums[0][r].v[from + n], four);
                    }
                    if (CODES::SMALL && j + 1 == LAST) {
                        const float sum_x = LAST - FIRST == UNIT_WORDS ? x[r].sum : x[r].halves[FIRST > 0];
                        const __m256i lifted = _mm256_set1_epi32(LEAST_SMALL * static_cast<int>(sum_x));
                        sums[0][r].v[from + n] = _mm256_add_epi32(sums[0][r].v[from + n], lifted);
                    }
                    // Else the compiler reorders the sums and computes all products first, for which there are no registers.
                    __m256i& sum = ends ? sums[0][r].v[from + n] : pairs[r][n];
                    __asm__("" : "+x"(sum));
                }
            }
        }
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
