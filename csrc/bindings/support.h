// What the bindings share: a status becomes a Python exception here, and nowhere else.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "status.h"

namespace zg::bindings {

namespace py = pybind11;

// Adds `zerograph._core.<name>`, an exception that derives from `base`.
void add_exception(py::module_& m, const char* name, PyObject* base);

// Raises what `status` says. Called with the GIL held.
void check(const Status& status);

// Runs signal handlers; true if one raised. Called without the GIL.
bool interrupted();

// Gives the GIL away for as long as it lives. A daemon thread that wants it back while the interpreter ends is unwound by
// CPython before 3.14, which ends the process where C++ frames are in the way, as pybind11's gil_scoped_release is: here it
// stays instead, as in 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) {
    Stay stay;
    PyEval_RestoreThread(state_);
    stay.back = true;
  }

 private:
  struct Stay {
    bool back = false;
    ~Stay() {
      while (!back) pause();
    }
  };
  PyThreadState* state_;
};

// Runs `work` without the GIL and raises what it returns.
template <typename Work>
void run(Work work) {
  Status status;
  {
    WithoutGil release;
    status = work();
  }
  check(status);
}

// One per file of this folder, called by module.cc.
void bind_mailbox(py::module_& m);
void bind_kernels(py::module_& m);
void bind_update(py::module_& m);
void bind_wire(py::module_& m);
void bind_io(py::module_& m);

}  // namespace zg::bindings
