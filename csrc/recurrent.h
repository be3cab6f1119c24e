// What recurrent blocks take in a pass.
#pragma once

#include <vector>

#include "blocks.h"

namespace forerun {

// Floats that each thread needs for the runs of a pass.
size_t state_floats(const RecurrencePart& r, const std::vector<StateRun>& runs, int num_threads);

// The most that a pass of so many rows can need.
size_t most_state_floats(const RecurrencePart& r, int num_rows);

}  // namespace forerun
