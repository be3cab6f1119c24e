// Products of quantised weights with rows that are rounded to int8.
//
// A weight is scale * code - minimum, with codes of 4 or 8 bits without a sign; a minimum may be stored as a zero point, in
// units of its scale. 32 inputs of a row (a unit) are rounded
// together: x = scale_x * code_x. So a unit adds scale * (scale_x * sum(code * code_x)) - minimum * (scale_x * sum(code_x)),
// where the sums are exact integers. Every output of every row adds its units in ascending order, whatever the number of
// rows is.
//
// A panel holds, unit by unit, four times eight outputs: scales, minimums, then codes, four inputs of each output in a
// 32-bit word. With four bits a word holds eight inputs: the first four in its low nibbles. Codes of eight bits are
// multiplied as two nibbles, because the processor's sum of two products saturates beyond seven bits.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int WORDS = UNIT / 4;  // 32-bit words of a unit's codes in a row

// Rounds to the nearest code, ties to even. A row with a number that is not finite has scales that are NaN.
inline void round_row(const float* x, int num_in, int num_steps, void* out) {
    int8_t* codes = static_cast<int8_t*>(out);
    UnitScale* scales = reinterpret_cast<UnitScale*>(codes + num_steps);
    for (int u = 0; u < num_steps / UNIT; ++u, codes += UNIT) {
        const int left = num_in - u * UNIT;
        F16 part[2];
        for (int h = 0; h < 2; ++h)
            part[h] = left > h * LANES ? load_first(x + u * UNIT + h * LANES, left - h * LANES) : f16(0.0f);
        const F16 zero = f16(0.0f), faults = (part[0] - part[0]) + (part[1] - part[1]);
        const float most = largest(max(max(part[0], zero - part[0]), max(part[1], zero - part[1])));
        const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int sums[2] = {0, 0};
        for (int h = 0; h < 2; ++h) {
            alignas(64) float shifted[LANES];
            store(shifted, part[h] * f16(inverse) + f16(12582912.0f));  // 1.5 * 2^23: the nearest integer in the low bits
            for (int i = 0; i < LANES; ++i) {
                uint32_t bits;
                std::memcpy(&bits, shifted + i, 4);
                codes[h * LANES + i] = static_cast<int8_t>(bits & 0xff);
                sums[h] += codes[h * LANES + i];
            }
        }
        const float scale = most / 127.0f + sum(faults);
        scales[u] = {scale, scale * static_cast<float>(sums[0] + sums[1]),
                     {scale * static_cast<float>(sums[0]), scale * static_cast<float>(sums[1])}};
    }
}

// ------------------------------------------------------------------------------- one unit of eight outputs

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

#if defined(__AVX2__)

using F8 = __m256;
inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, F8 a) { _mm256_storeu_ps(p, a); }
inline F8 load8_scales(const char* p, bool wide) {
    if (wide) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F8 multiplied(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
// acc + scale * (factor * sum) - minimum * offset
inline F8 add_unit(F8 acc, __m256i sum, F8 scale, F8 minimum, float factor, float offset) {
    const F8 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(factor));
    return _mm256_fnmadd_ps(minimum, _mm256_set1_ps(offset), _mm256_fmadd_ps(scale, scaled, acc));
}
inline __m256i word(const int8_t* codes, int j) {
    int32_t x;
    std::memcpy(&x, codes + 4 * j, 4);
    return _mm256_set1_epi32(x);
}

// Codes of a unit in nibbles: `low` of four bits, and `high` beside it where there are eight.
template <Type TYPE>
struct Nibbles {
    __m256i low[WORDS], high[TYPE == Type::int8 ? WORDS : 1];

    explicit Nibbles(const char* codes) {
        const __m256i mask = _mm256_set1_epi8(15);
        const __m256i* lines = reinterpret_cast<const __m256i*>(codes);
        if constexpr (TYPE == Type::int4) {
            for (int j = 0; j < WORDS; j += 2) {
                const __m256i line = _mm256_loadu_si256(lines + j / 2);
                low[j] = _mm256_and_si256(line, mask);
                low[j + 1] = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
            }
        } else {
            for (int j = 0; j < WORDS; ++j) {
                const __m256i line = _mm256_loadu_si256(lines + j);
                low[j] = _mm256_and_si256(line, mask);
                high[j] = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
            }
        }
    }
    // The exact sums over words [FIRST, LAST). Eight products of nibbles fit into 16 bits: 8 * 2 * 15 * 127 < 2^15.
    template <int FIRST, int LAST>
    __m256i dot(const int8_t* x) const {
        __m256i lows = _mm256_setzero_si256(), highs = _mm256_setzero_si256();
        for (int j = FIRST; j < LAST; ++j) {
            const __m256i input = word(x, j);
            lows = _mm256_add_epi16(lows, _mm256_maddubs_epi16(low[j], input));
            if constexpr (TYPE == Type::int8) highs = _mm256_add_epi16(highs, _mm256_maddubs_epi16(high[j], input));
        }
        const __m256i sums = _mm256_madd_epi16(lows, _mm256_set1_epi16(1));
        if constexpr (TYPE == Type::int4) return sums;
        return _mm256_add_epi32(sums, _mm256_madd_epi16(highs, _mm256_set1_epi16(16)));
    }
};

#else

struct F8 {
    float v[8];
};
struct I8 {
    int32_t v[8];
};
inline F8 load8(const float* p) {
    F8 a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store8(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 load8_scales(const char* p, bool wide) {
    if (wide) return load8(reinterpret_cast<const float*>(p));
    F8 a;
    for (int i = 0; i < 8; ++i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        a.v[i] = half_to_float(half);
    }
    return a;
}
inline F8 multiplied(F8 a, F8 b) {
    for (int i = 0; i < 8; ++i) a.v[i] *= b.v[i];
    return a;
}
inline F8 add_unit(F8 acc, I8 sum, F8 scale, F8 minimum, float factor, float offset) {
    for (int i = 0; i < 8; ++i) {
        acc.v[i] = scale.v[i] * (static_cast<float>(sum.v[i]) * factor) + acc.v[i];
        acc.v[i] = acc.v[i] - minimum.v[i] * offset;
    }
    return acc;
}

template <Type TYPE>
struct Nibbles {
    uint8_t codes[8][UNIT];

    explicit Nibbles(const char* packed) {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(packed);
        for (int o = 0; o < 8; ++o)
            for (int k = 0; k < UNIT; ++k)
                codes[o][k] = TYPE == Type::int8 ? bytes[k / 4 * 32 + 4 * o + k % 4]
                                                 : bytes[k / 8 * 32 + 4 * o + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
    }
    template <int FIRST, int LAST>
    I8 dot(const int8_t* x) const {
        I8 sums;
        for (int o = 0; o < 8; ++o) {
            int32_t sum = 0;
            for (int k = 4 * FIRST; k < 4 * LAST; ++k) sum += codes[o][k] * x[k];
            sums.v[o] = sum;
        }
        return sums;
    }
};

#endif

// ------------------------------------------------------------------------------------------------ a panel

constexpr int NEAR_ROWS = 16;  // rows whose sums and codes of some units stay in the nearest cache

// Sums of one panel for rows that `round_row` has written, float32 [num_rows][32].
template <Type TYPE, int GROUPS>
void quantised_sums(const Matrix& w, const Inputs& x, int panel, float* sums) {
    const size_t row_bytes = rounded_bytes(w.num_steps), scale_bytes = w.scale_bytes(), half = scale_bytes / (2 * GROUPS);
    const size_t code_bytes = w.code_bytes();
    const char* rows = reinterpret_cast<const char*>(x.words);
    for (int first = 0; first < x.num_rows; first += NEAR_ROWS) {
        const int last = x.num_rows - first < NEAR_ROWS ? x.num_rows : first + NEAR_ROWS;
        const char* data = static_cast<const char*>(w.data) + w.panel_bytes() * static_cast<size_t>(panel);
        for (int i = first * PANEL; i < last * PANEL; i += LANES) store(sums + i, f16(0.0f));
        for (int u = 0; u < w.num_steps / UNIT; ++u)
            for (int part = 0; part < PANEL; part += 8) {
                for (size_t i = 0; i < scale_bytes + code_bytes; i += 64) __builtin_prefetch(data + AHEAD_BYTES + i);
                F8 scale[GROUPS], minimum[GROUPS];
                for (int g = 0; g < GROUPS; ++g) {
                    scale[g] = load8_scales(data + 2 * static_cast<size_t>(g) * half, w.wide_scales);
                    minimum[g] = load8_scales(data + (2 * static_cast<size_t>(g) + 1) * half, w.wide_scales);
                    if (w.has_zeros) minimum[g] = multiplied(minimum[g], scale[g]);
                }
                const Nibbles<TYPE> codes(data + scale_bytes);
                data += scale_bytes + code_bytes;
                for (int row = first; row < last; ++row) {
                    const char* rounded = rows + row_bytes * static_cast<size_t>(row);
                    const int8_t* input = reinterpret_cast<const int8_t*>(rounded) + u * UNIT;
                    const UnitScale& unit = reinterpret_cast<const UnitScale*>(rounded + w.num_steps)[u];
                    float* to = sums + row * PANEL + part;
                    F8 acc = load8(to);
                    if constexpr (GROUPS == 1) {
                        acc = add_unit(acc, codes.template dot<0, WORDS>(input), scale[0], minimum[0], unit.scale, unit.sum);
                    } else {
                        acc = add_unit(acc, codes.template dot<0, WORDS / 2>(input), scale[0], minimum[0], unit.scale,
                                       unit.halves[0]);
                        acc = add_unit(acc, codes.template dot<WORDS / 2, WORDS>(input), scale[1], minimum[1], unit.scale,
                                       unit.halves[1]);
                    }
                    store8(to, acc);
                }
            }
    }
}

inline void quantised_panel(const Matrix& w, const Inputs& x, int panel, float* sums) {
    if (w.type == Type::int4)
        return w.groups_per_unit == 1 ? quantised_sums<Type::int4, 1>(w, x, panel, sums)
                                      : quantised_sums<Type::int4, 2>(w, x, panel, sums);
    return w.groups_per_unit == 1 ? quantised_sums<Type::int8, 1>(w, x, panel, sums)
                                  : quantised_sums<Type::int8, 2>(w, x, panel, sums);
}

// The weights of one output, each operation rounded.
inline void unpack_quantised(const Matrix& w, int lane, const char* panel, float* out) {
    const size_t scale_bytes = w.scale_bytes(), size = scale_bytes + w.code_bytes();
    const size_t width = w.wide_scales ? 4 : 2;
    const auto number = [&](const char* p) {
        if (!w.wide_scales) {
            uint16_t half;
            std::memcpy(&half, p, 2);
            return half_to_float(half);
        }
        float x;
        std::memcpy(&x, p, 4);
        return x;
    };
    for (int k = 0; k < w.num_in; ++k) {
        const char* data = panel + size * static_cast<size_t>(k / UNIT * 4 + lane / 8);
        const size_t group = static_cast<size_t>(k % UNIT / (UNIT / w.groups_per_unit)), o = static_cast<size_t>(lane % 8);
        const float scale = number(data + (2 * group * 8 + o) * width), minimum = number(data + ((2 * group + 1) * 8 + o) * width);
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(data + scale_bytes);
        const int in = k % UNIT;
        const int code = w.type == Type::int8 ? codes[in / 4 * 32 + 4 * static_cast<int>(o) + in % 4]
                                              : codes[in / 8 * 32 + 4 * static_cast<int>(o) + in % 4] >> (in % 8 < 4 ? 0 : 4) & 15;
        const float number_of_code = static_cast<float>(code);
        out[k] = w.has_zeros ? (number_of_code - minimum) * scale : number_of_code * scale - minimum;
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
