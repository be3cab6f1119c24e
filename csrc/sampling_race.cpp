// From a distribution to a token: draws by the cumulative sum, and the race that match verification is decided by.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "philox.h"
#include "sampling.h"

namespace forerun {

namespace {

thread_local std::vector<float> block_largest;

Scan scan(const SamplingKernels& kernels, const float* weights, int64_t n) {
    block_largest.resize(blocks_of(n));
    return kernels.scan(weights, n, block_largest.data());
}

bool is_distribution(const Scan& scan) {
    return scan.ordered && scan.smallest >= 0 && scan.largest > 0 && scan.largest < INFINITY;
}

}  // namespace

int64_t place_of(const SamplingKernels& kernels, const float* weights, int64_t n, uint64_t uniform) {
    static thread_local std::vector<uint64_t> mass;
    const Scan found = scan(kernels, weights, n);
    if (!is_distribution(found)) return -1;
    const double ticks_per_one = ticks_per_one_of(n, found.largest);
    mass.clear();
    uint64_t total = 0;
    for (int64_t i = 0; i < n; i += PLACE_BLOCK) {
        total += kernels.ticks(weights + i, n - i < PLACE_BLOCK ? n - i : PLACE_BLOCK, ticks_per_one);
        mass.push_back(total);
    }
    const uint64_t goal = static_cast<uint64_t>((static_cast<unsigned __int128>(uniform) * total) >> 53);
    size_t b = 0;
    while (mass[b] <= goal) ++b;
    uint64_t sum = b > 0 ? mass[b - 1] : 0;
    for (int64_t i = b * PLACE_BLOCK;; ++i) {
        sum += tick_of(weights[i], ticks_per_one);
        if (sum > goal) return i;
    }
}

// ------------------------------------------------------------------------------------------------------- the race

double log_of(double x) {
    int exponent;
    double fraction = std::frexp(x, &exponent);
    if (fraction < 0.70710678118654752440) fraction += fraction, --exponent;
    const double f = fraction - 1.0, k = exponent;
    const double s = f / (2.0 + f), z = s * s, w = z * z;
    const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double odd =
        z * (6.666666666666735130e-01 +
             w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860510658591e-01)));
    const double half_square = 0.5 * f * f;
    const double tail = s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10;
    return k * 6.93147180369123816490e-01 - ((half_square - tail) - f);
}

namespace {

struct Best {
    double time = INFINITY;
    int64_t id = -1;

    // To be called by ascending id: of equals the first stays.
    void enter(uint32_t word, float weight, int64_t candidate) {
        if (!(weight > 0)) return;
        const double finished = -log_of((word + 0.5) * 0x1p-32) / weight;
        if (finished < time) time = finished, id = candidate;
    }
};

// Words in half units, and a margin above every rounding error here: too many candidates never change the winner.
float with_margin(double reach) { return static_cast<float>(reach * 0x1p31 * (1 + 1e-5)); }

// The ids that may finish before `reach`; the reach shrinks to the best time seen.
Best run(const SamplingKernels& kernels, const float* weights, int64_t n, Noise noise, double reach) {
    Best best;
    uint32_t words[SCAN_BLOCK];
    float limit = with_margin(reach), last[SCAN_BLOCK] = {};
    for (int64_t b = 0; b < blocks_of(n); ++b) {
        // -log u is at least 2^-33.
        if (block_largest[b] * limit < 0.25f) continue;
        const float* block = weights + b * SCAN_BLOCK;
        if ((b + 1) * SCAN_BLOCK > n) {
            std::memcpy(last, block, (n - b * SCAN_BLOCK) * sizeof(float));
            block = last;
        }
        uint64_t able = kernels.able(block, static_cast<uint32_t>(b), noise, limit, words);
        if (able == 0) continue;
        for (int i = 0; i < SCAN_BLOCK; ++i)
            if (able >> i & 1) best.enter(words[i], block[i], b * SCAN_BLOCK + i);
        if (best.time < reach) limit = with_margin(best.time);
    }
    return best;
}

Best run_listed(const float* weights, const int64_t* ids, int64_t n, Noise noise) {
    Best best;
    PhiloxWords words = {};
    int64_t known = -1;
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] >> 2 != known) {
            known = ids[i] >> 2;
            const PhiloxWords counter = {{noise.position, PURPOSE_MATCH, 0, static_cast<uint32_t>(known)}};
            words = philox(counter, noise.key0, noise.key1);
        }
        best.enter(words.word[ids[i] & 3], weights[i], ids[i]);
    }
    return best;
}

}  // namespace

int64_t race(const SamplingKernels& kernels, const float* weights, const int64_t* ids, int64_t n, uint64_t seed,
             uint64_t position) {
    const Scan found = scan(kernels, weights, n);
    if (!is_distribution(found)) return -1;
    const Noise noise = {static_cast<uint32_t>(position), static_cast<uint32_t>(seed),
                         static_cast<uint32_t>(seed >> 32)};
    if (ids != nullptr) return run_listed(weights, ids, n, noise).id;
    // The winner's time is exponential with the whole mass as its rate, which is 1: all but surely it is below 16.
    double reach = 16.0;
    Best best = run(kernels, weights, n, noise, reach);
    while (!(best.time <= reach)) {
        reach = best.time < INFINITY ? best.time : reach * 64;
        best = run(kernels, weights, n, noise, reach);
    }
    return best.id;
}

}  // namespace forerun
