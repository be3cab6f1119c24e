// Bindings of the kernels: matrices and single operators. The interpreter lock is released while they run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "backend.h"
#include "bindings.h"
#include "cpu.h"
#include "matrix.h"
#include "memory.h"
#include "spec.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace forerun;

namespace {

Inputs make_inputs(Scratch& scratch, const Matrix& w, int num_rows) {
    return {scratch.words(static_cast<size_t>(num_rows) * w.num_steps), w.type, num_rows, w.num_steps};
}

void put_rows(Backend& b, int thread, const Inputs& x, const float* rows, int width) {
    b.team.tiles(thread, x.num_rows,
                 [&](int i) { b.kernels.put_row(x, i, rows + static_cast<size_t>(i) * width, width); });
}

// out = x w, or out += x w.
template <Finish finish>
void linear(Backend& b, const Packed& w, Address x, int num_rows, Address out) {
    Scratch scratch;
    const Matrix& m = w.matrix();
    const Inputs inputs = make_inputs(scratch, m, num_rows);
    b.team.run(false, [&](int thread) {
        put_rows(b, thread, inputs, at<const float>(x), m.num_in);
        const Output to = finish == Finish::add ? added(at<float>(out), static_cast<size_t>(m.num_out))
                                                : stored(at<float>(out), static_cast<size_t>(m.num_out));
        product(b, thread, m, inputs, to);
    });
}

// silu(gate x) * (up x), then the product with `down`, added to out.
void gated_linear(Backend& b, const Packed& gate_up, const Packed& down, Address x, int num_rows, Address out) {
    Scratch scratch, second;
    const Inputs inputs = make_inputs(scratch, gate_up.matrix(), num_rows);
    const Inputs between = make_inputs(second, down.matrix(), num_rows);
    b.team.run(false, [&](int thread) {
        put_rows(b, thread, inputs, at<const float>(x), gate_up.matrix().num_in);
        product(b, thread, gate_up.matrix(), inputs, activated_as(between, Act::silu, true));
        product(b, thread, down.matrix(), between, added(at<float>(out), static_cast<size_t>(down.matrix().num_out)));
    });
}

void rms_norm(Backend& b, Address x, Address weight, int num_rows, int width, float eps, Address out) {
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            const size_t offset = static_cast<size_t>(i) * width;
            b.kernels.rms_norm(at<const float>(x) + offset, at<const float>(weight), width, eps,
                               at<float>(out) + offset);
        });
    });
}

// bias: 0 = none.
void layer_norm(Backend& b, Address x, Address weight, Address bias, int num_rows, int width, float eps, Address out) {
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            const size_t o = static_cast<size_t>(i) * width;
            b.kernels.layer_norm(at<const float>(x) + o, at<const float>(weight), at<const float>(bias), width, eps,
                                 at<float>(out) + o);
        });
    });
}

// act(gate) * up.
void gated(Backend& b, const std::string& name, Address gate, Address up, int num_rows, int width, Address out) {
    const Act act = act_of(name);
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            const size_t o = static_cast<size_t>(i) * width;
            b.kernels.act_mul(act, at<const float>(gate) + o, at<const float>(up) + o, width, at<float>(out) + o);
        });
    });
}

// x [rows, heads, dim]; cos, sin [rows, dim].
void rope(Backend& b, Address x, Address cos, Address sin, int num_rows, int num_heads, int dim, Address out) {
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            for (int head = 0; head < num_heads; ++head) {
                const size_t o = (static_cast<size_t>(i) * num_heads + head) * dim, r = static_cast<size_t>(i) * dim;
                b.kernels.rope(at<const float>(x) + o, at<const float>(cos) + r, at<const float>(sin) + r, dim, 1.0f,
                               at<float>(out) + o);
            }
        });
    });
}

// q [num_rows, heads, dim] scaled; keys, values [pool_rows, kv heads, dim]; out as q. dim must be even. sees_all: rows
// see the whole of their run, and not only what comes before them.
void attention(Backend& b, int type, Address q, int num_rows, Address keys, Address values, int64_t pool_rows,
               int num_heads, int num_kv_heads, int dim, int window, int block_tokens, int num_runs,
               const Numbers& numbers, Address out, bool sees_all) {
    if (dim % 2 != 0)
        throw std::invalid_argument("native attention multiplies pairs of dimensions: head_dim must be even, not " +
                                    std::to_string(dim));
    if (static_cast<Type>(type) == Type::int8 && dim > MOST_KEY_DIM)
        throw std::invalid_argument("heads are too large for bytes");
    const size_t stride = static_cast<size_t>(num_heads) * dim;
    const Attention a{static_cast<Type>(type),
                      at<const float>(q),
                      stride,
                      at<const void>(keys),
                      at<const void>(values),
                      num_heads,
                      num_kv_heads,
                      dim,
                      {dim, nullptr},
                      window,
                      0,
                      at<float>(out),
                      stride,
                      {},
                      sees_all ? Sees::all : Sees::past};
    const Runs expanded(numbers, num_runs, block_tokens, pool_rows);
    expanded.check_rows(num_rows);
    const std::vector<Run>& runs = expanded.runs;
    int longest = 0;
    for (const Run& run : runs) longest = std::max(longest, run.num_rows);
    std::vector<Scratch> scratch(static_cast<size_t>(b.team.num_threads()));
    std::vector<float*> floats;
    for (Scratch& s : scratch)
        floats.push_back(s.floats(attention_scratch({num_heads, num_kv_heads, dim, window}, longest, 1)));
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_runs * num_kv_heads, [&](int i) {
            const Run& run = runs[static_cast<size_t>(i / num_kv_heads)];
            b.kernels.attention(a, run, {i % num_kv_heads, i % num_kv_heads + 1}, 0, run.num_rows, -1, nullptr,
                                floats[static_cast<size_t>(thread)]);
        });
    });
}

std::unique_ptr<Packed> pack(Backend& b, bool bfloat16, const std::vector<std::pair<Address, int>>& parts, int num_in,
                             bool paired, Address bias, bool give_back) {
    std::vector<Part> rows;
    for (const auto& [address, count] : parts) rows.push_back({at<const void>(address), count});
    const Type type = bfloat16 ? Type::bfloat16 : Type::float32;
    return std::make_unique<Packed>(b.team, type, rows, num_in, paired, at<const float>(bias), give_back);
}

// Of each section its outputs, then the fields of its Format that ops/cpu/packed.py has, the numbers of its table last.
using SectionNumbers = std::vector<std::array<int, 9 + 16>>;

std::vector<Section> sections_of(const SectionNumbers& numbers) {
    std::vector<Section> found;
    for (const std::array<int, 9 + 16>& n : numbers) {
        Format format{n[1], n[2], n[3], n[4], n[5] != 0, static_cast<Offset>(n[6]), n[7], n[8] != 0, {}, 0, nullptr};
        for (size_t i = 0; i < 16; ++i) format.table[i] = static_cast<int8_t>(n[9 + i]);
        found.push_back({n[0], format});
    }
    return found;
}

std::unique_ptr<Packed> pack_quantised(Backend&, const SectionNumbers& sections, int num_in, bool paired,
                                       Address bias) {
    return std::make_unique<Packed>(sections_of(sections), num_in, paired, at<const float>(bias));
}

void check_outputs(const Packed& packed, int first, int count) {
    const Matrix& m = packed.matrix();
    const int num_out = m.paired ? 2 * m.num_out : m.num_out;
    require(first >= 0 && count >= 0 && first <= num_out && count <= num_out - first,
            "a packed matrix has no such rows");
}

bool fill(Backend& b, Packed& packed, int first, int count, const std::array<Address, 5>& rows) {
    check_outputs(packed, first, count);
    const auto& [codes, scales, subtracted, scale_levels, minimum_levels] = rows;
    return packed.fill(b.team, first, count,
                       {at<const uint8_t>(codes), at<const float>(scales), at<const float>(subtracted),
                        at<const int8_t>(scale_levels), at<const uint8_t>(minimum_levels)});
}

bool fill_stored(Backend& b, Packed& packed, int first, int count, int type, int file, size_t start, Address numbers) {
    check_outputs(packed, first, count);
    return packed.fill_stored(b.team, first, count, {type, file, start, at<const int32_t>(numbers)});
}

// x [rows, groups * group]; codes like x, scales and zeros [rows, groups].
void round_groups(Backend& b, Address x, size_t num_groups, int group, int bits, Address codes, Address scales,
                  Address zeros) {
    if (group < 16 || group > MOST_GROUP || group % 16 != 0 || (bits != 4 && bits != 8))
        throw std::invalid_argument("groups of 16 to 256 weights are rounded to 4 or 8 bits");
    constexpr size_t PER_TILE = 128;
    b.team.run(num_groups <= 2 * PER_TILE, [&](int thread) {
        b.team.tiles(thread, static_cast<int>((num_groups + PER_TILE - 1) / PER_TILE), [&](int tile) {
            const size_t first = static_cast<size_t>(tile) * PER_TILE, last = std::min(num_groups, first + PER_TILE);
            for (size_t i = first; i < last; ++i) {
                const size_t at_weight = i * static_cast<size_t>(group);
                b.kernels.round_group(
                    at<const float>(x) + at_weight, group, bits,
                    {at<uint8_t>(codes) + at_weight, at<uint16_t>(scales) + i, at<uint8_t>(zeros) + i});
            }
        });
    });
}

// Whether it could, and whether all fits.
std::pair<bool, bool> round_stored(Backend& b, Packed& packed, int first, int count, int type, int file, size_t start,
                                   Address numbers, int group) {
    check_outputs(packed, first, count);
    bool fits = true;
    const StoredRows rows{type, file, start, at<const int32_t>(numbers)};
    const bool is_good = packed.round_stored(b.team, first, count, rows, group, b.kernels.round_group, fits);
    return {is_good, fits};
}

}  // namespace

void bind_ops(nb::module_& m) {
    m.attr("PANEL") = PANEL;
    m.attr("KEY_BLOCK") = KEY_BLOCK;
    m.attr("UNIT") = UNIT;
    m.attr("GIVE_BACK_BYTES") = GIVE_BACK_BYTES;
    m.def("allocated_bytes", &allocated_bytes, "num_bytes"_a,
          "Counts the bytes that the system gives for a buffer: whole pages from the size of a huge one on.");
    m.def(
        "packed_bytes",
        [](int num_out, int num_in, bool bfloat16, bool paired) {
            return packed_bytes(bfloat16 ? Type::bfloat16 : Type::float32, num_out, num_in, paired);
        },
        "num_out"_a, "num_in"_a, "bfloat16"_a, "paired"_a = false,
        "Counts the bytes of a packed matrix, padding included.\n\nnum_out: the number of outputs of all parts.");
    m.def(
        "quantised_bytes",
        [](const SectionNumbers& sections, int num_in, bool paired) {
            return packed_bytes(sections_of(sections), num_in, paired);
        },
        "sections"_a, "num_in"_a, "paired"_a = false,
        "Counts the bytes of a packed quantised matrix.\n\nsections: as `pack_quantised` takes them.");
    nb::class_<Packed>(m, "Packed", "A matrix in panels; see docs/development/kernels.md.")
        .def_prop_ro(
            "num_bytes", [](const Packed& p) { return p.matrix().bytes(); }, "The bytes in memory, padding included.")
        .def_prop_ro(
            "address", [](const Packed& p) { return reinterpret_cast<Address>(p.matrix().data); },
            "The address of the first byte.")
        .def(
            "unpack_row",
            [](const Packed& p, int index, Address out) {
                check_outputs(p, index, 1);
                p.unpack(index, at<void>(out));
            },
            "index"_a, "out"_a, "Writes a row as it was before packing to the address `out`.");
    nb::class_<Backend>(m, "Backend", "The kernels of one instruction set and a team of threads.")
        .def("__init__", [](Backend* self, const std::string& isa,
                            int num_threads) { new (self) Backend(kernels_for(isa), num_threads); })
        .def("pack", &pack, Free())
        .def("pack_quantised", &pack_quantised, Free())
        .def("fill", &fill, Free())
        .def(
            "fill_stored", &fill_stored, Free(), "packed"_a, "first"_a, "count"_a, "type"_a, "file"_a, "start"_a,
            "numbers"_a,
            "Packs rows of a file in the form in which the file stores them; returns False if `fill` must pack them.\n\n"
            "type: the number of the stored type in GGUF files. file: a descriptor. start: the first byte of row 0. numbers: "
            "the address of the rows' numbers, int32, 0 = from row 0 on.")
        .def(
            "round_groups", &round_groups, Free(), "x"_a, "num_groups"_a, "group"_a, "bits"_a, "codes"_a, "scales"_a,
            "zeros"_a,
            "Rounds consecutive groups of float32 to 4 or 8 bits.\n\nWrites codes (uint8, one for each weight), scales "
            "(bfloat16) and zeros (uint8), one for each group.")
        .def(
            "round_stored", &round_stored, Free(), "packed"_a, "first"_a, "count"_a, "type"_a, "file"_a, "start"_a,
            "numbers"_a, "group"_a,
            "Rounds rows of a file to 4 bits (ops/quantising.py) and packs them.\n\nReturns whether that was possible, and "
            "whether all scales fit. The other arguments are as for `fill_stored`.")
        .def("linear", &linear<Finish::store>, Free())
        .def("add_linear", &linear<Finish::add>, Free())
        .def("gated_linear", &gated_linear, Free())
        .def("rms_norm", &rms_norm, Free())
        .def("layer_norm", &layer_norm, Free())
        .def("gated", &gated, Free())
        .def("rope", &rope, Free())
        .def("attention", &attention, Free(), "type"_a, "q"_a, "num_rows"_a, "keys"_a, "values"_a, "pool_rows"_a,
             "num_heads"_a, "num_kv_heads"_a, "dim"_a, "window"_a, "block_tokens"_a, "num_runs"_a, "numbers"_a, "out"_a,
             "sees_all"_a);
}
