// Checks of the numbers that kernels are given, once in each call: behind them, indices are followed as they are.
#pragma once

#include <stdexcept>
#include <string>

namespace forerun {

// The numbers of a call do not hold together; forerun.errors.InternalError in Python.
struct WrongNumbers : std::logic_error {
    using std::logic_error::logic_error;
};

inline void require(bool holds, const char* sentence) {
    if (!holds) throw WrongNumbers(sentence);
}

}  // namespace forerun
