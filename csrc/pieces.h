// Memory that a caller lends to a kernel, cut into pieces.
#pragma once

#include <cstddef>

namespace forerun {

struct Floats {
    float* next;
    float* take(size_t count) {
        float* taken = next;
        next += (count + 15) / 16 * 16;
        return taken;
    }
};

}  // namespace forerun
