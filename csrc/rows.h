// Operators on one row at a time: norms, activation, rotary positions, conversions.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

// Sum of squares in 16 lanes, each in ascending order, then the fixed tree of `sum`.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    F16 squares = f16(0.0f);
    const int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES) {
        const F16 part = load(x + i);
        squares = madd(part, part, squares);
    }
    if (whole < n) {
        const F16 part = load_first(x + whole, n - whole);
        squares = madd(part, part, squares);
    }
    // The builtin is one instruction; std::sqrt is a function that the linker might share with other instruction sets.
    const F16 inverse = f16(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < whole; i += LANES) store(out + i, load(x + i) * inverse * load(weight + i));
    if (whole < n) {
        const int rest = n - whole;
        store_first(out + whole, load_first(x + whole, rest) * inverse * load_first(weight + whole, rest), rest, false);
    }
}

// Sums of a row as above: of numbers, then of squared differences from their mean.
inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
    const auto sum_of = [&](const auto& part) {
        F16 total = f16(0.0f);
        for (int i = 0; i < n; i += LANES) total = total + part(i, n - i < LANES ? n - i : LANES);
        return sum(total) / static_cast<float>(n);
    };
    const F16 mean = f16(sum_of([&](int i, int count) { return load_first(x + i, count); }));
    const float variance = sum_of([&](int i, int count) {
        alignas(64) float lanes[LANES] = {};  // zeros behind the last number
        store_first(lanes, load_first(x + i, count) - mean, count, false);
        const F16 difference = load(lanes);
        return difference * difference;
    });
    const F16 inverse = f16(1.0f / __builtin_sqrtf(variance + eps));
    for (int i = 0; i < n; i += LANES) {
        const int count = n - i < LANES ? n - i : LANES;
        const F16 normed = (load_first(x + i, count) - mean) * inverse * load_first(weight + i, count);
        store_first(out + i, bias ? normed + load_first(bias + i, count) : normed, count, false);
    }
}

inline void act_mul(Act act, const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += LANES) {
        const int count = n - i < LANES ? n - i : LANES;
        store_first(out + i, gated(act, load_first(gate + i, count), load_first(up + i, count)), count, false);
    }
}

inline void rope(const float* x, const float* cos, const float* sin, int n, float scale, float* out) {
    const int half = n / 2;
    for (int i = 0; i < half; i += LANES) {
        const int count = half - i < LANES ? half - i : LANES;
        const F16 a = load_first(x + i, count), b = load_first(x + i + half, count);
        const F16 low = a * load_first(cos + i, count) + b * load_first(sin + i, count);
        const F16 high = b * load_first(cos + i + half, count) + a * load_first(sin + i + half, count);
        store_first(out + i, low * f16(scale), count, false);
        store_first(out + i + half, high * f16(scale), count, false);
    }
}

inline void rope_adjacent(const float* x, const float* cos, const float* sin, int n, float scale, float* out) {
    alignas(64) float apart[2][LANES];
    const int half = n / 2;
    for (int i = 0; i < half; i += LANES) {
        const int count = half - i < LANES ? half - i : LANES;
        for (int j = 0; j < count; ++j) apart[0][j] = x[2 * (i + j)], apart[1][j] = x[2 * (i + j) + 1];
        const F16 a = load_first(apart[0], count), b = load_first(apart[1], count);
        const F16 low = a * load_first(cos + i, count) + b * load_first(sin + i, count);
        const F16 high = b * load_first(cos + i + half, count) + a * load_first(sin + i + half, count);
        store(apart[0], low * f16(scale)), store(apart[1], high * f16(scale));
        for (int j = 0; j < count; ++j) out[2 * (i + j)] = apart[0][j], out[2 * (i + j) + 1] = apart[1][j];
    }
}

inline void to_type(const float* x, int n, Type type, void* out) {
    if (type == Type::float32) {
        std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(out);
    for (int i = 0; i < n; i += LANES) {
        if (n - i >= LANES) {
            narrow(load(x + i), to + i);
            continue;
        }
        uint16_t rest[LANES];
        narrow(load_first(x + i, n - i), rest);
        std::memcpy(to + i, rest, static_cast<size_t>(n - i) * 2);
    }
}

inline void from_type(const void* x, int n, Type type, float* out) {
    for (int i = 0; i < n; ++i)
        out[i] = type == Type::float32 ? static_cast<const float*>(x)[i] : widen(static_cast<const uint16_t*>(x)[i]);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
