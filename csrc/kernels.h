// The data of the kernels, and the table of kernels that each instruction set fills. This file is the same for all
// sets.
//
// Weights are packed in *panels* of 32 outputs: for each step along the inputs, 128 consecutive bytes hold the weights
// of all 32 outputs, so a panel is read as one sequential stream (docs/development/kernels.md has pictures).
#pragma once

#include <cstddef>
#include <cstdint>

#include "inline.h"
#include "sampling_loops.h"

namespace forerun {

constexpr int PANEL = 32;           // outputs side by side in a panel
constexpr int MAX_BLOCK_ROWS = 14;  // rows whose accumulators fit into the registers: 14 x 2, two weights, one input
constexpr int KEY_BLOCK = 64;       // logical positions per attention block
constexpr int KEY_RANGE = 4 * KEY_BLOCK;  // keys of one item of work, where a run is shared among threads

constexpr int VALUE_GROUP = 64;  // dimensions of values in bytes that share a scale; of keys a unit does
constexpr int REFINED = 32;      // dimensions of keys with second codes
constexpr int MOST_KEY_DIM = 1024 + REFINED;

constexpr int UNIT = 32;              // inputs of a quantised product that are rounded together
constexpr int UNIT_WORDS = UNIT / 4;  // 32-bit words of their codes
constexpr int TILE_ROWS = 16;         // rows of a block of rounded inputs
// Rows of a quantised product whose sums stay in the nearest cache; 16 were 7 % slower for a prompt, 32 were 2 %.
constexpr int NEAR_ROWS = 64;

// int8: inputs that are rounded to it, and weights of any format that are multiplied with them; keys and values in
// bytes.
enum class Type : int { float32 = 0, bfloat16 = 1, int8 = 2 };

FORERUN_INLINE bool is_quantised(Type type) { return type == Type::int8; }
FORERUN_INLINE int inputs_per_step(Type type) { return type == Type::bfloat16 ? 2 : 1; }
FORERUN_INLINE int steps_of(Type type, int num_in) {
    if (is_quantised(type)) return (num_in + UNIT - 1) / UNIT * UNIT;
    return (num_in + inputs_per_step(type) - 1) / inputs_per_step(type);
}
FORERUN_INLINE size_t bytes_of(Type type) { return type == Type::bfloat16 ? 2 : 4; }

// A head in a cache: its numbers, or in bytes (int8) their codes and behind them the scales of groups, bfloat16.
FORERUN_INLINE int key_groups(int key_dim) { return (key_dim + UNIT - 1) / UNIT; }
FORERUN_INLINE int value_groups(int head_dim) { return (head_dim + VALUE_GROUP - 1) / VALUE_GROUP; }
FORERUN_INLINE size_t kept_bytes(Type type, int dim, int num_groups) {
    const size_t numbers = static_cast<size_t>(dim);
    return type == Type::int8 ? numbers + 2 * static_cast<size_t>(num_groups) : numbers * bytes_of(type);
}

// The order of dimensions in a head's byte keys: dimensions of similar size share a scale, the largest first. Where
// key_dim is more than head_dim, the first REFINED dimensions have second codes at the end, for the rest that the first
// codes leave, and queries repeat their numbers there: where keys have a bias, some dimensions are a hundred times as
// large as others. of: [kv heads, key_dim], or null = as they come.
struct KeyOrder {
    int key_dim;
    const uint16_t* of;

    FORERUN_INLINE const uint16_t* head(int kv_head) const {
        return of ? of + static_cast<size_t>(kv_head) * static_cast<size_t>(key_dim) : nullptr;
    }
};
FORERUN_INLINE size_t key_bytes(Type type, const KeyOrder& order) {
    return kept_bytes(type, order.key_dim, key_groups(order.key_dim));
}
FORERUN_INLINE size_t value_bytes(Type type, int head_dim) {
    return kept_bytes(type, head_dim, value_groups(head_dim));
}

constexpr int LEAST_SMALL = -15;  // of the numbers of a small table, which are 32 at most

// What is subtracted from quantised weights: one zero point for all codes, one for each group, or minimums of the
// groups.
enum class Offset : int { zero = 0, zeros = 1, minimums = 2 };

// How the panels of a quantised matrix are packed, from one panel on. A panel is walked unit by unit; `head_units` of
// them follow a head with float scales, and zeros or minimums behind them. With two levels these are factors, and each
// unit begins with integer scales and minimums. Then come its codes, eight outputs at a time (quantised.h).
struct Format {
    int bits;          // of a code: 2 to 6, or 8
    int groups;        // of a unit: 1 or 2
    int head_units;    // units that share a head
    int number_bytes;  // of a number of a head: 4 float32, 2 float16, 1 the exponent of a float32 that is a power of
                       // two, or 0
    bool two_levels;
    Offset offset;
    int zero;                      // of Offset::zero
    bool looks_up;                 // codes of 4 bits stand for the numbers of `table`; offset and zero are 0
    alignas(16) int8_t table[16];  // from -127 to 127
    int first_panel;
    const char* data;  // of this panel

    FORERUN_INLINE int head_groups() const { return two_levels ? 1 : groups; }
    // Whether all numbers of the table are from -15 to 16.
    FORERUN_INLINE bool has_small_table() const {
        for (const int8_t number : table)
            if (number < LEAST_SMALL || number > LEAST_SMALL + 31) return false;
        return looks_up;
    }
    FORERUN_INLINE size_t width() const { return static_cast<size_t>(number_bytes); }
    FORERUN_INLINE bool is_centred() const { return bits == 8 && offset == Offset::zero && zero == 128; }
    // Bytes from the beginning of a head to a scale (what = 0), or to what is subtracted (1).
    FORERUN_INLINE size_t number_at(int group, int what, int lane) const {
        return static_cast<size_t>((group * (offset == Offset::zero ? 1 : 2) + what) * PANEL + lane) * width();
    }
    // The same from the beginning of a unit to its integers.
    FORERUN_INLINE size_t level_at(int group, int what, int lane) const {
        return static_cast<size_t>((group * (offset == Offset::minimums ? 2 : 1) + what) * PANEL + lane);
    }
    FORERUN_INLINE size_t head_bytes() const { return number_at(head_groups(), 0, 0); }
    FORERUN_INLINE size_t level_bytes() const { return two_levels ? level_at(groups, 0, 0) : 0; }
    FORERUN_INLINE size_t code_bytes() const { return static_cast<size_t>(bits) * UNIT; }  // of eight outputs
    FORERUN_INLINE size_t unit_bytes() const { return level_bytes() + PANEL / 8 * code_bytes(); }
    // Bytes from the beginning of a panel to the head of a unit, and to the unit.
    FORERUN_INLINE size_t head_of(int unit) const {
        return static_cast<size_t>(unit / head_units) * (head_bytes() + static_cast<size_t>(head_units) * unit_bytes());
    }
    FORERUN_INLINE size_t unit_at(int unit) const {
        return static_cast<size_t>(unit / head_units + 1) * head_bytes() + static_cast<size_t>(unit) * unit_bytes();
    }
    FORERUN_INLINE size_t panel_bytes(int num_units) const {
        return (unit_at(num_units - 1) + unit_bytes() + 63) / 64 * 64;
    }
};

// Where the bits of a code lie among the codes of eight outputs and a unit. Codes of 8 bits have a byte each, which is
// the code less 128, four inputs of an output side by side. Of other codes two share a byte with their low 4 bits, or
// four with their low 2 where they have 2 or 3, and the bits above are in bytes that each hold several codes.
FORERUN_INLINE constexpr int num_low_bits(int bits) { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
struct Place {
    int byte, shift;
};
FORERUN_INLINE Place low_bits(int bits, int input, int output) {
    const int low = num_low_bits(bits), codes_per_byte = 8 / low, word = input / 4;
    return {word / codes_per_byte * 32 + 4 * output + input % 4, word % codes_per_byte * low};
}
FORERUN_INLINE Place high_bits(int bits, int input, int output) {  // of 3, 5 or 6 bits
    const int low = num_low_bits(bits), codes_per_byte = 8 / (bits - low), word = input / 4;
    return {low * UNIT + word / codes_per_byte * 32 + 4 * output + input % 4, word % codes_per_byte * (bits - low)};
}
FORERUN_INLINE int bits_at(const char* codes, Place place, int mask) {
    return static_cast<uint8_t>(codes[place.byte]) >> place.shift & mask;
}
FORERUN_INLINE int code_at(int bits, const char* codes, int input, int output) {
    const Place low = low_bits(bits, input, output);
    if (bits == 8) return bits_at(codes, low, 255) ^ 128;
    const int num_low = num_low_bits(bits), found = bits_at(codes, low, (1 << num_low) - 1);
    if (bits == num_low) return found;
    return found | bits_at(codes, high_bits(bits, input, output), (1 << (bits - num_low)) - 1) << num_low;
}

// The codes that a kernel of quantised products is compiled for: their bits, and whether 4 bits are looked up in a
// table. CENTRED: codes of 8 bits with the zero point 128, which their product has subtracted already.
enum class Lookup { none, table, small_table };
template <int BITS_, Lookup LOOKUP = Lookup::none, bool CENTRED = false>
struct Codes {
    static constexpr int BITS = BITS_;
    static constexpr bool LOOKED_UP = LOOKUP != Lookup::none;
    static constexpr bool SMALL = LOOKUP == Lookup::small_table;
    static constexpr bool SIGNED = BITS == 8 || LOOKED_UP;        // the multiplied numbers have a sign
    static constexpr bool HAS_MINIMUMS = !LOOKED_UP && !CENTRED;  // whether something is subtracted behind the product
};
// The same codes, unpacked once for many rows.
template <class CODES>
struct Unpacked : CODES {};

// A packed matrix. `paired`: a panel holds 16 outputs of one matrix and the same 16 of a second (gate and up), which
// lets the activation function be applied before anything is written.
struct Matrix {
    Type type;
    bool paired;
    int num_out;    // outputs of one matrix, padding excluded
    int num_in;     // inputs, padding excluded
    int num_steps;  // steps_of(type, num_in)
    int num_panels;
    const void* data;       // num_panels x panel_bytes, aligned to 64
    const float* bias;      // num_panels x 32, or null
    const Format* formats;  // of quantised weights, by ascending first panel
    int num_formats;

    FORERUN_INLINE const Format& format_of(int panel) const {
        int i = 0;
        while (i + 1 < num_formats && formats[i + 1].first_panel <= panel) ++i;
        return formats[i];
    }
    FORERUN_INLINE const char* panel_at(int panel) const {
        if (!is_quantised(type)) return static_cast<const char*>(data) + panel_bytes() * static_cast<size_t>(panel);
        const Format& f = format_of(panel);
        return f.data + f.panel_bytes(num_steps / UNIT) * static_cast<size_t>(panel - f.first_panel);
    }
    FORERUN_INLINE size_t panel_bytes() const {  // of the largest panel
        if (!is_quantised(type)) return static_cast<size_t>(num_steps) * 128;
        size_t most = 0;
        for (int i = 0; i < num_formats; ++i) {
            const size_t size = formats[i].panel_bytes(num_steps / UNIT);
            most = size > most ? size : most;
        }
        return most;
    }
    FORERUN_INLINE size_t bytes() const {
        if (!is_quantised(type)) return panel_bytes() * static_cast<size_t>(num_panels);
        const Format& last = format_of(num_panels - 1);
        const size_t size = last.panel_bytes(num_steps / UNIT);
        return static_cast<size_t>(panel_at(num_panels - 1) - static_cast<const char*>(data)) + size;
    }
};

// Rows of inputs in the layout of the linear kernels: 32-bit words (two bfloat16 or one float32), in blocks of up to 14
// rows, word s of all rows of a block side by side. The number of rows decides the blocks, but never the order of a
// sum. For quantised products they are plain rows of float32 until `product` rounds them (see quantised.h).
struct Inputs {
    uint32_t* words;
    Type type;
    int num_rows;
    int num_steps;

    FORERUN_INLINE int num_blocks() const {
        return num_rows <= MAX_BLOCK_ROWS ? 1
               : num_rows <= 16           ? 2
                                          : (num_rows + MAX_BLOCK_ROWS - 3) / (MAX_BLOCK_ROWS - 2);
    }
    FORERUN_INLINE int block_start(int b) const {
        return static_cast<int>(static_cast<int64_t>(b) * num_rows / num_blocks());
    }
    FORERUN_INLINE int block_of(int row) const {
        int b = static_cast<int>(static_cast<int64_t>(row) * num_blocks() / num_rows);
        while (block_start(b + 1) <= row) ++b;
        while (block_start(b) > row) --b;
        return b;
    }
};

enum class Act : int { silu, gelu, gelu_tanh, relu, clamped_silu };

enum class Finish : int {
    store,      // out = product + bias
    add,        // out += product + bias: the residual stream
    gated,      // inputs of the next product = act(gate) * up, both bounded and up + 1 where act is clamped_silu
    activated,  // inputs of the next product = act(product + bias)
    logits,     // out = scale (product + bias), capped
    argmax,     // per row, the largest logit in the given panels and its lowest id
};

// The largest logit of a row so far.
struct Best {
    float value;
    int32_t id;
};

// The sum of e^(logit - top) over the logits of a row so far. top: the largest of these logits.
struct Odds {
    float top = -__builtin_inff();
    alignas(64) float sums[16] = {};
};

// NaN counts as largest, as in numpy's argmax; the lowest id wins a tie, in whatever order they come.
FORERUN_INLINE bool beats(const Best& a, const Best& b) {
    const bool nan = a.value != a.value, other_nan = b.value != b.value;
    if (nan != other_nan) return nan;
    if (nan || a.value == b.value) return a.id < b.id;
    return a.value > b.value;
}

// Quantised panels that are read side by side. With more rows the sums would not stay in the nearest cache, and
// arithmetic takes the time.
FORERUN_INLINE int num_streams(int num_rows) { return num_rows <= 16 ? 4 : 1; }
FORERUN_INLINE size_t sum_floats(int num_rows) {  // at most, of as many rows and fewer
    const int few = num_rows < 16 ? num_rows : 16, of_few = few * num_streams(few);
    return static_cast<size_t>(num_rows > of_few ? num_rows : of_few) * PANEL;
}

// How logits are scaled: by a factor, and then to c tanh(logit / c) with a cap c; 0 = no cap.
struct LogitRange {
    float scale, cap;
    FORERUN_INLINE bool is_plain() const { return scale == 1.0f && cap == 0.0f; }
};

// Where a product is written. out: float32 [num_rows, stride]. next, act: for `gated` and `activated`. best: for
// `argmax`, one per row, which is updated. odds: null, or beside best.
struct Output {
    Finish finish;
    float* out;
    size_t stride;
    Inputs next;
    Act act;
    LogitRange range;
    Best* best;
    Odds* odds = nullptr;
};

FORERUN_INLINE Output stored(float* out, size_t stride) {
    return {Finish::store, out, stride, {}, Act::silu, {1, 0}, nullptr};
}
FORERUN_INLINE Output added(float* out, size_t stride) {
    return {Finish::add, out, stride, {}, Act::silu, {1, 0}, nullptr};
}
FORERUN_INLINE Output activated_as(const Inputs& next, Act act, bool gated) {
    return {gated ? Finish::gated : Finish::activated, nullptr, 0, next, act, {1, 0}, nullptr};
}
FORERUN_INLINE Output logits_of(float* out, size_t stride, LogitRange range) {
    return {range.is_plain() ? Finish::store : Finish::logits, out, stride, {}, Act::silu, range, nullptr};
}
FORERUN_INLINE Output best_of(Best* best, Odds* odds, LogitRange range) {
    return {Finish::argmax, nullptr, 0, {}, Act::silu, range, best, odds};
}

// One sequence's run of new rows within a pass, for attention.
struct Run {
    int first_row;
    int num_rows;
    int cached;              // rows that every row of the run sees, in order
    int pending;             // rows behind them that are written and not kept; 0 in a chain
    const int32_t* rows;     // [cached + pending + num_rows] physical row of each, the run's own last
    const int32_t* parents;  // [pending + num_rows] index of each one's parent among these, -1 = cached; null = a chain
};

// What a row sees: the rows before it and itself, the cached rows and its whole run, or cached rows alone, which are
// another sequence's (an encoder's output for a source).
enum class Sees { past, all, source };

// One more than the last row that a row at a depth of a run sees; with `all` the run is a chain.
FORERUN_INLINE int seen_end(Sees sees, const Run& run, int depth) {
    return run.cached + (sees == Sees::past ? depth + 1 : sees == Sees::all ? run.num_rows : 0);
}

// A bias for the score at each distance from row to key, by query head. A head has `width()` biases, for the distances
// reach, reach - 1 .. 1 - reach - KEY_BLOCK. All distances of `reach - KEY_BLOCK` and more have one bias, and so have
// all distances below its negative.
struct Biases {
    const float* rows;  // [heads, width()], or null
    int reach;
    int width() const { return 2 * reach + KEY_BLOCK; }

    // The biases of a row at some position for the KEY_BLOCK keys from `start` on.
    const float* of(int head, int position, int start) const {
        const int first = reach - (position - start);
        return rows + static_cast<size_t>(head) * static_cast<size_t>(width()) +
               (first < 0           ? 0
                : first > 2 * reach ? 2 * reach
                                    : first);
    }
};

struct Attention {
    Type type;       // of keys and values
    const float* q;  // [rows, q_stride], rotated and scaled
    size_t q_stride;
    const void* keys;  // [pool rows, num_kv_heads] heads, see kept_bytes; of a plain type as wide as head_dim
    const void* values;
    int num_heads, num_kv_heads, head_dim;
    KeyOrder order;  // key_dim = head_dim unless keys are in bytes
    int window;      // 0 = none
    float softcap;   // of scores: c tanh(score / c); 0 = none
    float* out;      // [rows, out_stride] float32, or null
    size_t out_stride;
    Inputs next;  // the inputs of the next product, written where out is null
    Sees sees = Sees::past;
    Biases biases = {};            // of scores, behind softcap
    const float* sinks = nullptr;  // [num_heads], a further score of each head without a value; null = none
    const float* gates = nullptr;  // [rows, q_stride]: the output is multiplied by their sigmoid; null = it is not
};

// A unit of a row that is rounded to scale * codes. sum, halves: of all codes, of the first half and of the second. The
// same unit of all rows is side by side.
struct RoundedUnit {
    int8_t codes[UNIT];
    float scale, sum, halves[2];
};

// Key heads [first, last).
struct Heads {
    int first, last;
};

// Where a rounded group of weights goes: its codes, scale (bfloat16) and zero point.
constexpr int MOST_GROUP = 256;
struct RoundedGroup {
    uint8_t* codes;
    uint16_t* scale;
    uint8_t* zero;
};

struct DeltaRule;  // recurrence.h
struct StateItem;

struct Kernels {
    // Product of every row with the panels [first, last). sums: sum_floats, aligned to 64.
    void (*linear)(const Matrix&, const Inputs&, const Output&, int first, int last, float* sums);
    // Where prepared_bytes is not 0, `linear` takes the output of `prepare` in place of the words: units of int8 for
    // quantised weights, floats where pairs of bfloat16 are widened. It prepares rows [first, last), which are whole
    // blocks.
    size_t (*prepared_bytes)(const Matrix&, int num_rows);
    void (*prepare)(const Matrix&, const Inputs&, int first, int last, void* to);
    // float32 row -> inputs of a product.
    void (*put_row)(const Inputs&, int row, const float* x, int n);
    // Root mean square norm of one row (Zhang and Sennrich 2019, eq. 4).
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Layer norm of one row (Ba et al. 2016, eq. 4). bias: or null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int n, float eps, float* out);
    void (*act_mul)(Act act, const float* gate, const float* up, int n, float* out);  // act(gate) * up
    // Rotary positions (Su et al. 2021), pairs (i, i + n/2); cos, sin [n], the first half of sin negated.
    void (*rope)(const float* x, const float* cos, const float* sin, int n, float scale, float* out);
    // The same of pairs (2i, 2i + 1); cos and sin in the same order as above.
    void (*rope_adjacent)(const float* x, const float* cos, const float* sin, int n, float scale, float* out);
    void (*to_type)(const float* x, int n, Type type, void* out);
    // Heads of keys or of values, float32 [num_heads, head_dim], as a cache has them.
    void (*keep_keys)(const float* x, int num_heads, int head_dim, const KeyOrder&, Type type, void* out);
    void (*keep_values)(const float* x, int num_heads, int head_dim, Type type, void* out);
    void (*from_type)(const void* x, int n, Type type, float* out);
    // One row of an embedding that is packed as a matrix.
    void (*unpack_row)(const Matrix&, int row, float* out);
    // Rows [first, last) of a run, all query heads of some key heads. range: -1 = all that the rows see; otherwise the
    // keys of this range alone, and the states go to `parts`, part_floats for each row and query head. scratch:
    // attention_scratch floats.
    void (*attention)(const Attention&, const Run&, Heads, int first, int last, int range, float* parts,
                      float* scratch);
    // One row and query head from its parts, which are `stride` floats apart. scratch: part_floats.
    void (*combine)(const Attention&, int row, int head, const float* parts, int num_parts, size_t stride,
                    float* scratch);
    // One item of a gated delta rule. scratch: delta_scratch floats.
    void (*delta_rule)(const DeltaRule&, const StateItem&, float* scratch);
    // A causal convolution of one row: the sum over the inputs of its window [conv][width], the oldest first, times
    // taps [conv, width]. bias: or null.
    void (*convolve)(Type, const void* const* window, const float* taps, const float* bias, int width, int conv,
                     float* out);
    // `group` weights, a multiple of 16, to 4 or 8 bits.
    void (*round_group)(const float* x, int group, int bits, const RoundedGroup& to);
    SamplingKernels sampling;
};

// Floats of one query's state over a range: its maximum and sum, then values.
FORERUN_INLINE size_t part_floats(int head_dim) { return 16 + (static_cast<size_t>(head_dim) + 15) / 16 * 16; }

// Whether AVX-512 multiplies pairs of bfloat16 as floats, with the same bits. cpu.cpp knows where that is faster.
extern bool widens_pairs;
// Whether this process may multiply tiles of bytes, and whether quantised products of many rows do, with the same bits.
extern const bool has_byte_tiles;
extern bool multiplies_tiles;

}  // namespace forerun
