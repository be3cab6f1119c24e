// The tiles of attention where no instruction multiplies pairs of bfloat16.
#pragma once

#include "turned_tile.h"

namespace forerun {
namespace FORERUN_ISA {

// Calls `use` with the type of the tile that suits so many queries of each key head.
template <class Use>
void with_tile(const Attention& a, int, const Use& use) {
    if (a.type == Type::int8) return with_rounded_tile(a, use);
    with_turned_tile(a, use);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
