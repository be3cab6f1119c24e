#include "cpu.h"

#include <algorithm>

namespace forerun {

namespace {

// Intel's vdpbf16ps takes two cycles (a Xeon of 2023: 45 G multiplications a second and core, of floats 78 G); AMD's takes
// one.
bool is_intel() {
#if defined(FORERUN_X86)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

}  // namespace

bool widens_pairs = is_intel();

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
#if defined(FORERUN_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
        names.push_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        names.push_back("avx2");
#endif
    names.push_back("baseline");
    return names;
}

const Kernels* kernels_for(const std::string& isa) {
    const std::vector<std::string> names = supported_isas();
    if (std::find(names.begin(), names.end(), isa) == names.end()) return nullptr;
#if defined(FORERUN_X86)
    if (isa == "avx512") return &avx512_kernels;
    if (isa == "avx2") return &avx2_kernels;
#endif
    return &baseline_kernels;
}

}  // namespace forerun
