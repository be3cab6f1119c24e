// The instruction sets of this processor, and their kernels.
//
// FORERUN_X86 is defined where the files for AVX-512 and AVX2 were compiled (csrc/CMakeLists.txt); elsewhere there is only
// the baseline, which is portable C++.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace forerun {

// Those of "avx512" (F, BW, DQ, VL, VNNI, BF16), "avx2" (AVX2, FMA, F16C) and "baseline" (any processor) that processor and
// operating system support, best first.
std::vector<std::string> supported_isas();

// The kernels of a supported instruction set; null for any other name.
const Kernels* kernels_for(const std::string& isa);

}  // namespace forerun
