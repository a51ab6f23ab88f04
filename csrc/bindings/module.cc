// The Python face of the core: only this folder includes pybind11. Addresses are integers; the caller checks device,
// contiguity and dtype, and keeps the memory alive. The GIL is released around everything that copies, computes or waits.
#include "bindings/support.h"
#include "dtype.h"

PYBIND11_MODULE(_core, m) {
  using namespace zg::bindings;
  m.doc() = "The native core of ZeroGraph.";
  py::enum_<zg::DType> dtypes(m, "DType");
  for (std::uint32_t i = 0; i < zg::kDTypes; ++i)
    dtypes.value(zg::name_of(static_cast<zg::DType>(i)), static_cast<zg::DType>(i));
  add_exception(m, "ConnectError", PyExc_OSError);
  add_exception(m, "MismatchError", PyExc_RuntimeError);
  add_exception(m, "PeerError", PyExc_RuntimeError);
  bind_mailbox(m);
  bind_kernels(m);
  bind_update(m);
  bind_wire(m);
  bind_io(m);
}
