// The matrix product of a few rows of inputs and weights that are read from memory once.
//
// Each output of each row has one accumulator, which sums the inputs from first to last: y = (((x0 w0) + x1 w1) + ...).
// The number of rows only decides how many accumulators share a loaded line of weights, so the bits of a row are the
// same for one row and for five hundred. With bfloat16 a step takes two inputs at once.
#pragma once

#include <type_traits>

#include "activations.h"
#include "kernels.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int AHEAD_BYTES = 4096;  // how far the weights are fetched ahead; 0.5 to 8 KB were tried, 4 was best or equal
// The steps after which the next block of rows takes its turn. For two blocks a turn reads 8 KB, half of it prefetched
// already. More blocks are limited by arithmetic and need fewer turns: 128 steps brought 512 rows from 0.93 to 1.0 of
// oneDNN's speed, 256 brought no more.
constexpr int CHUNK_STEPS = 64, MANY_CHUNK_STEPS = 128;

// ---------------------------------------------------------------------------------- one step of 16 outputs

struct Float32Step {
    static constexpr int WORDS = 1;  // of an input
    using Line = F16;
    static Line weights(const void* p) { return load(static_cast<const float*>(p)); }
    static F16 input(const uint32_t* word) {
        float x;
        std::memcpy(&x, word, 4);
        return f16(x);
    }
    static F16 add(F16 acc, Line w, F16 x) { return madd(w, x, acc); }
};

struct Bfloat16Step {
    static constexpr int WORDS = 1;
    using Line = Pairs;
    static Line weights(const void* p) { return load_pairs(p); }
    static Line input(const uint32_t* word) { return spread_pair(*word); }
    static F16 add(F16 acc, const Line& w, const Line& x) { return add_pairs(acc, w, x); }
};

// The same bits as an instruction's by two multiplications of floats, where those are faster (`widens_pairs`).
// vdpbf16ps adds the odd product first, each sum rounded, and takes denormal numbers for zeros; so does this within the
// life of a DenormalsAreZero.
struct Halves {
    F16 even, odd;
};
struct WidePairStep {
    static constexpr int WORDS = 2;  // an input is widened already: even, odd
    using Line = Halves;
    static Line weights(const void* p) { return {low_halves(p), high_halves(p)}; }
    static Line input(const uint32_t* words) { return {Float32Step::input(words), Float32Step::input(words + 1)}; }
    static F16 add(F16 acc, const Line& w, const Line& x) { return madd(w.even, x.even, madd(w.odd, x.odd, acc)); }
};

// The same by products that are exact (`with_pairs`).
struct ExactPairStep : Bfloat16Step {
    template <class Pair>
    FORERUN_INLINE static F16 add(const F16& acc, const Pair& w, const Pair& x) {
        return Exact::add(w.first, x.first, Exact::add(w.second, x.second, acc));
    }
};

// -------------------------------------------------------------------------------- a block of rows, a panel

// The address to prefetch, which moves by `stride` bytes with every step: two lines of 64 where a pass is alone.
struct Ahead {
    const char* at;
    int stride;
};

// Adds the steps of one panel to acc [ROWS][2], which stays in registers; `fresh` starts from zero.
template <class Step, int ROWS>
void block_times_panel(const char* w, const uint32_t* x, int num_steps, bool fresh, Ahead ahead, float* acc) {
    F16 sums[ROWS][2];
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < 2; ++n) sums[m][n] = fresh ? f16(0.0f) : load(acc + (2 * m + n) * LANES);
    for (int s = 0; s < num_steps; ++s) {
        const auto w0 = Step::weights(w + 128 * s), w1 = Step::weights(w + 128 * s + 64);
        __builtin_prefetch(ahead.at, 0, NEAR_CACHE);
        __builtin_prefetch(ahead.at + 64, 0, NEAR_CACHE);
        ahead.at += ahead.stride;
#pragma GCC unroll 14
        for (int m = 0; m < ROWS; ++m) {
            const auto input = Step::input(x + (s * ROWS + m) * Step::WORDS);
            sums[m][0] = Step::add(sums[m][0], w0, input);
            sums[m][1] = Step::add(sums[m][1], w1, input);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < 2; ++n) store(acc + (2 * m + n) * LANES, sums[m][n]);
}

using Block = void (*)(const char*, const uint32_t*, int, bool, Ahead, float*);

template <class Step>
constexpr Block BLOCKS[] = {block_times_panel<Step, 1>,  block_times_panel<Step, 2>,  block_times_panel<Step, 3>,
                            block_times_panel<Step, 4>,  block_times_panel<Step, 5>,  block_times_panel<Step, 6>,
                            block_times_panel<Step, 7>,  block_times_panel<Step, 8>,  block_times_panel<Step, 9>,
                            block_times_panel<Step, 10>, block_times_panel<Step, 11>, block_times_panel<Step, 12>,
                            block_times_panel<Step, 13>, block_times_panel<Step, 14>};

// Whether the inputs of a product with bfloat16 are widened, once for all panels (`prepare`). For one or two rows it
// takes as long to widen the weights as the other way saves.
inline bool has_wide_inputs(const Matrix& w, int num_rows) {
    return PAIR_PRODUCTS && w.type == Type::bfloat16 && widens_pairs && num_rows > 2;
}

// how: pairs of bfloat16 are added, Once or Exact.
template <class How>
inline const Block* blocks_for(const Matrix& w, bool is_wide, How) {
    if (w.type != Type::bfloat16) return BLOCKS<Float32Step>;
    if constexpr (std::is_same_v<How, Exact>) return BLOCKS<ExactPairStep>;
    if constexpr (PAIR_PRODUCTS)
        if (is_wide) return BLOCKS<WidePairStep>;
    return BLOCKS<Bfloat16Step>;
}

// Computes the sums of all rows for one panel, float32 [num_rows][32]. One block of rows streams the panel; several
// take turns every CHUNK_STEPS and prefetch equal parts of the next chunk, so that reading memory never waits for
// arithmetic.
inline void panel_sums(const Matrix& w, const Inputs& x, int panel, const Block* blocks, float* sums) {
    const size_t width = has_wide_inputs(w, x.num_rows) ? 2 : 1;
    const char* data = w.panel_at(panel);
    const int num_blocks = x.num_blocks();
    if (num_blocks == 1)
        return blocks[x.num_rows - 1](data, x.words, w.num_steps, true, {data + AHEAD_BYTES, 128}, sums);
    const int chunk = num_blocks > 2 ? MANY_CHUNK_STEPS : CHUNK_STEPS;
    for (int s = 0; s < w.num_steps; s += chunk) {
        const int n = w.num_steps - s < chunk ? w.num_steps - s : chunk;
        for (int b = 0; b < num_blocks; ++b) {
            const int start = x.block_start(b), rows = x.block_start(b + 1) - start;
            const uint32_t* words =
                x.words + width * (static_cast<size_t>(start) * x.num_steps + static_cast<size_t>(s) * rows);
            const char* next = data + 128 * (s + n);
            const Ahead ahead{next + static_cast<int64_t>(128) * n * b / num_blocks, 128 / num_blocks};
            blocks[rows - 1](data + 128 * s, words, n, s == 0, ahead, sums + static_cast<size_t>(start) * PANEL);
        }
    }
}

inline void panel_sums(const Matrix& w, const Inputs& x, int panel, float* sums) {
    const bool is_wide = has_wide_inputs(w, x.num_rows);
    if (w.type != Type::bfloat16) return panel_sums(w, x, panel, blocks_for(w, is_wide, Once()), sums);
    const DenormalsAreZero denormals(true);
    with_pairs([&](auto how) { panel_sums(w, x, panel, blocks_for(w, is_wide, how), sums); });
}

// --------------------------------------------------------------------------------------------- what follows

// Writes n values to the inputs from k on of one row; k is even.
inline void put(const Inputs& to, int row, int k, F16 values, int n) {
    if (is_quantised(to.type)) {
        float* const at =
            reinterpret_cast<float*>(to.words + static_cast<size_t>(row) * static_cast<size_t>(to.num_steps) + k);
        if (n == LANES) return store(at, values);
        alignas(64) float lanes[LANES];
        store(lanes, values);
        std::memcpy(at, lanes, static_cast<size_t>(n) * 4);
        return;
    }
    const int b = to.block_of(row), start = to.block_start(b), rows = to.block_start(b + 1) - start;
    uint32_t* words = to.words + static_cast<size_t>(start) * to.num_steps + (row - start);
    if (to.type == Type::float32) {
        alignas(64) float lanes[LANES];
        store(lanes, values);
        for (int i = 0; i < n; ++i) std::memcpy(words + static_cast<size_t>(k + i) * rows, lanes + i, 4);
        return;
    }
    alignas(64) uint16_t halves[LANES];
    narrow(values, halves);
    if (n % 2 == 1) halves[n] = 0;  // it is multiplied by a padding weight of 0, so it must not be NaN
    for (int i = 0; i < n; i += 2) std::memcpy(words + static_cast<size_t>((k + i) / 2) * rows, halves + i, 4);
}

inline void put_row(const Inputs& to, int row, const float* x, int n) {
    for (int k = 0; k < n; k += LANES) {
        const int count = n - k < LANES ? n - k : LANES;
        put(to, row, k, load_first(x + k, count), count);
    }
}

inline void store_first(float* out, F16 values, int n, bool add) {
    if (n == LANES) return store(out, add ? load(out) + values : values);
    alignas(64) float lanes[LANES];
    store(lanes, values);
    for (int i = 0; i < n; ++i) out[i] = add ? out[i] + lanes[i] : lanes[i];
}

inline int lanes_left(int num_out, int first) {
    const int left = num_out - first;
    return left < 0 ? 0 : left < LANES ? left : LANES;
}

inline F16 logits(F16 x, LogitRange range) {
    if (range.scale != 1.0f) x = x * f16(range.scale);
    return range.cap == 0.0f ? x : capped(x, range.cap);
}

inline void finish_panel(const Matrix& w, const Inputs& x, const Output& to, int panel, const float* sums) {
    const F16 zero = f16(0.0f);
    const F16 bias0 = w.bias ? load(w.bias + panel * PANEL) : zero;
    const F16 bias1 = w.bias ? load(w.bias + panel * PANEL + LANES) : zero;
    const int first = w.paired ? panel * LANES : panel * PANEL;
    for (int row = 0; row < x.num_rows; ++row) {
        const float* at = sums + static_cast<size_t>(row) * PANEL;
        F16 y0 = w.bias ? load(at) + bias0 : load(at), y1 = w.bias ? load(at + LANES) + bias1 : load(at + LANES);
        const int rest = lanes_left(w.num_out, first + LANES);
        if (to.finish == Finish::gated) {
            put(to.next, row, first, gated(to.act, y0, y1), lanes_left(w.num_out, first));
            continue;
        }
        if (to.finish == Finish::activated) {
            put(to.next, row, first, activated(to.act, y0), lanes_left(w.num_out, first));
            if (rest > 0) put(to.next, row, first + LANES, activated(to.act, y1), rest);
            continue;
        }
        if (to.finish == Finish::logits) y0 = logits(y0, to.range), y1 = logits(y1, to.range);
        float* out = to.out + static_cast<size_t>(row) * to.stride + first;
        store_first(out, y0, lanes_left(w.num_out, first), to.finish == Finish::add);
        if (rest > 0) store_first(out + LANES, y1, rest, to.finish == Finish::add);
    }
}

// Adds a panel's logits of a row; those behind `count` are none.
inline void add_odds(float* values, int count, Odds& to) {
    for (int i = count; i < PANEL; ++i) values[i] = -__builtin_inff();
    bool is_higher = false;
    for (int n = 0; n < PANEL; n += LANES) is_higher |= any_at_least(load(values + n), to.top);
    if (is_higher) {
        float top = to.top;
        for (int n = 0; n < PANEL; n += LANES) {
            const float found = largest(load(values + n));
            if (found > top) top = found;
        }
        store(to.sums, load(to.sums) * exp(f16(to.top - top)));
        to.top = top;
    }
    F16 sum = load(to.sums);
    for (int n = 0; n < PANEL; n += LANES) sum = sum + exp(load(values + n) - f16(to.top));
    store(to.sums, sum);
}

inline void best_of_panel(const Matrix& w, const Inputs& x, const Output& to, int panel, const float* sums) {
    const int first = panel * PANEL, count = w.num_out - first < PANEL ? w.num_out - first : PANEL;
    for (int row = 0; row < x.num_rows; ++row) {
        alignas(64) float values[PANEL];
        bool worth_a_look = count < PANEL;
        for (int n = 0; n < PANEL; n += LANES) {
            F16 y = load(sums + static_cast<size_t>(row) * PANEL + n);
            if (w.bias) y = y + load(w.bias + first + n);
            if (!to.range.is_plain()) y = logits(y, to.range);
            store(values + n, y);
            worth_a_look |= any_at_least(y, to.best[row].value);
        }
        if (to.odds) add_odds(values, count, to.odds[row]);
        if (!worth_a_look) continue;
        for (int i = 0; i < count; ++i) {
            const Best candidate{values[i], first + i};
            if (beats(candidate, to.best[row])) to.best[row] = candidate;
        }
    }
}

int quantised_panels(const Matrix& w, const Inputs& x, int panel, int last, float* sums);  // quantised.h
void round_rows(const Matrix& w, const Inputs& x, int first, int last, RoundedUnit* to);
void unpack_quantised(const Matrix& w, int row, float* out);

// What `linear` needs besides the inputs, or in their place: units of int8, or bfloat16 as floats.
inline size_t prepared_bytes(const Matrix& w, int num_rows) {
    const size_t rows = static_cast<size_t>(num_rows), steps = static_cast<size_t>(w.num_steps);
    const size_t whole_blocks = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    if (is_quantised(w.type))
        return sizeof(RoundedUnit) * (steps / UNIT) * (num_rows > TILE_ROWS ? whole_blocks : rows);
    return has_wide_inputs(w, num_rows) ? 8 * steps * rows : 0;
}

inline void prepare(const Matrix& w, const Inputs& x, int first, int last, void* to) {
    if (is_quantised(w.type)) return round_rows(w, x, first, last, static_cast<RoundedUnit*>(to));
    uint32_t* out = static_cast<uint32_t*>(to);
    const size_t steps = static_cast<size_t>(x.num_steps), end = steps * static_cast<size_t>(last);
    for (size_t i = steps * static_cast<size_t>(first); i < end; ++i)
        out[2 * i] = x.words[i] << 16, out[2 * i + 1] = x.words[i] & 0xffff0000u;
}

// The inputs are those that `prepare` has written, where it has any.
inline void linear(const Matrix& w, const Inputs& x, const Output& to, int first, int last, float* sums) {
    if (x.num_rows == 0) return;
    for (int panel = first, count = 1; panel < last; panel += count) {
        if (is_quantised(w.type)) count = quantised_panels(w, x, panel, last, sums);
        else panel_sums(w, x, panel, sums);
        for (int i = 0; i < count; ++i)
            (to.finish == Finish::argmax ? best_of_panel : finish_panel)(w, x, to, panel + i,
                                                                         sums + i * x.num_rows * PANEL);
    }
}

inline void unpack_row(const Matrix& w, int row, float* out) {
    if (is_quantised(w.type)) return unpack_quantised(w, row, out);
    const char* data = w.panel_at(row / PANEL);
    const int lane = row % PANEL;
    for (int k = 0; k < w.num_in; ++k) {
        if (w.type == Type::float32) std::memcpy(out + k, data + 128 * k + 4 * lane, 4);
        else {
            uint16_t half;
            std::memcpy(&half, data + 128 * (k / 2) + 4 * lane + 2 * (k % 2), 2);
            out[k] = bf16_to_float(half);
        }
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
