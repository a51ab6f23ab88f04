#include "bindings/support.h"

#include <string>

namespace zg::bindings {

namespace {

py::object exception_type(const char* name) { return py::module_::import("zerograph._core").attr(name); }

[[noreturn]] void raise_os_error(const py::object& type, const Status& status) {
  const py::object path = status.path.empty() ? py::object(py::none()) : py::object(py::str(status.path));
  const py::object error = type(status.error, status.text, path);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

[[noreturn]] void raise_with(PyObject* type, const Status& status) {
  PyErr_SetString(type, status.text.c_str());
  throw py::error_already_set();
}

}  // namespace

void add_exception(py::module_& m, const char* name, PyObject* base) {
  const std::string full = std::string("zerograph._core.") + name;
  m.add_object(name, py::reinterpret_steal<py::object>(PyErr_NewException(full.c_str(), base, nullptr)));
}

void check(const Status& status) {
  switch (status.code) {
    case Code::ok: return;
    case Code::invalid: raise_with(PyExc_ValueError, status);
    case Code::system: raise_os_error(py::reinterpret_borrow<py::object>(PyExc_OSError), status);
    case Code::connect: raise_os_error(exception_type("ConnectError"), status);
    case Code::mismatch: raise_with(exception_type("MismatchError").ptr(), status);
    case Code::peer: raise_with(exception_type("PeerError").ptr(), status);
    case Code::timeout: raise_with(PyExc_TimeoutError, status);
    case Code::internal: raise_with(PyExc_RuntimeError, status);
    case Code::interrupted: throw py::error_already_set();
  }
}

bool interrupted() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace zg::bindings
