// The I/O core without Python: order, priorities, faults and threads, made to be run under sanitizers.
#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "huge.h"
#include "io.h"
#include "refuse.h"
#include "slab.h"

using namespace zg;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::vector<std::string> engines() {
  std::vector<std::string> names{"threads"};
  if (has_uring() && probe_uring() == 0) names.push_back("uring");
  return names;
}

struct Folder {
  char path[64] = "/tmp/zerograph-test-XXXXXX";
  Folder() { REQUIRE(mkdtemp(path) != nullptr); }
  ~Folder() { CHECK(rmdir(path) == 0); }  // nothing may be left
};

// An engine with one slab.
struct Rig {
  Folder folder;
  std::unique_ptr<Slab> slab;
  std::unique_ptr<IoEngine> engine;
  std::uint32_t file = 0;

  Rig(const std::string& name, IoOptions options = {}, std::uint64_t bytes = 16 * kMiB) {
    options.engine = name;
    REQUIRE(Slab::create(folder.path, bytes, true, Naming::automatic, slab).ok());
    REQUIRE(IoEngine::create(options, nullptr, engine).ok());
    REQUIRE(engine->attach(slab->fd(), slab->path(), slab->memory_alignment(), slab->offset_alignment(), file).ok());
  }

  std::uint64_t begin(Direction direction, const void* memory, std::uint64_t offset, std::uint64_t bytes,
                      Priority priority = Priority::now, bool padded = false) {
    std::uint64_t ticket = 0;
    const Segment segment{file, offset, reinterpret_cast<std::uint64_t>(memory), bytes, padded};
    REQUIRE(engine->submit(direction, {segment}, priority, ticket).ok());
    return ticket;
  }
  Status run(Direction direction, const void* memory, std::uint64_t offset, std::uint64_t bytes) {
    return engine->wait(begin(direction, memory, offset, bytes), -1);
  }
};

std::vector<std::uint8_t> noise(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> out(bytes);
  for (auto& byte : out) byte = static_cast<std::uint8_t>(random());
  return out;
}

}  // namespace

TEST_CASE("any range of a file holds what was written there") {
  for (const std::string& name : engines()) {
    IoOptions options;
    options.block = options.buffer = 64 << 10;
    options.buffers = 2;
    Rig rig(name, options, kMiB);
    std::vector<std::uint8_t> model(kMiB), got(kMiB);
    REQUIRE(rig.run(Direction::write, model.data(), 0, model.size()).ok());
    std::mt19937 random(1);
    for (int i = 0; i < 60; ++i) {
      const std::size_t begin = random() % kMiB, bytes = 1 + random() % std::min<std::size_t>(kMiB - begin, 300'000);
      const auto sent = noise(bytes, random());
      memcpy(model.data() + begin, sent.data(), bytes);
      const auto priority = static_cast<Priority>(random() % 3);
      const std::uint64_t write = rig.begin(Direction::write, sent.data(), begin, bytes, priority);
      if (random() % 2) REQUIRE(rig.engine->wait(write, -1).ok());
      const std::size_t from = random() % kMiB;
      REQUIRE(rig.run(Direction::read, got.data(), from, kMiB - from).ok());
      REQUIRE(memcmp(got.data(), model.data() + from, kMiB - from) == 0);
      if (random() % 2) rig.run(Direction::read, got.data(), 0, kMiB).ok();
      REQUIRE(rig.run(Direction::read, got.data(), 0, kMiB).ok());  // waits for `sent`
    }
  }
}

TEST_CASE("many threads at once, with faults and early ends") {
  for (const std::string& name : engines()) {
    IoOptions options;
    options.block = options.buffer = 64 << 10;
    options.buffers = 3;
    options.depth = 4;
    Rig rig(name, options);
    std::vector<Fault> faults;
    for (std::uint64_t i = 1; i < 2000; i += 7) {
      faults.push_back({i % 2 ? Fault::Point::read : Fault::Point::write, i, 1, Fault::Effect::cut, i % 5000});
      faults.push_back({Fault::Point::write, i + 1, 1, Fault::Effect::error, EINTR});
      faults.push_back({Fault::Point::submit, i, 1, Fault::Effect::error, EBUSY});
    }
    faults.push_back({Fault::Point::write, 50, 1, Fault::Effect::error, EIO});
    REQUIRE(rig.engine->inject(faults).ok());
    std::atomic<int> wrong{0}, failed{0};
    const auto work = [&](unsigned number) {
      std::mt19937 random(number);
      const std::uint64_t base = number * 2 * kMiB;
      for (int i = 0; i < 25; ++i) {
        const std::size_t bytes = 1 + random() % 400'000;
        const auto sent = noise(bytes, random());
        std::vector<std::uint8_t> got(bytes);
        const std::uint64_t write = rig.begin(Direction::write, sent.data(), base + i, bytes, Priority::later);
        const std::uint64_t read = rig.begin(Direction::read, got.data(), base + i, bytes);
        bool done = false;
        REQUIRE(rig.engine->done(write, done).ok());
        const Status read_status = rig.engine->wait(read, -1), write_status = rig.engine->wait(write, -1);
        if (!read_status.ok()) ++wrong;
        if (!write_status.ok()) ++failed;
        if (write_status.ok() && got != sent) ++wrong;
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 6; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(failed <= 1);
    REQUIRE(rig.engine->close().ok());
    std::uint64_t ticket = 0;
    CHECK(rig.engine->submit(Direction::read, {}, Priority::now, ticket).code == Code::invalid);
  }
}

TEST_CASE("a request tells when it moved bytes") {
  for (const std::string& name : engines()) {
    Rig rig(name);
    const auto sent = noise(4 * kMiB, 5);
    const std::int64_t begin = now();
    const std::uint64_t ticket = rig.begin(Direction::write, sent.data(), 0, sent.size());
    for (bool done = false; !done;) REQUIRE(rig.engine->done(ticket, done).ok());
    const std::int64_t end = now();
    IoTimes times;
    CHECK(rig.engine->wait(ticket, -1, &times).ok());
    CHECK(begin <= times.began);
    CHECK(times.began < times.ended);
    CHECK(times.ended <= end);
    const std::uint64_t nothing = rig.begin(Direction::read, sent.data(), 0, 0);
    CHECK(rig.engine->wait(nothing, -1, &times).ok());
    CHECK(times.began == 0);
    CHECK(times.ended == 0);
  }
}

TEST_CASE("closing waits, from several threads, and tickets keep their outcome") {
  for (const std::string& name : engines()) {
    Rig rig(name);
    const auto sent = noise(8 * kMiB, 3);
    std::vector<std::uint64_t> tickets;
    for (int i = 0; i < 8; ++i) tickets.push_back(rig.begin(Direction::write, sent.data(), i * kMiB, kMiB, Priority::later));
    std::thread other([&] { CHECK(rig.engine->close().ok()); });
    CHECK(rig.engine->close().ok());
    other.join();
    for (const std::uint64_t ticket : tickets) CHECK(rig.engine->wait(ticket, 0).ok());
    CHECK(rig.engine->wait(tickets[0], 0).code == Code::invalid);
  }
}

TEST_CASE("threads of an engine go on where there is no memory left") {
  for (const std::string& name : engines()) {
    IoOptions options;
    options.block = options.buffer = 64 << 10;
    options.buffers = 3;
    options.depth = 4;
    Rig rig(name, options);
    const auto sent = noise(300'000, 5);
    std::vector<std::vector<std::uint8_t>> got(40, std::vector<std::uint8_t>(sent.size()));
    REQUIRE(rig.run(Direction::write, sent.data(), 0, sent.size()).ok());
    const RefuseMemory refuse;
    for (unsigned round = 0; round < 20; ++round) {
      // Requests that wait for one another, a failure whose text is long, transfers that are tried again.
      REQUIRE(rig.engine->inject({{Fault::Point::write, 3 + round, 1, Fault::Effect::error, EIO},
                                  {Fault::Point::read, 1, 4, Fault::Effect::error, EAGAIN},
                                  {Fault::Point::write, 1, 1, Fault::Effect::cut, 5000}}).ok());
      std::vector<std::uint64_t> tickets;
      for (std::size_t i = 0; i < got.size(); ++i)
        tickets.push_back(rig.begin(i % 3 ? Direction::read : Direction::write, i % 3 ? got[i].data() : sent.data(),
                                    i % 3 ? 0 : i, sent.size() - got.size(), static_cast<Priority>(i % kPriorities)));
      int failures = 0;
      for (const std::uint64_t ticket : tickets) failures += rig.engine->wait(ticket, -1).code == Code::system;
      CHECK(failures == 1);
    }
    REQUIRE(rig.engine->close().ok());
  }
}

TEST_CASE("a lock is the maker's alone: a transfer in flight keeps it from nobody") {
  Folder folder;
  std::unique_ptr<Slab> slab;
  REQUIRE(Slab::create(folder.path, 4096, true, Naming::named, slab).ok());
  const int kept = dup(slab->fd());  // as the kernel keeps it for a transfer
  const std::string name = slab->path();
  std::uint32_t removed = 9;
  REQUIRE(Slab::remove_leftovers(folder.path, removed).ok());
  CHECK(removed == 0);
  REQUIRE(link(name.c_str(), (name + ".kept").c_str()) == 0);
  slab.reset();
  REQUIRE(rename((name + ".kept").c_str(), name.c_str()) == 0);  // as if its maker had been killed
  REQUIRE(Slab::remove_leftovers(folder.path, removed).ok());
  CHECK(removed == 1);
  close(kept);
}

TEST_CASE("what a caller gets wrong is a status") {
  for (const std::string& name : engines()) {
    Rig rig(name);
    std::uint64_t ticket = 0;
    std::uint32_t file = 0;
    bool done = false;
    CHECK(rig.engine->submit(Direction::read, {{99, 0, 4096, 1, false}}, Priority::now, ticket).code == Code::invalid);
    CHECK(rig.engine->submit(Direction::read, {{rig.file, 0, 0, 1, false}}, Priority::now, ticket).code == Code::invalid);
    CHECK(rig.engine->submit(Direction::read, {{rig.file, ~0ull, 1, 1, false}}, Priority::now, ticket).code == Code::invalid);
    const Segment twice{rig.file, 0, reinterpret_cast<std::uint64_t>(&rig), 8, false};
    CHECK(rig.engine->submit(Direction::write, {twice, twice}, Priority::now, ticket).code == Code::invalid);
    CHECK(rig.engine->attach(-1, "x", 1, 1, file).code == Code::invalid);
    CHECK(rig.engine->attach(0, "x", 3, 1, file).code == Code::invalid);
    CHECK(rig.engine->wait(12345, 0).code == Code::invalid);
    CHECK((rig.engine->done(12345, done).ok() && done));
  }
  std::unique_ptr<IoEngine> engine;
  for (const auto& set : std::vector<void (*)(IoOptions&)>{
           [](IoOptions& o) { o.engine = "tape"; }, [](IoOptions& o) { o.depth = 0; }, [](IoOptions& o) { o.block = 1; },
           [](IoOptions& o) { o.buffers = 0; }, [](IoOptions& o) { o.buffer = 100'000; }}) {
    IoOptions options;
    set(options);
    CHECK(IoEngine::create(options, nullptr, engine).code == Code::invalid);
  }
}

TEST_CASE("io_uring that is refused gives way to threads, unless it was asked for") {
  if (!has_uring()) return;
  IoOptions options;
  options.refuse = ENOSYS;
  std::unique_ptr<IoEngine> engine;
  REQUIRE(IoEngine::create(options, nullptr, engine).ok());
  CHECK(engine->name() == std::string("threads"));
  CHECK(engine->notes().find("pool of threads") != std::string::npos);
  options.engine = "uring";
  CHECK(IoEngine::create(options, nullptr, engine).code == Code::invalid);
}

TEST_CASE("slabs are private, and only the dead ones' are removed") {
  Folder folder;
  std::unique_ptr<Slab> living, other;
  REQUIRE(Slab::create(folder.path, 4096, true, Naming::named, living).ok());
  std::uint32_t removed = 9;
  REQUIRE(Slab::remove_leftovers(folder.path, removed).ok());
  CHECK(removed == 0);
  const std::string dead = std::string(folder.path) + "/.zerograph-00000000deadbeef.slab";
  close(open(dead.c_str(), O_CREAT | O_RDWR, 0600));
  REQUIRE(Slab::create(folder.path, 4096, true, Naming::unlinked, other).ok());
  CHECK(access(dead.c_str(), F_OK) != 0);
  struct stat info;
  REQUIRE(fstat(living->fd(), &info) == 0);
  CHECK(info.st_nlink == 1);
  CHECK((info.st_mode & 0777) == 0600);
  REQUIRE(fstat(other->fd(), &info) == 0);
  CHECK(info.st_nlink == 0);
}

TEST_CASE("memory on huge pages is aligned and zero; mappings show their parts in order") {
  Mapping memory;
  REQUIRE(map_huge(5 * kMiB, memory).ok());
  CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % kHugePage == 0);
  CHECK(memory.bytes() == 6 * kMiB);
  CHECK(memory.data()[6 * kMiB - 1] == std::byte{0});
  Folder folder;
  std::unique_ptr<Slab> slab;
  REQUIRE(Slab::create(folder.path, 3 * 4096, false, Naming::automatic, slab).ok());
  Mapping map;
  REQUIRE(map_files({{slab->fd(), 8192, 4096}, {slab->fd(), 0, 4096}}, map).ok());
  map.data()[0] = std::byte{1};
  map.data()[4096] = std::byte{2};
  std::uint8_t got[2];
  REQUIRE(pread(slab->fd(), got, 1, 8192) == 1);
  REQUIRE(pread(slab->fd(), got + 1, 1, 0) == 1);
  CHECK((got[0] == 1 && got[1] == 2));
  CHECK(map_files({{slab->fd(), 0, 4 * 4096}}, map).code == Code::invalid);
  CHECK(map_files({{slab->fd(), 100, 4096}}, map).code == Code::invalid);
}
