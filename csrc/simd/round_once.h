// a * b + c rounded once, on processors that have no instruction for it.
//
// A product of two float32 is exact in float64. Its sum with a third is rounded to 53 bits there and then to 24, which
// is one rounding too many only where the first ends halfway between two float32, or where the result is denormal.
// There the sum is rounded to odd first, behind which the second rounding is right (Boldo and Melquiond 2008,
// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd"). With numbers of a model that
// is one sum in 2^29.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace forerun {
namespace FORERUN_ISA {

inline float round_once(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b), added = c;
    double sum = product + added;
    // Exactly what was rounded off.
    const double rest = sum - product, error = (product - (sum - rest)) + (added - rest);
    uint64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (error != 0.0 && error - error == 0.0 && (bits & 1) == 0) {
        bits += (error > 0.0) == (sum > 0.0) ? 1 : ~uint64_t{0};
        std::memcpy(&sum, &bits, 8);
    }
    return static_cast<float>(sum);
}

#if defined(__SSE2__)

// Sums of four, and marks of those that may have been rounded twice.
inline __m128 round_four(__m128 a, __m128 b, __m128 c, __m128i& marks) {
    const __m128d low = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), _mm_cvtps_pd(c));
    const __m128d high = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b))),
                                    _mm_cvtps_pd(_mm_movehl_ps(c, c)));
    const __m128 x = _mm_castpd_ps(low), y = _mm_castpd_ps(high);
    const __m128i last = _mm_castps_si128(_mm_shuffle_ps(x, y, 0x88)),
                  first = _mm_castps_si128(_mm_shuffle_ps(x, y, 0xdd));
    const __m128i is_half =
        _mm_cmpeq_epi32(_mm_and_si128(last, _mm_set1_epi32(0x1fffffff)), _mm_set1_epi32(0x10000000));
    // 0 < |sum| < 2^-126: the first word, less 1 and without its sign, is less than 0x380fffff, compared without a sign
    const __m128i size = _mm_and_si128(first, _mm_set1_epi32(0x7fffffff));
    const __m128i is_tiny =
        _mm_cmplt_epi32(_mm_add_epi32(size, _mm_set1_epi32(0x7fffffff)), _mm_set1_epi32(-0x47f00001));
    marks = _mm_or_si128(marks, _mm_or_si128(is_half, is_tiny));
    return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
}

// out = a * b + c, sixteen of each. Within a loop it would take the registers of all else: passes of 4 bits took 1.06
// times as long as with two roundings, and 1.03 by calls.
__attribute__((noinline)) inline void round_once(const float* a, const float* b, const float* c, float* out) {
    __m128i marks = _mm_setzero_si128();
    __m128 sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        sums[i] = round_four(_mm_loadu_ps(a + 4 * i), _mm_loadu_ps(b + 4 * i), _mm_loadu_ps(c + 4 * i), marks);
    if (__builtin_expect(_mm_movemask_epi8(marks) != 0, 0)) {
        for (int i = 0; i < 16; ++i) out[i] = round_once(a[i], b[i], c[i]);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(out + 4 * i, sums[i]);
}

#else

inline void round_once(const float* a, const float* b, const float* c, float* out) {
    for (int i = 0; i < 16; ++i) out[i] = round_once(a[i], b[i], c[i]);
}

#endif

}  // namespace FORERUN_ISA
}  // namespace forerun
