// Functions of single numbers: each result is a function of its own number alone.
//
// The polynomials are least-squares fits, weighed towards the smallest error; with the rounding of float32 erf is
// within 1.4e-7 and tanh within 2 units in the last place.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

template <int N>
inline F16 polynomial(const float (&c)[N], F16 x) {
    F16 y = f16(c[N - 1]);
    for (int i = N - 2; i >= 0; --i) y = madd(y, x, f16(c[i]));
    return y;
}

inline F16 negative(F16 x) { return f16(0.0f) - x; }
inline F16 with_sign_of(F16 x, F16 magnitude) { return less_than(x, f16(0.0f), negative(magnitude), magnitude); }

inline F16 tanh(F16 x) {
    constexpr float NEAR[] = {-3.333328392e-1f, 1.333149125e-1f, -5.374349526e-2f, 2.065057899e-2f, -5.717036547e-3f};
    const F16 size = max(x, negative(x)), square = x * x;
    const F16 far = with_sign_of(x, f16(1.0f) - f16(2.0f) / (exp(size + size) + f16(1.0f)));
    return less_than(size, f16(0.625f), madd(x * square, polynomial(NEAR, square), x), far);
}

inline F16 erf(F16 x) {
    constexpr float NEAR[] = {1.128379166f,    -3.761262714e-1f, 1.128360018e-1f, -2.685444459e-2f,
                              5.189535339e-3f, -8.020841280e-4f, 7.889119533e-5f};
    // -log(1 - erf(x)) for x in 1 .. 4; beyond, erf is 1
    constexpr float FAR[] = {-1.880359367e-4f, 1.129578406f,    6.332199246e-1f,  1.084185471e-1f,
                             -2.520823968e-2f, 4.204556205e-3f, -4.413353505e-4f, 2.168677182e-5f};
    const F16 size = max(x, negative(x)), bounded = less_than(f16(4.0f), size, f16(4.0f), size);
    const F16 far = with_sign_of(x, f16(1.0f) - exp(negative(polynomial(FAR, bounded))));
    return less_than(size, f16(1.0f), x * polynomial(NEAR, x * x), far);
}

inline F16 sigmoid(F16 x) { return f16(1.0f) / (f16(1.0f) + exp(negative(x))); }
inline F16 silu(F16 x) { return x / (f16(1.0f) + exp(negative(x))); }

// 0.5 x (1 + erf(x / sqrt 2)) (Hendrycks and Gimpel 2016).
inline F16 gelu(F16 x) { return f16(0.5f) * x * (f16(1.0f) + erf(x * f16(0.70710678118654752f))); }

// The same with tanh(u) in place of erf, u = sqrt(2 / pi) (x + 0.044715 x^3); and (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
inline F16 gelu_tanh(F16 x) {
    const F16 u = x * madd(x * x, f16(0.044715f * 0.79788456080286536f), f16(0.79788456080286536f));
    return x / (f16(1.0f) + exp(negative(u + u)));
}

// x sigmoid(1.702 x), x at most 7: what gpt-oss does with gate (its model card, section 2.2).
constexpr float CLAMPED_SLOPE = 1.702f, CLAMPED_AT = 7.0f;
inline F16 clamped_silu(F16 x) {
    const F16 at = f16(CLAMPED_AT), bounded = less_than(at, x, at, x);
    return bounded / (f16(1.0f) + exp(negative(bounded * f16(CLAMPED_SLOPE))));
}

inline F16 activated(Act act, F16 x) {
    switch (act) {
        case Act::silu: return silu(x);
        case Act::gelu: return gelu(x);
        case Act::gelu_tanh: return gelu_tanh(x);
        case Act::relu: return max(f16(0.0f), x);
        case Act::clamped_silu: return clamped_silu(x);
    }
    return x;
}

inline F16 gated(Act act, F16 gate, F16 up) {
    if (act == Act::clamped_silu) {
        const F16 most = f16(CLAMPED_AT), least = f16(-CLAMPED_AT), bounded = less_than(most, up, most, up);
        up = less_than(bounded, least, least, bounded) + f16(1.0f);
    }
    return activated(act, gate) * up;
}

inline F16 capped(F16 x, float cap) { return f16(cap) * tanh(x / f16(cap)); }

}  // namespace FORERUN_ISA
}  // namespace forerun
