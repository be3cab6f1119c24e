// Products of pairs of bfloat16 take denormal numbers for zeros. The instruction of AVX-512 always does, and other sets set the
// processor so while they multiply floats in its place.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace forerun {
namespace FORERUN_ISA {

// As long as one lives and is wanted, its thread's denormals are zeros: those that are read, and results.
class DenormalsAreZero {
#if defined(__SSE2__)
  public:
    explicit DenormalsAreZero(bool is_wanted) : before_(_mm_getcsr()) {
        if (is_wanted) _mm_setcsr(before_ | 0x8040);
    }
    ~DenormalsAreZero() { _mm_setcsr(before_); }

  private:
    const unsigned before_;
#else
  public:
    explicit DenormalsAreZero(bool) {}
    ~DenormalsAreZero() {}
#endif
};

}  // namespace FORERUN_ISA
}  // namespace forerun
