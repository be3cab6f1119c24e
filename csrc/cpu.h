// The instruction sets that kernels were compiled for, and which of them this processor has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace forerun {

struct InstructionSet {
    std::string name;   // of its file in isa/
    std::string needs;  // features of a processor, between spaces
    bool is_supported;  // by this processor and its operating system
    const Kernels* kernels;
};

// Best first; the last is portable C++.
const std::vector<InstructionSet>& instruction_sets();

// Throws std::invalid_argument where this processor cannot run it.
const Kernels& kernels_for(const std::string& isa);

// Portable kernels, for what has to have the same bits everywhere.
const Kernels& portable_kernels();

}  // namespace forerun
