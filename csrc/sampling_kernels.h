// The inner loops of sampling, written once and compiled for each instruction set.
//
// Only loops over plain arrays stand here: a template of the standard library that was first instantiated with AVX-512
// would be shared with other sets. Multiplications and additions are never fused (-ffp-contract=off), so that all sets,
// and numpy, return the same bits.
#pragma once

#include <cmath>

#include "sampling_loops.h"
#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace forerun {
namespace FORERUN_ISA {
namespace sampling {

constexpr int NUM_LANES = VECTOR_BYTES / 4;

typedef float Lanes __attribute__((vector_size(VECTOR_BYTES)));

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadMarks __attribute__((vector_size(16)));

FORERUN_INLINE Quad halves_swapped(const Quad& x) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, 2, 3, 0, 1);
#else
    return __builtin_shuffle(x, QuadMarks{2, 3, 0, 1});
#endif
}

FORERUN_INLINE float largest_of(const Lanes& lanes) {
    Quad x[NUM_LANES / 4];
    std::memcpy(x, &lanes, sizeof x);
    for (int i = 1; i < NUM_LANES / 4; ++i) x[0] = x[i] > x[0] ? x[i] : x[0];
    const Quad half = halves_swapped(x[0]);
    x[0] = half > x[0] ? half : x[0];
    return x[0][1] > x[0][0] ? x[0][1] : x[0][0];
}

// A float, or 0: without a branch, and without a choice between floats that could not be made for several at once.
FORERUN_INLINE float zero_unless(bool condition, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= condition ? 0xffffffffu : 0u;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void scan_tail(const float* x, int64_t n, Scan& scan, float* block_largest) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        scan.smallest = x[i] < scan.smallest ? x[i] : scan.smallest;
        scan.ordered &= x[i] == x[i];
    }
    if (n > 0) *block_largest = largest;
    scan.largest = largest > scan.largest ? largest : scan.largest;
}

inline Scan scan(const float* x, int64_t n, float* block_largest) {
    Lanes largest = Lanes{} - INFINITY, smallest = Lanes{} + INFINITY;
    Marks ordered = Marks{} - 1;
    const int64_t num_blocks = n / SCAN_BLOCK;
    for (int64_t b = 0; b < num_blocks; ++b, x += SCAN_BLOCK) {
        Lanes of_block = Lanes{} - INFINITY;
        for (int i = 0; i < SCAN_BLOCK; i += NUM_LANES) {
            Lanes a;
            std::memcpy(&a, x + i, sizeof a);
            of_block = a > of_block ? a : of_block;
            smallest = a < smallest ? a : smallest;
            ordered &= a == a;
        }
        block_largest[b] = largest_of(of_block);
        largest = of_block > largest ? of_block : largest;
    }
    Scan found = {largest_of(largest), -largest_of(-smallest), true};
    for (int i = 0; i < NUM_LANES; ++i) found.ordered &= ordered[i] != 0;
    scan_tail(x, n - num_blocks * SCAN_BLOCK, found, block_largest + num_blocks);
    return found;
}

inline void scale(const float* x, int64_t n, Scale scale, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - scale.top) / scale.temperature;
}

inline uint64_t ticks(const float* weights, int64_t n, double ticks_per_one) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += tick_of(weights[i], ticks_per_one);
    return sum;
}

// e^x for x <= 0, within 1 unit in the last place, 0 below -87: x = k ln 2 + r, a polynomial of degree 6 in r (Cephes
// expf, Moshier 1989), k goes into the exponent. What comes out below -87 is nonsense, and is not looked at.
FORERUN_INLINE float exp_of(float x) {
    const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23
    const float k = shifted - 12582912.0f;
    const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * (r * r) + r) + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    std::memcpy(&power, &bits, 4);
    return zero_unless(x >= -87.0f, y * power);
}

inline uint64_t exp(const float* x, int64_t n, double ticks_per_one, float* weights) {
    for (int64_t i = 0; i < n; ++i) weights[i] = exp_of(x[i]);
    return ticks(weights, n, ticks_per_one);
}

inline void divide(float* x, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; ++i) x[i] /= divisor;
}

inline void divide_from(const float* values, float threshold, float* weights, int64_t n, float divisor) {
    for (int64_t i = 0; i < n; ++i) weights[i] = zero_unless(values[i] >= threshold, weights[i] / divisor);
}

inline Counts count(const float* values, int64_t n, float threshold) {
    int32_t above = 0, equal = 0;
    for (int64_t i = 0; i < n; ++i) above += values[i] > threshold, equal += values[i] == threshold;
    return {above, equal};
}

// Most groups hold nothing of what is looked for: they are passed over whole.
constexpr int GROUP = 16;

FORERUN_INLINE bool any_from(const float* values, float threshold) {
    Marks marks = {};
    for (int i = 0; i < GROUP; i += NUM_LANES) {
        Lanes a;
        std::memcpy(&a, values + i, sizeof a);
        marks |= a >= threshold;
    }
    return any(marks);
}

FORERUN_INLINE bool any_between(const float* values, float low, float high) {
    Marks marks = {};
    for (int i = 0; i < GROUP; i += NUM_LANES) {
        Lanes a;
        std::memcpy(&a, values + i, sizeof a);
        marks |= (a > low) & (a <= high);
    }
    return any(marks);
}

inline int64_t from(const float* values, int64_t n, float threshold, int64_t first_id, int64_t* ids, float* kept) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += GROUP) {
        const int64_t end = start + GROUP <= n ? start + GROUP : n;
        if (end - start == GROUP && !any_from(values + start, threshold)) continue;
        for (int64_t i = start; i < end; ++i) {
            ids[count] = first_id + i, kept[count] = values[i];
            count += values[i] >= threshold;
        }
    }
    return count;
}

inline int64_t between(const float* values, int64_t n, float low, float high, float* out) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += GROUP) {
        const int64_t end = start + GROUP <= n ? start + GROUP : n;
        if (end - start == GROUP && !any_between(values + start, low, high)) continue;
        for (int64_t i = start; i < end; ++i) {
            out[count] = values[i];
            count += (values[i] > low) & (values[i] <= high);
        }
    }
    return count;
}

inline void buckets(const float* values, const float* weights, int64_t n, double ticks_per_one, uint64_t* mass) {
    int32_t bucket[SCAN_BLOCK];
    uint64_t counts[SCAN_BLOCK];
    for (int64_t i = 0; i < n; ++i) {
        const float depth = values[i] * -BUCKETS_PER_UNIT;
        bucket[i] = static_cast<int32_t>(depth < NUM_BUCKETS - 1 ? depth : NUM_BUCKETS - 1);
    }
    for (int64_t i = 0; i < n; ++i) counts[i] = tick_of(weights[i], ticks_per_one);
    for (int64_t i = 0; i < n; ++i) mass[bucket[i]] += counts[i];
}

// ------------------------------------------------------------------------------------------------ the match noise

constexpr int WIDTH = sizeof(Wide) / 8;           // counters in one vector, each in 64 bits, the upper half ignored
constexpr int NUM_WIDE = SCAN_BLOCK / 4 / WIDTH;  // vectors in one block of ids

FORERUN_INLINE void philox_rounds(Wide (&c)[4][NUM_WIDE], Noise noise) {
    const Wide even = Wide{} + PHILOX_MULTIPLIER_0, odd = Wide{} + PHILOX_MULTIPLIER_1;
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        const Wide key0 = Wide{} + noise.key0, key1 = Wide{} + noise.key1;
        for (int v = 0; v < NUM_WIDE; ++v) {
            Wide product0, product1;
            times(c[0][v], even, product0);
            times(c[2][v], odd, product1);
            c[0][v] = (product1 >> 32) ^ c[1][v] ^ key0;
            c[1][v] = product1;
            c[2][v] = (product0 >> 32) ^ c[3][v] ^ key1;
            c[3][v] = product0;
        }
        noise.key0 += PHILOX_INCREMENT_0, noise.key1 += PHILOX_INCREMENT_1;
    }
}

// The words of ids 64 * block .. + 63, and which of these ids may finish before the reach: bit i = id 64 * block + i.
// `reach` counts in half units of the words, with a margin; words as float are rounded, which the margin covers.
inline uint64_t able(const float* weights, uint32_t block, Noise noise, float reach, uint32_t* words) {
    Wide c[4][NUM_WIDE];
    for (int v = 0; v < NUM_WIDE; ++v) {
        c[0][v] = Wide{} + noise.position, c[1][v] = Wide{} + PURPOSE_MATCH, c[2][v] = Wide{};
        for (int i = 0; i < WIDTH; ++i) c[3][v][i] = block * (SCAN_BLOCK / 4) + v * WIDTH + i;
    }
    philox_rounds(c, noise);
    uint64_t pairs[2][SCAN_BLOCK / 4];
    for (int v = 0; v < NUM_WIDE; ++v)
        for (int half = 0; half < 2; ++half) {
            const Wide pair = (c[2 * half][v] & 0xffffffffu) | (c[2 * half + 1][v] << 32);
            std::memcpy(pairs[half] + v * WIDTH, &pair, sizeof pair);
        }
    for (int i = 0; i < SCAN_BLOCK / 4; ++i) {
        std::memcpy(words + 4 * i, &pairs[0][i], 8);
        std::memcpy(words + 4 * i + 2, &pairs[1][i], 8);
    }
    int32_t may[SCAN_BLOCK], any = 0;
    for (int i = 0; i < SCAN_BLOCK; ++i) {
        may[i] = static_cast<float>(static_cast<int32_t>(~words[i] >> 1)) <= weights[i] * reach;
        any |= may[i];
    }
    uint64_t found = 0;
    for (int i = 0; any && i < SCAN_BLOCK; ++i) found |= static_cast<uint64_t>(may[i]) << i;
    return found;
}

constexpr SamplingKernels KERNELS = {scan, scale, exp, ticks, divide, divide_from, count, from, between, buckets, able};

}  // namespace sampling
}  // namespace FORERUN_ISA
}  // namespace forerun
