// Products of quantised weights and many rows by tiles of bytes (AMX): one instruction multiplies 16 rows, 16 outputs
// and the inputs of a group, in 16 cycles where `dot` takes 64.
//
// The sums of a group are exact integers either way, and what follows is the same in the same order, so the bits are
// the same. A Xeon of 2023 does nothing else meanwhile: 16 rows, 16 outputs and 32 inputs take 31 cycles for the tiles
// and 38 for what follows, 71 in all at best, 97 to 105 here, and 140 without tiles. Codes and scales of some units are
// unpacked once for all rows, and the sums of a block of rows stay in registers.
#pragma once

#include <immintrin.h>

#include "quantised.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int CHUNK_UNITS = 16;  // that are unpacked together; 8 to 64 take the same time

// Sixteen outputs and a group of inputs.
struct alignas(64) UnpackedGroup {
    int8_t codes[UNIT * LANES];  // of four inputs side by side, for each output
    Scales scales;
};

// While one lives, tiles 0 and 1 are sums [rows][16], 2 is inputs [rows][length] and 3 is weights [length / 4][16], of
// four bytes each.
class TileShapes {
  public:
    explicit TileShapes(int length) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        const auto set = [&](int tile, int rows, int row_bytes) {
            shapes.rows[tile] = static_cast<uint8_t>(rows), shapes.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
        };
        set(0, TILE_ROWS, 4 * LANES), set(1, TILE_ROWS, 4 * LANES), set(2, TILE_ROWS, length),
            set(3, length / 4, 4 * LANES);
        __asm__ volatile("" : : "r"(&shapes) : "memory");  // the compiler does not know that all of it is read
        _tile_loadconfig(&shapes);
    }
    ~TileShapes() { _tile_release(); }
    TileShapes(const TileShapes&) = delete;
};

// Adds groups to the sums of a block's first rows, float32 [num_rows][32]; ROWS is num_rows or more.
template <int GROUPS, int ROWS>
void add_groups(const UnpackedGroup* weights, int num_groups, const RoundedUnit* x, int num_rows, float* sums) {
    constexpr int LENGTH = UNIT / GROUPS;
    alignas(64) int32_t dots[2][TILE_ROWS][LANES];
    const auto multiply = [&](int i) {
        const RoundedUnit* const unit = x + i / GROUPS * TILE_ROWS;
        __asm__ volatile("" : : : "memory");  // nor that tiles are read from memory
        _tile_loadd(2, unit->codes + i % GROUPS * LENGTH, sizeof(RoundedUnit));
        _tile_loadd(3, weights[2 * i].codes, 64);
        if (i % 2 == 0) {
            _tile_zero(0);
            _tile_dpbssd(0, 2, 3);
            _tile_stored(0, dots[0], 64);
        } else {
            _tile_zero(1);
            _tile_dpbssd(1, 2, 3);
            _tile_stored(1, dots[1], 64);
        }
    };
    F16 own[ROWS];
    multiply(0);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) own[r] = r < num_rows ? load(sums + r * PANEL) : f16(0.0f);
    for (int i = 0; i < num_groups; ++i) {
        if (i + 1 < num_groups) multiply(i + 1);
        const RoundedUnit* const unit = x + i / GROUPS * TILE_ROWS;
        const Scales scales = weights[2 * i].scales;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const F16 sum_x = f16(GROUPS == 1 ? unit[r].sum : unit[r].halves[i % GROUPS]);
            const F16 dot = {_mm512_cvtepi32_ps(_mm512_load_si512(dots[i % 2][r]))};
            own[r] = madd(f16(unit[r].scale), nmadd(scales.minimum, sum_x, scales.scale * dot), own[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
        if (r < num_rows) store(sums + r * PANEL, own[r]);
}

inline UnpackedGroup* unpacked_groups() {
    static thread_local UnpackedGroup groups[CHUNK_UNITS * 2 * 2];  // two groups of a unit, two sixteens of outputs
    return groups;
}

// The sums of one panel, float32 [num_rows][32], as rows_times_panels makes them.
template <class CODES, int GROUPS>
void tiles_times_panel(const Format& format, int num_units, const char* panel, const RoundedUnit* x, int num_rows,
                       float* sums) {
    const Format f = format;
    UnpackedGroup* const weights = unpacked_groups();
    const __m512i table = spread_table(f.table);
    const TileShapes shapes(UNIT / GROUPS);
    for (int i = 0; i < num_rows * PANEL; i += LANES) store(sums + i, f16(0.0f));
    for (int first = 0; first < num_units; first += CHUNK_UNITS, x += CHUNK_UNITS * TILE_ROWS) {
        const int count = num_units - first < CHUNK_UNITS ? num_units - first : CHUNK_UNITS;
        for (int i = 0; i < count; ++i) {
            const char *const head = panel + f.head_of(first + i), *const unit = panel + f.unit_at(first + i);
            const char* codes = unit + f.level_bytes();
            for (int n = 0; n < 2; ++n, codes += 2 * CODES::BITS * UNIT)
                for (int g = 0; g < GROUPS; ++g) {
                    UnpackedGroup& to = weights[2 * (GROUPS * i + g) + n];
                    to.scales = scales_of<CODES>(f, head, unit, g, n * LANES);
                    constexpr int WORDS = UNIT_WORDS / GROUPS;
                    for (int j = 0; j < WORDS; ++j)
                        _mm512_store_si512(to.codes + 64 * j, signed_codes<CODES>(codes, g * WORDS + j, table));
                }
        }
        // The next units are fetched bit by bit, into the second cache.
        const char* ahead = panel + f.head_of(first + count);
        const size_t bytes = CHUNK_UNITS * f.unit_bytes() + CHUNK_UNITS / f.head_units * f.head_bytes();
        const size_t part = bytes * TILE_ROWS / (2 * static_cast<size_t>(num_rows)) + 64;
        for (int row = 0; row < num_rows; row += TILE_ROWS) {
            const RoundedUnit* const block = x + units_of_blocks(num_rows, num_units, row / TILE_ROWS);
            const int left = num_rows - row;
            for (int n = 0; n < 2; ++n) {
                for (const char* const end = ahead + part; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
                const auto add = left > 8   ? add_groups<GROUPS, 16>
                                 : left > 4 ? add_groups<GROUPS, 8>
                                            : add_groups<GROUPS, 4>;
                add(weights + n, count * GROUPS, block, left, sums + row * PANEL + n * LANES);
            }
        }
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
