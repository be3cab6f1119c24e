// The inner loops of sampling for each instruction set, and the choice between them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(FORERUN_X86)
#include <immintrin.h>
#endif

#include "philox.h"
#include "sampling.h"

#pragma GCC diagnostic ignored "-Wpsabi"

#define FORERUN_SAMPLING_ISA sampling_baseline
#define FORERUN_VECTOR_BYTES 16
#include "sampling_kernels.h"
#undef FORERUN_SAMPLING_ISA
#undef FORERUN_VECTOR_BYTES

#if defined(FORERUN_X86)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define FORERUN_SAMPLING_ISA sampling_avx2
#define FORERUN_VECTOR_BYTES 32
#include "sampling_kernels.h"
#undef FORERUN_SAMPLING_ISA
#undef FORERUN_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
#endif
#define FORERUN_SAMPLING_ISA sampling_avx512
#define FORERUN_VECTOR_BYTES 64
#include "sampling_kernels.h"
#undef FORERUN_SAMPLING_ISA
#undef FORERUN_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace forerun {

const SamplingKernels& sampling_kernels(const std::string& isa) {
#if defined(FORERUN_X86)
    if (isa == "avx512") return sampling_avx512::kernels;
    if (isa == "avx2") return sampling_avx2::kernels;
#endif
    if (isa == "baseline") return sampling_baseline::kernels;
    throw std::invalid_argument("there are no sampling kernels for " + isa);
}

}  // namespace forerun
