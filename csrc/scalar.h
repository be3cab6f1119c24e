// Conversions of single numbers, the same on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace forerun {
namespace FORERUN_ISA {

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

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) {
        bits = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
    } else {
        bits = magnitude << 13;  // with an exponent too small by 112, which also rescales what is denormal
        float x;
        std::memcpy(&x, &bits, 4);
        x *= 5.192296858534828e33f;  // 2^112
        std::memcpy(&bits, &x, 4);
        bits |= sign;
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bf16_to_float(x); }
inline void narrow(float x, float* out) { *out = x; }
// Denormals become zero, as they do in products.
inline void narrow(float x, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *out = bits & 0x7f800000u ? float_to_bf16(x) : static_cast<uint16_t>(bits >> 16 & 0x8000u);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
