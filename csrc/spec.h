// Reads src/forerun/blocks.py's description of a model from its Python objects. Only this file knows their fields.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blocks.h"

namespace forerun {

// Where weights are, by the names of blocks.weights(spec) and, of matrices, of their products.
struct WeightPlaces {
    std::unordered_map<std::string, const Matrix*> matrices;  // biases are packed with them
    std::unordered_map<std::string, uintptr_t> vectors;       // float32
    std::unordered_map<std::string, uintptr_t> tables;        // rows in the model's type
};

// The activation of a name in blocks.py.
Act act_of(const std::string& name);

// Why these kernels do not compute a model, in a sentence without an end; none where they do.
std::optional<std::string> refusal(nanobind::handle spec);

// A model's parts, and weights of norms that were made for them, which they point to. places: null = sizes alone.
// Throws std::invalid_argument for a model that is refused, and for a weight that is missing.
std::pair<ModelParts, std::vector<std::vector<float>>> read_spec(nanobind::handle spec, Type type,
                                                                 const WeightPlaces* places);

}  // namespace forerun
