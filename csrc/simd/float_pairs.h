// Products of pairs of bfloat16 where no instruction has them: by floats, the second of a pair first, as the
// instruction adds them. `low_halves` and `high_halves` widen sixteen pairs.
#pragma once

#include "denormals.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr bool PAIR_PRODUCTS = false;  // whether there is an instruction

struct Pairs {
    F16 first, second;
};
inline Pairs load_pairs(const void* p) { return {low_halves(p), high_halves(p)}; }
inline Pairs spread_pair(uint32_t pair) {
    const uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float x, y;
    std::memcpy(&x, &low, 4);
    std::memcpy(&y, &high, 4);
    return {f16(x), f16(y)};
}
inline F16 add_pairs(F16 acc, const Pairs& w, const Pairs& x) {
    return madd(w.first, x.first, madd(w.second, x.second, acc));
}

}  // namespace FORERUN_ISA
}  // namespace forerun
