// The extension module forerun._native. Only this file and the bind_*.cpp files use Python.
#include <nanobind/nanobind.h>

void bind_system(nanobind::module_& m);
void bind_numbers(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels of forerun; loaded through forerun.native.";
    nanobind::set_leak_warnings(false);  // a process that called gc.freeze() exits with its engines alive
    bind_system(m);
    bind_ops(m);
    bind_numbers(m);
    bind_model(m);
    bind_sampling(m);
}
