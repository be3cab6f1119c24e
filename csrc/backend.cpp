#include "backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "memory.h"

namespace forerun {

namespace {

// Of weights per tile: some microseconds; 96 KB were 4 to 9 % slower for hidden size 576.
constexpr size_t TILE_BYTES = 40 << 10;

// Panels of one tile. Some are read side by side, as long as there are enough tiles for the threads to end together.
// num_panels: of all products that are computed together.
int panels_per_tile(const Backend& backend, const Matrix& w, int num_rows, int num_panels) {
    const int shared =
        is_quantised(w.type) ? std::min(num_streams(num_rows), num_panels / (4 * backend.team.num_threads())) : 1;
    return std::max({1, shared, static_cast<int>(TILE_BYTES / w.panel_bytes())});
}

constexpr size_t FETCHED_BYTES = 4096;  // of each panel, as far as kernels fetch ahead within a matrix

// Prefetches the beginning of the matrix that is read next: kernels fetch ahead within one matrix alone.
void fetch_beginning(const Matrix& w, int num_rows) {
    const int side_by_side = is_quantised(w.type) ? num_streams(num_rows) : 1;
    for (int panel = 0; panel < std::min(side_by_side, w.num_panels); ++panel)
        for (size_t i = 0; i < FETCHED_BYTES; i += 64) __builtin_prefetch(w.panel_at(panel) + i, 0, 2);
}

// With fewer, each thread rounds all of them: waiting for others would take as long.
constexpr int LEAST_SHARED_ROWS = 64;

}  // namespace

void product(Backend& backend, int thread, const Matrix& w, const Inputs& inputs, const Output& to,
             const std::function<void()>& prepare) {
    static thread_local Scratch kept, prepared;  // grow to the largest pass, outside of the tiles
    float* sums = kept.floats(sum_floats(inputs.num_rows));
    Inputs x = inputs;
    const size_t bytes = backend.kernels.prepared_bytes(w, inputs.num_rows);
    const bool shares =
        is_quantised(w.type) && inputs.num_rows >= LEAST_SHARED_ROWS && !prepare && backend.team.num_threads() > 1;
    if (shares) {
        const int num_rows = inputs.num_rows;
        backend.team.tiles(thread, 1, [&](int) { backend.prepared.bytes(bytes); });  // has room for them from here on
        backend.team.tiles(thread, (num_rows + TILE_ROWS - 1) / TILE_ROWS, [&](int block) {
            const int first = block * TILE_ROWS, last = std::min(num_rows, first + TILE_ROWS);
            backend.kernels.prepare(w, inputs, first, last, backend.prepared.bytes(bytes));
        });
    } else if (bytes > 0) {
        x.words = static_cast<uint32_t*>(prepared.bytes(bytes));
    }
    const int per_tile = panels_per_tile(backend, w, inputs.num_rows, w.num_panels);
    const int num_tiles = (w.num_panels + per_tile - 1) / per_tile;
    bool is_ready = false;
    backend.team.tiles(thread, num_tiles, [&](int tile) {
        if (!is_ready) {  // a thread without a tile may be late, and the rows may be others already
            if (prepare) prepare();
            if (shares) x.words = static_cast<uint32_t*>(backend.prepared.bytes(bytes));
            else if (bytes > 0) backend.kernels.prepare(w, inputs, 0, inputs.num_rows, x.words);
            is_ready = true;
        }
        backend.kernels.linear(w, x, to, tile * per_tile, std::min(w.num_panels, (tile + 1) * per_tile), sums);
    });
}

void products(Backend& backend, int thread, const std::vector<Product>& all) {
    static thread_local Scratch kept, prepared;
    int most_rows = 0, num_panels = 0;
    size_t most_bytes = 0;
    for (const Product& p : all) {
        most_rows = std::max(most_rows, p.x.num_rows);
        num_panels += p.w->num_panels;
        most_bytes = std::max(most_bytes, backend.kernels.prepared_bytes(*p.w, p.x.num_rows));
    }
    std::vector<int> per_tile, starts{0};  // starts: of each product's tiles
    for (const Product& p : all) {
        per_tile.push_back(panels_per_tile(backend, *p.w, p.x.num_rows, num_panels));
        starts.push_back(starts.back() + (p.w->num_panels + per_tile.back() - 1) / per_tile.back());
    }
    float* const sums = kept.floats(sum_floats(most_rows));
    uint32_t* const words = most_bytes > 0 ? static_cast<uint32_t*>(prepared.bytes(most_bytes)) : nullptr;
    size_t ready = all.size();  // the product whose inputs are prepared
    backend.team.tiles(thread, starts.back(), [&](int tile) {
        const size_t i = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), tile) - starts.begin()) - 1;
        const Product& p = all[i];
        Inputs x = p.x;
        if (backend.kernels.prepared_bytes(*p.w, x.num_rows) > 0) {
            if (ready != i) backend.kernels.prepare(*p.w, p.x, 0, x.num_rows, words);
            ready = i;
            x.words = words;
        }
        const int first = (tile - starts[i]) * per_tile[i];
        if (tile + 1 == starts[i + 1] && i + 1 < all.size()) fetch_beginning(*all[i + 1].w, x.num_rows);
        backend.kernels.linear(*p.w, x, p.to, first, std::min(p.w->num_panels, first + per_tile[i]), sums);
    });
}

void norm_row(const Kernels& kernels, const Norm& norm, const float* x, int width, float* out) {
    if (norm.is_layer) return kernels.layer_norm(x, norm.weight, norm.bias, width, norm.eps, out);
    kernels.rms_norm(x, norm.weight, width, norm.eps, out);
    for (int i = 0; i < width && norm.bias; ++i) out[i] += norm.bias[i];
}

void check_join(const Join& join, int width) {
    if (static_cast<size_t>(width) * join.norms.size() != static_cast<size_t>(join.w->num_in))
        throw std::invalid_argument("the parts of a row must be as wide as the inputs of the product");
}

const float* cut(const float* x, int width, float largest, float* out) {
    for (int i = 0; i < width; ++i) out[i] = std::clamp(x[i], -largest, largest);
    return out;
}

void join_rows(Backend& backend, const Join& join, const std::vector<const float*>& parts, int num_rows, float* out) {
    static thread_local Scratch kept;
    const Matrix& w = *join.w;
    const int width = w.num_in / static_cast<int>(parts.size());
    const Inputs x{kept.words(static_cast<size_t>(num_rows) * static_cast<size_t>(w.num_steps)), w.type, num_rows,
                   w.num_steps};
    backend.team.run(w.bytes() * static_cast<size_t>(num_rows) < ALONE_BYTES, [&](int thread) {
        static thread_local Scratch own;
        float* const row_buffer = own.floats(static_cast<size_t>(w.num_in));
        backend.team.tiles(thread, x.num_blocks(), [&](int block) {
            for (int row = x.block_start(block); row < x.block_start(block + 1); ++row) {
                for (size_t i = 0; i < parts.size(); ++i) {
                    const float* from = parts[i] + static_cast<size_t>(row) * static_cast<size_t>(width);
                    float* const to = row_buffer + i * static_cast<size_t>(width);
                    if (join.largest > 0) from = cut(from, width, join.largest, to);
                    if (join.norms[i]) backend.kernels.rms_norm(from, join.norms[i], width, join.norm_eps, to);
                    else if (from != to) std::memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
                }
                if (join.whole_norm)
                    backend.kernels.rms_norm(row_buffer, join.whole_norm, w.num_in, join.norm_eps, row_buffer);
                backend.kernels.put_row(x, row, row_buffer, w.num_in);
            }
        });
        product(backend, thread, w, x, stored(out, static_cast<size_t>(w.num_out)));
    });
}

}  // namespace forerun
