#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "buffers.h"
#include "door.h"
#include "philox.h"
#include "recurrent.h"

namespace forerun {

namespace {

constexpr int FEW_BLOCKS = 2;  // up to so many blocks of rows, each thread norms all rows and waits for none

bool shares_inputs(int num_rows) { return Inputs{nullptr, Type::float32, num_rows, 0}.num_blocks() > FEW_BLOCKS; }

HeadShape shape_of(const AttentionPart& a) { return {a.heads, a.kv_heads, a.head_dim, a.window, a.sees}; }

}  // namespace

// ------------------------------------------------------------------------------------------------------------ buffers

BufferSizes buffer_sizes(const ModelParts& model, bool weights_are_quantised, int num_rows, size_t part_floats,
                         size_t state_floats) {
    const auto steps = [&](int n) {  // at most
        return static_cast<size_t>(steps_of(weights_are_quantised ? Type::int8 : model.type, n));
    };
    const size_t rows = static_cast<size_t>(num_rows), hidden = static_cast<size_t>(model.hidden_size);
    size_t qkv = 0, widest = steps(model.hidden_size), read = model.hidden_size, ffn = 0, attention = 0;
    size_t scores = 0, chosen = 0, inner = 0, groups = 0, gates = 0;
    bool has_branch = false, has_experts = false, has_shared = false;
    for (const Block& block : model.blocks) {
        has_branch |= (block.post_attention || block.post_mlp) && !block.norms_sum;
        has_branch |= block.branch_scale != 1.0f;
        if (block.mlp) {
            ffn = std::max(ffn, steps(block.mlp->size));
            has_branch |= !block.mlp->has_down;
        }
        if (block.experts) {
            const ExpertsPart& e = *block.experts;
            const size_t choices = rows * static_cast<size_t>(e.chosen), size = steps(e.parts[0].size);
            has_branch = has_experts = true;
            scores = std::max(scores, rows * static_cast<size_t>(e.num));
            chosen = std::max(chosen, choices);
            inner = std::max(inner, choices * size);
            groups += 4 * choices;
            if (e.shared) ffn = std::max(ffn, steps(e.shared->size));
            has_shared |= e.shared || block.mlp;
            widest = std::max(widest, hidden);  // the router's inputs are float32
        }
        if (block.layer_input) {
            const int size = block.layer_input->size;
            qkv = std::max(qkv, static_cast<size_t>(size));
            ffn = std::max(ffn, steps(size));
            has_branch = true;
        }
        if (block.recurrence) {
            const RecurrencePart& r = *block.recurrence;
            qkv = std::max(qkv, static_cast<size_t>(r.input_size()));
            widest = std::max(widest, steps(r.inner()));
            gates = std::max(gates, static_cast<size_t>(r.num_gates()));
        }
        if (!block.attention) continue;
        const AttentionPart& a = *block.attention;
        qkv = std::max(qkv, static_cast<size_t>(a.qkv_size()));
        widest = std::max({widest, steps(a.q_size()), steps(a.reads)});
        read = std::max(read, static_cast<size_t>(a.reads));
        attention = std::max(attention, attention_scratch(shape_of(a), ATTENTION_ROWS, a.kv_heads));
    }
    BufferSizes sizes{};
    const size_t inputs = model.layer_inputs ? model.blocks.size() * static_cast<size_t>(model.layer_inputs->size) : 0;
    sizes.layer_inputs = rows * inputs;
    sizes.residual = rows * hidden;
    sizes.branch = has_branch ? rows * hidden : 0;
    sizes.qkv = rows * qkv;
    sizes.inputs = rows * widest;
    sizes.ffn = rows * ffn;
    sizes.parts = part_floats;
    sizes.experts_in = has_experts ? rows * hidden : 0;
    sizes.scores = scores;
    sizes.experts_out = chosen * hidden;
    sizes.shared_out = has_shared ? rows * hidden : 0;
    sizes.experts_words = chosen * steps(model.hidden_size);
    sizes.experts_inner = inner;
    sizes.groups = groups;
    sizes.each_normed = up_to(std::max(read, inputs), 64);  // where a row of the table is unpacked, too
    // A gate's inputs are float32.
    const size_t of_own = std::max(steps(static_cast<int>(read)), has_shared ? hidden : 0);
    sizes.each_own = shares_inputs(num_rows) ? 0 : up_to(rows * of_own, 32);
    sizes.each_attention = up_to(attention, 64);
    sizes.state_gates = rows * gates;
    sizes.each_state = up_to(state_floats, 64);
    return sizes;
}

size_t pass_bytes(const Kernels& kernels, const ModelParts& model, bool weights_are_quantised, int num_rows,
                  int context, int num_threads) {
    const size_t threads = static_cast<size_t>(num_threads);
    size_t parts = 0, states = 0;
    int widest = model.hidden_size;
    for (const Block& block : model.blocks) {
        if (block.mlp) widest = std::max(widest, block.mlp->size);
        if (block.experts) widest = std::max(widest, block.experts->parts[0].size);
        if (block.experts && block.experts->shared) widest = std::max(widest, block.experts->shared->size);
        if (block.recurrence) {
            widest = std::max(widest, block.recurrence->inner());
            states = std::max(states, most_state_floats(*block.recurrence, num_rows));
        }
        if (!block.attention) continue;
        const AttentionPart& a = *block.attention;
        widest = std::max({widest, a.q_size(), a.reads});
        parts = std::max(parts, most_part_floats(shape_of(a), num_rows, context, num_threads));
    }
    // Each thread has its own copy of few rows' inputs after a pass of few rows, which may have come before this one.
    const int few_rows = FEW_BLOCKS * (MAX_BLOCK_ROWS - 2);
    const BufferSizes s = buffer_sizes(model, weights_are_quantised, num_rows, parts, states);
    const size_t own = buffer_sizes(model, weights_are_quantised, std::min(num_rows, few_rows), 0, 0).each_own;
    size_t bytes = 0;
    for (size_t count :
         {s.residual, s.branch, s.qkv, s.inputs, s.ffn, s.parts, threads * s.each_normed, threads * own,
          threads * s.each_attention, s.experts_in, s.scores, s.experts_out, s.shared_out, s.experts_words,
          s.experts_inner, s.groups, s.layer_inputs, s.state_gates, threads * s.each_state})
        bytes += count > 0 ? allocated_bytes(4 * count) : 0;
    // What `product` keeps for each thread: the sums of a panel, and prepared inputs.
    const Matrix w{weights_are_quantised ? Type::int8 : model.type,
                   false,
                   0,
                   widest,
                   steps_of(weights_are_quantised ? Type::int8 : model.type, widest),
                   0,
                   nullptr,
                   nullptr,
                   nullptr,
                   0};
    const size_t kept =
        allocated_bytes(4 * sum_floats(num_rows)) + allocated_bytes(kernels.prepared_bytes(w, num_rows));
    return bytes + threads * kept * (s.experts_in > 0 ? 2 : 1);  // `products` keeps as much
}

// The kind of layers that the blocks of each shape read, -1 where none of them runs.
std::vector<int> Model::kinds_of(const Pass& pass) const {
    std::vector<int> kinds(shapes_.size(), -1);
    for (int layer : pass.layers) {
        if (!parts_.blocks[static_cast<size_t>(layer)].attention) continue;
        int& kind = kinds[shape_of_[static_cast<size_t>(layer)]];
        const int own = pass.kinds[keys_of(layer)];
        if (kind >= 0 && kind != own)
            throw std::invalid_argument("blocks with equal heads and windows need rows of one kind");
        kind = own;
    }
    return kinds;
}

// How a block's keys lie in the cache of a pass.
KeyOrder Model::order_of(int block, const Pass& pass) const {
    const int dim = parts_.blocks[static_cast<size_t>(block)].attention->head_dim;
    if (pass.kept == Type::int8 && dim + REFINED > MOST_KEY_DIM)
        throw std::invalid_argument("heads are too large for bytes");
    if (pass.kept != Type::int8 || !pass.refined) return {dim, nullptr};
    return {dim + REFINED, orders_[static_cast<size_t>(block)].data()};
}

int Model::keys_of(int block) const {
    const int other = parts_.blocks[static_cast<size_t>(block)].attention->keys_of;
    return other < 0 ? block : other;
}

Model::Buffers Model::buffers(Room& room, const Pass& pass) const {
    Buffers b{};
    size_t part_floats = 0;
    const int num_threads = backend_.team.num_threads();
    const std::vector<int> kinds = kinds_of(pass);
    for (size_t i = 0; i < shapes_.size(); ++i) {
        const HeadShape& shape = shapes_[i];
        const auto& runs =
            shape.sees == Sees::source ? pass.sources : pass.runs[static_cast<size_t>(std::max(0, kinds[i]))];
        b.work.push_back(attention_work(runs, shape, num_threads));
        part_floats = std::max(part_floats, b.work.back().num_floats);
    }
    size_t state_floats = 0;
    for (int i : pass.layers)
        if (const auto& r = parts_.blocks[static_cast<size_t>(i)].recurrence)
            state_floats = std::max(state_floats, forerun::state_floats(*r, pass.states, num_threads));
    const BufferSizes sizes = buffer_sizes(parts_, is_any_quantised_, pass.num_rows, part_floats, state_floats);
    const size_t threads = static_cast<size_t>(num_threads);
    b.num_rows = pass.num_rows;
    b.width = parts_.hidden_size;
    b.residual = room.residual.floats(sizes.residual);
    b.branch = room.branch.floats(sizes.branch);
    b.qkv = room.qkv.floats(sizes.qkv);
    b.inputs = room.inputs.words(sizes.inputs);
    b.ffn = room.ffn.words(sizes.ffn);
    b.parts = room.parts.floats(sizes.parts);
    b.experts_in = room.experts_in.floats(sizes.experts_in);
    b.scores = room.scores.floats(sizes.scores);
    b.experts_out = room.experts_out.floats(sizes.experts_out);
    b.shared_out = room.shared_out.floats(sizes.shared_out);
    b.experts_words = room.experts_words.words(sizes.experts_words);
    b.experts_inner = room.experts_inner.words(sizes.experts_inner);
    b.layer_inputs = room.layer_inputs.floats(sizes.layer_inputs);
    b.state_gates = room.state_gates.floats(sizes.state_gates);
    b.state_stride = sizes.each_state;
    b.state = room.state.floats(threads * sizes.each_state);
    b.groups.resize(parts_.blocks.size());
    for (int i : pass.layers) {
        const Block& block = parts_.blocks[static_cast<size_t>(i)];
        const size_t choices =
            block.experts ? static_cast<size_t>(pass.num_rows) * static_cast<size_t>(block.experts->chosen) : 0;
        auto& group = b.groups[static_cast<size_t>(i)];
        group.chosen.resize(choices);
        group.shares.resize(choices);
    }
    b.normed_stride = sizes.each_normed;
    b.normed = room.normed.floats(threads * sizes.each_normed);
    b.own_stride = sizes.each_own;
    b.own = sizes.each_own ? room.own.words(threads * sizes.each_own) : nullptr;
    b.attention_stride = sizes.each_attention;
    b.attention = room.attention.floats(threads * sizes.each_attention);
    return b;
}

Inputs Model::head_inputs(Room& room, const Matrix& head, int num_rows) const {
    return {room.inputs.words(static_cast<size_t>(num_rows) * static_cast<size_t>(head.num_steps)), head.type, num_rows,
            head.num_steps};
}

// -------------------------------------------------------------------------------------------------------------- passes

// The order of a key head's dimensions by the size that their biases give keys at any rotation, the largest first; the
// first ones are repeated at the end. Without biases the order stays.
static std::vector<uint16_t> key_order(const AttentionPart& a) {
    const int half = a.turned / 2;
    const auto pair_of = [&](int i) {
        if (a.rotation < 0 || i >= a.turned) return i;
        return a.adjacent ? i ^ 1 : i < half ? i + half : i - half;
    };
    const float* const biases = a.makes_keys() ? a.qkv->bias : nullptr;
    std::vector<uint16_t> order;
    for (int head = 0; head < a.kv_heads; ++head) {
        const auto square = [&](int i) {
            const float b = biases ? biases[a.keys_at() + head * a.head_dim + i] : 0.0f;
            return b * b;
        };
        std::vector<uint16_t> own(static_cast<size_t>(a.head_dim));
        for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<uint16_t>(i);
        std::vector<float> sizes;
        for (int i = 0; i < a.head_dim; ++i)
            sizes.push_back(pair_of(i) == i ? square(i)
                                            : square(std::min(i, pair_of(i))) + square(std::max(i, pair_of(i))));
        std::stable_sort(own.begin(), own.end(), [&](uint16_t i, uint16_t j) { return sizes[i] > sizes[j]; });
        order.insert(order.end(), own.begin(), own.end());
        for (size_t i = 0; i < REFINED; ++i) order.push_back(own[i % own.size()]);
    }
    return order;
}

static void check_features(const FeatureParts& f, int width) {
    if (f.sides.w) check_join(f.sides, width);
    if (f.layers.w) check_join(f.layers, f.size);
    if ((f.sides.w && f.sides.w->num_out != width) || (f.layers.w && f.layers.w->num_out != width * (f.act ? 2 : 1)))
        throw std::invalid_argument("features are as wide as a row");
    if (!f.layers.w && f.size != width)
        throw std::invalid_argument("features that no matrix makes are as wide as a row");
}

Model::Model(Backend& backend, ModelParts parts, std::vector<std::vector<float>> vectors, Lent lent)
    : backend_(backend), parts_(std::move(parts)), lent_(std::move(lent)), vectors_(std::move(vectors)) {
    if (parts_.features) check_features(*parts_.features, parts_.hidden_size);
    const bool embeds = parts_.features && parts_.features->begins != Begins::features;
    if (embeds && embedder().parts_.hidden_size != parts_.hidden_size)
        throw std::invalid_argument("a head's embedding is as wide as a row");
    const auto count = [&](const Matrix* w) {
        bytes_ += w->bytes();
        is_any_quantised_ |= is_quantised(w->type);
    };
    if (parts_.layer_inputs) count(parts_.layer_inputs->projection);
    for (const Block& block : parts_.blocks) {
        size_t shape = 0;
        if (block.layer_input) count(block.layer_input->gate), count(block.layer_input->up);
        if (block.attention) {
            count(block.attention->qkv), count(block.attention->o);
            const HeadShape wanted = shape_of(*block.attention);
            shape = static_cast<size_t>(std::find(shapes_.begin(), shapes_.end(), wanted) - shapes_.begin());
            if (shape == shapes_.size()) shapes_.push_back(wanted);
        }
        if (block.recurrence) {
            const RecurrencePart& r = *block.recurrence;
            count(r.input), count(r.o);
            if (r.gates) count(r.gates);
            zeros_.resize(std::max(zeros_.size(), static_cast<size_t>(r.width)));
        }
        if (block.mlp) count(block.mlp->up);
        if (block.mlp && block.mlp->has_down) count(block.mlp->down);
        else if (block.mlp && block.mlp->up->num_out != parts_.hidden_size)
            throw std::invalid_argument("a part is as wide as a row");
        if (block.experts) {
            for (const MlpPart& part : block.experts->parts) {
                const size_t before = bytes_;
                count(part.up), count(part.down);
                if (&part - block.experts->parts.data() >= block.experts->chosen)
                    bytes_ = before;  // a row reads no more
            }
            if (block.experts->shared) count(block.experts->shared->up), count(block.experts->shared->down);
        }
        shape_of_.push_back(shape);
        orders_.push_back(block.attention ? key_order(*block.attention) : std::vector<uint16_t>());
    }
}

bool Model::alone(int num_rows) const {
    return bytes_ / std::max<size_t>(parts_.blocks.size(), 1) * static_cast<size_t>(num_rows) < ALONE_BYTES;
}

const Matrix& Model::head() const {
    if (!parts_.head) throw std::logic_error("the model has no LM head");
    return *parts_.head;
}

void Model::unpack(const Table& table, int64_t row, int width, float* x) const {
    if (table.packed) return backend_.kernels.unpack_row(*table.packed, static_cast<int>(row), x);
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(width) * bytes_of(parts_.type);
    backend_.kernels.from_type(static_cast<const char*>(table.rows) + at, width, parts_.type, x);
}

void Model::embed(int64_t token, float* x) const {
    const size_t width = static_cast<size_t>(parts_.hidden_size);
    unpack(parts_.embedding, token, parts_.hidden_size, x);
    for (size_t i = 0; i < width && parts_.embed_scale != 1.0f; ++i) x[i] *= parts_.embed_scale;
}

// Adds the learned position to what the first block gets, and norms it.
void Model::enter(const Pass& pass, int row, float* x) const {
    if (parts_.positions.is_there()) {
        static thread_local std::vector<float> position;
        const size_t width = static_cast<size_t>(parts_.hidden_size);
        position.resize(width);
        const size_t at =
            static_cast<size_t>(pass.positions[row] + parts_.position_offset) * width * bytes_of(parts_.type);
        backend_.kernels.from_type(static_cast<const char*>(parts_.positions.rows) + at, parts_.hidden_size,
                                   parts_.type, position.data());
        for (size_t i = 0; i < width; ++i) x[i] += position[i];
    }
    if (parts_.embed_norm) norm_row(backend_.kernels, *parts_.embed_norm, x, parts_.hidden_size, x);
}

void Model::check(const Pass& pass) const {
    if (pass.rotations.size() != parts_.rotations.size())
        throw std::invalid_argument("every kind of rotation needs a table");
    const bool reads_tokens = !pass.input || parts_.layer_inputs || joins_tokens();
    const Table& embedding = embedder().parts_.embedding;
    if (reads_tokens && !embedding.is_there())
        throw std::logic_error("the model has no embedding and was given no rows");
    for (size_t i = 0; i < pass.layers.size(); ++i) {
        const auto& attention = parts_.blocks[static_cast<size_t>(pass.layers[i])].attention;
        const int width = parts_.hidden_size * (begins(Begins::read) && pass.layers[i] == 0 ? 2 : 1);
        if (attention && attention->reads != width)
            throw std::invalid_argument("a block reads rows of another width than there are");
        if (attention && attention->sees == Sees::source && pass.sources.size() != pass.runs[0].size())
            throw std::invalid_argument("every run of a decoder that sees a source needs one");
        if (!attention) continue;
        const int from = keys_of(pass.layers[i]);
        const AttentionPart& kept = *parts_.blocks[static_cast<size_t>(from)].attention;
        const size_t heads = static_cast<size_t>(kept.kv_heads);
        require(pass.row_bytes[from][0] == heads * key_bytes(pass.kept, order_of(from, pass)) &&
                    pass.row_bytes[from][1] == heads * value_bytes(pass.kept, kept.head_dim),
                "the rows of a pool are not those of the block that keeps them");
    }
    const Table& positions = parts_.positions;
    int64_t end = INT64_MAX;
    for (const auto& rotation : pass.rotations) end = std::min(end, rotation.second);
    for (int row = 0; row < pass.num_rows; ++row) {
        if (reads_tokens && (pass.tokens[row] < 0 || pass.tokens[row] >= embedding.num_rows))
            throw std::out_of_range("there is no token with the id " + std::to_string(pass.tokens[row]));
        const int64_t at = pass.positions[row] + parts_.position_offset;
        if (pass.positions[row] < 0 || pass.positions[row] >= end ||
            (positions.is_there() && (at < 0 || at >= positions.num_rows)))
            throw std::out_of_range("there is no position " + std::to_string(pass.positions[row]));
    }
}

void Model::features(const std::vector<const float*>& layer_rows, int num_rows, float* out) const {
    const FeatureParts& f = *parts_.features;
    const size_t width = static_cast<size_t>(parts_.hidden_size);
    if (!f.layers.w) {
        cut(layer_rows[0], num_rows * f.size, f.layers.largest, out);
        return;
    }
    if (!f.act) return join_rows(backend_, f.layers, layer_rows, num_rows, out);
    std::vector<float> both(2 * static_cast<size_t>(num_rows) * width), ones(width, 1.0f);
    join_rows(backend_, f.layers, layer_rows, num_rows, both.data());
    for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
        float *const plain = both.data() + 2 * row * width, *const acted = plain + width;
        backend_.kernels.act_mul(*f.act, acted, ones.data(), parts_.hidden_size, acted);
        for (size_t i = 0; i < width; ++i) out[row * width + i] = plain[i] + acted[i];
    }
}

void Model::remember(const Pass& pass, const std::vector<const float*>& layer_rows) {
    check(pass);
    const FeatureParts& f = *parts_.features;
    const size_t width = static_cast<size_t>(parts_.hidden_size);
    std::vector<float> rows(static_cast<size_t>(pass.num_rows) * width);
    features(layer_rows, pass.num_rows, rows.data());
    for (float* x = rows.data(); x < rows.data() + rows.size(); x += width)
        norm_row(backend_.kernels, *f.context_norm, x, parts_.hidden_size, x);
    Pass kept = pass;
    kept.read = rows.data();
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    Buffers b = buffers(room, kept);
    backend_.team.run(alone(pass.num_rows), [&](int thread) {
        for (int i : kept.layers) keep_keys(thread, i, kept, b);
    });
}

// Begins a head's pass. stream, read: receive the first block's input and what its attention reads in place of it.
Pass Model::begun(const Pass& given, std::vector<float>& stream, std::vector<float>& read) const {
    const FeatureParts& f = *parts_.features;
    const size_t width = static_cast<size_t>(parts_.hidden_size),
                 num_floats = static_cast<size_t>(given.num_rows) * width;
    std::vector<float> embedded(num_floats), zeros(given.input ? 0 : num_floats);
    const float* const features = given.input ? given.input : zeros.data();
    for (int row = 0; row < given.num_rows; ++row)
        embedder().embed(given.tokens[row], embedded.data() + static_cast<size_t>(row) * width);
    stream.resize(num_floats);
    Pass pass = given;
    pass.input = stream.data();
    if (f.begins == Begins::product) {
        join_rows(backend_, f.sides, {embedded.data(), features}, given.num_rows, stream.data());
        return pass;
    }
    read.resize(2 * num_floats);
    for (size_t at = 0; at < num_floats; at += width) {
        float* const both = read.data() + 2 * at;
        backend_.kernels.rms_norm(embedded.data() + at, f.sides.norms[0], parts_.hidden_size, f.sides.norm_eps, both);
        backend_.kernels.rms_norm(features + at, f.sides.norms[1], parts_.hidden_size, f.sides.norm_eps, both + width);
        std::memcpy(stream.data() + at, f.normed_stream ? both + width : features + at, width * sizeof(float));
    }
    pass.read = read.data();
    return pass;
}

std::vector<int> Model::forward(const Pass& pass) {
    check(pass);
    if (!joins_tokens() || pass.layers.empty() || pass.layers[0] != 0) return run(pass);
    std::vector<float> stream, read;
    return run(begun(pass, stream, read));
}

// Runs a pass that was checked.
std::vector<int> Model::run(const Pass& pass) {
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    Buffers b = buffers(room, pass);
    const size_t width = static_cast<size_t>(parts_.hidden_size);
    const int num_blocks = static_cast<int>(parts_.blocks.size());
    const bool enters = !pass.input || (!pass.layers.empty() && pass.layers[0] == 0);
    backend_.team.run(alone(pass.num_rows), [&](int thread) {
        const auto for_rows = [&](const auto& act) {
            backend_.team.tiles(thread, pass.num_rows, [&](int row) { act(row, static_cast<size_t>(row) * width); });
        };
        const auto copy = [&](const float* from, float* to) {
            for_rows([&](int, size_t at) { std::memcpy(to + at, from + at, width * sizeof(float)); });
        };
        size_t tap = 0;
        const auto write_taps = [&](int last) {  // of all blocks up to `last` that are not written yet
            for (; tap < pass.taps.size() && pass.taps[tap].first <= last; ++tap)
                copy(b.residual, pass.taps[tap].second);
        };
        for_rows([&](int row, size_t at) {
            float* const x = b.residual + at;
            if (pass.input) std::memcpy(x, pass.input + at, width * sizeof(float));
            else embedder().embed(pass.tokens[row], x);
            if (enters) enter(pass, row, x);
        });
        if (parts_.layer_inputs) make_layer_inputs(thread, pass, b);
        for (int i : pass.layers) {
            write_taps(i);
            run_block(thread, i, pass, b);
        }
        write_taps(num_blocks);
        if (!pass.is_normed || !parts_.final_norm) return copy(b.residual, pass.hidden);
        for_rows([&](int, size_t at) {
            norm_row(backend_.kernels, *parts_.final_norm, b.residual + at, parts_.hidden_size, pass.hidden + at);
        });
    });
    std::vector<int> num_experts;
    for (int i : pass.layers)
        if (parts_.blocks[static_cast<size_t>(i)].experts)
            num_experts.push_back(static_cast<int>(b.groups[static_cast<size_t>(i)].experts.size()));
    return num_experts;
}

void Model::run_block(int thread, int index, const Pass& pass, Buffers& b) {
    const Block& block = parts_.blocks[static_cast<size_t>(index)];
    // Of a parallel block the feed-forward part reads the rows before attention adds to them.
    const bool is_fed = block.mlp && block.mlp->has_down;
    if (block.parallel && is_fed) feed(thread, block, b);
    if (block.attention) run_attention(thread, index, pass, b);
    if (block.recurrence) run_recurrence(thread, index, pass, b);
    if (!block.parallel && is_fed) feed(thread, block, b);
    if (block.mlp && !is_fed) add_activated(thread, block, b);
    const bool is_beside = is_fed && block.experts;  // the experts add what both give
    const Inputs inner = is_fed ? b.inputs_of(*block.mlp->down, b.ffn) : Inputs{};
    if (is_beside)
        product(backend_, thread, *block.mlp->down, inner, stored(b.shared_out, static_cast<size_t>(b.width)));
    else if (is_fed) add_branch(thread, block, block.post_mlp, *block.mlp->down, inner, b);
    if (block.experts) {
        run_experts(thread, index, block, b);
        join_branch(thread, block, block.post_mlp, b);
    }
    if (block.layer_input) add_layer_input(thread, index, block, b);
    if (block.out_scale != 1.0f)
        backend_.team.tiles(thread, b.num_rows, [&](int row) {
            float* const x = b.row(b.residual, row);
            for (int i = 0; i < b.width; ++i) x[i] *= block.out_scale;
        });
}

// Makes the second inputs of all blocks for each token, beside the residual stream.
void Model::make_layer_inputs(int thread, const Pass& pass, Buffers& b) {
    const LayerInputs& own = *parts_.layer_inputs;
    const int width = own.size * static_cast<int>(parts_.blocks.size());
    const float scale = 1.0f / std::sqrt(static_cast<float>(b.width)), half = std::sqrt(0.5f);
    backend_.team.tiles(thread, b.num_rows, [&](int row) { embed(pass.tokens[row], b.row(b.branch, row)); });
    times_rows(thread, b.branch, b.width, std::nullopt, *own.projection,
               stored(b.layer_inputs, static_cast<size_t>(width)), b);
    float* const looked_up = b.normed + b.normed_stride * static_cast<size_t>(thread);
    backend_.team.tiles(thread, b.num_rows, [&](int row) {
        float* const x = b.layer_inputs + static_cast<size_t>(row) * static_cast<size_t>(width);
        unpack(own.table, pass.tokens[row], width, looked_up);
        for (int i = 0; i < width; ++i) x[i] *= scale;
        for (int at = 0; at < width && own.norm; at += own.size)
            norm_row(backend_.kernels, *own.norm, x + at, own.size, x + at);
        for (int i = 0; i < width; ++i) x[i] = (x[i] + looked_up[i] * own.scale) * half;
    });
}

void Model::add_layer_input(int thread, int index, const Block& block, Buffers& b) {
    const LayerInputPart& own = *block.layer_input;
    const size_t size = static_cast<size_t>(own.size), all = size * parts_.blocks.size();
    const Inputs inner = b.inputs_of(*own.up, b.ffn);
    times_rows(thread, b.residual, b.width, std::nullopt, *own.gate, stored(b.qkv, size), b);
    // Rows of one block share cache lines, so a block belongs to one thread.
    backend_.team.tiles(thread, inner.num_blocks(), [&](int k) {
        for (int row = inner.block_start(k); row < inner.block_start(k + 1); ++row) {
            float* const gate = b.qkv + static_cast<size_t>(row) * size;
            const float* const inputs =
                b.layer_inputs + static_cast<size_t>(row) * all + static_cast<size_t>(index) * size;
            backend_.kernels.act_mul(own.act, gate, inputs, own.size, gate);
            backend_.kernels.put_row(inner, row, gate, own.size);
        }
    });
    product(backend_, thread, *own.up, inner, stored(b.branch, static_cast<size_t>(b.width)));
    backend_.team.tiles(thread, b.num_rows, [&](int row) {
        float *const branch = b.row(b.branch, row), *const sum = b.row(b.residual, row);
        if (own.norm) norm_row(backend_.kernels, *own.norm, branch, b.width, branch);
        for (int i = 0; i < b.width; ++i) sum[i] += branch[i];
    });
}

// Adds a feed-forward part that has no last matrix.
void Model::add_activated(int thread, const Block& block, Buffers& b) {
    static thread_local std::vector<float> ones;
    ones.resize(static_cast<size_t>(b.width), 1.0f);
    times_rows(thread, b.residual, b.width, block.pre_mlp, *block.mlp->up,
               stored(b.branch, static_cast<size_t>(b.width)), b);
    backend_.team.tiles(thread, b.num_rows, [&](int row) {
        float* const x = b.row(b.branch, row);
        backend_.kernels.act_mul(block.mlp->act, x, ones.data(), b.width, x);
    });
    join_branch(thread, block, block.post_mlp, b);
}

// Projects what a pass gives attention to read, or the residual stream, and writes keys and values into the cache.
void Model::keep_keys(int thread, int index, const Pass& pass, Buffers& b) {
    const Block& block = parts_.blocks[static_cast<size_t>(index)];
    const AttentionPart& a = *block.attention;
    const bool reads_pass = pass.read && (index == pass.layers[0] || begins(Begins::context));
    times_rows(thread, reads_pass ? pass.read : b.residual, a.reads, reads_pass ? std::nullopt : block.pre_attention,
               *a.qkv, stored(b.qkv, static_cast<size_t>(a.qkv_size())), b);
    backend_.team.tiles(thread, pass.num_rows, [&](int row) { rotate_and_write(a, index, pass, b, row); });
}

void Model::run_attention(int thread, int index, const Pass& pass, Buffers& b) {
    const Block& block = parts_.blocks[static_cast<size_t>(index)];
    const AttentionPart& a = *block.attention;
    const Kernels& kernels = backend_.kernels;
    const size_t stride = static_cast<size_t>(a.qkv_size());
    keep_keys(thread, index, pass, b);
    const int from = keys_of(index);
    const Attention attention{pass.kept,
                              b.qkv,
                              stride,
                              pass.keys[from],
                              pass.values[from],
                              a.heads,
                              a.kv_heads,
                              a.head_dim,
                              order_of(from, pass),
                              a.window,
                              a.softcap,
                              nullptr,
                              0,
                              b.inputs_of(*a.o, b.inputs),
                              a.sees,
                              a.biases,
                              a.sinks,
                              a.gated ? b.qkv + a.q_size() : nullptr};
    const AttentionWork& work = b.work[shape_of_[static_cast<size_t>(index)]];
    float* const scratch = b.attention + b.attention_stride * static_cast<size_t>(thread);
    backend_.team.tiles(thread, static_cast<int>(work.items.size()), [&](int i) {
        const AttentionItem& item = work.items[static_cast<size_t>(i)];
        if (item.first < item.last)
            kernels.attention(attention, *item.run, item.heads, item.first, item.last, item.range, b.parts + item.parts,
                              scratch);
    });
    if (!work.queries.empty())
        backend_.team.tiles(thread, static_cast<int>(work.queries.size()), [&](int i) {
            const AttentionQuery& query = work.queries[static_cast<size_t>(i)];
            kernels.combine(attention, query.row, query.head, b.parts + query.parts, query.num_parts, query.stride,
                            scratch);
        });
    add_branch(thread, block, block.post_attention, *a.o, b.inputs_of(*a.o, b.inputs), b);
}

// The inputs of the feed-forward part's last product.
void Model::feed(int thread, const Block& block, Buffers& b) {
    const MlpPart& mlp = *block.mlp;
    const Inputs inner = b.inputs_of(*mlp.down, b.ffn);
    times_rows(thread, b.residual, parts_.hidden_size, block.pre_mlp, *mlp.up, activated_as(inner, mlp.act, mlp.gated),
               b);
}

// The product of rows behind their norm, where they have one.
void Model::times_rows(int thread, const float* rows, int width, const std::optional<Norm>& norm, const Matrix& w,
                       const Output& to, Buffers& b) {
    Inputs x = b.inputs_of(w, b.inputs);
    float* const normed = b.normed + b.normed_stride * static_cast<size_t>(thread);
    const auto put_rows = [&](int first, int last) {
        for (int row = first; row < last; ++row) {
            const float* from = rows + static_cast<size_t>(row) * static_cast<size_t>(width);
            if (norm) norm_row(backend_.kernels, *norm, from, width, normed);
            backend_.kernels.put_row(x, row, norm ? normed : from, width);
        }
    };
    if (b.own) {
        x.words = b.own + b.own_stride * static_cast<size_t>(thread);
        return product(backend_, thread, w, x, to, [&] { put_rows(0, b.num_rows); });
    }
    // Rows of one block share cache lines, so a block belongs to one thread.
    backend_.team.tiles(thread, x.num_blocks(),
                        [&](int block) { put_rows(x.block_start(block), x.block_start(block + 1)); });
    product(backend_, thread, w, x, to);
}

// Adds a part's last product to the residual stream: behind its norm, or before the norm of the sum.
void Model::add_branch(int thread, const Block& block, const std::optional<Norm>& post, const Matrix& w,
                       const Inputs& x, Buffers& b) {
    Team& team = backend_.team;
    const bool norms_branch = post && !block.norms_sum, norms_sum = post && block.norms_sum;
    if (!norms_branch && block.branch_scale == 1.0f) {
        product(backend_, thread, w, x, b.add());
        if (norms_sum)
            team.tiles(thread, b.num_rows, [&](int i) {
                norm_row(backend_.kernels, *post, b.row(b.residual, i), b.width, b.row(b.residual, i));
            });
        return;
    }
    product(backend_, thread, w, x, stored(b.branch, static_cast<size_t>(b.width)));
    join_branch(thread, block, post, b);
}

// Adds a part's output to the residual stream.
void Model::join_branch(int thread, const Block& block, const std::optional<Norm>& post, Buffers& b) {
    const bool norms_branch = post && !block.norms_sum, norms_sum = post && block.norms_sum;
    backend_.team.tiles(thread, b.num_rows, [&](int i) {
        float *const branch = b.row(b.branch, i), *const sum = b.row(b.residual, i);
        if (norms_branch) norm_row(backend_.kernels, *post, branch, b.width, branch);
        for (int k = 0; k < b.width; ++k) sum[k] += branch[k] * block.branch_scale;
        if (norms_sum) norm_row(backend_.kernels, *post, sum, b.width, sum);
    });
}

// Norms heads where the model wants it, rotates by position, and writes new keys and values into the cache.
void Model::rotate_and_write(const AttentionPart& a, int index, const Pass& pass, Buffers& b, int row) const {
    const Kernels& k = backend_.kernels;
    const int dim = a.head_dim;
    float* const q = b.qkv + static_cast<size_t>(row) * static_cast<size_t>(a.qkv_size());
    float *const key = q + a.keys_at(), *const value = key + a.kv_size();
    const float *cos = nullptr, *sin = nullptr;
    if (a.rotation >= 0) {
        cos = pass.rotations[static_cast<size_t>(a.rotation)].first +
              static_cast<size_t>(pass.positions[row]) * 2 * static_cast<size_t>(a.turned);
        sin = cos + a.turned;
    }
    const auto norm = [&](float* x, int num_heads, const std::optional<Norm>& norm) {
        if (!norm) return;
        const int width = norm->is_per_head ? dim : num_heads * dim;
        for (int at = 0; at < num_heads * dim; at += width) norm_row(k, *norm, x + at, width, x + at);
    };
    const auto turn = [&](float* x, int num_heads, float scale) {
        for (int head = 0; head < num_heads; ++head, x += dim) {
            const int turned = a.rotation >= 0 ? a.turned : 0;
            if (turned > 0) (a.adjacent ? k.rope_adjacent : k.rope)(x, cos, sin, turned, scale, x);
            for (int i = turned; i < dim && scale != 1.0f; ++i) x[i] *= scale;
        }
    };
    float scale = a.scale;
    if (a.position_beta != 0.0) {
        const auto steps = static_cast<double>(pass.positions[row] / a.position_step);
        scale *= static_cast<float>(1.0 + a.position_beta * std::log(1.0 + steps));
    }
    norm(q, a.heads, a.q_norm), turn(q, a.heads, scale);
    if (!a.makes_keys()) return;  // a source's or another block's keys are there already
    if (a.k_is_v) std::memcpy(value, key, static_cast<size_t>(a.kv_size()) * sizeof(float));
    norm(key, a.kv_heads, a.k_norm), norm(value, a.kv_heads, a.v_norm);
    turn(key, a.kv_heads, 1.0f);
    const Run* run = pass.runs[static_cast<size_t>(pass.kinds[index])].data();
    while (row >= run->first_row + run->num_rows) ++run;
    const int at = run->cached + run->pending + row - run->first_row;
    const size_t heads = static_cast<size_t>(run->rows[at]) * static_cast<size_t>(a.kv_heads);
    const KeyOrder order = order_of(index, pass);
    k.keep_keys(key, a.kv_heads, dim, order, pass.kept,
                static_cast<char*>(pass.keys[index]) + heads * key_bytes(pass.kept, order));
    k.keep_values(value, a.kv_heads, dim, pass.kept,
                  static_cast<char*>(pass.values[index]) + heads * value_bytes(pass.kept, dim));
}

// ------------------------------------------------------------------------------------------------ behind the last
// block

void Model::norm(const float* hidden, int num_rows, float* out) {
    const size_t width = static_cast<size_t>(parts_.hidden_size);
    if (!parts_.final_norm) {
        std::memcpy(out, hidden, static_cast<size_t>(num_rows) * width * sizeof(float));
        return;
    }
    backend_.team.run(false, [&](int thread) {
        backend_.team.tiles(thread, num_rows, [&](int row) {
            const size_t at = static_cast<size_t>(row) * width;
            norm_row(backend_.kernels, *parts_.final_norm, hidden + at, parts_.hidden_size, out + at);
        });
    });
}

// The first outputs of a matrix.
static Matrix first_of(Matrix w, int num_out) {
    w.num_out = std::min(num_out, w.num_out);
    w.num_panels = (w.num_out + PANEL - 1) / PANEL;
    return w;
}

void Model::logits(const float* hidden, int num_rows, int num_ids, float* out) {
    const Matrix head = first_of(this->head(), num_ids);
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    const Inputs x = head_inputs(room, head, num_rows);
    const int width = parts_.hidden_size;
    backend_.team.run(head.bytes() < ALONE_BYTES, [&](int thread) {
        backend_.team.tiles(thread, num_rows, [&](int row) {
            backend_.kernels.put_row(x, row, hidden + static_cast<size_t>(row) * static_cast<size_t>(width), width);
        });
        product(backend_, thread, head, x, logits_of(out, static_cast<size_t>(head.num_out), parts_.range));
    });
}

void Model::argmax(const float* hidden, const std::vector<int>& rows, int num_ids, int64_t* ids, float* values,
                   float* probs) {
    const Matrix head = first_of(this->head(), num_ids);
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    const int num_rows = static_cast<int>(rows.size()), width = parts_.hidden_size;
    const Inputs x = head_inputs(room, head, num_rows);
    const size_t threads = static_cast<size_t>(backend_.team.num_threads());
    std::vector<Best> best(threads * static_cast<size_t>(num_rows), Best{-__builtin_inff(), INT32_MAX});
    std::vector<Odds> odds(probs ? best.size() : 0);
    backend_.team.run(head.bytes() < ALONE_BYTES, [&](int thread) {
        backend_.team.tiles(thread, num_rows, [&](int i) {
            const size_t row = static_cast<size_t>(rows[static_cast<size_t>(i)]);
            backend_.kernels.put_row(x, i, hidden + row * static_cast<size_t>(width), width);
        });
        const size_t first = static_cast<size_t>(thread) * static_cast<size_t>(num_rows);
        product(backend_, thread, head, x,
                best_of(best.data() + first, probs ? odds.data() + first : nullptr, parts_.range));
    });
    for (int row = 0; row < num_rows; ++row) {
        Best winner = best[static_cast<size_t>(row)];
        for (size_t t = 1; t < threads; ++t) {
            const Best& other = best[t * static_cast<size_t>(num_rows) + static_cast<size_t>(row)];
            if (beats(other, winner)) winner = other;
        }
        ids[row] = winner.id;
        values[row] = winner.value;
        if (!probs) continue;
        float sum = 0.0f;
        for (size_t t = 0; t < threads; ++t) {
            const Odds& own = odds[t * static_cast<size_t>(num_rows) + static_cast<size_t>(row)];
            const float scale = std::exp(own.top - winner.value);
            for (float part : own.sums) sum += scale * part;
        }
        probs[row] = 1.0f / sum;
    }
}

// Whether a run goes on behind an id. survival: the product of the shares before the id; the id's own share joins it.
static bool goes_on(const Stop& stop, size_t k, float prob, float& survival) {
    size_t bin = 0;
    while (bin < stop.edges.size() && prob >= stop.edges[bin]) ++bin;
    survival *= stop.shares[bin];
    return k < stop.least.size() && survival >= stop.least[k];
}

// The id that follows a row; -1 where its logits are no numbers.
struct Model::Next {
    int64_t id = -1;
    float chance = 1.0f;
    Probs probs;
};

std::vector<Model::Next> Model::likeliest(const float* hidden, const std::vector<int>& rows, int num_ids,
                                          bool is_told) {
    std::vector<int64_t> ids(rows.size());
    std::vector<float> values(rows.size()), chances(rows.size(), 1.0f);
    argmax(hidden, rows, num_ids, ids.data(), values.data(), is_told ? chances.data() : nullptr);
    std::vector<Next> next(rows.size());
    for (size_t k = 0; k < rows.size(); ++k)
        if (std::isfinite(values[k])) next[k].id = ids[k], next[k].chance = chances[k];
    return next;
}

// Draws from the weights that make_probs leaves; returns the place of the id among them, -1 where there is none.
static int64_t place_drawn(const SamplingKernels& kernels, const Draw& draw, uint64_t depth, const float* weights,
                           const std::vector<int64_t>& ids, int64_t n) {
    const uint64_t position = draw.position + depth;
    if (draw.shares_noise) {
        const int64_t id = race(kernels, weights, ids.empty() ? nullptr : ids.data(), n, draw.seed, position);
        return ids.empty() || id < 0 ? id : std::lower_bound(ids.begin(), ids.end(), id) - ids.begin();
    }
    const PhiloxWords words = philox({{static_cast<uint32_t>(position), PURPOSE_DRAFT, draw.round, 0}},
                                     static_cast<uint32_t>(draw.seed), static_cast<uint32_t>(draw.seed >> 32));
    return place_of(kernels, weights, n, uniform53(words.word[0], words.word[1]));
}

std::vector<Model::Next> Model::drawn(const float* hidden, const std::vector<int>& rows, int num_ids,
                                      const std::vector<const Draw*>& draws, uint64_t depth, bool is_told) {
    const size_t width = static_cast<size_t>(parts_.hidden_size), num = rows.size();
    const int64_t n = std::min(num_ids, head().num_out);
    std::vector<float> chosen(num * width);
    for (size_t k = 0; k < num; ++k)
        std::memcpy(chosen.data() + k * width, hidden + static_cast<size_t>(rows[k]) * width, width * sizeof(float));
    const std::unique_ptr<float[]> scores(new float[num * static_cast<size_t>(n)]);
    logits(chosen.data(), static_cast<int>(num), static_cast<int>(n), scores.get());
    const SamplingKernels& kernels = backend_.kernels.sampling;
    std::vector<Next> next(num);
    const auto one = [&](int k) {
        const float* const row = scores.get() + k * n;
        const Draw& draw = *draws[static_cast<size_t>(k)];
        Next& own = next[static_cast<size_t>(k)];
        if (draw.filters.temperature == 0) {
            own.id = forerun::argmax(kernels, row, n);
            Probs at_one;
            if (own.id >= 0 && is_told && make_probs(kernels, row, n, {1.0f, 0, -INFINITY, 1.0, 0}, at_one))
                own.chance = at_one.dense->data()[own.id];
            return;
        }
        if (!make_probs(kernels, row, n, draw.filters, own.probs)) return;
        const std::vector<int64_t>& ids = own.probs.ids;
        const float* const weights = own.probs.dense ? own.probs.dense->data() : own.probs.listed.data();
        const int64_t place =
            place_drawn(kernels, draw, depth, weights, ids, own.probs.dense ? n : static_cast<int64_t>(ids.size()));
        if (place >= 0) own.id = ids.empty() ? place : ids[static_cast<size_t>(place)], own.chance = weights[place];
    };
    backend_.team.run(num * static_cast<size_t>(n) * sizeof(float) < ALONE_BYTES,
                      [&](int thread) { backend_.team.tiles(thread, static_cast<int>(num), one); });
    return next;
}

bool Model::run_ahead(const Pass& first, const std::vector<int>& lengths, int num_ids,
                      const std::vector<const float*>& layer_rows, const std::vector<Stop>& stops,
                      const std::vector<Draw>& draws, std::vector<Continued>& found) {
    const size_t num_runs = lengths.size(), width = static_cast<size_t>(parts_.hidden_size);
    const size_t num_floats = static_cast<size_t>(first.num_rows) * width;
    std::vector<float> hidden(num_floats), survival(num_runs, 1.0f);
    std::vector<float> left, before, made;
    std::vector<char> stopped(num_runs, 0);
    std::vector<int64_t> tokens, positions;
    std::vector<const Draw*> own_draws;
    std::vector<int> rows, row_of(num_runs);
    std::vector<size_t> going(num_runs);
    found.clear(), found.resize(num_runs);
    const bool is_told = !stops.empty();
    Pass pass = first;
    pass.hidden = hidden.data();
    const bool is_head = parts_.features.has_value(), feeds_stream = is_head && !parts_.features->feeds_normed;
    if (is_head) before.resize(num_runs * width);
    if (feeds_stream) {
        left.resize(num_floats);
        pass.taps = {{static_cast<int>(parts_.blocks.size()), left.data()}};
    }
    if (!layer_rows.empty()) {
        made.resize(num_floats);
        features(layer_rows, first.num_rows, made.data());
        pass.input = made.data();
    }
    const std::vector<float>& fed = feeds_stream ? left : hidden;
    for (size_t i = 0; i < num_runs; ++i) {
        const Run& run = first.runs[0][i];
        going[i] = i;
        rows.push_back(row_of[i] = run.first_row + run.num_rows - 1);
        if (!first.states.empty()) pass.states[i] = first.states[i].part(0, run.num_rows, run.first_row);
    }
    for (int depth = 1;; ++depth) {
        forward(pass);
        own_draws.clear();
        for (size_t i : going)
            if (!draws.empty()) own_draws.push_back(&draws[i]);
        std::vector<Next> next =
            draws.empty() ? likeliest(hidden.data(), rows, num_ids, is_told)
                          : drawn(hidden.data(), rows, num_ids, own_draws, static_cast<uint64_t>(depth - 1), is_told);
        for (size_t k = 0; k < going.size(); ++k) {
            if (next[k].id < 0) return false;
            const size_t i = going[k];
            Continued& own = found[i];
            own.ids.push_back(next[k].id);
            if (!draws.empty()) own.probs.push_back(std::move(next[k].probs));
            if (!is_told) continue;
            own.chances.push_back(next[k].chance);
            stopped[i] = !goes_on(stops[i], own.ids.size() - 1, next[k].chance, survival[i]);
        }
        for (auto& runs : pass.runs) runs.clear();
        pass.sources.clear(), pass.states.clear(), tokens.clear(), positions.clear(), rows.clear(), going.clear();
        for (size_t i = 0; i < num_runs; ++i) {
            if (lengths[i] <= depth || stopped[i]) continue;
            const Run& run = first.runs[0][i];
            const int at = run.cached + run.num_rows + depth - 1;
            const size_t row = going.size();
            if (is_head) {
                const float* const from = fed.data() + static_cast<size_t>(row_of[i]) * width;
                std::memcpy(before.data() + row * width, from, width * sizeof(float));
            }
            rows.push_back(row_of[i] = static_cast<int>(row));
            for (size_t kind = 0; kind < pass.runs.size(); ++kind)
                pass.runs[kind].push_back({rows.back(), 1, at, 0, first.runs[kind][i].rows, nullptr});
            if (!first.sources.empty())
                pass.sources.push_back({rows.back(), 1, first.sources[i].cached, 0, first.sources[i].rows, nullptr});
            if (!first.states.empty())
                pass.states.push_back(first.states[i].part(run.num_rows + depth - 1, 1, rows.back()));
            const int64_t id = found[i].ids.back();
            tokens.push_back(is_head ? lent_.ids[static_cast<size_t>(id)] : id);
            positions.push_back(at);
            going.push_back(i);
        }
        if (going.empty()) return true;
        pass.num_rows = static_cast<int>(going.size());
        pass.tokens = tokens.data(), pass.positions = positions.data();
        if (is_head) pass.input = before.data();
    }
}

}  // namespace forerun
