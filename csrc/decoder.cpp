#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

namespace {

constexpr size_t HUGE_PAGE = size_t{1} << 21;
constexpr size_t TILE_BYTES = 40 << 10;     // of weights per tile: some microseconds; 96 KB were 4 to 9 % slower for hidden size 576
constexpr size_t ALONE_BYTES = 1 << 20;     // passes that read less run on one thread: waking others would cost more
constexpr int FEW_BLOCKS = 2;               // up to so many blocks of rows, each thread norms all rows and waits for none
constexpr int ATTENTION_ROWS = 16;          // rows of one run that share a tile of keys
constexpr int ITEMS_PER_THREAD = 4;         // with fewer, a long run is shared among threads

size_t up_to(size_t n, size_t step) { return (n + step - 1) / step * step; }

}  // namespace

// Large blocks are mapped one by one: between those of a heap there would be gaps, up to a huge page before each.
void* allocate(size_t bytes) {
#if defined(__linux__)
    if (bytes >= HUGE_PAGE) {
        const size_t size = up_to(bytes, HUGE_PAGE);
        void* const mapped = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return nullptr;
        char* const from = static_cast<char*>(mapped);
        const size_t skipped = -reinterpret_cast<uintptr_t>(from) % HUGE_PAGE;
        if (skipped > 0) munmap(from, skipped);
        munmap(from + skipped + size, HUGE_PAGE - skipped);
        madvise(from + skipped, size, MADV_HUGEPAGE);
        return from + skipped;
    }
#endif
    // Prefetches may reach behind the end by one line pair and the distance fetched ahead; nothing is read there.
    return std::aligned_alloc(64, up_to(std::max<size_t>(bytes, 1), 64));
}

void release(void* data, size_t bytes) {
#if defined(__linux__)
    if (data && bytes >= HUGE_PAGE) {
        munmap(data, up_to(bytes, HUGE_PAGE));
        return;
    }
#else
    (void)bytes;
#endif
    std::free(data);
}

Scratch::~Scratch() { release(data_, size_); }

void* Scratch::bytes(size_t count) {
    if (count > size_) {
        release(data_, size_);
        size_ = 0;
        data_ = allocate(count);
        if (!data_) throw std::bad_alloc();
        size_ = count;
        std::memset(data_, 0, count);
    }
    return data_;
}

size_t attention_scratch(const Attention& a, int num_rows, int num_kv_heads) {
    const size_t dim = up_to(static_cast<size_t>(a.head_dim), 16);
    const size_t states = static_cast<size_t>(num_rows) * static_cast<size_t>(a.num_heads / a.num_kv_heads * num_kv_heads);
    return KEY_BLOCK * 2 * dim + states * (3 * dim + 16) + 3 * static_cast<size_t>(num_rows) + 128;
}

void product(Backend& backend, int thread, const Matrix& w, const Inputs& inputs, const Output& to,
             const std::function<void()>& prepare) {
    static thread_local Scratch kept, prepared;  // grow to the largest pass, outside of the tiles
    float* sums = kept.floats(static_cast<size_t>(inputs.num_rows) * PANEL);
    Inputs x = inputs;
    const size_t bytes = backend.kernels.prepared_bytes(w, inputs.num_rows);
    if (bytes > 0) x.words = static_cast<uint32_t*>(prepared.bytes(bytes));
    const int per_tile = static_cast<int>(std::max<size_t>(1, TILE_BYTES / w.panel_bytes()));
    const int num_tiles = (w.num_panels + per_tile - 1) / per_tile;
    bool is_ready = false;
    backend.team.tiles(thread, num_tiles, [&](int tile) {
        if (!is_ready) {  // a thread without a tile may be late, and the rows may be others already
            if (prepare) prepare();
            if (bytes > 0) backend.kernels.prepare(w, inputs, x.words);  // by each thread: a barrier would take longer
            is_ready = true;
        }
        backend.kernels.linear(w, x, to, tile * per_tile, std::min(w.num_panels, (tile + 1) * per_tile), sums);
    });
}

// Some rows of a run, at most ATTENTION_ROWS, whose keys are walked at once, or range by range by any thread.
struct Decoder::Share {
    const Run* run;
    int first, last;
    int first_range, num_ranges;  // num_ranges = 1: at once
    size_t first_part;            // of those before it; a part is what one row and query head has seen of a range

    size_t num_parts(int num_heads) const {
        return num_ranges > 1 ? static_cast<size_t>(num_ranges) * static_cast<size_t>(last - first) * num_heads : 0;
    }
};

// The buffers that one pass writes, besides the caches. The inputs of one product after the other use the same memory.
struct Decoder::Buffers {
    float *residual, *qkv, *normed, *attention, *parts;
    int qkv_stride;
    size_t attention_stride, normed_stride;
    int num_rows;
    uint32_t *hidden, *ffn;  // inputs of products; those of the heads are where those of the hidden rows were
    uint32_t* own;  // each thread's own copy of the normed rows, or null
    size_t own_stride;

    Inputs inputs(const Matrix& w, uint32_t* words) const { return {words, w.type, num_rows, w.num_steps}; }
};

Decoder::Decoder(Backend& backend, DecoderShape shape, std::vector<Layer> layers, Embedding embedding,
                 const float* final_norm, const Matrix* head)
    : backend_(backend), shape_(shape), layers_(std::move(layers)), embedding_(embedding), final_norm_(final_norm),
      head_(head), bytes_(0) {
    for (const Layer& layer : layers_)
        for (const Matrix* w : {layer.qkv, layer.o, layer.gate_up, layer.down}) {
            bytes_ += w->bytes();
            is_any_quantised_ |= is_quantised(w->type);
        }
}

bool Decoder::alone(int num_rows) const {
    return bytes_ / std::max<size_t>(layers_.size(), 1) * static_cast<size_t>(num_rows) < ALONE_BYTES;
}

Decoder::Buffers Decoder::buffers(Room& room, const Pass& pass) {
    const DecoderShape& s = shape_;
    const int num_rows = pass.num_rows;
    const size_t rows = static_cast<size_t>(num_rows), threads = static_cast<size_t>(backend_.team.num_threads());
    const int q_size = s.num_heads * s.head_dim;
    const auto steps = [&](int n) { return steps_of(is_any_quantised_ ? Type::int8 : s.type, n); };  // at most
    const int widest = std::max(steps(s.hidden_size), steps(q_size));
    Buffers b{};
    b.qkv_stride = q_size + 2 * s.num_kv_heads * s.head_dim;
    b.residual = room.residual.floats(rows * static_cast<size_t>(s.hidden_size));
    b.qkv = room.qkv.floats(rows * static_cast<size_t>(b.qkv_stride));
    b.normed_stride = up_to(static_cast<size_t>(s.hidden_size), 64);
    b.normed = room.normed.floats(b.normed_stride * threads);
    uint32_t* words = room.inputs.words(rows * static_cast<size_t>(widest));
    b.num_rows = num_rows;
    b.hidden = words;
    b.own_stride = up_to(rows * static_cast<size_t>(steps(s.hidden_size)), 32);
    b.own = Inputs{words, s.type, num_rows, 0}.num_blocks() > FEW_BLOCKS ? nullptr : room.own.words(b.own_stride * threads);
    b.ffn = room.ffn.words(rows * static_cast<size_t>(steps(s.ffn_size)));
    Attention a{};
    a.num_heads = s.num_heads, a.num_kv_heads = s.num_kv_heads, a.head_dim = s.head_dim;
    b.attention_stride = up_to(attention_scratch(a, ATTENTION_ROWS, s.num_kv_heads), 64);
    b.attention = room.attention.floats(b.attention_stride * threads);
    size_t num_parts = 0;  // with a window there are less
    for (const Share& share : shares_of(pass, 0)) num_parts = std::max(num_parts, share.first_part + share.num_parts(s.num_heads));
    b.parts = room.parts.floats(num_parts * part_floats(a));
    return b;
}

Inputs Decoder::head_inputs(Room& room, int num_rows) const {
    const int steps = head_->num_steps;
    return {room.inputs.words(static_cast<size_t>(num_rows) * steps), head_->type, num_rows, steps};
}

void Decoder::embed(int64_t token, float* x) const {
    const DecoderShape& s = shape_;
    if (embedding_.packed) return backend_.kernels.unpack_row(*embedding_.packed, static_cast<int>(token), x);
    const size_t at = static_cast<size_t>(token) * static_cast<size_t>(s.hidden_size) * bytes_of(s.type);
    backend_.kernels.from_type(static_cast<const char*>(embedding_.rows) + at, s.hidden_size, s.type, x);
}

void Decoder::forward(const Pass& pass) {
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    for (int row = 0; row < pass.num_rows && !pass.input; ++row)
        if (pass.tokens[row] < 0 || pass.tokens[row] >= shape_.vocab_size)
            throw std::out_of_range("there is no token with the id " + std::to_string(pass.tokens[row]));
    Buffers b = buffers(room, pass);
    const size_t width = static_cast<size_t>(shape_.hidden_size);
    backend_.team.run(alone(pass.num_rows), [&](int thread) {
        const auto for_rows = [&](const auto& act) {
            backend_.team.tiles(thread, pass.num_rows, [&](int row) { act(row, static_cast<size_t>(row) * width); });
        };
        const auto copy = [&](const float* from, float* to) {
            for_rows([&](int, size_t at) { std::memcpy(to + at, from + at, width * sizeof(float)); });
        };
        size_t tap = 0;
        const auto write_taps = [&](int last) {
            for (; tap < pass.taps.size() && pass.taps[tap].first <= last; ++tap) copy(b.residual, pass.taps[tap].second);
        };
        if (pass.input) copy(pass.input, b.residual);
        else for_rows([&](int row, size_t at) { embed(pass.tokens[row], b.residual + at); });
        for (int i : pass.layers) {
            write_taps(i);
            layer(thread, layers_[static_cast<size_t>(i)], i, pass, b);
        }
        write_taps(static_cast<int>(layers_.size()));
        if (!pass.is_normed) return copy(b.residual, pass.hidden);
        for_rows([&](int, size_t at) {
            backend_.kernels.rms_norm(b.residual + at, final_norm_, shape_.hidden_size, shape_.norm_eps, pass.hidden + at);
        });
    });
}

void Decoder::layer(int thread, const Layer& layer, int index, const Pass& pass, Buffers& b) {
    const DecoderShape& s = shape_;
    Team& team = backend_.team;
    float* row_buffer = b.normed + b.normed_stride * static_cast<size_t>(thread);
    const auto norm_row = [&](const float* weight, const Inputs& to, int row) {
        const float* x = b.residual + static_cast<size_t>(row) * s.hidden_size;
        backend_.kernels.rms_norm(x, weight, s.hidden_size, s.norm_eps, row_buffer);
        backend_.kernels.put_row(to, row, row_buffer, s.hidden_size);
    };
    const auto times_normed = [&](const float* weight, const Matrix& w, const Output& to) {
        Inputs x = b.inputs(w, b.hidden);
        const auto norm_rows = [&](int first, int last) {
            for (int row = first; row < last; ++row) norm_row(weight, x, row);
        };
        if (b.own) {
            x.words = b.own + b.own_stride * static_cast<size_t>(thread);
            return product(backend_, thread, w, x, to, [&] { norm_rows(0, pass.num_rows); });
        }
        // Rows of one block share cache lines, so a block belongs to one thread.
        team.tiles(thread, x.num_blocks(), [&](int block) { norm_rows(x.block_start(block), x.block_start(block + 1)); });
        product(backend_, thread, w, x, to);
    };
    const Output residual{Finish::add, b.residual, static_cast<size_t>(s.hidden_size), {}, nullptr};
    times_normed(layer.input_norm, *layer.qkv, {Finish::store, b.qkv, static_cast<size_t>(b.qkv_stride), {}, nullptr});
    team.tiles(thread, pass.num_rows, [&](int row) { rotate_and_write(layer, index, pass, b, row); });
    attend(thread, layer, index, pass, b);
    product(backend_, thread, *layer.o, b.inputs(*layer.o, b.hidden), residual);
    const Inputs ffn = b.inputs(*layer.down, b.ffn);
    times_normed(layer.mlp_norm, *layer.gate_up, {Finish::gated, nullptr, 0, ffn, nullptr});
    product(backend_, thread, *layer.down, ffn, residual);
}

// Norms each head where the architecture wants it, rotates by position, and writes new keys and values into the cache.
void Decoder::rotate_and_write(const Layer& layer, int index, const Pass& pass, Buffers& b, int row) {
    const DecoderShape& s = shape_;
    const Kernels& k = backend_.kernels;
    const int dim = s.head_dim;
    float* q = b.qkv + static_cast<size_t>(row) * b.qkv_stride;
    float* key = q + s.num_heads * dim;
    const float* value = key + s.num_kv_heads * dim;
    const float* cos = pass.rotations + static_cast<size_t>(pass.positions[row]) * 2 * dim;
    for (int head = 0; head < s.num_heads; ++head) {
        float* x = q + head * dim;
        if (layer.q_norm) k.rms_norm(x, layer.q_norm, dim, s.norm_eps, x);
        k.rope(x, cos, cos + dim, dim, 1.0f / std::sqrt(static_cast<float>(dim)), x);
    }
    for (int head = 0; head < s.num_kv_heads; ++head) {
        float* x = key + head * dim;
        if (layer.k_norm) k.rms_norm(x, layer.k_norm, dim, s.norm_eps, x);
        k.rope(x, cos, cos + dim, dim, 1.0f, x);
    }
    const Run* run = &pass.runs[0];
    while (row >= run->first_row + run->num_rows) ++run;
    const int at = run->cached + run->pending + row - run->first_row, width = s.num_kv_heads * dim;
    const size_t offset = static_cast<size_t>(run->rows[at]) * static_cast<size_t>(width) * bytes_of(s.type);
    k.to_type(key, width, s.type, static_cast<char*>(pass.keys[index]) + offset);
    k.to_type(value, width, s.type, static_cast<char*>(pass.values[index]) + offset);
}

// Long runs are shared among threads where there are too few runs to occupy them.
std::vector<Decoder::Share> Decoder::shares_of(const Pass& pass, int window) const {
    std::vector<Share> shares;
    for (const Run& run : pass.runs)
        for (int first = 0; first < run.num_rows; first += ATTENTION_ROWS)
            shares.push_back({&run, first, std::min(run.num_rows, first + ATTENTION_ROWS), 0, 1, 0});
    const int num_threads = backend_.team.num_threads();
    if (num_threads == 1 || static_cast<int>(shares.size()) >= ITEMS_PER_THREAD * num_threads) return shares;
    size_t num_parts = 0;
    for (Share& share : shares) {
        const int end = share.run->cached + share.run->pending + share.last;  // no row sees more
        const int oldest = window > 0 ? std::max(0, share.run->cached + 1 - window) : 0;
        share.first_range = oldest / KEY_RANGE;
        share.num_ranges = (end + KEY_RANGE - 1) / KEY_RANGE - share.first_range;
        share.first_part = num_parts;
        num_parts += share.num_parts(shape_.num_heads);
    }
    return shares;
}

void Decoder::attend(int thread, const Layer& layer, int index, const Pass& pass, Buffers& b) {
    const DecoderShape& s = shape_;
    const Attention a{s.type, b.qkv, static_cast<size_t>(b.qkv_stride), pass.keys[index], pass.values[index],
                      s.num_heads, s.num_kv_heads, s.head_dim, layer.window, nullptr, 0,
                      b.inputs(*layer.o, b.hidden)};
    const std::vector<Share> shares = shares_of(pass, layer.window);
    float* scratch = b.attention + b.attention_stride * static_cast<size_t>(thread);
    const size_t group = static_cast<size_t>(s.num_heads / s.num_kv_heads), size = part_floats(a);
    int num_walks = 0, num_queries = 0;
    for (const Share& share : shares) {
        num_walks += share.num_ranges;
        if (share.num_ranges > 1) num_queries += (share.last - share.first) * s.num_heads;
    }
    const bool by_head = num_walks < ITEMS_PER_THREAD * backend_.team.num_threads();
    const int items_per_walk = by_head ? s.num_kv_heads : 1, num_items = num_walks * items_per_walk;
    // What is left when all threads have equally many is cut by rows, and each thread's share ends with a piece.
    const int num_threads = backend_.team.num_threads(), num_left = by_head ? num_items % num_threads : 0;
    const int num_pieces = num_left > 0 ? num_threads / num_left : 1;
    const int num_whole = num_items - num_left, count = num_whole + num_left * num_pieces;
    const bool is_dealt = num_left > 0 && count % num_threads == 0;
    backend_.team.tiles(thread, count, [&](int tile) {
        const int per_thread = count / num_threads, at = is_dealt ? tile % per_thread * num_threads + tile / per_thread : tile;
        const int beyond = at - num_whole, item = beyond < 0 ? at : num_whole + beyond / num_pieces;
        const Heads heads = by_head ? Heads{item % s.num_kv_heads, item % s.num_kv_heads + 1} : Heads{0, s.num_kv_heads};
        int walk = item / items_per_walk;
        const Share* share = shares.data();
        for (; walk >= share->num_ranges; ++share) walk -= share->num_ranges;
        const int num_rows = share->last - share->first, piece = beyond < 0 ? 0 : beyond % num_pieces;
        const int pieces = beyond < 0 ? 1 : num_pieces;
        const int first = num_rows * piece / pieces, last = num_rows * (piece + 1) / pieces;
        if (first == last) return;
        const size_t part = (static_cast<size_t>(walk * s.num_kv_heads + heads.first) * static_cast<size_t>(num_rows) +
                             static_cast<size_t>(first)) * group;
        const bool is_shared = share->num_ranges > 1;
        backend_.kernels.attention(a, *share->run, heads, share->first + first, share->first + last,
                                   is_shared ? share->first_range + walk : -1,
                                   is_shared ? b.parts + (share->first_part + part) * size : nullptr, scratch);
    });
    if (num_queries == 0) return;
    backend_.team.tiles(thread, num_queries, [&](int item) {
        const Share* share = shares.data();
        for (;; ++share) {
            const int own = share->num_ranges > 1 ? (share->last - share->first) * s.num_heads : 0;
            if (item < own) break;
            item -= own;
        }
        const size_t num_rows = static_cast<size_t>(share->last - share->first), row = static_cast<size_t>(item / s.num_heads);
        const size_t head = static_cast<size_t>(item % s.num_heads);
        const size_t at = (head / group * num_rows + row) * group + head % group;
        backend_.kernels.combine(a, share->run->first_row + share->first + static_cast<int>(row), static_cast<int>(head),
                                 b.parts + (share->first_part + at) * size, share->num_ranges,
                                 num_rows * static_cast<size_t>(s.num_heads) * size, scratch);
    });
}

void Decoder::logits(const float* hidden, int num_rows, float* out) {
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    const Inputs x = head_inputs(room, num_rows);
    backend_.team.run(head_->bytes() < ALONE_BYTES, [&](int thread) {
        backend_.team.tiles(thread, num_rows, [&](int row) {
            backend_.kernels.put_row(x, row, hidden + static_cast<size_t>(row) * shape_.hidden_size, shape_.hidden_size);
        });
        product(backend_, thread, *head_, x, {Finish::store, out, static_cast<size_t>(shape_.vocab_size), {}, nullptr});
    });
}

void Decoder::argmax(const float* hidden, const std::vector<int>& rows, int num_ids, int64_t* ids, float* values) {
    Room& room = room_.get();
    std::lock_guard<std::mutex> lock(room.turn);
    const int num_rows = static_cast<int>(rows.size());
    const Inputs x = head_inputs(room, num_rows);
    const size_t threads = static_cast<size_t>(backend_.team.num_threads());
    std::vector<Best> best(threads * static_cast<size_t>(num_rows), Best{-__builtin_inff(), INT32_MAX});
    Matrix head = *head_;
    head.num_out = std::min(num_ids, head.num_out);
    head.num_panels = (head.num_out + PANEL - 1) / PANEL;
    backend_.team.run(head.bytes() < ALONE_BYTES, [&](int thread) {
        backend_.team.tiles(thread, num_rows, [&](int i) {
            const size_t row = static_cast<size_t>(rows[static_cast<size_t>(i)]);
            backend_.kernels.put_row(x, i, hidden + row * shape_.hidden_size, shape_.hidden_size);
        });
        Best* own = best.data() + static_cast<size_t>(thread) * static_cast<size_t>(num_rows);
        product(backend_, thread, head, x, {Finish::argmax, nullptr, 0, {}, own});
    });
    for (int row = 0; row < num_rows; ++row) {
        Best winner = best[static_cast<size_t>(row)];
        for (size_t t = 1; t < threads; ++t) {
            const Best& other = best[t * static_cast<size_t>(num_rows) + static_cast<size_t>(row)];
            if (beats(other, winner)) winner = other;
        }
        ids[row] = winner.id;
        values[row] = winner.value;
    }
}

void join_rows(Backend& backend, const Join& join, const std::vector<const float*>& parts, int num_rows, float* out) {
    static thread_local Scratch kept;
    const Matrix& w = *join.w;
    const int width = w.num_in / static_cast<int>(parts.size());
    const Inputs x{kept.words(static_cast<size_t>(num_rows) * static_cast<size_t>(w.num_steps)), w.type, num_rows, w.num_steps};
    backend.team.run(w.bytes() * static_cast<size_t>(num_rows) < ALONE_BYTES, [&](int thread) {
        static thread_local Scratch own;
        float* const row_buffer = own.floats(static_cast<size_t>(w.num_in));
        backend.team.tiles(thread, x.num_blocks(), [&](int block) {
            for (int row = x.block_start(block); row < x.block_start(block + 1); ++row) {
                for (size_t i = 0; i < parts.size(); ++i) {
                    const float* from = parts[i] + static_cast<size_t>(row) * static_cast<size_t>(width);
                    float* const to = row_buffer + i * static_cast<size_t>(width);
                    if (join.norms[i]) backend.kernels.rms_norm(from, join.norms[i], width, join.norm_eps, to);
                    else std::memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
                }
                backend.kernels.put_row(x, row, row_buffer, w.num_in);
            }
        });
        product(backend, thread, w, x, {Finish::store, out, static_cast<size_t>(w.num_out), {}, nullptr});
    });
}

bool Decoder::run_ahead(const Pass& first, const std::vector<int>& lengths, int num_ids, const Ahead* ahead,
                        std::vector<std::vector<int64_t>>& ids) {
    const size_t num_runs = lengths.size(), width = static_cast<size_t>(shape_.hidden_size);
    const size_t num_floats = static_cast<size_t>(first.num_rows) * width;
    std::vector<float> hidden(num_floats), values(num_runs), left, embedded, before, input;
    std::vector<int64_t> tokens, positions, found(num_runs);
    std::vector<int> rows, row_of(num_runs);
    std::vector<size_t> going(num_runs);
    ids.assign(num_runs, {});
    Pass pass = first;
    pass.hidden = hidden.data();
    if (ahead) {
        left.resize(num_floats), embedded.resize(num_runs * width), before.resize(num_runs * width), input.resize(num_runs * width);
        pass.taps = {{static_cast<int>(layers_.size()), left.data()}};
    }
    for (size_t i = 0; i < num_runs; ++i) {
        const Run& run = first.runs[i];
        going[i] = i;
        rows.push_back(row_of[i] = run.first_row + run.num_rows - 1);
    }
    for (int depth = 1;; ++depth) {
        forward(pass);
        argmax(hidden.data(), rows, num_ids, found.data(), values.data());
        for (size_t k = 0; k < going.size(); ++k) {
            if (!std::isfinite(values[k])) return false;
            ids[going[k]].push_back(found[k]);
        }
        pass.runs.clear(), tokens.clear(), positions.clear(), rows.clear(), going.clear();
        for (size_t i = 0; i < num_runs; ++i) {
            if (lengths[i] <= depth) continue;
            const Run& run = first.runs[i];
            const int at = run.cached + run.num_rows + depth - 1;
            const size_t row = going.size();
            if (ahead) {
                ahead->target->embed(ahead->ids[static_cast<size_t>(ids[i].back())], embedded.data() + row * width);
                const float* const from = left.data() + static_cast<size_t>(row_of[i]) * width;
                std::memcpy(before.data() + row * width, from, width * sizeof(float));
            }
            rows.push_back(row_of[i] = static_cast<int>(row));
            pass.runs.push_back({rows.back(), 1, at, 0, run.rows, nullptr});
            tokens.push_back(ids[i].back());
            positions.push_back(at);
            going.push_back(i);
        }
        if (going.empty()) return true;
        pass.num_rows = static_cast<int>(going.size());
        pass.tokens = tokens.data(), pass.positions = positions.data();
        if (ahead) {
            join_rows(backend_, ahead->join, {embedded.data(), before.data()}, pass.num_rows, input.data());
            pass.input = input.data();
        }
    }
}

}  // namespace forerun
