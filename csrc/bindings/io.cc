// Transfers to files: the engine, slabs, memory on huge pages and mapped files.
#include "io.h"

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/support.h"
#include "huge.h"
#include "slab.h"

namespace zg::bindings {

namespace {

using SegmentTuple = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, bool>;
using FaultTuple = std::tuple<Fault::Point, std::uint64_t, std::uint64_t, Fault::Effect, std::uint64_t>;

struct Memory {  // HugeMemory and FileMapping: an address that is a Python buffer
  Mapping map;
};
struct FileMemory : Memory {};

py::buffer_info view(const Memory& memory) {
  return {memory.map.data(), 1, py::format_descriptor<std::uint8_t>::format(),
          static_cast<py::ssize_t>(memory.map.bytes())};
}

// An engine waits for its transfers when it goes: without the GIL, as another thread may be needed for that.
struct Release {
  void operator()(IoEngine* engine) const {
    WithoutGil release;
    delete engine;
  }
};

std::unique_ptr<IoEngine, Release> make_engine(const IoOptions& options) {
  std::unique_ptr<IoEngine> engine;
  run([&] { return IoEngine::create(options, interrupted, engine); });
  return std::unique_ptr<IoEngine, Release>(engine.release());
}

py::dict stats_dict(const IoEngine& engine) {
  const IoStats stats = engine.stats();
  py::dict out;
  out["transfers"] = stats.transfers;
  out["retries"] = stats.retries;
  out["bytes_read"] = stats.bytes_read;
  out["bytes_written"] = stats.bytes_written;
  out["bytes_staged"] = stats.bytes_staged;
  return out;
}

void bind_engine(py::module_& m) {
  py::enum_<Direction>(m, "Direction").value("read", Direction::read).value("write", Direction::write);
  py::enum_<Priority>(m, "Priority")
      .value("now", Priority::now)
      .value("soon", Priority::soon)
      .value("later", Priority::later);
  py::enum_<Fault::Point>(m, "FaultPoint")
      .value("read", Fault::Point::read)
      .value("write", Fault::Point::write)
      .value("submit", Fault::Point::submit);
  py::enum_<Fault::Effect>(m, "FaultEffect")
      .value("error", Fault::Effect::error)
      .value("cut", Fault::Effect::cut)
      .value("nothing", Fault::Effect::nothing);
  const IoOptions usual;
  py::class_<IoEngine, std::unique_ptr<IoEngine, Release>>(m, "IoEngine", "Transfers between memory and files.")
      .def(py::init([](std::string engine, std::uint32_t depth, std::uint32_t threads, std::size_t block,
                       std::size_t buffer, std::uint32_t buffers, int refuse) {
             return make_engine({std::move(engine), depth, threads, block, buffer, buffers, refuse});
           }),
           py::arg("engine") = usual.engine, py::kw_only(), py::arg("depth") = usual.depth,
           py::arg("threads") = usual.threads, py::arg("block") = usual.block, py::arg("buffer") = usual.buffer,
           py::arg("buffers") = usual.buffers, py::arg("refuse") = usual.refuse)
      .def_property_readonly("name", &IoEngine::name)
      .def_property_readonly("notes", &IoEngine::notes)
      .def_property_readonly("stats", &stats_dict)
      .def(
          "attach",
          [](IoEngine& engine, int fd, const std::string& path, std::size_t memory_alignment,
             std::size_t offset_alignment) {
            std::uint32_t file = 0;
            run([&] { return engine.attach(fd, path, memory_alignment, offset_alignment, file); });
            return file;
          },
          py::arg("fd"), py::arg("path"), py::arg("memory_alignment") = 1, py::arg("offset_alignment") = 1)
      .def(
          "detach", [](IoEngine& engine, std::uint32_t file) { run([&] { return engine.detach(file); }); },
          py::arg("file"))
      .def(
          "register_memory",
          [](IoEngine& engine, std::uint64_t address, std::uint64_t bytes) {
            bool registered = false;
            run([&] { return engine.register_memory(address, bytes, registered); });
            return registered;
          },
          py::arg("address"), py::arg("bytes"))
      .def(
          "submit",
          [](IoEngine& engine, Direction direction, const std::vector<SegmentTuple>& segments, Priority priority) {
            std::vector<Segment> parts;
            parts.reserve(segments.size());
            for (const auto& [file, offset, address, bytes, padded] : segments)
              parts.push_back({file, offset, address, bytes, padded});
            std::uint64_t ticket = 0;
            run([&] { return engine.submit(direction, parts, priority, ticket); });
            return ticket;
          },
          py::arg("direction"), py::arg("segments"), py::arg("priority"))
      .def(
          "wait",
          [](IoEngine& engine, std::uint64_t ticket, double timeout) {
            IoTimes times;
            run([&] { return engine.wait(ticket, timeout, &times); });
            return std::pair(times.began, times.ended);
          },
          py::arg("ticket"), py::arg("timeout") = -1.0)
      .def(
          "done",
          [](IoEngine& engine, std::uint64_t ticket) {
            bool done = false;
            run([&] { return engine.done(ticket, done); });
            return done;
          },
          py::arg("ticket"))
      .def("finished",
           [](IoEngine& engine) {
             std::vector<std::uint64_t> tickets;
             run([&] { return engine.finished(tickets); });
             return tickets;
           })
      .def(
          "inject",
          [](IoEngine& engine, const std::vector<FaultTuple>& faults) {
            std::vector<Fault> list;
            for (const auto& [point, nth, times, effect, value] : faults) list.push_back({point, nth, times, effect, value});
            run([&] { return engine.inject(std::move(list)); });
          },
          py::arg("faults"))
      .def("close", [](IoEngine& engine) { run([&] { return engine.close(); }); });
  m.def("has_uring", &has_uring);
  m.def("probe_uring", &probe_uring, py::call_guard<WithoutGil>());
}

void bind_files(py::module_& m) {
  py::enum_<Naming>(m, "Naming")
      .value("automatic", Naming::automatic)
      .value("unlinked", Naming::unlinked)
      .value("named", Naming::named);
  py::class_<Slab>(m, "Slab", "A private, reserved file for offloaded tensors.")
      .def(py::init([](const std::string& folder, std::uint64_t bytes, bool direct, Naming naming) {
             std::unique_ptr<Slab> slab;
             run([&] { return Slab::create(folder, bytes, direct, naming, slab); });
             return slab;
           }),
           py::arg("folder"), py::arg("bytes"), py::arg("direct") = true, py::arg("naming") = Naming::automatic)
      .def_property_readonly("fd", &Slab::fd)
      .def_property_readonly("path", &Slab::path)
      .def_property_readonly("bytes", &Slab::bytes)
      .def_property_readonly("direct", &Slab::direct)
      .def_property_readonly("notes", &Slab::notes)
      .def_property_readonly("memory_alignment", &Slab::memory_alignment)
      .def_property_readonly("offset_alignment", &Slab::offset_alignment)
      .def(
          "flush",
          [](const Slab& slab, std::uint64_t offset, std::uint64_t bytes) {
            run([&] { return slab.flush(offset, bytes); });
          },
          py::arg("offset"), py::arg("bytes"))
      .def(
          "drop",
          [](const Slab& slab, std::uint64_t offset, std::uint64_t bytes) {
            run([&] { return slab.drop(offset, bytes); });
          },
          py::arg("offset"), py::arg("bytes"));
  m.def(
      "remove_leftovers",
      [](const std::string& folder) {
        std::uint32_t removed = 0;
        run([&] { return Slab::remove_leftovers(folder, removed); });
        return removed;
      },
      py::arg("folder"));
}

void bind_memory(py::module_& m) {
  const auto address = [](const Memory& memory) { return reinterpret_cast<std::uint64_t>(memory.map.data()); };
  py::class_<Memory>(m, "HugeMemory", py::buffer_protocol(), "Private memory on 2 MiB pages; zero at first.")
      .def(py::init([](std::size_t bytes) {
             auto memory = std::make_unique<Memory>();
             run([&] { return map_huge(bytes, memory->map); });
             return memory;
           }),
           py::arg("bytes"))
      .def_property_readonly("address", address)
      .def_buffer(&view);
  py::class_<FileMemory>(m, "FileMapping", py::buffer_protocol(), "Parts of files as memory that is shared with them.")
      .def(py::init([](const std::vector<std::tuple<int, std::uint64_t, std::uint64_t>>& parts) {
             std::vector<FilePart> list;
             for (const auto& [fd, offset, bytes] : parts) list.push_back({fd, offset, bytes});
             auto memory = std::make_unique<FileMemory>();
             run([&] { return map_files(list, memory->map); });
             return memory;
           }),
           py::arg("parts"))
      .def_property_readonly("address",
                             [](const FileMemory& memory) { return reinterpret_cast<std::uint64_t>(memory.map.data()); })
      .def(
          "drop",
          [](const FileMemory& memory, std::uint64_t offset, std::uint64_t bytes) {
            run([&] { return drop_pages(memory.map, offset, bytes); });
          },
          py::arg("offset"), py::arg("bytes"))
      .def(
          "any_resident",
          [](const FileMemory& memory, std::uint64_t offset, std::uint64_t bytes) {
            bool found = false;
            run([&] { return any_resident(memory.map, offset, bytes, found); });
            return found;
          },
          py::arg("offset"), py::arg("bytes"))
      .def_buffer([](const FileMemory& memory) { return view(memory); });
}

}  // namespace

void bind_io(py::module_& m) {
  bind_engine(m);
  bind_files(m);
  bind_memory(m);
}

}  // namespace zg::bindings
