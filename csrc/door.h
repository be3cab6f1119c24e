// What the kernels ask of the numbers that they are given, once in each call: behind that they follow indices as they are.
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
