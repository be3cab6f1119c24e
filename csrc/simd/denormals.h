// Products of pairs of bfloat16 take denormal numbers for zeros. The instruction of AVX-512 always does, and other sets
// set the processor so while they multiply floats in its place.
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

// Whether a result has become too small or too large for a float32 since this was made.
class OutOfRange {
#if defined(__SSE2__)
  public:
    static constexpr bool IS_TOLD = true;  // by the processor
    OutOfRange() {
        _mm_setcsr(_mm_getcsr() & ~FLAGS);
        __asm__ volatile("" ::: "memory");  // nothing is loaded before
    }
    bool was_seen() const {
        __asm__ volatile("" ::: "memory");  // all is stored
        return (_mm_getcsr() & FLAGS) != 0;
    }

  private:
    static constexpr unsigned FLAGS = 0x18;  // overflow, underflow
#else
  public:
    static constexpr bool IS_TOLD = false;
    bool was_seen() const { return true; }
#endif
};

}  // namespace FORERUN_ISA
}  // namespace forerun
