// Attention over block tables, by logical position.
//
// A row at logical position p sees the positions 0 .. p (or the last `window` of them): the cached rows, then its own
// ancestors among pending rows and the run, depth by depth. Positions are taken in blocks of 64, counted from position
// 0, with the running maximum and sum of Milakov and Gimelshein 2018. Four blocks are a range: each range has its own
// maximum and sums, so that threads can share a long sequence, and ranges are folded in ascending order. The operations
// are the same wherever a key lies, however long the run is, whatever is beside it, and whether the row is in a chain
// or in a tree.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "pieces.h"
#include "simd.h"
#include "tile.h"

namespace forerun {
namespace FORERUN_ISA {

// Returns the lanes that N queries all see, which are added at once: whole pairs, unless all see the same. None: {0,
// 0}.
template <int N>
Seen common_of(const Seen* seen) {
    Seen common = seen[0];
    bool is_same = true;
    for (int n = 1; n < N; ++n) {
        is_same = is_same && seen[n].first == seen[0].first && seen[n].last == seen[0].last;
        common.first = common.first > seen[n].first ? common.first : seen[n].first;
        common.last = common.last < seen[n].last ? common.last : seen[n].last;
    }
    if (is_same) return common;
    common = {(common.first + 1) / 2 * 2, common.last / 2 * 2};
    return common.first < common.last ? common : Seen{0, 0};
}

// Adds to the sums what each query sees of some lanes.
template <class Tile, int N, int CHUNKS>
void add_own(const Tile& tile, int d, const typename Tile::Weights* weights, const Seen* seen, Seen lanes,
             F16 (*sums)[CHUNKS]) {
    for (int n = 0; n < N; ++n) {
        const Seen own{lanes.first > seen[n].first ? lanes.first : seen[n].first,
                       lanes.last < seen[n].last ? lanes.last : seen[n].last};
        if (own.first < own.last) tile.template add<1, CHUNKS>(d, weights + n, own, sums + n);
    }
}

// Adds new values to the running states of N queries: values = values * scale + sum of weight * value.
template <class Tile, int N, int CHUNKS>
void add_values(const Tile& tile, int d, const typename Tile::Weights* weights, const Seen* seen, Seen common,
                const float* scales, State* states) {
    F16 sums[N][CHUNKS];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) sums[n][c] = load(states[n].values + d + c * LANES) * f16(scales[n]);
    add_own<Tile, N, CHUNKS>(tile, d, weights, seen, {0, common.first}, sums);
    tile.template add<N, CHUNKS>(d, weights, common, sums);
    add_own<Tile, N, CHUNKS>(tile, d, weights, seen, {common.last, KEY_BLOCK}, sums);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) store(states[n].values + d + c * LANES, sums[n][c]);
}

// Returns the number that is subtracted from scores: the maximum, or 0 where all scores are -inf so far, because
// -inf - -inf would be NaN and their weights must be 0.
inline float finite(float max) { return max == -__builtin_inff() ? 0.0f : max; }

// Adds one block to the running states of N queries. Lanes that a query does not see have no effect on it.
template <class Tile, int N>
void take_block(const Tile& tile, const Seen* seen, float softcap, State* states) {
    F16 scores[N][VECTORS];
    typename Tile::Weights weights[N];
    alignas(64) float scales[LANES] = {};
    Seen any = seen[0];
    for (int n = 0; n < N; ++n) {
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = f16(0.0f);
        any = {any.first < seen[n].first ? any.first : seen[n].first,
               any.last > seen[n].last ? any.last : seen[n].last};
    }
    tile.template score<N>(states, any, scores);
    for (int n = 0; n < N && softcap > 0.0f; ++n)
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = capped(scores[n][i], softcap);
    for (int n = 0; n < N && states[n].biases; ++n)
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = scores[n][i] + load(states[n].biases + i * LANES);
    for (int n = 0; n < N; ++n) {
        hide(seen[n], scores[n], -__builtin_inff());
        F16 top = scores[n][0];
        for (int i = 1; i < VECTORS; ++i) top = max(top, scores[n][i]);
        const float block_max = largest(top), new_max = states[n].max > block_max ? states[n].max : block_max;
        scales[n] = states[n].max - finite(new_max);
        states[n].max = new_max;
    }
    store(scales, exp(load(scales)));
    for (int n = 0; n < N; ++n) {
        F16 total = f16(0.0f);
        for (int i = 0; i < VECTORS; ++i)
            if (i * LANES < any.last)  // else the weights are 0
                total = total +
                        Tile::keep(weights[n], i * LANES, Tile::weight_of(scores[n][i] - f16(finite(states[n].max))));
        states[n].sum = states[n].sum * scales[n] + sum(total);
    }
    if constexpr (Tile::ADDS_BLOCKS) {
        tile.template add_block<N>(weights, seen, any, scales, states);
    } else {
        constexpr int CHUNKS = Tile::template chunks<N>();
        const Seen common = common_of<N>(seen);
        int d = 0;
        for (; d + CHUNKS * LANES <= tile.padded_dim; d += CHUNKS * LANES)
            add_values<Tile, N, CHUNKS>(tile, d, weights, seen, common, scales, states);
        for (; d < tile.padded_dim; d += LANES) add_values<Tile, N, 1>(tile, d, weights, seen, common, scales, states);
    }
}

// Adds one block to the states of N queries, or of fewer.
template <class Tile, int N>
void take_some(const Tile& tile, const Seen* seen, float softcap, State* states, int num) {
    if (num >= N) return take_block<Tile, N>(tile, seen, softcap, states);
    if constexpr (N > 1) take_some<Tile, N - 1>(tile, seen, softcap, states, num);
}

// Some queries share each load of keys and values. The first of them fetch the next block. seen: of each row, which has
// `group` queries.
template <class Tile>
void take_block(Tile& tile, const Seen* seen, int group, float softcap, State* states, int num_queries) {
    constexpr int MOST = Tile::QUERIES;
    for (int done = 0; done < num_queries; done += MOST, states += MOST) {
        const int left = num_queries - done;
        Seen own[MOST];
        for (int n = 0; n < MOST && n < left; ++n) own[n] = seen[(done + n) / group];
        take_some<Tile, MOST>(tile, own, softcap, states, left);
        tile.num_next = 0;
    }
}

// Writes a query's weighted values, divided by the sum of all weights, and times its gate. A sink's weight comes last,
// behind the weights of all keys.
inline void write_out(const Attention& a, int row, int head, const State& state) {
    const bool has_values = state.sum != 0.0f;  // else all scores are -inf, and nothing was written there
    F16 inverse = f16(1.0f / state.sum);
    if (a.sinks && has_values) {
        const float sink = a.sinks[head], max = state.max > sink ? state.max : sink;
        alignas(64) float scales[LANES] = {state.max - max, sink - max};
        store(scales, exp(load(scales)));
        inverse = f16(scales[0] / (state.sum * scales[0] + scales[1]));
    }
    for (int d = 0; d < a.head_dim; d += LANES) {
        const int n = a.head_dim - d < LANES ? a.head_dim - d : LANES;
        const int at = head * a.head_dim + d;
        F16 values = has_values ? load(state.values + d) * inverse : f16(a.sinks ? 0.0f : __builtin_nanf(""));
        if (a.gates) values = values * sigmoid(load_first(a.gates + static_cast<size_t>(row) * a.q_stride + at, n));
        if (a.out) store_first(a.out + static_cast<size_t>(row) * a.out_stride + at, values, n, false);
        else put(a.next, row, at, values, n);
    }
}

// The lanes of the block from `start` on that a row at a position sees; without a window it sees all positions below
// `end`. A window holds the positions up to the row's own and, where later rows are seen, as many from there on.
inline Seen seen_of(const Attention& a, int position, int end, int start) {
    if (a.window > 0 && a.sees == Sees::all && position + a.window < end) end = position + a.window;
    const int first = a.window > 0 && position + 1 - a.window > start ? position + 1 - a.window - start : 0;
    return {first, end - start < KEY_BLOCK ? end - start : KEY_BLOCK};
}

// Computes one block for all rows. Rows whose keys lie in the same lanes are computed together: all rows of a chain,
// and of a tree where all keys of the block are cached; elsewhere each row of a tree has its own ancestors.
template <class Tile>
void take_block_for_rows(const Attention& a, const Run& run, Tile& tile, int kv_head, int start, const int32_t* depths,
                         int first, int last, Seen* seen, State* states) {
    const int group = a.num_heads / a.num_kv_heads;
    const int committed = run.cached - start < 0 ? 0 : run.cached - start;
    int filled = 0;  // lanes with keys that every row sees at these positions
    for (int row = first; row < last; ++row) {
        const int depth = depths[row - first];
        seen[row - first] = seen_of(a, run.cached + depth, seen_end(a.sees, run, depth), start);
        for (int i = 0; i < group && a.biases.rows; ++i)
            states[(row - first) * group + i].biases = a.biases.of(kv_head * group + i, run.cached + depth, start);
    }
    const auto sees_none = [&](int row) { return seen[row - first].last <= 0 || seen[row - first].first >= KEY_BLOCK; };
    const auto has_own = [&](int row) { return run.parents && committed < seen[row - first].last; };
    for (int row = first, end; row < last; row = end) {
        end = row + 1;
        if (sees_none(row)) continue;
        if (!has_own(row))
            while (end < last && !sees_none(end) && !has_own(end)) ++end;
        int needed = 0;
        for (int i = row; i < end; ++i) needed = needed > seen[i - first].last ? needed : seen[i - first].last;
        const int shared = has_own(row) ? committed : needed;
        if (shared > filled) {
            fill_tile(a, run, tile, kv_head, start, filled, shared, end - 1, depths[end - 1 - first]);
            filled = shared;
        }
        if (shared < needed) fill_tile(a, run, tile, kv_head, start, shared, needed, row, depths[row - first]);
        take_block(tile, seen + (row - first), group, a.softcap, states + (row - first) * group, (end - row) * group);
    }
}

// Returns the position of the first block that a row of [first, last) sees; blocks before it are outside the window.
inline int first_block(const Attention& a, const Run& run, int first) {
    if (a.window == 0) return 0;
    const int oldest = run.cached + (run.parents ? 0 : first) + 1 - a.window;  // a row of a tree may be of depth 0
    return oldest > 0 ? oldest / KEY_BLOCK * KEY_BLOCK : 0;
}

// Adds a query's state over a later range to its state so far. Where nothing was seen the sum is exactly 0.
inline void fold(State& total, const State& part, int padded_dim) {
    if (part.sum == 0.0f) return;
    if (total.sum == 0.0f) {
        total.max = part.max, total.sum = part.sum;
        for (int d = 0; d < padded_dim; d += LANES) store(total.values + d, load(part.values + d));
        return;
    }
    const float max = total.max > part.max ? total.max : part.max;
    alignas(64) float scales[LANES] = {total.max - finite(max), part.max - finite(max)};
    store(scales, exp(load(scales)));
    total.max = max;
    total.sum = total.sum * scales[0] + part.sum * scales[1];
    for (int d = 0; d < padded_dim; d += LANES)
        store(total.values + d, madd(load(part.values + d), f16(scales[1]), load(total.values + d) * f16(scales[0])));
}

constexpr int FEW_ROWS = 4;

// Computes the rows [first, last) of a run for all query heads that share the key heads of `heads`: range by range,
// folded in order, or one range alone, whose states the caller keeps. Few rows walk all heads of a block before the
// next block, because a cached row holds them side by side; many rows walk a range for each head, so that their states
// stay near.
template <class Tile>
void attend(const Attention& a, const Run& run, Heads heads, int first, int last, int range, float* parts,
            float* scratch) {
    const int group = a.num_heads / a.num_kv_heads, dim = padded(a.head_dim), num_heads = heads.last - heads.first;
    const int per_head = (last - first) * group, count = per_head * num_heads;
    Floats memory{scratch};
    Tile tile(memory.take(static_cast<size_t>(2 * KEY_BLOCK * dim)), a);
    const size_t all = static_cast<size_t>(count) * static_cast<size_t>(dim);
    float *values = memory.take(all), *queries = memory.take(all), *sums = memory.take(all);
    int32_t* depths = reinterpret_cast<int32_t*>(memory.take(static_cast<size_t>(last - first)));
    Seen* seen = reinterpret_cast<Seen*>(memory.take(2 * static_cast<size_t>(last - first)));
    State* states = reinterpret_cast<State*>(memory.take(static_cast<size_t>(count) * sizeof(State) / sizeof(float)));
    State* totals = reinterpret_cast<State*>(memory.take(static_cast<size_t>(count) * sizeof(State) / sizeof(float)));
    int deepest = 0;
    for (int row = first; row < last; ++row) {
        const int depth = depths[row - first] = depth_of(run, row);
        if (depth > deepest) deepest = depth;
        const float* q = a.q + static_cast<size_t>(run.first_row + row) * a.q_stride;
        for (int h = 0; h < num_heads; ++h)
            for (int g = 0; g < group; ++g) {
                const size_t i = static_cast<size_t>(h * per_head + (row - first) * group + g);
                states[i].q = tile.query(q + ((heads.first + h) * group + g) * a.head_dim,
                                         a.order.head(heads.first + h), queries + i * dim);
                states[i].values = values + i * dim;
                states[i].biases = nullptr;
                totals[i] = {nullptr, -__builtin_inff(), 0.0f, sums + i * dim, nullptr};
            }
    }
    const int begin = first_block(a, run, first), end = seen_end(a.sees, run, deepest);
    const int step = last - first <= FEW_ROWS ? KEY_BLOCK : KEY_RANGE;
    const auto take_range = [&](int r) {
        const DenormalsAreZero denormals(Tile::DENORMALS_ARE_ZERO);
        const int from = r * KEY_RANGE > begin ? r * KEY_RANGE : begin;
        const int to = (r + 1) * KEY_RANGE < end ? (r + 1) * KEY_RANGE : end;
        for (int i = 0; i < count; ++i) {
            states[i].max = -__builtin_inff(), states[i].sum = 0.0f;
            for (int d = 0; d < dim; d += LANES) store(states[i].values + d, f16(0.0f));
        }
        for (int at = from; at < to; at += step)
            for (int h = 0; h < num_heads; ++h)
                for (int start = at; start < to && start < at + step; start += KEY_BLOCK) {
                    fetch_next(a, run, tile, heads.first + h, start + KEY_BLOCK);
                    take_block_for_rows(a, run, tile, heads.first + h, start, depths, first, last, seen,
                                        states + h * per_head);
                }
    };
    if (range >= 0) {
        for (int i = 0; i < count; ++i)
            states[i].values = parts + static_cast<size_t>(i) * part_floats(a.head_dim) + LANES;
        take_range(range);
        for (int i = 0; i < count; ++i) {
            float* part = parts + static_cast<size_t>(i) * part_floats(a.head_dim);
            part[0] = states[i].max, part[1] = states[i].sum;
        }
        return;
    }
    for (int r = begin / KEY_RANGE; r * KEY_RANGE < end; ++r) {
        take_range(r);
        for (int i = 0; i < count; ++i) fold(totals[i], states[i], dim);
    }
    for (int i = 0; i < count; ++i) {
        const int h = i / per_head, row = i % per_head / group;
        write_out(a, run.first_row + first + row, (heads.first + h) * group + i % group, totals[i]);
    }
}

inline void attention(const Attention& a, const Run& run, Heads heads, int first, int last, int range, float* parts,
                      float* scratch) {
    with_tile(a, (last - first) * (a.num_heads / a.num_kv_heads), [&](auto tile) {
        attend<typename decltype(tile)::Tile>(a, run, heads, first, last, range, parts, scratch);
    });
}

// Folds the parts of one query, which are `stride` floats apart, and writes the result.
inline void combine(const Attention& a, int row, int head, const float* parts, int num_parts, size_t stride,
                    float* scratch) {
    State total{nullptr, -__builtin_inff(), 0.0f, scratch, nullptr};
    for (int i = 0; i < num_parts; ++i, parts += stride)
        fold(total, {nullptr, parts[0], parts[1], const_cast<float*>(parts) + LANES, nullptr}, padded(a.head_dim));
    write_out(a, row, head, total);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
