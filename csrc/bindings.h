// What the bind_*.cpp files share. Tensors come as addresses of contiguous memory that the caller keeps alive; forerun/ops checks
// types and shapes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

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

}  // namespace forerun
