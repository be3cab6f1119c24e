// F16, sixteen floats on every instruction set, and the few operations that the kernels are written in.
//
// Each file of isa/ includes the kernels (linear.h, attention.h, ...) once and is compiled with flags of its own. All of
// it is in a namespace named after the instruction set, so that the linker never confuses two sets. A lane always does the
// same operations in the same order, whatever the other lanes hold; row invariance depends on that. `madd` rounds once
// with AVX2 and AVX-512 and twice at the baseline; nothing else differs between the sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace forerun {
namespace FORERUN_ISA {

constexpr int LANES = 16;

#if defined(__AVX512F__)

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

#elif defined(__AVX2__)

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
inline F16 madd(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
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

#else

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
inline F16 madd(F16 a, F16 b, F16 c) {
    return lanewise([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
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

#endif

// --------------------------------------------------------------------------------------- the same on every set

inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN, and denormals are kept.
inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Sixteen floats as bfloat16, rounded as above; with AVX-512 denormals become zero, as they do in its products.
inline void narrow(F16 a, uint16_t* out) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh(a.v);
    std::memcpy(out, &half, 32);
#else
    alignas(64) float lanes[LANES];
    store(lanes, a);
    for (int i = 0; i < LANES; ++i) out[i] = float_to_bf16(lanes[i]);
#endif
}

// Loads numbers of either type from memory as floats: a row of weights, keys or values.
inline F16 load(const uint16_t* p) { return load_bf16(p); }
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bf16_to_float(x); }
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, uint16_t* out) { *out = float_to_bf16(x); }

// The first n lanes from memory, zeros behind.
template <class T>
inline F16 load_first(const T* p, int n) {
    if (n >= LANES) return load(p);
    alignas(64) float lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = widen(p[i]);
    return load(lanes);
}

// Sums the lanes by one fixed tree (halves, quarters, ...), so that the order is always the same.
#if defined(__AVX2__)
inline __m256 half_sum(F16 a) {
#if defined(__AVX512F__)
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    return _mm256_add_ps(a.lo, a.hi);
#endif
}
inline __m256 half_max(F16 a) {
#if defined(__AVX512F__)
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    return _mm256_max_ps(a.lo, a.hi);
#endif
}
inline float sum(F16 a) {
    const __m256 half = half_sum(a);
    const __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float largest(F16 a) {
    const __m256 half = half_max(a);
    const __m128 x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
#else
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
#endif

// Sums of many vectors at once: each is halved and stored, then sixteen halves become sixteen sums by one fixed tree,
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
constexpr int HALF = LANES / 2;
#if defined(__AVX2__)
inline void store_half_sum(float* p, F16 a) { _mm256_store_ps(p, half_sum(a)); }
inline __m256 sums_of_eight(const float (*p)[HALF]) {
    const auto pairs = [&](int i) { return _mm256_hadd_ps(_mm256_load_ps(p[i]), _mm256_load_ps(p[i + 1])); };
    const __m256 a = _mm256_hadd_ps(pairs(0), pairs(2)), b = _mm256_hadd_ps(pairs(4), pairs(6));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline F16 sums_of_halves(const float (*p)[HALF]) {
#if defined(__AVX512F__)
    return {_mm512_insertf32x8(_mm512_castps256_ps512(sums_of_eight(p)), sums_of_eight(p + HALF), 1)};
#else
    return {sums_of_eight(p), sums_of_eight(p + HALF)};
#endif
}
#else
inline void store_half_sum(float* p, F16 a) {
    for (int i = 0; i < HALF; ++i) p[i] = a.v[i] + a.v[i + HALF];
}
inline F16 sums_of_halves(const float (*p)[HALF]) {
    return lanewise([&](int i) {
        const float* x = p[i];
        return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    });
}
#endif

#if defined(__AVX512F__)
constexpr bool WIDE_REGISTERS = true;  // whether an F16 is one register
#else
constexpr bool WIDE_REGISTERS = false;
#endif
// What __builtin_prefetch is told: into the second cache where lines are consumed faster than the first can ask for them.
// On a Xeon of 2023 that made products of 1 to 8 rows 5 % faster.
constexpr int NEAR_CACHE = WIDE_REGISTERS ? 2 : 3;

// Transposes 16 x 16 floats in place.
#if defined(__AVX512F__)
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
#endif

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

}  // namespace FORERUN_ISA
}  // namespace forerun
