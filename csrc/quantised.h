// Products of quantised weights with rows that are rounded to int8.
//
// A weight is scale * code - minimum, with codes of 2 to 6 or 8 bits without a sign; a zero point stands for the
// minimum scale * zero. Codes of 4 bits may be places in a table, whose numbers are used as codes from here on. 32
// inputs of a row (a unit) are rounded together: x = scale_x * code_x. So a unit adds scale_x * (scale * sum(code *
// code_x) - minimum * sum(code_x)), where the sums are exact integers. Every output of every row adds its units in
// ascending order, whatever the number of rows is. `Format` says where a panel has its numbers.
//
// The processor's products of bytes take one factor without a sign. AVX-512 (VNNI) adds four products into 32 bits,
// which is exact; 128 times the sum of the inputs is subtracted from codes of 8 bits. AVX2 adds two into 16 bits and
// saturates beyond: codes of up to 4, 5 and 6 bits leave room for the sums of 8, 4 and 2 such pairs. A code of 8 bits
// less 128 is multiplied as |code| * (code_x with the code's sign), which just fits: 2 * 128 * 127 < 2^15. Numbers of a
// table, which have signs, are taken for such codes less 128; those from -15 to 16 and 15 more are codes of 5 bits.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

// ------------------------------------------------------------------------------------------------- rounding

// Numbers below this count as zeros where no larger one is in their unit: 127 over the largest would be infinite.
constexpr float LEAST_ROUNDED = 1e-36f;

// A row with a number that is not finite has scales that are NaN.
inline void round_row(const float* x, int num_in, int num_steps, RoundedUnit* out, int stride) {
    const F16 zero = f16(0.0f);
    for (int k = 0; k < num_steps; k += UNIT, out += stride) {
        const int left = num_in - k;
        F16 a = load_first(x + k, left), b = left > LANES ? load_first(x + k + LANES, left - LANES) : zero;
        const float faults = sum((a - a) + (b - b));
        const float most = largest(max(max(a, zero - a), max(b, zero - b)));
        const bool has_codes = most >= LEAST_ROUNDED && faults == 0.0f;
        if (!has_codes) a = b = zero;
        const F16 inverse = f16(has_codes ? 127.0f / most : 0.0f);
        alignas(64) float scaled[UNIT];
        store(scaled, a * inverse), store(scaled + LANES, b * inverse);
        round_codes(scaled, out->codes, out->halves);
        out->scale = most / 127.0f + faults;
        out->sum = out->halves[0] + out->halves[1];
    }
}

// Units of up to 16 rows are side by side, and unit by unit: a block. All blocks but a single one have room for 16
// rows.
inline int units_stride(int num_rows) { return num_rows < TILE_ROWS ? num_rows : TILE_ROWS; }
inline size_t units_of_blocks(int num_rows, int num_units, int num_blocks) {
    return static_cast<size_t>(num_blocks) * static_cast<size_t>(num_units) *
           static_cast<size_t>(units_stride(num_rows));
}

inline void round_rows(const Matrix& w, const Inputs& x, int first, int last, RoundedUnit* to) {
    for (int row = first; row < last; ++row) {
        const float* from =
            reinterpret_cast<const float*>(x.words + static_cast<size_t>(row) * static_cast<size_t>(w.num_steps));
        RoundedUnit* const block = to + units_of_blocks(x.num_rows, w.num_steps / UNIT, row / TILE_ROWS);
        round_row(from, w.num_in, w.num_steps, block + row % TILE_ROWS, units_stride(x.num_rows));
    }
}

// ------------------------------------------------------------------------------------------------ a panel

// Scales and minimums of a unit and sixteen outputs, of one group. Codes of 8 bits are less 128 in `dot`, and so are
// they here.
struct Scales {
    F16 scale, minimum;
};
inline F16 load_numbers(const Format& f, const char* at) {
    return f.number_bytes == 2   ? load_halves(at)
           : f.number_bytes == 4 ? load(reinterpret_cast<const float*>(at))
                                 : load_powers(at);
}
template <class CODES>
inline Scales scales_of(const Format& f, const char* head, const char* unit, int group, int first_lane) {
    constexpr float SHIFT = CODES::BITS == 8 ? 128.0f : 0.0f;
    const auto number = [&](int what) {
        return load_numbers(f, head + f.number_at(f.two_levels ? 0 : group, what, first_lane));
    };
    F16 scale = number(0);
    if (f.two_levels) scale = scale * load_signed(unit + f.level_at(group, 0, first_lane));
    if (!CODES::HAS_MINIMUMS) return {scale, f16(0.0f)};
    if (f.offset == Offset::zero) return {scale, scale * f16(static_cast<float>(f.zero) - SHIFT)};
    if (f.offset == Offset::zeros) return {scale, scale * (number(1) - f16(SHIFT))};
    F16 minimum = number(1);
    if (f.two_levels) minimum = minimum * load_unsigned(unit + f.level_at(group, 1, first_lane));
    return {scale, SHIFT == 0.0f ? minimum : nmadd(scale, f16(SHIFT), minimum)};
}

// What `dot` multiplies: rows of a unit and codes of sixteens of outputs, both as they lie. Where a set UNPACKS, its
// Operands of Unpacked codes keep both as its product takes them.
template <class CODES>
struct Operands {
    const char* codes;
    void take_rows(const RoundedUnit*, size_t, int) {}
    void take_codes(const char* packed, const int8_t*) { codes = packed; }
    template <int FIRST, int LAST, int N, int ROWS>
    void multiply(const int8_t* table, const RoundedUnit* x, int, I16 (&sums)[N][ROWS]) const {
        dot<CODES, FIRST, LAST>(codes, table, x, sums);
    }
};

// Adds a unit to the sums of ROWS rows, float32 [ROWS][32], for N sixteens of outputs. row: the first one's number.
template <class CODES, int ROWS, int N, int GROUPS>
inline void add_unit(const Operands<CODES>& operands, const int8_t* table, const Scales (&scales)[N][GROUPS],
                     const RoundedUnit* x, int row, float* sums) {
    const auto add_group = [&](auto group) {
        constexpr int G = group, LENGTH = UNIT_WORDS / GROUPS;
        I16 dots[N][ROWS];
        operands.template multiply<G * LENGTH, (G + 1) * LENGTH>(table, x, row, dots);
        for (int r = 0; r < ROWS; ++r) {
            const F16 sum_x = f16(GROUPS == 1 ? x[r].sum : x[r].halves[G]);
            for (int n = 0; n < N; ++n) {
                float* const at = sums + r * PANEL + n * LANES;
                F16 of_unit = scales[n][G].scale * to_float(dots[n][r]);
                if (CODES::HAS_MINIMUMS) of_unit = nmadd(scales[n][G].minimum, sum_x, of_unit);
                store(at, madd(f16(x[r].scale), of_unit, load(at)));
            }
        }
    };
    add_group(std::integral_constant<int, 0>());
    if constexpr (GROUPS == 2) add_group(std::integral_constant<int, 1>());
}

// How far the weights of each panel are fetched ahead. The first cache has few places for lines that are waited for, so
// wide registers have them fetched into the second: on an EPYC that makes a product of 8-bit codes 1.2 to 1.5 times as
// fast as from 1,024 bytes ahead into the first, and of 4 bits up to 1.15 times. On a Xeon 4 bits took as long either
// way. 4 KB ahead are another 5 % faster than 2 on an EPYC where panels are short (experts of 512 inputs), and as fast
// where they are long.
constexpr int QUANTISED_AHEAD_BYTES = WIDE_REGISTERS ? 4096 : 1024;

// The sums of panels that follow each other, float32 [panels][num_rows][32]. They are walked side by side: a processor
// fetches several streams of memory faster than one. x: blocks of rows, whose units are `stride` apart.
template <class CODES, int GROUPS>
void rows_times_panels(const Format& format, int num_units, const char* data, int num_panels, const RoundedUnit* x,
                       int stride, int num_rows, float* sums) {
    const Format f = format;  // a copy, which no store to the sums could change
    const size_t head_bytes = f.head_bytes(), level_bytes = f.level_bytes(), unit_bytes = f.unit_bytes();
    const size_t panel_bytes = f.panel_bytes(num_units);
    constexpr int N = SIXTEENS<GROUPS>, WIDTH = N * LANES, MOST = MOST_ROWS<CODES>;
    constexpr size_t CODE_BYTES = static_cast<size_t>(CODES::BITS) * UNIT / 8 * WIDTH;
    const size_t block_units = static_cast<size_t>(num_units) * static_cast<size_t>(stride);
    const char* first_head = nullptr;  // of the first panel
    int left = 0;                      // units of the head
    Operands<CODES> operands;
    for (int i = 0; i < num_panels * num_rows * PANEL; i += LANES) store(sums + i, f16(0.0f));
    const char* const last_ahead = data + panel_bytes - QUANTISED_AHEAD_BYTES;
    for (int u = 0; u < num_units; ++u, x += stride) {
        const char* const first_line = data;
        // Behind the end of a panel is the next one, which is read beside it; so what comes after all of them is
        // fetched.
        const size_t ahead =
            QUANTISED_AHEAD_BYTES + (data < last_ahead ? 0 : panel_bytes * static_cast<size_t>(num_panels - 1));
        if (left-- == 0) first_head = data, data += head_bytes, left = f.head_units - 1;
        operands.take_rows(x, block_units, num_rows);
        for (int panel = 0; panel < num_panels; ++panel) {
            const size_t at = panel_bytes * static_cast<size_t>(panel);
            const char *const head = first_head + at, *const unit = data + at;
            const char* codes = unit + level_bytes;
            float* const own = sums + panel * num_rows * PANEL;
            for (const char* p = first_line + at; p < codes; p += 64) __builtin_prefetch(p + ahead, 0, NEAR_CACHE);
            for (int lane = 0; lane < PANEL; lane += WIDTH, codes += CODE_BYTES) {
                for (size_t i = 0; i < CODE_BYTES; i += 64) __builtin_prefetch(codes + ahead + i, 0, NEAR_CACHE);
                Scales scales[N][GROUPS];
                for (int n = 0; n < N; ++n)
                    for (int g = 0; g < GROUPS; ++g)
                        scales[n][g] = scales_of<CODES>(f, head, unit, g, lane + n * LANES);
                operands.take_codes(codes, f.table);
                int row = 0;
                const auto take = [&](auto count) {
                    const RoundedUnit* const rows =
                        x + static_cast<size_t>(row / TILE_ROWS) * block_units + row % TILE_ROWS;
                    add_unit<CODES, decltype(count)::value>(operands, f.table, scales, rows, row,
                                                            own + row * PANEL + lane);
                    row += decltype(count)::value;
                };
                while (num_rows - row >= MOST) take(std::integral_constant<int, MOST>());
                if constexpr (MOST > 4) {
                    if (num_rows - row == 7) take(std::integral_constant<int, 7>());
                    if (num_rows - row == 6) take(std::integral_constant<int, 6>());
                    if (num_rows - row == 5) take(std::integral_constant<int, 5>());
                    if (num_rows - row == 4) take(std::integral_constant<int, 4>());
                }
                if (num_rows - row == 3) take(std::integral_constant<int, 3>());
                if (num_rows - row == 2) take(std::integral_constant<int, 2>());
                if (num_rows - row == 1) take(std::integral_constant<int, 1>());
            }
        }
        data += unit_bytes;
    }
}

// Of fewer rows tiles take as long (Qwen2.5-Coder 1.5B, 17, 32, 48 and 64 rows: 125, 151, 195 and 246 ms; without 91,
// 151, 221, 292).
constexpr int LEAST_TILE_ROWS = 33;

// byte_tiles.h, where there are BYTE_TILES
template <class CODES, int GROUPS>
void tiles_times_panel(const Format& f, int num_units, const char* panel, const RoundedUnit* x, int num_rows,
                       float* sums);

template <class CODES>
void any_groups(const Format& f, int num_units, const char* data, int num_panels, const Inputs& x, float* sums) {
    const RoundedUnit* units = reinterpret_cast<const RoundedUnit*>(x.words);
    if constexpr (BYTE_TILES)
        if (multiplies_tiles && x.num_rows >= LEAST_TILE_ROWS) {
            const size_t panel_bytes = f.panel_bytes(num_units);
            for (int i = 0; i < num_panels; ++i, data += panel_bytes, sums += x.num_rows * PANEL)
                (f.groups == 1 ? tiles_times_panel<CODES, 1> : tiles_times_panel<CODES, 2>)(f, num_units, data, units,
                                                                                            x.num_rows, sums);
            return;
        }
    auto product = f.groups == 1 ? rows_times_panels<CODES, 1> : rows_times_panels<CODES, 2>;
    if constexpr (UNPACKS<CODES>)
        if (x.num_rows > TILE_ROWS)
            product = f.groups == 1 ? rows_times_panels<Unpacked<CODES>, 1> : rows_times_panels<Unpacked<CODES>, 2>;
    for (int first = 0; first < x.num_rows; first += NEAR_ROWS) {
        const int num_rows = x.num_rows - first < NEAR_ROWS ? x.num_rows - first : NEAR_ROWS;
        product(f, num_units, data, num_panels, units + units_of_blocks(x.num_rows, num_units, first / TILE_ROWS),
                units_stride(x.num_rows), num_rows, sums + first * PANEL);
    }
}

// The sums of the first panels of [panel, last), float32 [panels][num_rows][32]; returns how many they are.
inline int quantised_panels(const Matrix& w, const Inputs& x, int panel, int last, float* sums) {
    const Format& f = w.format_of(panel);
    int count = 1;
    while (count < num_streams(x.num_rows) && panel + count < last && &w.format_of(panel + count) == &f) ++count;
    const auto looked_up = SMALL_TABLES && f.has_small_table()
                               ? any_groups<Codes<4, SMALL_TABLES ? Lookup::small_table : Lookup::table>>
                               : any_groups<Codes<4, Lookup::table>>;
    const auto product = f.looks_up       ? looked_up
                         : f.bits == 2    ? any_groups<Codes<2>>
                         : f.bits == 3    ? any_groups<Codes<3>>
                         : f.bits == 4    ? any_groups<Codes<4>>
                         : f.bits == 5    ? any_groups<Codes<5>>
                         : f.bits == 6    ? any_groups<Codes<6>>
                         : f.is_centred() ? any_groups<Codes<8, Lookup::none, true>>
                                          : any_groups<Codes<8>>;
    product(f, w.num_steps / UNIT, w.panel_at(panel), count, x, sums);
    return count;
}

// The weights of one output, each operation rounded.
inline void unpack_quantised(const Matrix& w, int row, float* out) {
    const Format& f = w.format_of(row / PANEL);
    const char* const panel = w.panel_at(row / PANEL);
    const int lane = row % PANEL, first = lane / LANES * LANES;
    for (int k = 0; k < w.num_in; ++k) {
        const char *head = panel + f.head_of(k / UNIT), *unit = panel + f.unit_at(k / UNIT);
        const int group = k % UNIT / (UNIT / f.groups);
        const auto number = [&](int what) {
            const char* at = head + f.number_at(f.two_levels ? 0 : group, what, first);
            alignas(64) float numbers[LANES];
            store(numbers, load_numbers(f, at));
            return numbers[lane - first];
        };
        float scale = number(0), subtracted = f.offset == Offset::zero ? static_cast<float>(f.zero) : number(1);
        if (f.two_levels) {
            scale *= static_cast<float>(static_cast<int8_t>(unit[f.level_at(group, 0, lane)]));
            if (f.offset == Offset::minimums)
                subtracted *= static_cast<float>(static_cast<uint8_t>(unit[f.level_at(group, 1, lane)]));
        }
        const char* codes = unit + f.level_bytes() + static_cast<size_t>(lane / 8) * f.code_bytes();
        const int bits = code_at(f.bits, codes, k % UNIT, lane % 8);
        const float code = static_cast<float>(f.looks_up ? f.table[bits] : bits);
        out[k] = f.offset == Offset::minimums ? code * scale - subtracted : (code - subtracted) * scale;
    }
}

}  // namespace FORERUN_ISA
}  // namespace forerun
