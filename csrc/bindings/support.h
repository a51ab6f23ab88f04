// What the bindings share: a status becomes a Python exception here, and nowhere else.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "status.h"

namespace zg::bindings {

namespace py = pybind11;

// Adds `zerograph._core.<name>`, an exception that derives from `base`.
void add_exception(py::module_& m, const char* name, PyObject* base);

// Raises what `status` says. Called with the GIL held.
void check(const Status& status);

// Runs signal handlers; true if one raised. Called without the GIL.
bool interrupted();

// Runs `work` without the GIL and raises what it returns.
template <typename Work>
void run(Work work) {
  Status status;
  {
    py::gil_scoped_release release;
    status = work();
  }
  check(status);
}

// One per file of this folder, called by module.cc.
void bind_mailbox(py::module_& m);
void bind_kernels(py::module_& m);
void bind_io(py::module_& m);

}  // namespace zg::bindings
