// For tests: every target against the baseline.
#include "kernels.h"

#include <string>
#include <vector>

#include "bindings/support.h"

namespace zg::bindings {

namespace {

const Kernels& kernels_named(const std::string& name) {
  for (const Kernels* kernels : all_kernels())
    if (name == kernels->name) return *kernels;
  throw py::value_error("no kernels named '" + name + "' on this processor");
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("kernel_targets", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : all_kernels()) names.emplace_back(kernels->name);
    return names;
  });
  m.def(
      "convert",
      [](const std::string& target, std::uint64_t src, DType src_dtype, std::uint64_t dst, DType dst_dtype,
         std::size_t count) {
        kernels_named(target).convert(reinterpret_cast<const void*>(src), src_dtype, reinterpret_cast<void*>(dst),
                                      dst_dtype, count);
      },
      py::arg("target"), py::arg("src"), py::arg("src_dtype"), py::arg("dst"), py::arg("dst_dtype"), py::arg("count"));
  m.def(
      "reduce",
      [](const std::string& target, const std::vector<std::uint64_t>& sources, DType dtype, std::size_t count,
         double scale, std::uint64_t out, DType out_dtype) {
        std::vector<const void*> from;
        for (const std::uint64_t source : sources) from.push_back(reinterpret_cast<const void*>(source));
        kernels_named(target).reduce(from.data(), from.size(), dtype, count, scale, reinterpret_cast<void*>(out),
                                     out_dtype);
      },
      py::arg("target"), py::arg("sources"), py::arg("dtype"), py::arg("count"), py::arg("scale"), py::arg("out"),
      py::arg("out_dtype"));
}

}  // namespace zg::bindings
