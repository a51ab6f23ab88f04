#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "generator.h"
#include "group.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"
#include "trace.h"

namespace fake {
void register_device();
}

PYBIND11_MODULE(_fake_device, module) {
  fake::register_device();
  module.def("synchronize", [] { fake::synchronize(); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("default_generator", [] { return fake::default_generator(); });
  module.def("manual_seed", &fake::manual_seed, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("delay", &fake::delay);
  module.def("held", &fake::held);
  module.def("keep_history", &fake::keep_history);
  pybind11::class_<fake::Allocation>(module, "Allocation")
      .def_readonly("taken", &fake::Allocation::taken)
      .def_readonly("address", &fake::Allocation::address)
      .def_readonly("size", &fake::Allocation::size)
      .def_readonly("stream", &fake::Allocation::stream)
      .def_readonly("microseconds", &fake::Allocation::microseconds);
  module.def("history", &fake::history);
  pybind11::class_<fake::Piece>(module, "Piece")
      .def_readonly("address", &fake::Piece::address)
      .def_readonly("size", &fake::Piece::size)
      .def_readonly("used", &fake::Piece::used);
  module.def("pieces", &fake::pieces);
  pybind11::class_<fake::Told>(module, "Told")
      .def_readonly("what", &fake::Told::what)
      .def_readonly("stream", &fake::Told::stream)
      .def_readonly("mark", &fake::Told::mark)
      .def_readonly("name", &fake::Told::name)
      .def_readonly("reads", &fake::Told::reads)
      .def_readonly("writes", &fake::Told::writes);
  module.def("begin_trace", &fake::begin_trace);
  module.def("end_trace", &fake::end_trace);
  module.def("waits", &fake::waits);
  module.def("forget_waits", &fake::forget_waits);
  module.def("pin", [](std::uintptr_t at, std::size_t size) { fake::pin(reinterpret_cast<void*>(at), size); });
  module.def("unpin", [](std::uintptr_t at) { fake::unpin(reinterpret_cast<void*>(at)); });
  module.def("group_over", &fake::group_over);
}
