// Collectives through shared memory. Pieces are tuples of addresses, counts and dtypes.
#include "mailbox.h"

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/support.h"

namespace zg::bindings {

namespace {

using GatherPiece = std::tuple<std::uint64_t, std::uint64_t, DType, DType>;
using ReducePiece = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, DType>;

std::vector<Piece> gather_pieces(const std::vector<GatherPiece>& pieces) {
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const auto& [address, count, source, wire] : pieces) out.push_back({address, count, 0, wire, source});
  return out;
}

std::vector<Piece> reduce_pieces(const std::vector<ReducePiece>& pieces) {
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const auto& [address, count, chunk, dtype] : pieces) out.push_back({address, count, chunk, dtype, dtype});
  return out;
}

std::vector<ReduceOut> reduce_outs(const std::vector<std::pair<std::uint64_t, DType>>& outs) {
  std::vector<ReduceOut> out;
  out.reserve(outs.size());
  for (const auto& [address, dtype] : outs) out.push_back({address, dtype});
  return out;
}

}  // namespace

void bind_mailbox(py::module_& m) {
  py::class_<Mailbox>(m, "Mailbox", "Collectives between processes of one host through shared memory.")
      .def(py::init([](std::uint32_t rank, std::uint32_t world, std::uint64_t token) {
             std::unique_ptr<Mailbox> box;
             check(Mailbox::create(rank, world, token, interrupted, box));
             return box;
           }),
           py::arg("rank"), py::arg("world"), py::arg("token"))
      .def_property_readonly("control_fd", &Mailbox::control_fd)
      .def_property_readonly("pid", &Mailbox::pid)
      .def_property_readonly("bytes", py::cpp_function(&Mailbox::bytes, py::call_guard<WithoutGil>()))
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
            std::vector<GatherOut> places;
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
      .def("abort", &Mailbox::abort, py::arg("text"), py::call_guard<WithoutGil>())
      .def("aborted", &Mailbox::aborted)
      .def("missing", &Mailbox::missing, py::arg("ticket"), py::call_guard<WithoutGil>())
      .def("is_present", &Mailbox::is_present, py::arg("rank"))
      .def(
          "recover", [](Mailbox& box, std::uint64_t generation) { run([&] { return box.recover(generation); }); },
          py::arg("generation"))
      .def("close", &Mailbox::close, py::arg("linger") = 5.0, py::call_guard<WithoutGil>());
}

}  // namespace zg::bindings
