// How the attention of a pass is cut into items of work for the threads of a team.
#pragma once

#include <vector>

#include "kernels.h"

namespace forerun {

constexpr int ATTENTION_ROWS = 16;  // rows of one run that share a tile of keys

// The heads of a block, which decide how its attention is cut.
struct HeadShape {
    int heads, kv_heads, head_dim, window;
    Sees sees = Sees::past;
    bool operator==(const HeadShape& o) const {
        return heads == o.heads && kv_heads == o.kv_heads && head_dim == o.head_dim && window == o.window &&
               sees == o.sees;
    }
    size_t part_floats() const { return forerun::part_floats(head_dim); }
};

// Rows [first, last) of a run and some key heads, which one thread computes at once. range: -1 = all keys that the rows
// see, and the result is written; else the keys of one range, and the state of each row and query head goes to `parts`.
struct AttentionItem {
    const Run* run;
    Heads heads;
    int first, last;
    int range;
    size_t parts;  // floats before them
};

// A row of the pass and a query head, which were seen range by range: its parts are `stride` floats apart.
struct AttentionQuery {
    int row, head;
    size_t parts;
    int num_parts;
    size_t stride;
};

struct AttentionWork {
    std::vector<AttentionItem> items;
    std::vector<AttentionQuery> queries;  // behind all items
    size_t num_floats;                    // of parts
};

AttentionWork attention_work(const std::vector<Run>& runs, const HeadShape& shape, int num_threads);

// Floats that a thread needs for so many rows of a run and so many key heads at once.
size_t attention_scratch(const HeadShape& shape, int num_rows, int num_kv_heads);

// The most floats of parts that a pass of so many rows and a context of so many tokens can need.
size_t most_part_floats(const HeadShape& shape, int num_rows, int context, int num_threads);

}  // namespace forerun
