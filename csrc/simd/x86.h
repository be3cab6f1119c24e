// What AVX-512 and AVX2 do alike, eight floats at a time.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace forerun {
namespace FORERUN_ISA {

// Sums the lanes by one fixed tree (quarters, ...), so that the order is always the same.
inline float sum_of_eight(__m256 half) {
    const __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float largest_of_eight(__m256 half) {
    const __m128 x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}

// Rounds 32 numbers to the nearest codes, ties to even. Returns the sums of both halves.
inline void round_codes(const float* x, int8_t* codes, float* sums) {
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32(_mm256_loadu_ps(x + 8 * i));
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(mixed, order));
    const __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
    const __m128i quarters = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128 halves = _mm_cvtepi32_ps(_mm_hadd_epi32(quarters, quarters));
    _mm_storel_pi(reinterpret_cast<__m64*>(sums), halves);
}

// The 8 words from `at` on of 8 rows, word by word: [8 words][8 rows].
inline void turn_words(const int8_t* const* rows, int at, char* to) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + at));
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    __m256i* const words = reinterpret_cast<__m256i*>(to);
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(words + i, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        _mm256_storeu_si256(words + i + 4, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}

// 32 bytes of four rows, byte by byte, in the order in which the processor makes it; order_sums puts sums of them into
// the order of the dimensions.
inline void put_fours(const int8_t* const* rows, int8_t* to) {
    const auto row = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i])); };
    const __m256i a = _mm256_unpacklo_epi8(row(0), row(1)), b = _mm256_unpackhi_epi8(row(0), row(1));
    const __m256i c = _mm256_unpacklo_epi8(row(2), row(3)), d = _mm256_unpackhi_epi8(row(2), row(3));
    __m256i* const fours = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(fours, _mm256_unpacklo_epi16(a, c));
    _mm256_storeu_si256(fours + 1, _mm256_unpackhi_epi16(a, c));
    _mm256_storeu_si256(fours + 2, _mm256_unpacklo_epi16(b, d));
    _mm256_storeu_si256(fours + 3, _mm256_unpackhi_epi16(b, d));
}

}  // namespace FORERUN_ISA
}  // namespace forerun
