// Messages in fewer bits, by the target in use or, for tests, one by name.
#include "wire.h"

#include <string>

#include "bindings/support.h"
#include "kernels.h"

namespace zg::bindings {

namespace {

Status find_wire(const std::string& target, DType dtype, const WireKernels*& out) {
  const Kernels* kernels = nullptr;
  ZG_TRY(find_target(target, kernels));
  if (!is_float(dtype) || dtype == DType::float64)
    return fail(Code::invalid, std::string(name_of(dtype)) + " has no wire; float32, bfloat16 and float16 do");
  out = kernels->wire;
  return {};
}

}  // namespace

void bind_wire(py::module_& m) {
  py::enum_<Wire>(m, "Wire")
      .value("fp8", Wire::fp8)
      .value("int8", Wire::int8)
      .value("int4", Wire::int4)
      .value("sign", Wire::sign);
  m.def(
      "encode",
      [](Wire wire, std::uint64_t src, DType dtype, std::size_t count, std::uint64_t dst, const std::string& target) {
        run([&]() -> Status {
          const WireKernels* found = nullptr;
          ZG_TRY(find_wire(target, dtype, found));
          found->encode(wire, reinterpret_cast<const void*>(src), dtype, count, reinterpret_cast<void*>(dst));
          return {};
        });
      },
      py::arg("wire"), py::arg("src"), py::arg("dtype"), py::arg("count"), py::arg("dst"), py::arg("target") = "");
  m.def(
      "decode",
      [](Wire wire, std::uint64_t src, std::size_t count, std::uint64_t dst, DType dtype, const std::string& target) {
        run([&]() -> Status {
          const WireKernels* found = nullptr;
          ZG_TRY(find_wire(target, dtype, found));
          found->decode(wire, reinterpret_cast<const void*>(src), count, reinterpret_cast<void*>(dst), dtype);
          return {};
        });
      },
      py::arg("wire"), py::arg("src"), py::arg("count"), py::arg("dst"), py::arg("dtype"), py::arg("target") = "");
}

}  // namespace zg::bindings
