// The Python face of the core. Addresses are integers; the caller checks device, contiguity and dtype, and keeps the
// memory alive. The GIL is released around everything that copies, computes or waits.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <tuple>

#include "kernels.h"
#include "mailbox.h"

namespace py = pybind11;

namespace {

using zg::Code;
using zg::DType;
using zg::Status;

void add_exception(py::module_& m, const char* name, PyObject* base) {
  const std::string full = std::string("zerograph._core.") + name;
  m.add_object(name, py::reinterpret_steal<py::object>(PyErr_NewException(full.c_str(), base, nullptr)));
}

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

// Called with the GIL held.
void check(const Status& status) {
  switch (status.code) {
    case Code::ok: return;
    case Code::invalid: raise_with(PyExc_ValueError, status);
    case Code::system: raise_os_error(py::reinterpret_borrow<py::object>(PyExc_OSError), status);
    case Code::connect: raise_os_error(exception_type("ConnectError"), status);
    case Code::mismatch: raise_with(exception_type("MismatchError").ptr(), status);
    case Code::peer: raise_with(exception_type("PeerError").ptr(), status);
    case Code::timeout: raise_with(PyExc_TimeoutError, status);
    case Code::interrupted: throw py::error_already_set();
  }
}

bool interrupted() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

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

using GatherPiece = std::tuple<std::uint64_t, std::uint64_t, DType, DType>;
using ReducePiece = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, DType>;

std::vector<zg::Piece> gather_pieces(const std::vector<GatherPiece>& pieces) {
  std::vector<zg::Piece> out;
  out.reserve(pieces.size());
  for (const auto& [address, count, source, wire] : pieces) out.push_back({address, count, 0, wire, source});
  return out;
}

std::vector<zg::Piece> reduce_pieces(const std::vector<ReducePiece>& pieces) {
  std::vector<zg::Piece> out;
  out.reserve(pieces.size());
  for (const auto& [address, count, chunk, dtype] : pieces) out.push_back({address, count, chunk, dtype, dtype});
  return out;
}

std::vector<zg::ReduceOut> reduce_outs(const std::vector<std::pair<std::uint64_t, DType>>& outs) {
  std::vector<zg::ReduceOut> out;
  out.reserve(outs.size());
  for (const auto& [address, dtype] : outs) out.push_back({address, dtype});
  return out;
}

const zg::Kernels& kernels_named(const std::string& name) {
  for (const zg::Kernels* kernels : zg::all_kernels())
    if (name == kernels->name) return *kernels;
  throw py::value_error("no kernels named '" + name + "' on this processor");
}

void bind_mailbox(py::module_& m) {
  using zg::Mailbox;
  py::class_<Mailbox>(m, "Mailbox", "Collectives between processes of one host through shared memory.")
      .def(py::init([](std::uint32_t rank, std::uint32_t world, std::uint64_t token) {
             std::unique_ptr<Mailbox> box;
             check(Mailbox::create(rank, world, token, interrupted, box));
             return box;
           }),
           py::arg("rank"), py::arg("world"), py::arg("token"))
      .def_property_readonly("control_fd", &Mailbox::control_fd)
      .def_property_readonly("pid", &Mailbox::pid)
      .def_property_readonly("bytes", py::cpp_function(&Mailbox::bytes, py::call_guard<py::gil_scoped_release>()))
      .def(
          "connect",
          [](Mailbox& box, const std::vector<std::pair<pid_t, int>>& ranks) { run([&] { return box.connect(ranks); }); },
          py::arg("ranks"))
      .def(
          "start_gather",
          [](Mailbox& box, std::uint64_t tag, const std::vector<GatherPiece>& pieces) {
            std::uint64_t ticket = 0;
            run([&] { return box.start_gather(tag, gather_pieces(pieces), ticket); });
            return ticket;
          },
          py::arg("tag"), py::arg("pieces"))
      .def(
          "finish_gather",
          [](Mailbox& box, std::uint64_t ticket, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& outs,
             double timeout) {
            std::vector<zg::GatherOut> places;
            places.reserve(outs.size());
            for (const auto& [address, chunk] : outs) places.push_back({address, chunk});
            run([&] { return box.finish_gather(ticket, places, timeout); });
          },
          py::arg("ticket"), py::arg("outs"), py::arg("timeout"))
      .def(
          "start_reduce",
          [](Mailbox& box, std::uint64_t tag, const std::vector<ReducePiece>& pieces) {
            std::uint64_t ticket = 0;
            run([&] { return box.start_reduce(tag, reduce_pieces(pieces), ticket); });
            return ticket;
          },
          py::arg("tag"), py::arg("pieces"))
      .def(
          "finish_reduce",
          [](Mailbox& box, std::uint64_t ticket, const std::vector<std::pair<std::uint64_t, DType>>& outs, double scale,
             double timeout) { run([&] { return box.finish_reduce(ticket, reduce_outs(outs), scale, timeout); }); },
          py::arg("ticket"), py::arg("outs"), py::arg("scale"), py::arg("timeout"))
      .def(
          "start_all_reduce",
          [](Mailbox& box, std::uint64_t tag, const std::vector<ReducePiece>& pieces) {
            std::uint64_t ticket = 0;
            run([&] { return box.start_all_reduce(tag, reduce_pieces(pieces), ticket); });
            return ticket;
          },
          py::arg("tag"), py::arg("pieces"))
      .def(
          "finish_all_reduce",
          [](Mailbox& box, std::uint64_t ticket, const std::vector<std::pair<std::uint64_t, DType>>& outs, double scale,
             double timeout) { run([&] { return box.finish_all_reduce(ticket, reduce_outs(outs), scale, timeout); }); },
          py::arg("ticket"), py::arg("outs"), py::arg("scale"), py::arg("timeout"))
      .def(
          "barrier", [](Mailbox& box, double timeout) { run([&] { return box.barrier(timeout); }); },
          py::arg("timeout"))
      .def("abort", &Mailbox::abort, py::arg("text"))
      .def("close", &Mailbox::close, py::arg("linger") = 5.0, py::call_guard<py::gil_scoped_release>());
}

// For tests: every target against the baseline.
void bind_kernels(py::module_& m) {
  m.def("kernel_targets", [] {
    std::vector<std::string> names;
    for (const zg::Kernels* kernels : zg::all_kernels()) names.emplace_back(kernels->name);
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

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of ZeroGraph.";
  py::enum_<DType> dtypes(m, "DType");
  for (std::uint32_t i = 0; i < zg::kDTypes; ++i)
    dtypes.value(zg::name_of(static_cast<DType>(i)), static_cast<DType>(i));
  add_exception(m, "ConnectError", PyExc_OSError);
  add_exception(m, "MismatchError", PyExc_RuntimeError);
  add_exception(m, "PeerError", PyExc_RuntimeError);
  bind_mailbox(m);
  bind_kernels(m);
}
