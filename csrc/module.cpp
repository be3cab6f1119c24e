// The extension module forerun._native. Python is known here and in the bind_*.cpp files, nowhere else.
#include <nanobind/nanobind.h>

void bind_system(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels of forerun; loaded through forerun.native.";
    nanobind::set_leak_warnings(false);  // who calls gc.freeze() exits with its engines alive
    bind_system(m);
    bind_ops(m);
    bind_sampling(m);
}
