// The inner loops of sampling: their data, and the table of them that each instruction set fills (sampling_kernels.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"
#include "philox.h"

namespace forerun {

constexpr int SCAN_BLOCK = 64;     // values whose largest is remembered, so that later passes can skip them
constexpr int NUM_BUCKETS = 8192;  // of logits below the largest, when top-p looks for its threshold
constexpr float BUCKETS_PER_UNIT = 256.0f;

// What one pass over a row tells. `ordered`: no NaN.
struct Scan {
    float largest, smallest;
    bool ordered;
};

// logit -> (logit - top) / temperature
struct Scale {
    float top, temperature;
};

// How many values are above a threshold, and how many equal to it.
struct Counts {
    int64_t above, equal;
};

// Where the match noise comes from: the absolute index of the token, and the seed as a Philox key.
struct Noise {
    uint32_t position, key0, key1;
};

// The inner loops, one set of them for each instruction set.
struct SamplingKernels {
    Scan (*scan)(const float* x, int64_t n, float* block_largest);
    void (*scale)(const float* x, int64_t n, Scale scale, float* out);
    // Weights e^x and the sum of their ticks; `ticks_per_one` is a power of two.
    uint64_t (*exp)(const float* x, int64_t n, double ticks_per_one, float* weights);
    uint64_t (*ticks)(const float* weights, int64_t n, double ticks_per_one);
    void (*divide)(float* x, int64_t n, float divisor);
    void (*divide_from)(const float* values, float threshold, float* weights, int64_t n, float divisor);
    Counts (*count)(const float* values, int64_t n, float threshold);
    // Copies the values at or above the threshold and their ids; returns how many. May write one place behind them.
    int64_t (*from)(const float* values, int64_t n, float threshold, int64_t first_id, int64_t* ids, float* kept);
    // Copies the values in (low, high]; returns how many. May write one place behind them.
    int64_t (*between)(const float* values, int64_t n, float low, float high, float* out);
    // Adds the ticks of at most SCAN_BLOCK values to the buckets of their depths.
    void (*buckets)(const float* values, const float* weights, int64_t n, double ticks_per_one, uint64_t* mass);
    uint64_t (*able)(const float* weights, uint32_t block, Noise noise, float reach, uint32_t* words);
};

// A weight as a whole number of ticks. Adding 1.5 * 2^52 rounds to a whole number, which then stands in the low bits.
FORERUN_INLINE uint64_t tick_of(float weight, double ticks_per_one) {
    const double shifted = weight * ticks_per_one + 6755399441055744.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);
    return bits - 0x4338000000000000u;
}

}  // namespace forerun
