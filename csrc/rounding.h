// Rounds groups of weights to 4 or 8 bits, and keys and values to bytes; ops/quantising.py and kv/rounded.py say how,
// and do the same operations where there is no kernel.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "quantised.h"
#include "rows.h"
#include "scalar.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer, ties to even
inline F16 nearest(F16 x) { return (x + f16(NEAREST)) - f16(NEAREST); }
inline F16 within(F16 x, float low, float high) { return f16(0.0f) - max(f16(0.0f) - max(x, f16(low)), f16(-high)); }

// A scale as bfloat16 and as the float that it stands for; 1 where it would be 0.
inline float positive(float scale, uint16_t& bits) {
    bits = float_to_bf16(scale);
    if (!(bf16_to_float(bits) > 0.0f)) bits = float_to_bf16(1.0f);
    return bf16_to_float(bits);
}

inline void put_codes(const float* codes, int group, uint8_t* out) {
    for (int i = 0; i < group; ++i) out[i] = static_cast<uint8_t>(static_cast<int>(codes[i]));
}

inline void round_to_eight(const float* x, int group, const RoundedGroup& to) {
    alignas(64) float codes[MOST_GROUP];
    F16 most = f16(0.0f);
    for (int i = 0; i < group; i += LANES) most = max(most, max(load(x + i), f16(0.0f) - load(x + i)));
    const F16 step = f16(positive(largest(most) / 127.0f, *to.scale));
    for (int i = 0; i < group; i += LANES)
        store(codes + i, within(nearest(load(x + i) / step), -127.0f, 127.0f) + f16(128.0f));
    put_codes(codes, group, to.codes);
    *to.zero = 128;
}

inline void round_to_four(const float* x, int group, const RoundedGroup& to) {
    alignas(64) float codes[2][MOST_GROUP];
    F16 most = f16(0.0f), least = f16(0.0f);
    for (int i = 0; i < group; i += LANES) most = max(most, load(x + i)), least = max(least, f16(0.0f) - load(x + i));
    const float high = largest(most), low = -largest(least);
    int best = 0;  // of `codes`; the other is written next
    float least_error = 0.0f;
    bool is_first = true;
    for (const double share : {1.0, 0.95, 0.9, 0.85, 0.8}) {  // of the range
        uint16_t scale;
        const float step = positive((high - low) * static_cast<float>(share / 15), scale);
        const float exact = static_cast<float>(-share) * low / step;
        const float zero = std::min(std::max((exact + NEAREST) - NEAREST, 0.0f), 15.0f);
        float* const out = codes[1 - best];
        F16 errors = f16(0.0f);
        for (int i = 0; i < group; i += LANES) {
            const F16 code = within(nearest(load(x + i) / f16(step)) + f16(zero), 0.0f, 15.0f);
            const F16 error = (code - f16(zero)) * f16(step) - load(x + i);
            store(out + i, code);
            errors = errors + error * error;
        }
        const float total = sum(errors);
        if (!is_first && !(total < least_error)) continue;
        is_first = false, least_error = total, best = 1 - best;
        *to.scale = scale, *to.zero = static_cast<uint8_t>(zero);
    }
    put_codes(codes[best], group, to.codes);
}

// Rounds a group of numbers to bytes. Returns the value of code 1, in the bits of bfloat16; NaN where a number is not
// finite.
inline uint16_t keep_group(const float* x, int num, int8_t* codes) {
    const auto part = [&](int i) { return load_first(x + i, num - i < LANES ? num - i : LANES); };
    F16 most = f16(0.0f), faults = f16(0.0f);
    for (int i = 0; i < num; i += LANES) {
        most = max(most, max(part(i), f16(0.0f) - part(i)));
        faults = faults + (part(i) - part(i));
    }
    const float fault = sum(faults);
    const uint16_t bits = float_to_bf16(largest(most) / 127.0f + fault);
    const F16 step = f16(bf16_to_float(bits));
    const bool has_codes = bf16_to_float(bits) >= LEAST_ROUNDED;
    for (int i = 0; i < num; i += LANES) {
        alignas(64) float numbers[LANES];
        store(numbers, has_codes ? within(nearest(part(i) / step), -127.0f, 127.0f) : f16(0.0f));
        for (int j = 0; j < LANES && i + j < num; ++j) codes[i + j] = static_cast<int8_t>(numbers[j]);
    }
    return has_codes || fault != 0.0f ? bits : 0;
}

inline void keep_keys(const float* x, int num_heads, int head_dim, const KeyOrder& order, Type type, void* out) {
    if (type != Type::int8) return to_type(x, num_heads * head_dim, type, out);
    int8_t* codes = static_cast<int8_t*>(out);
    for (int head = 0; head < num_heads; ++head, x += head_dim, codes += key_bytes(type, order)) {
        const uint16_t* const own = order.head(head);
        uint16_t scales[MOST_KEY_DIM / UNIT + 1];
        for (int first = 0; first < order.key_dim; first += UNIT) {
            const int num = order.key_dim - first < UNIT ? order.key_dim - first : UNIT;
            float numbers[UNIT];
            for (int i = 0; i < num; ++i) {
                numbers[i] = x[own ? own[first + i] : first + i];
                if (first >= head_dim)
                    numbers[i] -= static_cast<float>(codes[i]) * bf16_to_float(scales[0]);  // what is left
            }
            scales[first / UNIT] = keep_group(numbers, num, codes + first);
        }
        std::memcpy(codes + order.key_dim, scales, 2 * static_cast<size_t>(key_groups(order.key_dim)));
    }
}

inline void keep_values(const float* x, int num_heads, int head_dim, Type type, void* out) {
    if (type != Type::int8) return to_type(x, num_heads * head_dim, type, out);
    int8_t* codes = static_cast<int8_t*>(out);
    for (int head = 0; head < num_heads; ++head, x += head_dim, codes += value_bytes(type, head_dim))
        for (int first = 0; first < head_dim; first += VALUE_GROUP) {
            const int num = head_dim - first < VALUE_GROUP ? head_dim - first : VALUE_GROUP;
            const uint16_t scale = keep_group(x + first, num, codes + first);
            std::memcpy(codes + head_dim + first / VALUE_GROUP * 2, &scale, 2);
        }
}

inline void round_group(const float* x, int group, int bits, const RoundedGroup& to) {
    (bits == 8 ? round_to_eight : round_to_four)(x, group, to);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
