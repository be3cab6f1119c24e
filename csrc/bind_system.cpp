// Bindings about the machine: its instruction sets, and how fast it reads memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "bandwidth.h"
#include "cpu.h"
#include "door.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using forerun::BandwidthProbe;

// csrc/CMakeLists.txt computes it from all files here; Python compares it with the hash of the files it finds.
#if !defined(FORERUN_SOURCE_HASH)
#define FORERUN_SOURCE_HASH ""
#endif

using NamedValues = std::vector<std::pair<std::string, std::vector<double>>>;

static NamedValues read_all(BandwidthProbe& probe, int num_repeats) {
    NamedValues values;
    for (forerun::Reading& reading : probe.read(num_repeats))
        values.emplace_back(std::move(reading.probe), std::move(reading.bytes_per_s));
    return values;
}

// Threads that cannot be started are a CapacityError: a later call, or a smaller number of threads, could work.
static void translate(const std::exception_ptr& error, void*) {
    const auto raise = [](const char* name, const char* what) {
        PyErr_SetString(nb::module_::import_("forerun.errors").attr(name).ptr(), what);
    };
    try {
        std::rethrow_exception(error);
    } catch (const forerun::NoThreads& e) {
        raise("CapacityError", e.what());
    } catch (const forerun::WrongNumbers& e) {
        raise("InternalError", e.what());
    }
}

void bind_system(nb::module_& m) {
    nb::register_exception_translator(translate);
    m.attr("source_hash") = FORERUN_SOURCE_HASH;
    m.def(
        "known_isas",
        [] {
            std::vector<std::pair<std::string, std::string>> found;
            for (const forerun::InstructionSet& set : forerun::instruction_sets())
                found.emplace_back(set.name, set.needs);
            return found;
        },
        "Instruction sets that kernels were compiled for, best first, with the features that a processor needs.");
    m.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (const forerun::InstructionSet& set : forerun::instruction_sets())
                if (set.is_supported) names.push_back(set.name);
            return names;
        },
        "Those that this processor runs, best first.");
    m.def(
        "widens_pairs", [] { return forerun::widens_pairs; },
        "Whether AVX-512 multiplies pairs of bfloat16 as floats.");
    m.def(
        "widen_pairs", [](bool is_wanted) { return std::exchange(forerun::widens_pairs, is_wanted); },
        "Chooses that, for tests: the bits are the same. Returns what was chosen before.");
    m.def(
        "has_byte_tiles", [] { return forerun::has_byte_tiles; },
        "Whether this process may multiply tiles of bytes (AMX).");
    m.def(
        "multiply_tiles",
        [](bool is_wanted) { return std::exchange(forerun::multiplies_tiles, is_wanted && forerun::has_byte_tiles); },
        "Chooses that for quantised products of many rows, for tests: the bits are the same. Returns what was chosen before.");
    nb::class_<BandwidthProbe>(m, "BandwidthProbe", "A buffer that threads read as fast as this machine can.")
        .def(nb::init<size_t, int>(), "num_bytes"_a, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("num_bytes", &BandwidthProbe::num_bytes)
        .def("read", &read_all, "num_repeats"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Returns the bytes per second of each way of reading, once per repeat. The ways take turns.");
}
