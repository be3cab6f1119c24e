// Temperature, top-k, min-p, top-p and softmax of one row: natively what _probs and _argmax of
// src/forerun/sampling/pipeline.py do.
//
// A row is read once to find its largest logit and the largest of every 64 ids. Whatever a filter asks afterwards
// (which values are above this one?) only opens the blocks that can hold an answer, so a peaked row of 100,000 ids
// costs little more than one pass over its memory.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace forerun {

namespace {

constexpr int64_t CHUNK = 1024;  // values run together: they stay in the first cache
constexpr int64_t FEW = 512;     // values that are sorted right away

// What one call needs on the way; the vectors only grow and are kept for the next call of the same thread.
struct Workspace {
    std::vector<float> block_largest, values, weights, sorted;
    std::vector<int64_t> ids;
    std::vector<uint64_t> mass;
};

template <class T>
T* at_least(std::vector<T>& vector, int64_t n) {
    if (static_cast<int64_t>(vector.size()) < n) vector.resize(n);
    return vector.data();
}

Workspace& workspace() {
    static thread_local Workspace kept;
    return kept;
}

// The ids that are still in, ascending, with their logits (largest = 0).
struct List {
    int64_t* ids;
    float* values;
    int64_t n;
};

// What a filter keeps: values above the threshold, and by ascending id the first `num_ties` that are equal to it.
struct Cut {
    float threshold;
    int64_t num_ties;
    uint64_t ticks;  // mass of what is kept, where top-p made the cut
};

struct Context {
    const SamplingKernels& kernels;
    Workspace& space;
    const double ticks_per_one;
    const int64_t width;  // of the row
};

float divisor_of(const Context& c, uint64_t ticks) {
    return static_cast<float>(static_cast<double>(ticks) / c.ticks_per_one);
}

// ------------------------------------------------------------------------------------------------------ top-k, min-p

// The ids at or above the threshold.
List list_from(const Context& c, const float* row, Scale scale, float threshold) {
    const int64_t num_blocks = blocks_of(c.width);
    float* largest = at_least(c.space.sorted, num_blocks);
    c.kernels.scale(c.space.block_largest.data(), num_blocks, scale, largest);
    List list = {at_least(c.space.ids, c.width), at_least(c.space.values, c.width), 0};
    float scaled[SCAN_BLOCK];
    for (int64_t b = 0; b < num_blocks; ++b) {
        if (!(largest[b] >= threshold)) continue;
        const int64_t first = b * SCAN_BLOCK, length = std::min<int64_t>(SCAN_BLOCK, c.width - first);
        c.kernels.scale(row + first, length, scale, scaled);
        list.n += c.kernels.from(scaled, length, threshold, first, list.ids + list.n, list.values + list.n);
    }
    return list;
}

// A logit that at least k of the row reach: the k-th largest of the blocks' largest.
float reached_by(const Context& c, int64_t k) {
    const int64_t num_blocks = blocks_of(c.width);
    if (k > num_blocks) return -INFINITY;
    float* largest = at_least(c.space.sorted, num_blocks);
    std::copy_n(c.space.block_largest.data(), num_blocks, largest);
    std::nth_element(largest, largest + k - 1, largest + num_blocks, std::greater<float>());
    return largest[k - 1];
}

void keep(List& list, Cut cut) {
    int64_t n = 0;
    for (int64_t i = 0; i < list.n; ++i) {
        const float value = list.values[i];
        const bool stays = value > cut.threshold || (value == cut.threshold && cut.num_ties-- > 0);
        list.ids[n] = list.ids[i], list.values[n] = value;
        n += stays;
    }
    list.n = n;
}

void keep_largest(const Context& c, List& list, int64_t k) {
    if (list.n <= k) return;
    float* sorted = at_least(c.space.sorted, list.n);
    std::copy_n(list.values, list.n, sorted);
    std::nth_element(sorted, sorted + k - 1, sorted + list.n, std::greater<float>());
    const float threshold = sorted[k - 1];
    const int64_t num_above = std::count_if(sorted, sorted + k, [=](float value) { return value > threshold; });
    keep(list, {threshold, k - num_above, 0});
}

// ------------------------------------------------------------------------------------------------------------- top-p

// At most the total, however it is rounded, because top_p < 1.
uint64_t goal_of(uint64_t total, double top_p) {
    return static_cast<uint64_t>(std::ceil(top_p * static_cast<double>(total)));
}

// The cut among these values. above: the ticks of larger values, which are kept.
Cut cut_among(const Context& c, float* values, int64_t n, uint64_t above, uint64_t goal) {
    float weights[CHUNK];
    std::sort(values, values + n, std::greater<float>());
    Cut cut = {values[0], 0, above};
    for (int64_t start = 0; start < n; start += CHUNK) {
        const int64_t length = std::min(CHUNK, n - start);
        c.kernels.exp(values + start, length, c.ticks_per_one, weights);
        for (int64_t i = 0; i < length; ++i) {
            if (values[start + i] != cut.threshold) cut.threshold = values[start + i], cut.num_ties = 0;
            ++cut.num_ties;
            cut.ticks += tick_of(weights[i], c.ticks_per_one);
            if (cut.ticks >= goal) return cut;
        }
    }
    return cut;
}

// Mass by buckets of depth below the largest logit, opened block by block from the top until they hold the goal.
int fill_buckets(const Context& c, const float* values, const float* weights, int64_t n, const float* largest,
                 uint64_t goal, uint64_t& above) {
    uint64_t* mass = at_least(c.space.mass, NUM_BUCKETS);
    std::fill_n(mass, NUM_BUCKETS, 0);
    float opened = INFINITY;
    for (const float depth : {4.0f, 8.0f, 16.0f, INFINITY}) {
        for (int64_t b = 0; b < blocks_of(n); ++b) {
            if (!(largest[b] > -depth && largest[b] <= opened)) continue;
            const int64_t first = b * SCAN_BLOCK;
            c.kernels.buckets(values + first, weights + first, std::min<int64_t>(SCAN_BLOCK, n - first),
                              c.ticks_per_one, mass);
        }
        const int end = static_cast<int>(std::min(depth * BUCKETS_PER_UNIT, static_cast<float>(NUM_BUCKETS)));
        above = 0;
        for (int bucket = 0; bucket < end; above += mass[bucket++])
            if (above + mass[bucket] >= goal) return bucket;
        opened = -depth;
    }
    return NUM_BUCKETS - 1;  // not reached: all buckets together hold the whole mass
}

// The shortest prefix of the sorted values whose mass reaches the goal. largest: of every 64 values.
Cut nucleus(const Context& c, const float* values, const float* weights, int64_t n, const float* largest,
            uint64_t goal) {
    float* chosen = at_least(c.space.sorted, n);
    if (n <= FEW) {
        std::copy_n(values, n, chosen);
        return cut_among(c, chosen, n, 0, goal);
    }
    uint64_t above = 0;
    const int bucket = fill_buckets(c, values, weights, n, largest, goal, above);
    // A bucket's bounds are multiples of a power of two: exact. The last is open below, and without mass.
    const float high = -bucket / BUCKETS_PER_UNIT, low = -(bucket + 1) / BUCKETS_PER_UNIT;
    int64_t num_chosen = 0;
    for (int64_t b = 0; b < blocks_of(n); ++b) {
        const int64_t first = b * SCAN_BLOCK;
        if (largest[b] > low)
            num_chosen += c.kernels.between(values + first, std::min<int64_t>(SCAN_BLOCK, n - first), low, high,
                                            chosen + num_chosen);
    }
    return cut_among(c, chosen, num_chosen, above, goal);
}

// ---------------------------------------------------------------------------------------------------------- softmax

// Probabilities of a list, from its weights and their mass.
void finish_list(const Context& c, const List& list, float* weights, uint64_t ticks, int64_t most_listed,
                 Probs& probs) {
    const float divisor = divisor_of(c, ticks);
    if (list.n > most_listed) {
        probs.dense = std::make_unique<Buffer>(c.width);
        std::fill_n(probs.dense->data(), c.width, 0.0f);
        for (int64_t i = 0; i < list.n; ++i) probs.dense->data()[list.ids[i]] = weights[i] / divisor;
        return;
    }
    for (int64_t i = 0; i < list.n; ++i)
        if (weights[i] > 0) {
            probs.ids.push_back(list.ids[i]);
            probs.listed.push_back(weights[i] / divisor);
        }
}

void probs_of_list(const Context& c, List list, const Filters& filters, Probs& probs) {
    float* weights = at_least(c.space.weights, list.n);
    uint64_t ticks = c.kernels.exp(list.values, list.n, c.ticks_per_one, weights);
    if (filters.top_p < 1) {
        float* largest = at_least(c.space.block_largest, blocks_of(list.n));
        if (list.n > FEW) c.kernels.scan(list.values, list.n, largest);
        const Cut cut = nucleus(c, list.values, weights, list.n, largest, goal_of(ticks, filters.top_p));
        keep(list, cut);
        c.kernels.exp(list.values, list.n, c.ticks_per_one, weights);
        ticks = cut.ticks;
    }
    finish_list(c, list, weights, ticks, filters.most_listed, probs);
}

// Scaled logits and weights of the whole row; returns the mass.
uint64_t weigh(const Context& c, const float* row, Scale scale, float* values, float* weights) {
    float scaled[CHUNK];
    uint64_t ticks = 0;
    for (int64_t i = 0; i < c.width; i += CHUNK) {
        const int64_t length = std::min(CHUNK, c.width - i);
        float* chunk = values == nullptr ? scaled : values + i;
        c.kernels.scale(row + i, length, scale, chunk);
        ticks += c.kernels.exp(chunk, length, c.ticks_per_one, weights + i);
    }
    return ticks;
}

void probs_without_filters(const Context& c, const float* row, Scale scale, Probs& probs) {
    probs.dense = std::make_unique<Buffer>(c.width);
    const uint64_t ticks = weigh(c, row, scale, nullptr, probs.dense->data());
    c.kernels.divide(probs.dense->data(), c.width, divisor_of(c, ticks));
}

// Ties beyond those that the cut keeps lose their probability.
void drop_ties(const Context& c, const float* values, Cut cut, float* weights) {
    for (int64_t i = 0; i < c.width; ++i)
        if (values[i] == cut.threshold && cut.num_ties-- <= 0) weights[i] = 0;
}

// top-p of a whole row.
void probs_by_mass(const Context& c, const float* row, Scale scale, const Filters& filters, Probs& probs) {
    auto weights = std::make_unique<Buffer>(c.width);
    float* values = at_least(c.space.values, c.width);
    float* largest = at_least(c.space.weights, blocks_of(c.width));
    c.kernels.scale(c.space.block_largest.data(), blocks_of(c.width), scale, largest);
    const uint64_t ticks = weigh(c, row, scale, values, weights->data());
    const Cut cut = nucleus(c, values, weights->data(), c.width, largest, goal_of(ticks, filters.top_p));
    const Counts counts = c.kernels.count(values, c.width, cut.threshold);
    if (counts.above + cut.num_ties <= filters.most_listed) {
        int64_t* ids = at_least(c.space.ids, c.width);
        List list = {ids, values, c.kernels.from(values, c.width, cut.threshold, 0, ids, values)};
        keep(list, cut);
        float* few = at_least(c.space.weights, list.n);
        c.kernels.exp(list.values, list.n, c.ticks_per_one, few);
        finish_list(c, list, few, cut.ticks, filters.most_listed, probs);
        return;
    }
    c.kernels.divide_from(values, cut.threshold, weights->data(), c.width, divisor_of(c, cut.ticks));
    if (counts.equal > cut.num_ties) drop_ties(c, values, cut, weights->data());
    probs.dense = std::move(weights);
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- the whole

int64_t argmax(const SamplingKernels& kernels, const float* row, int64_t n) {
    float* largest = at_least(workspace().block_largest, blocks_of(n));
    const Scan scan = kernels.scan(row, n, largest);
    if (!scan.ordered || !std::isfinite(scan.largest)) return -1;
    const int64_t block = std::find(largest, largest + blocks_of(n), scan.largest) - largest;
    return std::find(row + block * SCAN_BLOCK, row + n, scan.largest) - row;
}

double mass_of(const SamplingKernels& kernels, const float* weights, int64_t n) {
    const Scan scan = kernels.scan(weights, n, at_least(workspace().block_largest, blocks_of(n)));
    if (!scan.ordered || !(scan.largest > 0) || !std::isfinite(scan.largest)) return 0;
    const double ticks_per_one = ticks_per_one_of(n, scan.largest);
    return static_cast<double>(kernels.ticks(weights, n, ticks_per_one)) / ticks_per_one;
}

double mass_of_logits(const SamplingKernels& kernels, const float* row, int64_t n) {
    const Context c = {kernels, workspace(), ticks_per_one_of(n, 1.0f), n};
    const Scan scan = kernels.scan(row, n, at_least(c.space.block_largest, blocks_of(n)));
    if (!scan.ordered || !std::isfinite(scan.largest)) return 0;
    const uint64_t ticks = weigh(c, row, {scan.largest, 1.0f}, nullptr, at_least(c.space.weights, n));
    return static_cast<double>(ticks) / c.ticks_per_one;
}

bool make_probs(const SamplingKernels& kernels, const float* row, int64_t n, const Filters& filters, Probs& probs) {
    const Context c = {kernels, workspace(), ticks_per_one_of(n, 1.0f), n};
    const Scan scan = kernels.scan(row, n, at_least(c.space.block_largest, blocks_of(n)));
    if (!scan.ordered || !std::isfinite(scan.largest)) return false;
    const Scale scale = {scan.largest, filters.temperature};
    const bool has_top_k = 0 < filters.top_k && filters.top_k<n, has_min_p = filters.log_min_p> - INFINITY;
    if (!has_top_k && !has_min_p) {
        if (filters.top_p < 1) probs_by_mass(c, row, scale, filters, probs);
        else probs_without_filters(c, row, scale, probs);
        return true;
    }
    float threshold = filters.log_min_p;
    if (has_top_k) {
        const float raw = reached_by(c, filters.top_k);
        kernels.scale(&raw, 1, scale, &threshold);
    }
    List list = list_from(c, row, scale, threshold);
    if (has_top_k) keep_largest(c, list, filters.top_k);
    if (has_top_k && has_min_p) keep(list, {std::nextafter(filters.log_min_p, -INFINITY), 0, 0});
    probs_of_list(c, list, filters, probs);
    return true;
}

}  // namespace forerun
