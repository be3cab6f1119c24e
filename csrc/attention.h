// Attention over block tables, by logical position.
//
// A row at logical position p sees the positions 0 .. p (or the last `window` of them): the committed ones from the
// cache, and from there on its own ancestors in the run, depth by depth. Positions are taken in blocks of 64, counted
// from position 0, with the running maximum and sum of Milakov and Gimelshein 2018. Where a key lies physically, how long
// the run is, what its neighbours are and whether the row sits in a chain or in a tree changes no operation.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"
#include "tile.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int VECTORS = KEY_BLOCK / LANES;
constexpr int MAX_QUERIES = 4;  // that share each load of keys and values

// Running state of one query row and head: maximum, sum, weighted values.
struct State {
    const float* q;
    float max, sum;
    float* values;  // [padded_dim]
};

// What a row sees of a block: lanes [first, last).
struct Seen {
    int first, last;
};

// Scores of N queries against the 64 keys of a tile: a lane is a key, summed over dimensions in order.
template <int N>
void scores_of(const Tile& tile, const State* states, float (*weights)[KEY_BLOCK]) {
    F16 scores[N][VECTORS];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < VECTORS; ++i) scores[n][i] = f16(0.0f);
    for (int d = 0; d < tile.dim; ++d) {
        F16 keys[VECTORS];
        for (int i = 0; i < VECTORS; ++i) keys[i] = load(tile.keys + d * KEY_BLOCK + i * LANES);
        for (int n = 0; n < N; ++n) {
            const F16 x = f16(states[n].q[d]);
            for (int i = 0; i < VECTORS; ++i) scores[n][i] = madd(x, keys[i], scores[n][i]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < VECTORS; ++i) store(weights[n] + i * LANES, scores[n][i]);
}

// values = values * scale + sum over the lanes seen of weight * value, lane by lane.
template <int N, int CHUNKS>
void add_values(const Tile& tile, int d, const float (*weights)[KEY_BLOCK], Seen seen, const float* scales,
                State* states) {
    F16 sums[N][CHUNKS];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) sums[n][c] = load(states[n].values + d + c * LANES) * f16(scales[n]);
    for (int lane = seen.first; lane < seen.last; ++lane) {
        F16 values[CHUNKS];
        for (int c = 0; c < CHUNKS; ++c) values[c] = load(tile.values + lane * tile.padded_dim + d + c * LANES);
        for (int n = 0; n < N; ++n) {
            const F16 weight = f16(weights[n][lane]);
            for (int c = 0; c < CHUNKS; ++c) sums[n][c] = madd(weight, values[c], sums[n][c]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) store(states[n].values + d + c * LANES, sums[n][c]);
}

// Take one block into the running states of N queries that see the same lanes; the others do not exist for them.
template <int N>
void take_block(const Tile& tile, Seen seen, State* states) {
    alignas(64) float weights[N][KEY_BLOCK];
    alignas(64) float scales[LANES] = {};
    scores_of<N>(tile, states, weights);
    for (int n = 0; n < N; ++n) {
        for (int lane = 0; lane < seen.first; ++lane) weights[n][lane] = -__builtin_inff();
        for (int lane = seen.last; lane < KEY_BLOCK; ++lane) weights[n][lane] = -__builtin_inff();
        F16 top = load(weights[n]);
        for (int i = 1; i < VECTORS; ++i) top = max(top, load(weights[n] + i * LANES));
        const float block_max = largest(top), new_max = states[n].max > block_max ? states[n].max : block_max;
        scales[n] = states[n].max - new_max;
        states[n].max = new_max;
    }
    store(scales, exp(load(scales)));
    for (int n = 0; n < N; ++n) {
        const F16 shift = f16(states[n].max);
        F16 total = f16(0.0f);
        for (int i = 0; i < VECTORS; ++i) {
            const F16 weight = exp(load(weights[n] + i * LANES) - shift);
            store(weights[n] + i * LANES, weight);
            total = total + weight;
        }
        states[n].sum = states[n].sum * scales[n] + sum(total);
    }
    int d = 0;
    for (; d + 4 * LANES <= tile.padded_dim; d += 4 * LANES) add_values<N, 4>(tile, d, weights, seen, scales, states);
    for (; d < tile.padded_dim; d += LANES) add_values<N, 1>(tile, d, weights, seen, scales, states);
}

inline void take_block(const Tile& tile, Seen seen, State* states, int num_queries) {
    for (; num_queries >= 4; num_queries -= 4, states += 4) take_block<4>(tile, seen, states);
    if (num_queries == 3) take_block<3>(tile, seen, states);
    if (num_queries == 2) take_block<2>(tile, seen, states);
    if (num_queries == 1) take_block<1>(tile, seen, states);
}

inline void write_out(const Attention& a, int row, int head, const State& state) {
    const F16 inverse = f16(1.0f / state.sum);
    for (int d = 0; d < a.head_dim; d += LANES) {
        const int n = a.head_dim - d < LANES ? a.head_dim - d : LANES;
        const F16 values = load(state.values + d) * inverse;
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

// One block for all rows: in a chain the keys are filled once, in a tree each row has ancestors of its own.
inline void take_block_for_rows(const Attention& a, const Run& run, const Tile& tile, int kv_head, int start,
                                const int32_t* depths, int first, int last, State* states) {
    const int group = a.num_heads / a.num_kv_heads;
    int filled = 0;  // lanes that hold what every row sees there
    for (int row = first; row < last; ++row) {
        const int depth = depths[row - first], end = run.cached + depth + 1;
        const Seen seen = seen_of(a, end, start);
        if (seen.last <= 0 || seen.first >= KEY_BLOCK) continue;
        const int committed = run.cached - start < 0 ? 0 : run.cached - start;
        const int shared = a.parents && committed < seen.last ? committed : seen.last;
        if (shared > filled) {
            fill_tile(a, run, tile, kv_head, start, filled, shared, row, depth);
            filled = shared;
        }
        if (shared < seen.last) fill_tile(a, run, tile, kv_head, start, shared, seen.last, row, depth);
        State* own = states + (row - first) * group;
        int num_rows = 1;  // rows that see all of the block alike are taken together
        while (shared == KEY_BLOCK && seen.first == 0 && row + num_rows < last) {
            const Seen next = seen_of(a, run.cached + depths[row + num_rows - first] + 1, start);
            if (next.first != 0 || next.last != KEY_BLOCK || (a.parents && committed < KEY_BLOCK)) break;
            ++num_rows;
        }
        take_block(tile, seen, own, num_rows * group);
        row += num_rows - 1;
    }
}

// The rows [first, last) of a run, for all query heads that share one key head.
inline void attention(const Attention& a, const Run& run, int kv_head, int first, int last, float* scratch) {
    const int group = a.num_heads / a.num_kv_heads, dim = padded(a.head_dim), count = (last - first) * group;
    const Tile tile{scratch, scratch + dim * KEY_BLOCK, a.head_dim, dim};
    float* values = tile.values + KEY_BLOCK * dim;
    int32_t* depths = reinterpret_cast<int32_t*>(values + static_cast<size_t>(count) * dim);
    State* states = reinterpret_cast<State*>(depths + (last - first + 15) / 16 * 16);
    int deepest = 0;
    for (int row = first; row < last; ++row) {
        const int depth = depths[row - first] = depth_of(a, run, row);
        if (depth > deepest) deepest = depth;
        const float* q = a.q + static_cast<size_t>(run.first_row + row) * a.q_stride + kv_head * group * a.head_dim;
        for (int g = 0; g < group; ++g) {
            const int i = (row - first) * group + g;
            states[i] = {q + g * a.head_dim, -__builtin_inff(), 0.0f, values + static_cast<size_t>(i) * dim};
        }
    }
    for (size_t i = 0; i < static_cast<size_t>(count) * dim; ++i) values[i] = 0.0f;
    int start = 0;
    if (a.window > 0) {  // blocks that nobody sees: the shallowest row may be of depth 0
        const int oldest = run.cached + (a.parents ? 0 : first) + 1 - a.window;
        start = oldest > 0 ? oldest / KEY_BLOCK * KEY_BLOCK : 0;
    }
    for (; start <= run.cached + deepest; start += KEY_BLOCK)
        take_block_for_rows(a, run, tile, kv_head, start, depths, first, last, states);
    for (int row = first; row < last; ++row)
        for (int g = 0; g < group; ++g)
            write_out(a, run.first_row + row, kv_head * group + g, states[(row - first) * group + g]);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
