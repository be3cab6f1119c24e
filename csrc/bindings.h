// What the bind_*.cpp files share. Tensors come as addresses of contiguous memory that the caller keeps alive;
// forerun/ops checks types and shapes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "door.h"
#include "kernels.h"

namespace forerun {

using Address = uintptr_t;
using Numbers = std::vector<int32_t>;  // a list is read faster than an array is made of one
using Ids = std::vector<int64_t>;
using Free = nanobind::call_guard<nanobind::gil_scoped_release>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// The runs of a pass, with the physical rows that their block tables name.
struct Runs {
    std::vector<Run> runs;
    std::vector<int32_t> rows;

    // numbers: six for each run (first row, rows, cached, pending, where its table begins, where its parents begin, 0
    // in a chain), then tables and parents, which are not copied. num_rows: of the pool that the tables are of. Throws
    // WrongNumbers for what would lead out of the numbers or the pool.
    Runs(const Numbers& numbers, int num_runs, int block_tokens, int64_t num_rows) {
        const int64_t begin = 6 * static_cast<int64_t>(num_runs), end = static_cast<int64_t>(numbers.size());
        require(num_runs >= 0 && begin <= end, "every run of a pass needs six numbers");
        const auto check = [](bool holds, int run, const char* what) {
            if (!holds) throw WrongNumbers("run " + std::to_string(run) + " of a pass " + what);
        };
        std::vector<size_t> starts;
        for (int i = 0; i < num_runs; ++i) {
            const int32_t* n = numbers.data() + 6 * i;
            check(n[0] >= 0 && n[1] >= 0 && n[2] >= 0 && n[3] >= 0, i, "has less than no rows");
            const int64_t covered = int64_t{n[1]} + n[2] + n[3],
                          num_blocks = (covered + block_tokens - 1) / block_tokens;
            check(n[4] >= begin && n[4] + num_blocks <= end, i, "has a block table that ends before its rows do");
            starts.push_back(rows.size());
            const int32_t* block = numbers.data() + n[4];
            for (int64_t left = covered; left > 0; left -= block_tokens, ++block) {
                check(*block >= 0 && (int64_t{*block} + 1) * block_tokens <= num_rows, i,
                      "has a block that its cache has not");
                for (int j = 0; j < block_tokens && j < left; ++j) rows.push_back(*block * block_tokens + j);
            }
            const int32_t* const parents = n[5] ? numbers.data() + n[5] : nullptr;
            const int num_nodes = parents ? n[3] + n[1] : 0;
            check(!parents || (n[5] >= begin && int64_t{n[5]} + num_nodes <= end), i, "has fewer parents than nodes");
            for (int node = 0; node < num_nodes; ++node)
                check(parents[node] >= -1 && parents[node] < node, i, "has a node that comes before its parent");
            runs.push_back({n[0], n[1], n[2], n[3], nullptr, parents});
        }
        for (size_t i = 0; i < runs.size(); ++i) runs[i].rows = rows.data() + starts[i];
    }

    // Throws WrongNumbers unless the runs have these rows of a pass, one behind the other.
    void check_rows(int num_rows) const {
        int next = 0;
        for (const Run& run : runs) {
            require(run.first_row == next && run.num_rows <= num_rows - next,
                    "the runs of a pass must have its rows, one behind the other");
            next += run.num_rows;
        }
        require(next == num_rows, "every row of a pass needs a run");
    }
};

}  // namespace forerun
