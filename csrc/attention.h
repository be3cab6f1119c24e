// Attention over block tables, by logical position.
//
// A row at logical position p sees the positions 0 .. p (or the last `window` of them): the cached rows, then its own
// ancestors among pending rows and the run, depth by depth. Positions are taken in blocks of 64, counted from position 0,
// with the running maximum and sum of Milakov and Gimelshein 2018. Four blocks are a range: each range has a maximum and
// sums of its own, so that threads can share a long sequence, and ranges are folded in ascending order. The operations are the same wherever a key lies, however
// long the run is, whatever is beside it, and whether the row is in a chain or in a tree.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"
#include "tile.h"

namespace forerun {
namespace FORERUN_ISA {

// Adds new values to the running states of N queries: values = values * scale + sum of weight * value.
template <class Tile, int N, int CHUNKS>
void add_values(const Tile& tile, int d, const typename Tile::Weights* weights, Seen seen, const float* scales,
                State* states) {
    F16 sums[N][CHUNKS];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) sums[n][c] = load(states[n].values + d + c * LANES) * f16(scales[n]);
    tile.template add<N, CHUNKS>(d, weights, seen, sums);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) store(states[n].values + d + c * LANES, sums[n][c]);
}

// Sets the scores of lanes that are not seen to -inf, so that their weight is exactly 0.
template <int N>
void hide(Seen seen, F16 (*scores)[VECTORS]) {
    if (seen.first == 0 && seen.last == KEY_BLOCK) return;
    for (int n = 0; n < N; ++n) {
        alignas(64) float lanes[KEY_BLOCK];
        for (int i = 0; i < VECTORS; ++i) store(lanes + i * LANES, scores[n][i]);
        for (int lane = 0; lane < seen.first; ++lane) lanes[lane] = -__builtin_inff();
        for (int lane = seen.last; lane < KEY_BLOCK; ++lane) lanes[lane] = -__builtin_inff();
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = load(lanes + i * LANES);
    }
}

// Returns the number that is subtracted from scores: the maximum, or 0 where all scores are -inf so far, because
// -inf - -inf would be NaN and their weights must be 0.
inline float finite(float max) { return max == -__builtin_inff() ? 0.0f : max; }

// Adds one block to the running states of N queries that see the same lanes; other lanes have no effect on them.
template <class Tile, int N>
void take_block(const Tile& tile, Seen seen, State* states) {
    F16 scores[N][VECTORS];
    typename Tile::Weights weights[N];
    alignas(64) float scales[LANES] = {};
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = f16(0.0f);
    tile.template score<N>(states, seen, scores);
    hide<N>(seen, scores);
    for (int n = 0; n < N; ++n) {
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
            total = total + Tile::keep(weights[n], i * LANES, exp(scores[n][i] - f16(finite(states[n].max))));
        states[n].sum = states[n].sum * scales[n] + sum(total);
    }
    constexpr int CHUNKS = Tile::template chunks<N>();
    int d = 0;
    for (; d + CHUNKS * LANES <= tile.padded_dim; d += CHUNKS * LANES)
        add_values<Tile, N, CHUNKS>(tile, d, weights, seen, scales, states);
    for (; d < tile.padded_dim; d += LANES) add_values<Tile, N, 1>(tile, d, weights, seen, scales, states);
}

// Four queries share each load of keys and values; the remaining ones are computed one by one. The first of them fetch the
// next block.
template <class Tile>
void take_block(Tile& tile, Seen seen, State* states, int num_queries) {
    for (; num_queries > 0; num_queries -= 4, states += 4) {
        if (num_queries >= 4) take_block<Tile, 4>(tile, seen, states);
        if (num_queries == 3) take_block<Tile, 3>(tile, seen, states);
        if (num_queries == 2) take_block<Tile, 2>(tile, seen, states);
        if (num_queries == 1) take_block<Tile, 1>(tile, seen, states);
        tile.num_next = 0;
    }
}

inline void write_out(const Attention& a, int row, int head, const State& state) {
    const F16 inverse = f16(1.0f / state.sum);
    const bool has_values = state.sum != 0.0f;  // else all scores are -inf, and nothing was written there
    for (int d = 0; d < a.head_dim; d += LANES) {
        const int n = a.head_dim - d < LANES ? a.head_dim - d : LANES;
        const F16 values = has_values ? load(state.values + d) * inverse : f16(__builtin_nanf(""));
        if (a.out)
            store_first(a.out + static_cast<size_t>(row) * a.out_stride + head * a.head_dim + d, values, n, false);
        else
            put(a.next, row, head * a.head_dim + d, values, n);
    }
}

inline Seen seen_of(const Attention& a, int end, int start) {
    const int first = a.window > 0 && end - a.window > start ? end - a.window - start : 0;
    return {first, end - start < KEY_BLOCK ? end - start : KEY_BLOCK};
}

// Computes one block for all rows. In a chain the keys are filled once; in a tree each row has ancestors of its own.
template <class Tile>
void take_block_for_rows(const Attention& a, const Run& run, Tile& tile, int kv_head, int start,
                         const int32_t* depths, int first, int last, State* states) {
    const int group = a.num_heads / a.num_kv_heads;
    const int committed = run.cached - start < 0 ? 0 : run.cached - start;
    int filled = 0;  // lanes with keys that every row sees at these positions
    for (int row = first; row < last; ++row) {
        const int depth = depths[row - first];
        const Seen seen = seen_of(a, run.cached + depth + 1, start);
        if (seen.last <= 0 || seen.first >= KEY_BLOCK) continue;
        const int shared = run.parents && committed < seen.last ? committed : seen.last;
        if (shared > filled) {
            fill_tile(a, run, tile, kv_head, start, filled, shared, row, depth);
            filled = shared;
        }
        if (shared < seen.last) fill_tile(a, run, tile, kv_head, start, shared, seen.last, row, depth);
        State* own = states + (row - first) * group;
        int num_rows = 1;  // rows that see the same lanes of the block are computed together
        while (shared == KEY_BLOCK && seen.first == 0 && row + num_rows < last) {
            const Seen next = seen_of(a, run.cached + depths[row + num_rows - first] + 1, start);
            if (next.first != 0 || next.last != KEY_BLOCK || (run.parents && committed < KEY_BLOCK)) break;
            ++num_rows;
        }
        take_block(tile, seen, own, num_rows * group);
        row += num_rows - 1;
    }
}

// Returns the position of the first block that a row of [first, last) sees; blocks before it are outside the window.
inline int first_block(const Attention& a, const Run& run, int first) {
    if (a.window == 0) return 0;
    const int oldest = run.cached + (run.parents ? 0 : first) + 1 - a.window;  // a row of a tree may be of depth 0
    return oldest > 0 ? oldest / KEY_BLOCK * KEY_BLOCK : 0;
}

// Adds what a query has seen of a later range to what it has seen before. Where nothing was seen the sum is exactly 0.
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

// Memory that a caller lends, cut into pieces.
struct Floats {
    float* next;
    float* take(size_t count) {
        float* taken = next;
        next += (count + 15) / 16 * 16;
        return taken;
    }
};

// Computes the rows [first, last) of a run for all query heads that share the key heads of `heads`: range by range, folded
// in order, or one range alone, whose states the caller keeps. Few rows walk all heads of a block before the next block,
// because a cached row holds them side by side; many rows walk a range for each head, so that their states stay near.
template <class Tile>
void attend(const Attention& a, const Run& run, Heads heads, int first, int last, int range, float* parts, float* scratch) {
    const int group = a.num_heads / a.num_kv_heads, dim = padded(a.head_dim), num_heads = heads.last - heads.first;
    const int per_head = (last - first) * group, count = per_head * num_heads;
    Floats memory{scratch};
    Tile tile(memory.take(static_cast<size_t>(2 * KEY_BLOCK * dim)), a.head_dim);
    const size_t all = static_cast<size_t>(count) * static_cast<size_t>(dim);
    float *values = memory.take(all), *queries = memory.take(all), *sums = memory.take(all);
    int32_t* depths = reinterpret_cast<int32_t*>(memory.take(static_cast<size_t>(last - first)));
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
                states[i].q = tile.query(q + ((heads.first + h) * group + g) * a.head_dim, queries + i * dim);
                states[i].values = values + i * dim;
                totals[i] = {nullptr, -__builtin_inff(), 0.0f, sums + i * dim};
            }
    }
    const int begin = first_block(a, run, first), end = run.cached + deepest + 1;
    const int step = last - first <= FEW_ROWS ? KEY_BLOCK : KEY_RANGE;
    const auto take_range = [&](int r) {
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
                    take_block_for_rows(a, run, tile, heads.first + h, start, depths, first, last, states + h * per_head);
                }
    };
    if (range >= 0) {
        for (int i = 0; i < count; ++i) states[i].values = parts + static_cast<size_t>(i) * part_floats(a) + LANES;
        take_range(range);
        for (int i = 0; i < count; ++i) {
            float* part = parts + static_cast<size_t>(i) * part_floats(a);
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
    if (a.type == Type::float32) return attend<RowTile<float>>(a, run, heads, first, last, range, parts, scratch);
#if defined(__AVX512BF16__)
    if ((last - first) * (a.num_heads / a.num_kv_heads) <= 4)
        return attend<PairRowTile>(a, run, heads, first, last, range, parts, scratch);
    attend<PairTile>(a, run, heads, first, last, range, parts, scratch);
#else
    if (a.head_dim == 64) return attend<RowTile<uint16_t, 64>>(a, run, heads, first, last, range, parts, scratch);
    if (a.head_dim == 128) return attend<RowTile<uint16_t, 128>>(a, run, heads, first, last, range, parts, scratch);
    attend<RowTile<uint16_t>>(a, run, heads, first, last, range, parts, scratch);
#endif
}

// Folds the parts of one query, which are `stride` floats apart, and writes the result.
inline void combine(const Attention& a, int row, int head, const float* parts, int num_parts, size_t stride, float* scratch) {
    State total{nullptr, -__builtin_inff(), 0.0f, scratch};
    for (int i = 0; i < num_parts; ++i, parts += stride)
        fold(total, {nullptr, parts[0], parts[1], const_cast<float*>(parts) + LANES}, padded(a.head_dim));
    write_out(a, row, head, total);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
