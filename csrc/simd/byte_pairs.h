// Products of bytes with AVX2: two are added into 16 bits, which saturate beyond.
#pragma once

#include "avx2.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr bool SMALL_TABLES = true;
// Whether many rows share unpacked codes. Those of 4 bits are decoded for four rows as fast as they are loaded.
template <class CODES>
constexpr bool UNPACKS = CODES::BITS != 4 || CODES::LOOKED_UP;

// The rows that share decoded codes. To decode 4 bits again for four more costs less than what four rows gain by
// loading each input once for two registers of outputs.
template <class CODES>
constexpr int MOST_ROWS = CODES::BITS == 4 ? 4 : 8;
template <class CODES>
constexpr int MOST_ROWS<Unpacked<CODES>> = 4;

// The words whose sums of pairs fit into 16 bits.
template <class CODES>
constexpr int SPAN = CODES::SIGNED && !CODES::SMALL     ? 1
                     : CODES::SMALL || CODES::BITS == 5 ? 4
                     : CODES::BITS == 6                 ? 2
                                                        : 8;

inline __m256i numbers_of(const int8_t* table, bool is_small) {
    const __m256i numbers = spread_table(table);
    return is_small ? _mm256_sub_epi8(numbers, _mm256_set1_epi8(LEAST_SMALL)) : numbers;
}

// Adds the products of four codes without a sign and sixteen fours of codes.
inline I16 add_fours(I16 sums, int32_t weights, const I16& fours) {
    const __m256i spread = _mm256_set1_epi32(weights), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; ++i)
        sums.v[i] = _mm256_add_epi32(sums.v[i], _mm256_madd_epi16(_mm256_maddubs_epi16(spread, fours.v[i]), ones));
    return sums;
}

// The exact sums over words [FIRST, LAST) of sixteen outputs, for ROWS rows; of codes of 8 bits less 128. Up to four
// rows take the two registers of outputs at once, more rows one after the other.
template <class CODES, int FIRST, int LAST, int N, int ROWS>
inline void dot(const char* codes, const int8_t* table, const RoundedUnit* x, I16 (&sums)[N][ROWS]) {
    constexpr int BITS = CODES::BITS;
    constexpr bool SIGNED = CODES::SIGNED && !CODES::SMALL;
    constexpr int AT_ONCE = ROWS > 4 ? 1 : 2;
    const __m256i numbers = numbers_of(table, CODES::SMALL);
    for (int from = 0; from < 2; from += AT_ONCE) {
        __m256i pairs[ROWS][AT_ONCE];
        const RoundedUnit* rows = x;
        // Else the compiler keeps the spread inputs for the other half, for which there is no room.
        if (AT_ONCE == 1) __asm__("" : "+r"(rows));
#pragma GCC unroll 8
        for (int j = FIRST; j < LAST; ++j) {
            __m256i code[AT_ONCE];
            for (int n = 0; n < AT_ONCE; ++n)
                code[n] = weight_codes<CODES>(codes + (from + n) * BITS * UNIT, j, numbers);
            const bool begins = (j - FIRST) % SPAN<CODES> == 0,
                       ends = (j - FIRST + 1) % SPAN<CODES> == 0 || j + 1 == LAST;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                int32_t word;
                std::memcpy(&word, rows[r].codes + 4 * j, 4);
                const __m256i input = _mm256_set1_epi32(word);
                for (int n = 0; n < AT_ONCE; ++n) {
                    const __m256i product =
                        SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(code[n]), _mm256_sign_epi8(input, code[n]))
                               : _mm256_maddubs_epi16(code[n], input);
                    pairs[r][n] = begins ? product : _mm256_add_epi16(pairs[r][n], product);
                    if (ends) {
                        const __m256i four = _mm256_madd_epi16(pairs[r][n], _mm256_set1_epi16(1));
                        sums[0][r].v[from + n] =
                            j - FIRST < SPAN<CODES> ? four : _mm256_add_epi32(sums[0][r].v[from + n], four);
                    }
                    if (CODES::SMALL && j + 1 == LAST) {
                        const float sum_x = LAST - FIRST == UNIT_WORDS ? x[r].sum : x[r].halves[FIRST > 0];
                        const __m256i lifted = _mm256_set1_epi32(LEAST_SMALL * static_cast<int>(sum_x));
                        sums[0][r].v[from + n] = _mm256_add_epi32(sums[0][r].v[from + n], lifted);
                    }
                    // Else the compiler reorders the sums and computes all products first, for which there are no
                    // registers.
                    __m256i& sum = ends ? sums[0][r].v[from + n] : pairs[r][n];
                    __asm__("" : "+x"(sum));
                }
            }
        }
    }
}

// Bytes with a sign as 16 bits each: from even places, and from odd ones.
inline __m256i even_bytes(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline __m256i odd_bytes(__m256i x) { return _mm256_srai_epi16(x, 8); }

template <class CODES>
struct Operands;  // quantised.h

// Many rows share unpacked codes of sixteen outputs, a byte each. Where these have a sign, they and the rows are
// widened to 16 bits, whose products are added in half as many operations.
template <class CODES>
struct Operands<Unpacked<CODES>> {
    static constexpr bool IS_WIDE = CODES::SIGNED && !CODES::SMALL;
    // Of eight outputs; of each word the even bytes, then the odd ones.
    static constexpr int LINES = UNIT_WORDS * (IS_WIDE ? 2 : 1);
    __m256i codes[2][LINES];
    alignas(32) int32_t wide_rows[IS_WIDE ? NEAR_ROWS : 1][2][UNIT_WORDS];

    // All rows before any of them is multiplied: the processor is slow to load parts of what it has just stored.
    void take_rows(const RoundedUnit* x, size_t block_units, int num_rows) {
        for (int r = 0; r < num_rows && IS_WIDE; ++r) {
            const int8_t* const row = x[static_cast<size_t>(r / TILE_ROWS) * block_units + r % TILE_ROWS].codes;
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
            _mm256_store_si256(reinterpret_cast<__m256i*>(wide_rows[r][0]), even_bytes(bytes));
            _mm256_store_si256(reinterpret_cast<__m256i*>(wide_rows[r][1]), odd_bytes(bytes));
        }
    }
    void take_codes(const char* packed, const int8_t* table) {
        const __m256i numbers = numbers_of(table, CODES::SMALL);
        for (int n = 0; n < 2; ++n)
#pragma GCC unroll 8
            for (int j = 0; j < UNIT_WORDS; ++j) {
                const __m256i word = weight_codes<CODES>(packed + n * CODES::BITS * UNIT, j, numbers);
                if constexpr (IS_WIDE) codes[n][2 * j] = even_bytes(word), codes[n][2 * j + 1] = odd_bytes(word);
                else codes[n][j] = word;
            }
    }

    template <int FIRST, int LAST, int N, int ROWS>
    void multiply(const int8_t*, const RoundedUnit* x, int row, I16 (&sums)[N][ROWS]) const {
        constexpr int PER_WORD = LINES / UNIT_WORDS, BEGIN = FIRST * PER_WORD, END = LAST * PER_WORD;
        const __m256i(*lines)[LINES] = codes;
        __asm__("" : "+r"(lines));  // else all lines are loaded before the first row, for which there are no registers
        __m256i pairs[ROWS][2];
#pragma GCC unroll 16
        for (int j = BEGIN; j < END; ++j) {
            __m256i code[2] = {lines[0][j], lines[1][j]};
            __asm__("" : "+x"(code[0]), "+x"(code[1]));  // and these would be loaded again for each row
            const bool begins = (j - BEGIN) % SPAN<CODES> == 0,
                       ends = (j - BEGIN + 1) % SPAN<CODES> == 0 || j + 1 == END;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                int32_t word;
                std::memcpy(
                    &word,
                    IS_WIDE ? reinterpret_cast<const int8_t*>(&wide_rows[row + r][j % 2][j / 2]) : x[r].codes + 4 * j,
                    4);
                const __m256i input = _mm256_set1_epi32(word);
                for (int n = 0; n < 2; ++n) {
                    __m256i& total = sums[0][r].v[n];
                    if constexpr (IS_WIDE) {
                        const __m256i product = _mm256_madd_epi16(code[n], input);
                        total = j == BEGIN ? product : _mm256_add_epi32(total, product);
                    } else {
                        const __m256i product = _mm256_maddubs_epi16(code[n], input);
                        pairs[r][n] = begins ? product : _mm256_add_epi16(pairs[r][n], product);
                        if (ends) {
                            const __m256i four = _mm256_madd_epi16(pairs[r][n], _mm256_set1_epi16(1));
                            total = j - BEGIN < SPAN<CODES> ? four : _mm256_add_epi32(total, four);
                        }
                    }
                    __m256i& sum = IS_WIDE || ends ? total : pairs[r][n];
                    __asm__("" : "+x"(sum));  // as in `dot`
                }
            }
        }
        for (int r = 0; r < ROWS && CODES::SMALL; ++r) {
            const float sum_x = LAST - FIRST == UNIT_WORDS ? x[r].sum : x[r].halves[FIRST > 0];
            const __m256i lifted = _mm256_set1_epi32(LEAST_SMALL * static_cast<int>(sum_x));
            for (int n = 0; n < 2; ++n) sums[0][r].v[n] = _mm256_add_epi32(sums[0][r].v[n], lifted);
        }
    }
};

}  // namespace FORERUN_ISA
}  // namespace forerun
