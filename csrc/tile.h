// One block of 64 keys and values of one head as floats, gathered from wherever the cache keeps them.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

// Keys by dimension, so that 16 keys are 16 lanes; values by key.
struct Tile {
    float* keys;    // [padded_dim][64]
    float* values;  // [64][padded_dim]
    int dim, padded_dim;
};

inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

inline size_t physical_row(const Attention& a, const Run& run, int index) {
    return static_cast<size_t>(run.table[index / a.block_tokens]) * static_cast<size_t>(a.block_tokens) +
           static_cast<size_t>(index % a.block_tokens);
}

// Depth of a row of the run below the committed context.
inline int depth_of(const Attention& a, const Run& run, int row) {
    if (!a.parents) return row;
    int depth = 0;
    for (int at = a.parents[run.first_row + row]; at >= 0; at = a.parents[at]) ++depth;
    return depth;
}

// Index within the run of the ancestor at a depth of a row of the run; in a chain that is the depth itself.
inline int ancestor_at(const Attention& a, const Run& run, int row, int own_depth, int depth) {
    if (!a.parents) return depth;
    int at = run.first_row + row;
    for (int d = own_depth; d > depth; --d) at = a.parents[at];
    return at - run.first_row;
}

// Sixteen keys into sixteen lanes, sixteen dimensions at a time.
template <class T>
void put_keys(const Tile& tile, int lane, const T* const* keys) {
    for (int d = 0; d < tile.dim; d += LANES) {
        F16 block[LANES];
        for (int i = 0; i < LANES; ++i) block[i] = load_first(keys[i] + d, tile.dim - d);
        transpose(block);
        for (int i = 0; i < LANES; ++i) store(tile.keys + (d + i) * KEY_BLOCK + lane, block[i]);
    }
}

template <class T>
void put_key(const Tile& tile, int lane, const T* key) {
    for (int d = 0; d < tile.dim; ++d) tile.keys[d * KEY_BLOCK + lane] = widen(key[d]);
}

template <class T>
void fill_tile_of(const Attention& a, const Run& run, const Tile& tile, int kv_head, int start, int first, int last,
                  int row, int own_depth) {
    const size_t width = static_cast<size_t>(a.num_kv_heads) * static_cast<size_t>(a.head_dim);
    const T* keys[KEY_BLOCK];
    for (int lane = first; lane < last; ++lane) {
        int index = start + lane;
        if (index >= run.cached) index = run.cached + ancestor_at(a, run, row, own_depth, index - run.cached);
        const size_t at = physical_row(a, run, index) * width + static_cast<size_t>(kv_head) * a.head_dim;
        keys[lane] = static_cast<const T*>(a.keys) + at;
        const T* value = static_cast<const T*>(a.values) + at;
        for (int d = 0; d < a.head_dim; d += LANES)
            store(tile.values + lane * tile.padded_dim + d, load_first(value + d, a.head_dim - d));
    }
    int lane = first;
    for (; lane < last && lane % LANES != 0; ++lane) put_key(tile, lane, keys[lane]);
    for (; lane + LANES <= last; lane += LANES) put_keys(tile, lane, keys + lane);
    for (; lane < last; ++lane) put_key(tile, lane, keys[lane]);
}

// Fill lanes [first, last) of the block that begins at position `start`, as `row` of the run sees them.
inline void fill_tile(const Attention& a, const Run& run, const Tile& tile, int kv_head, int start, int first, int last,
                      int row, int own_depth) {
    if (a.type == Type::bfloat16)
        fill_tile_of<uint16_t>(a, run, tile, kv_head, start, first, last, row, own_depth);
    else
        fill_tile_of<float>(a, run, tile, kv_head, start, first, last, row, own_depth);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
