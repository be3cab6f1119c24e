#include "attention_work.h"

#include <algorithm>

namespace forerun {

namespace {

constexpr int ITEMS_PER_THREAD = 4;  // with fewer, a long run is shared among threads

// Some rows of a run, at most ATTENTION_ROWS, whose keys are walked at once, or range by range by any thread.
struct Share {
    const Run* run;
    int first, last;
    int first_range = 0, num_ranges = 1;  // 1: at once
    size_t parts = 0;                     // floats of those before it

    int num_rows() const { return last - first; }
    bool is_split() const { return num_ranges > 1; }
    size_t num_queries(const HeadShape& s) const {
        return static_cast<size_t>(num_rows()) * static_cast<size_t>(s.heads);
    }

    // The place of a row and a query head among the parts of one range: heads that share keys are side by side.
    size_t place(const HeadShape& s, int row, int head) const {
        const int group = s.heads / s.kv_heads;
        return (static_cast<size_t>(head / group) * static_cast<size_t>(num_rows()) + static_cast<size_t>(row)) *
                   static_cast<size_t>(group) +
               static_cast<size_t>(head % group);
    }
};

std::vector<Share> shares_of(const std::vector<Run>& runs, const HeadShape& shape, int num_threads) {
    std::vector<Share> shares;
    for (const Run& run : runs)
        for (int first = 0; first < run.num_rows; first += ATTENTION_ROWS)
            shares.push_back({&run, first, std::min(run.num_rows, first + ATTENTION_ROWS)});
    if (num_threads == 1 || static_cast<int>(shares.size()) >= ITEMS_PER_THREAD * num_threads) return shares;
    size_t parts = 0;
    for (Share& share : shares) {
        const int end = seen_end(shape.sees, *share.run, share.run->pending + share.last - 1);  // no row sees more
        const int oldest = shape.window > 0 ? std::max(0, share.run->cached + 1 - shape.window) : 0;
        share.first_range = oldest / KEY_RANGE;
        share.num_ranges = (end + KEY_RANGE - 1) / KEY_RANGE - share.first_range;
        share.parts = parts;
        if (share.is_split())
            parts += static_cast<size_t>(share.num_ranges) * share.num_queries(shape) * shape.part_floats();
    }
    return shares;
}

// The rows and ranges of the shares, for all key heads at once or, where that is too little for the threads, for each.
std::vector<AttentionItem> items_of(const std::vector<Share>& shares, const HeadShape& shape, bool by_head) {
    std::vector<AttentionItem> items;
    for (const Share& share : shares)
        for (int range = 0; range < share.num_ranges; ++range) {
            const size_t before = static_cast<size_t>(range) * share.num_queries(shape) * shape.part_floats();
            const auto put = [&](Heads heads) {
                items.push_back(
                    {share.run, heads, share.first, share.last, share.is_split() ? share.first_range + range : -1,
                     share.parts + before +
                         share.place(shape, 0, heads.first * (shape.heads / shape.kv_heads)) * shape.part_floats()});
            };
            if (!by_head) put({0, shape.kv_heads});
            for (int head = 0; head < shape.kv_heads && by_head; ++head) put({head, head + 1});
        }
    return items;
}

// One of several equal pieces of an item, by its rows; they share a key head.
AttentionItem piece_of(const AttentionItem& item, const HeadShape& shape, int piece, int num_pieces) {
    AttentionItem cut = item;
    const int num_rows = item.last - item.first;
    cut.first = item.first + num_rows * piece / num_pieces;
    cut.last = item.first + num_rows * (piece + 1) / num_pieces;
    cut.parts += static_cast<size_t>((cut.first - item.first) * (shape.heads / shape.kv_heads)) * shape.part_floats();
    return cut;
}

// What is left when all threads have equally many items is cut by rows, and each thread's share of tiles ends with a
// piece.
void even_out(std::vector<AttentionItem>& items, const HeadShape& shape, int num_threads) {
    const size_t threads = static_cast<size_t>(num_threads), num_left = items.size() % threads;
    if (num_left == 0) return;
    const int num_pieces = num_threads / static_cast<int>(num_left);
    const std::vector<AttentionItem> left(items.end() - static_cast<std::ptrdiff_t>(num_left), items.end());
    items.resize(items.size() - num_left);
    for (const AttentionItem& item : left)
        for (int piece = 0; piece < num_pieces; ++piece) items.push_back(piece_of(item, shape, piece, num_pieces));
    if (items.size() % threads != 0) return;
    const std::vector<AttentionItem> dealt = items;
    const size_t per_thread = items.size() / threads;
    for (size_t i = 0; i < items.size(); ++i) items[i] = dealt[i % per_thread * threads + i / per_thread];
}

}  // namespace

AttentionWork attention_work(const std::vector<Run>& runs, const HeadShape& shape, int num_threads) {
    const std::vector<Share> shares = shares_of(runs, shape, num_threads);
    int num_walks = 0;
    for (const Share& share : shares) num_walks += share.num_ranges;
    const bool by_head = num_walks < ITEMS_PER_THREAD * num_threads;
    AttentionWork work{items_of(shares, shape, by_head), {}, 0};
    if (by_head) even_out(work.items, shape, num_threads);
    for (const Share& share : shares) {
        if (!share.is_split()) continue;
        const size_t stride = share.num_queries(shape) * shape.part_floats();
        work.num_floats = share.parts + static_cast<size_t>(share.num_ranges) * stride;
        for (int row = 0; row < share.num_rows(); ++row)
            for (int head = 0; head < shape.heads; ++head)
                work.queries.push_back({share.run->first_row + share.first + row, head,
                                        share.parts + share.place(shape, row, head) * shape.part_floats(),
                                        share.num_ranges, stride});
    }
    return work;
}

size_t attention_scratch(const HeadShape& shape, int num_rows, int num_kv_heads) {
    const size_t dim = (static_cast<size_t>(shape.head_dim) + 15) / 16 * 16;
    const size_t states =
        static_cast<size_t>(num_rows) * static_cast<size_t>(shape.heads / shape.kv_heads * num_kv_heads);
    return KEY_BLOCK * 2 * dim + states * (3 * dim + 16) + 3 * static_cast<size_t>(num_rows) + 128;
}

size_t most_part_floats(const HeadShape& shape, int num_rows, int context, int num_threads) {
    if (num_threads == 1) return 0;
    const int most_rows = std::min(num_rows, ATTENTION_ROWS * (ITEMS_PER_THREAD * num_threads - 1));
    const size_t num_ranges = static_cast<size_t>((context + KEY_RANGE - 1) / KEY_RANGE);
    return static_cast<size_t>(most_rows) * static_cast<size_t>(shape.heads) * num_ranges * shape.part_floats();
}

}  // namespace forerun
