#include "cpu.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

namespace {

// Intel's vdpbf16ps takes two cycles (a Xeon of 2023: 45 G multiplications a second and core, of floats 78 G); AMD's
// takes one.
bool is_intel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// Linux lends the registers of tiles to a process that asks for them.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned NEEDED = 1u << 24 | 1u << 25;  // AMX-TILE, AMX-INT8
    return (d & NEEDED) == NEEDED && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILES) == 0;
#else
    return false;
#endif
}

}  // namespace

bool widens_pairs = is_intel();
const bool has_byte_tiles = may_use_tiles();
bool multiplies_tiles = has_byte_tiles;

// csrc/CMakeLists.txt writes a line for each file of isa/, best first: FORERUN_SET(name, needs, whether the processor
// has them).
#define FORERUN_SET(name, needs, is_supported) extern const Kernels name##_kernels;
#include "isas.inc"
#undef FORERUN_SET

const std::vector<InstructionSet>& instruction_sets() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#define FORERUN_SET(name, needs, is_supported) {#name, needs, is_supported, &name##_kernels},
    static const std::vector<InstructionSet> sets = {
#include "isas.inc"
    };
#undef FORERUN_SET
    return sets;
}

const Kernels& kernels_for(const std::string& isa) {
    for (const InstructionSet& set : instruction_sets())
        if (set.name == isa && set.is_supported) return *set.kernels;
    throw std::invalid_argument("this processor has no " + isa);
}

const Kernels& portable_kernels() { return *instruction_sets().back().kernels; }

}  // namespace forerun
