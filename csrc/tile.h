// One block of 64 keys and values of one head.
//
// How keys and values are laid out for multiplying them is a tile: simd/turned_tile.h turns keys,
// simd/avx512_tiles.h takes pairs of bfloat16 together.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int VECTORS = KEY_BLOCK / LANES;

constexpr int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// The lanes [first, last) of a block that a row sees.
struct Seen {
    int first, last;
    bool has(int lane) const { return lane >= first && lane < last; }
};

// Gives another value to the lanes that are not seen: -inf to scores, so that their weight is exactly 0.
inline void hide(Seen seen, F16* lanes_of, float value) {
    if (seen.first == 0 && seen.last == KEY_BLOCK) return;
    alignas(64) float lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = static_cast<float>(i);
    const F16 hidden = f16(value);
    for (int i = 0; i < VECTORS; ++i) {
        const F16 lane = load(lanes) + f16(static_cast<float>(i * LANES));
        lanes_of[i] = less_than(lane, f16(static_cast<float>(seen.first)), hidden, lanes_of[i]);
        lanes_of[i] = less_than(lane, f16(static_cast<float>(seen.last)), lanes_of[i], hidden);
    }
}

// The running state of one query row and head: maximum, sum, weighted values [padded_dim]. q: in the tile's layout.
// biases: of the keys of the block that it sees now, or null.
struct State {
    const void* q;
    float max, sum;
    float* values;
    const float* biases;
};

// The first lanes of the block after this one. Each is fetched while the same lane is read here: 256 lines of memory
// asked for at once would wait for each other.
template <class T>
struct NextBlock {
    static constexpr bool ADDS_BLOCKS = false;              // whether all values of a block are added at once
    static constexpr int QUERIES = 4;                       // that share each load of keys and values
    static F16 weight_of(F16 score) { return exp(score); }  // below the largest
    static constexpr int LINE = 64 / sizeof(T);             // numbers in a line of memory
    const T *next_keys[KEY_BLOCK], *next_values[KEY_BLOCK];
    int num_next = 0;

    void fetch_key(int lane, int first, int last) const {
        if (lane < num_next)
            for (int d = first; d < last; d += LINE) __builtin_prefetch(next_keys[lane] + d, 0, NEAR_CACHE);
    }
    void fetch_value(int lane, int first, int last) const {
        if (lane < num_next)
            for (int d = first; d < last; d += LINE) __builtin_prefetch(next_values[lane] + d, 0, NEAR_CACHE);
    }
};

// DIM: the head dimension where the compiler knows it, which unrolls all loops over dimensions; 0 otherwise.
template <int DIM>
struct Dimensions {
    static constexpr int dim = DIM, padded_dim = padded(DIM);
    explicit Dimensions(int) {}
};
template <>
struct Dimensions<0> {
    const int dim, padded_dim;
    explicit Dimensions(int head_dim) : dim(head_dim), padded_dim(padded(head_dim)) {}
};

// A tile's type as an argument.
template <class T>
struct As {
    using Tile = T;
};

// --------------------------------------------------------------------------------------- from the cache

// Returns the depth of a row of the run below the cached rows.
inline int depth_of(const Run& run, int row) {
    if (!run.parents) return row;
    int depth = 0;
    for (int at = run.parents[run.pending + row]; at >= 0; at = run.parents[at]) ++depth;
    return depth;
}

// Returns the index, among pending rows and the run's own, of a row's ancestor at a depth; in a chain it is the depth.
inline int ancestor_at(const Run& run, int row, int own_depth, int depth) {
    if (!run.parents) return depth;
    int at = run.pending + row;
    for (int d = own_depth; d > depth; --d) at = run.parents[at];
    return at;
}

// Where the rows of a pool have the key and the value of one head.
template <class T>
struct Kept {
    const T *keys, *values;            // of row 0
    int64_t key_stride, value_stride;  // from a row to the next

    Kept(const Attention& a, int kv_head) {
        const auto key_width = static_cast<int64_t>(key_bytes(a.type, a.order) / sizeof(T));
        const auto value_width = static_cast<int64_t>(value_bytes(a.type, a.head_dim) / sizeof(T));
        keys = static_cast<const T*>(a.keys) + kv_head * key_width;
        key_stride = a.num_kv_heads * key_width;
        values = static_cast<const T*>(a.values) + kv_head * value_width;
        value_stride = a.num_kv_heads * value_width;
    }
    const T* key(int32_t row) const { return keys + row * key_stride; }
    const T* value(int32_t row) const { return values + row * value_stride; }
};

// Where the rows of lanes [first, last) have their keys and values, of the block that begins at position `start`. All
// of them are cached.
template <class T>
void find_cached(const Attention& a, const Run& run, int kv_head, int start, int first, int last, const T** keys,
                 const T** values) {
    const Kept<T> kept(a, kv_head);
    const int32_t* const rows = run.rows + start;
    for (int lane = first; lane < last; ++lane)
        keys[lane] = kept.key(rows[lane]), values[lane] = kept.value(rows[lane]);
}

// Has the cached rows of the block that begins at position `start` prefetched while the one before it is read: they lie
// far apart, so the processor does not prefetch them itself.
template <class Tile>
void fetch_next(const Attention& a, const Run& run, Tile& tile, int kv_head, int start) {
    const int left = run.cached - start;
    tile.num_next = left < 0 ? 0 : left < KEY_BLOCK ? left : KEY_BLOCK;
    find_cached(a, run, kv_head, start, 0, tile.num_next, tile.next_keys, tile.next_values);
}

// Fills lanes [first, last) of the block that begins at position `start`, as `row` of the run sees them.
template <class Tile>
void fill_tile(const Attention& a, const Run& run, Tile& tile, int kv_head, int start, int first, int last, int row,
               int own_depth) {
    using T = typename Tile::Stored;
    const Kept<T> kept(a, kv_head);
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];
    const int committed = run.cached - start, own = committed < first ? first : committed < last ? committed : last;
    find_cached(a, run, kv_head, start, first, own, keys, values);
    for (int lane = own; lane < last; ++lane) {
        const int index = run.cached + ancestor_at(run, row, own_depth, lane - committed);
        keys[lane] = kept.key(run.rows[index]), values[lane] = kept.value(run.rows[index]);
    }
    tile.put_keys(first, last, keys);
    tile.put_values(first, last, values);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
