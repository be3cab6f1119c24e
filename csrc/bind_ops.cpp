// Bindings of the kernels: matrices, single operators, whole decoders. Tensors come as addresses of contiguous memory that
// the caller keeps alive; forerun/ops/cpu.py checks types and shapes. The interpreter lock is released while they run.
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

#include "cpu.h"
#include "decoder.h"
#include "matrix.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace forerun;

namespace {

using Address = uintptr_t;
using Numbers = std::vector<int32_t>;  // a list is read faster than an array is made of one
using Ids = std::vector<int64_t>;
using Free = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// The runs of a pass, with the physical rows that their block tables name.
struct Runs {
    std::vector<Run> runs;
    std::vector<int32_t> rows;

    // numbers: six for each run (first row, rows, cached, pending, where its table begins, where its parents begin, 0 in a
    // chain), then tables and parents, which are not copied.
    Runs(const Numbers& numbers, int num_runs, int block_tokens) {
        std::vector<size_t> starts;
        for (int i = 0; i < num_runs; ++i) {
            const int32_t* n = numbers.data() + 6 * i;
            starts.push_back(rows.size());
            const int32_t* block = numbers.data() + n[4];
            for (int left = n[1] + n[2] + n[3]; left > 0; left -= block_tokens, ++block)
                for (int j = 0; j < block_tokens && j < left; ++j) rows.push_back(*block * block_tokens + j);
            runs.push_back({n[0], n[1], n[2], n[3], nullptr, n[5] ? numbers.data() + n[5] : nullptr});
        }
        for (size_t i = 0; i < runs.size(); ++i) runs[i].rows = rows.data() + starts[i];
    }
};

Inputs make_inputs(Scratch& scratch, const Matrix& w, int num_rows) {
    return {scratch.words(static_cast<size_t>(num_rows) * w.num_steps), w.type, num_rows, w.num_steps};
}

void put_rows(Backend& b, int thread, const Inputs& x, const float* rows, int width) {
    b.team.tiles(thread, x.num_rows, [&](int i) { b.kernels.put_row(x, i, rows + static_cast<size_t>(i) * width, width); });
}

// out = x w, or out += x w.
template <Finish finish>
void linear(Backend& b, const Packed& w, Address x, int num_rows, Address out) {
    Scratch scratch;
    const Matrix& m = w.matrix();
    const Inputs inputs = make_inputs(scratch, m, num_rows);
    b.team.run(false, [&](int thread) {
        put_rows(b, thread, inputs, at<const float>(x), m.num_in);
        product(b, thread, m, inputs, {finish, at<float>(out), static_cast<size_t>(m.num_out), {}, nullptr});
    });
}

// silu(gate x) * (up x), then the product with `down`, added to out.
void gated_linear(Backend& b, const Packed& gate_up, const Packed& down, Address x, int num_rows, Address out) {
    Scratch scratch, second;
    const Inputs inputs = make_inputs(scratch, gate_up.matrix(), num_rows);
    const Inputs between = make_inputs(second, down.matrix(), num_rows);
    b.team.run(false, [&](int thread) {
        put_rows(b, thread, inputs, at<const float>(x), gate_up.matrix().num_in);
        product(b, thread, gate_up.matrix(), inputs, {Finish::gated, nullptr, 0, between, nullptr});
        product(b, thread, down.matrix(), between,
                {Finish::add, at<float>(out), static_cast<size_t>(down.matrix().num_out), {}, nullptr});
    });
}

void rms_norm(Backend& b, Address x, Address weight, int num_rows, int width, float eps, Address out) {
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            const size_t offset = static_cast<size_t>(i) * width;
            b.kernels.rms_norm(at<const float>(x) + offset, at<const float>(weight), width, eps, at<float>(out) + offset);
        });
    });
}

void silu_mul(Backend& b, Address gate, Address up, int num_rows, int width, Address out) {
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_rows, [&](int i) {
            const size_t o = static_cast<size_t>(i) * width;
            b.kernels.silu_mul(at<const float>(gate) + o, at<const float>(up) + o, width, at<float>(out) + o);
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

// q [rows, heads, dim] scaled; keys, values [pool rows, kv heads, dim]; out [rows, heads, dim]. dim must be even.
void attention(Backend& b, bool bfloat16, Address q, Address keys, Address values, int num_heads, int num_kv_heads, int dim,
               int window, int block_tokens, int num_runs, const Numbers& numbers, Address out) {
    if (dim % 2 != 0)
        throw std::invalid_argument("native attention multiplies pairs of dimensions: head_dim must be even, not " +
                                    std::to_string(dim));
    const size_t stride = static_cast<size_t>(num_heads) * dim;
    const Attention a{bfloat16 ? Type::bfloat16 : Type::float32, at<const float>(q), stride, at<const void>(keys),
                      at<const void>(values), num_heads, num_kv_heads, dim, window, at<float>(out), stride, {}};
    const Runs expanded(numbers, num_runs, block_tokens);
    const std::vector<Run>& runs = expanded.runs;
    int longest = 0;
    for (const Run& run : runs) longest = std::max(longest, run.num_rows);
    std::vector<Scratch> scratch(static_cast<size_t>(b.team.num_threads()));
    std::vector<float*> floats;
    for (Scratch& s : scratch) floats.push_back(s.floats(attention_scratch(a, longest, 1)));
    b.team.run(false, [&](int thread) {
        b.team.tiles(thread, num_runs * num_kv_heads, [&](int i) {
            const Run& run = runs[static_cast<size_t>(i / num_kv_heads)];
            b.kernels.attention(a, run, {i % num_kv_heads, i % num_kv_heads + 1}, 0, run.num_rows, -1, nullptr, floats[static_cast<size_t>(thread)]);
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

// sections: of each its outputs, then the first seven fields of its Format, as ops/packed.py has them.
std::unique_ptr<Packed> pack_quantised(Backend&, const std::vector<std::array<int, 8>>& sections, int num_in, bool paired,
                                       Address bias) {
    std::vector<Section> found;
    for (const std::array<int, 8>& n : sections)
        found.push_back({n[0], {n[1], n[2], n[3], n[4] != 0, n[5] != 0, static_cast<Offset>(n[6]), n[7], 0, nullptr}});
    return std::make_unique<Packed>(found, num_in, paired, at<const float>(bias));
}

bool fill(Backend& b, Packed& packed, int first, int count, const std::array<Address, 5>& rows) {
    const auto& [codes, scales, subtracted, scale_levels, minimum_levels] = rows;
    return packed.fill(b.team, first, count, {at<const uint8_t>(codes), at<const float>(scales), at<const float>(subtracted),
                                              at<const int8_t>(scale_levels), at<const uint8_t>(minimum_levels)});
}

const Matrix* matrix_at(const Packed* p) { return p ? &p->matrix() : nullptr; }

// norms: four addresses for each layer (input, mlp, q, k; the last two may be 0). matrices: qkv, o, gate_up, down for each.
std::unique_ptr<Decoder> make_decoder(Backend& b, const std::vector<int>& sizes, float eps, bool bfloat16,
                                      const std::vector<Address>& norms, const std::vector<const Packed*>& matrices,
                                      const std::vector<int>& windows, const Packed* packed_embedding, Address embedding,
                                      Address final_norm, const Packed& head) {
    const DecoderShape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps,
                             bfloat16 ? Type::bfloat16 : Type::float32};
    std::vector<Layer> layers;
    for (size_t i = 0; i < windows.size(); ++i) {
        const Address* n = &norms[4 * i];
        const Packed* const* m = &matrices[4 * i];
        layers.push_back({at<const float>(n[0]), at<const float>(n[1]), at<const float>(n[2]), at<const float>(n[3]),
                          matrix_at(m[0]), matrix_at(m[1]), matrix_at(m[2]), matrix_at(m[3]), windows[i]});
    }
    return std::make_unique<Decoder>(b, shape, std::move(layers),
                                     Embedding{matrix_at(packed_embedding), at<const void>(embedding)},
                                     at<const float>(final_norm), &head.matrix());
}

struct Pools {
    std::vector<void*> keys, values;
    int block_tokens;
    size_t row_bytes;

    // Copies row sources[i] to row targets[i] in every layer, one after the other.
    void copy(const std::vector<size_t>& sources, const std::vector<size_t>& targets) const {
        for (const auto* pools : {&keys, &values})
            for (void* pool : *pools)
                for (size_t i = 0; i < sources.size(); ++i)
                    std::memcpy(static_cast<char*>(pool) + targets[i] * row_bytes,
                                static_cast<const char*>(pool) + sources[i] * row_bytes, row_bytes);
    }
};

Pass make_pass(const Ids& tokens, const int64_t* positions, Address rotations, const Runs& runs, const Pools& pools,
               const std::vector<int>& layers) {
    return {static_cast<int>(tokens.size()), tokens.data(), positions, at<const float>(rotations), runs.runs,
            pools.keys.data(), pools.values.data(), layers, nullptr, {}, true, nullptr};
}

// input: 0 = embeddings of the tokens. taps: see Pass.
void forward(Decoder& d, const Ids& tokens, const Ids& positions, Address rotations, int num_runs, const Numbers& numbers,
             const Pools& pools, const std::vector<int>& layers, Address input,
             const std::vector<std::pair<int, Address>>& taps, bool is_normed, Address hidden) {
    if (positions.size() != tokens.size()) throw std::invalid_argument("every token needs a position");
    const Runs runs(numbers, num_runs, pools.block_tokens);
    Pass pass = make_pass(tokens, positions.data(), rotations, runs, pools, layers);
    pass.input = at<const float>(input), pass.is_normed = is_normed, pass.hidden = at<float>(hidden);
    for (const auto& [k, address] : taps) pass.taps.emplace_back(k, at<float>(address));
    nb::gil_scoped_release release;
    d.forward(pass);
}

// Returns the ids of the largest logits, and these logits.
std::pair<Ids, std::vector<float>> argmax(Decoder& d, Address hidden, const std::vector<int>& rows, int num_ids) {
    Ids ids(rows.size());
    std::vector<float> values(rows.size());
    {
        nb::gil_scoped_release release;
        d.argmax(at<const float>(hidden), rows, num_ids, ids.data(), values.data());
    }
    return {std::move(ids), std::move(values)};
}

void check_join(const Join& join, int width) {
    const Matrix& w = *join.w;
    if (static_cast<size_t>(width) * join.norms.size() != static_cast<size_t>(w.num_in))
        throw std::invalid_argument("the parts of a row must be as wide as the inputs of the product");
}

void join(Backend& b, const std::vector<Address>& norms, float eps, const Packed& w, const std::vector<Address>& parts,
          int width, int num_rows, Address out) {
    Join made{{}, eps, &w.matrix()};
    std::vector<const float*> rows;
    for (Address norm : norms) made.norms.push_back(at<const float>(norm));
    for (Address part : parts) rows.push_back(at<const float>(part));
    check_join(made, width);
    if (rows.size() != norms.size()) throw std::invalid_argument("every part needs a norm, or 0");
    join_rows(b, made, rows, num_rows, at<float>(out));
}

// Returns None where a logit is NaN. numbers: as for `forward`, with rows for all tokens that are fed; counts: how many of
// `tokens` each run begins with.
std::optional<std::vector<Ids>> run_ahead(Decoder& d, const Ids& tokens, const Ids& positions,
                                          const std::vector<int>& counts, const std::vector<int>& lengths,
                                          Address rotations, const Numbers& numbers, const Pools& pools,
                                          const std::vector<int>& layers, int num_ids, Address input,
                                          const Ahead* ahead) {
    if ((input != 0) != (ahead != nullptr)) throw std::invalid_argument("a head, and only a head, has an input");
    if (ahead && ahead->ids.size() < static_cast<size_t>(num_ids)) throw std::invalid_argument("every id needs one of the target");
    if (ahead) check_join(ahead->join, d.shape().hidden_size);
    if (lengths.size() != counts.size()) throw std::invalid_argument("every run needs a length");
    Runs runs(numbers, static_cast<int>(counts.size()), pools.block_tokens);
    int first_row = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        Run& run = runs.runs[i];
        if (counts[i] < 1 || lengths[i] < 1 || counts[i] + lengths[i] - 1 > run.num_rows)
            throw std::invalid_argument("a run is fed its tokens, and all that is wanted but the last");
        run.first_row = first_row, run.num_rows = counts[i];
        first_row += counts[i];
    }
    if (static_cast<size_t>(first_row) != tokens.size() || positions.size() != tokens.size() || counts.empty())
        throw std::invalid_argument("every token needs a run and a position");
    Pass pass = make_pass(tokens, positions.data(), rotations, runs, pools, layers);
    pass.input = at<const float>(input);
    std::vector<Ids> ids;
    nb::gil_scoped_release release;
    if (!d.run_ahead(pass, lengths, num_ids, ahead, ids)) return {};
    return ids;
}

}  // namespace

void bind_ops(nb::module_& m) {
    nb::class_<Packed>(m, "Packed", "A matrix in panels; see docs/kernels.md.")
        .def_prop_ro("num_bytes", [](const Packed& p) { return p.matrix().bytes(); }, "Bytes in memory, padding included.")
        .def("unpack_row", [](const Packed& p, int index, Address out) { p.unpack(index, at<void>(out)); }, "index"_a, "out"_a,
             "Writes a row as it was before packing to the address `out`.");
    nb::class_<Pools>(m, "Pools", "Addresses of a cache's keys and values, one pool for each layer.")
        .def("__init__", [](Pools* self, const std::vector<Address>& keys, const std::vector<Address>& values, int tokens,
                            size_t row_bytes) {
            new (self) Pools{{}, {}, tokens, row_bytes};
            for (Address a : keys) self->keys.push_back(at<void>(a));
            for (Address a : values) self->values.push_back(at<void>(a));
        })
        .def("copy", &Pools::copy, "sources"_a, "targets"_a,
             "Copies row sources[i] to row targets[i] in every layer, one after the other.");
    nb::class_<Backend>(m, "Backend", "The kernels of one instruction set and a team of threads.")
        .def("__init__", [](Backend* self, const std::string& isa, int num_threads) {
            new (self) Backend(kernels_for(isa), num_threads);
        })
        .def("pack", &pack, Free())
        .def("pack_quantised", &pack_quantised, Free())
        .def("fill", &fill, Free())
        .def("linear", &linear<Finish::store>, Free())
        .def("add_linear", &linear<Finish::add>, Free())
        .def("gated_linear", &gated_linear, Free())
        .def("rms_norm", &rms_norm, Free())
        .def("silu_mul", &silu_mul, Free())
        .def("rope", &rope, Free())
        .def("attention", &attention, Free())
        .def("join", &join, Free(), "norms"_a, "eps"_a, "w"_a, "parts"_a, "width"_a, "num_rows"_a, "out"_a,
             "Writes [norm(a) | norm(b) | ...] w to `out`, float32 [num_rows, outputs of w].\n\nparts: addresses of float32 "
             "[num_rows, width] each. norms: of each part's weights, 0 = the part as it is.");
    nb::class_<Decoder>(m, "Decoder", "A whole decoder; one call for each pass. Arguments that are integers where a tensor is "
                                      "meant are addresses of contiguous memory, which the caller keeps alive.")
        .def("forward", &forward, "tokens"_a, "positions"_a, "rotations"_a, "num_runs"_a, "numbers"_a, "pools"_a, "layers"_a,
             "input"_a, "taps"_a, "is_normed"_a, "hidden"_a,
             "Runs a ragged pass through some layers and writes its rows, float32 [tokens, hidden_size], to `hidden`.\n\n"
             "rotations: cos and sin by position, float32 [positions, 2, head_dim]. numbers: the runs, as "
             "forerun.ops.packed.run_numbers makes them. layers: ascending. input: float32 rows for the first of them, 0 = the "
             "tokens' embeddings. taps: ascending pairs (k, address) that receive the residual stream before layer k. "
             "is_normed: whether the final norm is applied. Raises IndexError for a token that is no row of the embedding.")
        .def("logits", [](Decoder& d, Address hidden, int rows, Address out) {
            d.logits(at<const float>(hidden), rows, at<float>(out)); }, Free(), "hidden"_a, "num_rows"_a, "out"_a,
             "Writes the logits of rows after the final norm, float32 [num_rows, vocab_size], to `out`.")
        .def("argmax", &argmax, "hidden"_a, "rows"_a, "num_ids"_a,
             "Returns the ids of the largest of the first `num_ids` logits of some rows, and these logits.\n\nTies go to the "
             "lowest id, and NaN counts as the largest.")
        .def("run_ahead", &run_ahead, "tokens"_a, "positions"_a, "counts"_a, "lengths"_a, "rotations"_a, "numbers"_a, "pools"_a,
             "layers"_a, "num_ids"_a, "input"_a = 0, "ahead"_a.none() = nb::none(),
             "Continues each run greedily by lengths[i] ids, and returns them; None where a logit is NaN.\n\ncounts: tokens "
             "that each run begins with. numbers: as for `forward`, with cache rows for all tokens that are fed. input: of a head, "
             "what the first layer gets for them. ahead: of a head, how a found id is fed.");
    nb::class_<Ahead>(m, "Ahead", "How a head goes on: a found id's embedding of the target and the row before are joined.")
        .def("__init__", [](Ahead* self, const Decoder& target, const Ids& ids, const std::array<Address, 2>& norms, float eps,
                            const Packed& input) {
            for (int64_t id : ids)
                if (id < 0 || id >= target.shape().vocab_size) throw std::invalid_argument("an id is none of the target's");
            new (self) Ahead{&target, ids, {{at<const float>(norms[0]), at<const float>(norms[1])}, eps, &input.matrix()}};
            check_join(self->join, target.shape().hidden_size);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>(), "target"_a, "ids"_a, "norms"_a, "eps"_a, "input"_a);
    m.def("make_decoder", &make_decoder, "backend"_a, "sizes"_a, "eps"_a, "bfloat16"_a, "norms"_a, "matrices"_a, "windows"_a,
          "packed_embedding"_a.none(), "embedding"_a, "final_norm"_a, "head"_a, nb::keep_alive<0, 1>());
}
