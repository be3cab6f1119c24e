// Which instruction sets this processor has, and which kernels to take.
//
// FORERUN_X86 is defined where the files for AVX-512 and AVX2 were compiled (csrc/CMakeLists.txt); elsewhere only the
// baseline, portable C++, is there.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace forerun {

// "avx512" (F, BW, DQ, VL, VNNI, BF16), "avx2" (AVX2, FMA, F16C), "baseline" (any processor); best first. Those that
// this processor runs, the operating system's part included.
std::vector<std::string> supported_isas();

// The kernels of a supported instruction set; null for any other name.
const Kernels* kernels_for(const std::string& isa);

}  // namespace forerun
