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
