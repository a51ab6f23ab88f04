// What goes wrong between mailboxes. All ranks are here in one process, each with descriptors and mappings of its own.
#include "mailbox.h"

#include <dirent.h>
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace zg;

namespace {

constexpr double kTimeout = 5;

using Boxes = std::vector<std::unique_ptr<Mailbox>>;

Boxes connected(std::uint32_t world, std::uint64_t token) {
  Boxes boxes(world);
  std::vector<std::pair<pid_t, int>> addresses;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    REQUIRE(Mailbox::create(rank, world, token, nullptr, boxes[rank]).ok());
    addresses.push_back({boxes[rank]->pid(), boxes[rank]->control_fd()});
  }
  for (auto& box : boxes) REQUIRE(box->connect(addresses).ok());
  return boxes;
}

// Descriptors of message blocks in this process, lowest first.
std::vector<int> block_descriptors() {
  std::vector<int> found;
  DIR* folder = opendir("/proc/self/fd");
  REQUIRE(folder != nullptr);
  for (const dirent* entry = readdir(folder); entry != nullptr; entry = readdir(folder)) {
    std::array<char, 256> target{};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target.data(), target.size() - 1) > 0 &&
        std::string(target.data()).find("zerograph-block") != std::string::npos)
      found.push_back(std::atoi(entry->d_name));
  }
  closedir(folder);
  return found;
}

Piece one(float& value) { return {reinterpret_cast<std::uint64_t>(&value), 1, 1, DType::float32, DType::float32}; }

std::uint64_t start_gather(Mailbox& box, float& value) {
  std::uint64_t ticket = 0;
  REQUIRE(box.start_gather(1, {one(value)}, ticket).ok());
  return ticket;
}

Status finish_gather(Mailbox& box, std::uint64_t ticket, std::vector<float>& out) {
  return box.finish_gather(ticket, {{reinterpret_cast<std::uint64_t>(out.data()), 1}}, kTimeout);
}

// A gather of all ranks, started by all and then finished by all.
void gather(Boxes& boxes) {
  std::vector<float> values(boxes.size());
  std::vector<std::uint64_t> tickets(boxes.size());
  for (std::size_t rank = 0; rank < boxes.size(); ++rank) {
    values[rank] = static_cast<float>(rank + 1);
    tickets[rank] = start_gather(*boxes[rank], values[rank]);
  }
  for (std::size_t rank = 0; rank < boxes.size(); ++rank) {
    std::vector<float> out(boxes.size());
    REQUIRE(finish_gather(*boxes[rank], tickets[rank], out).ok());
    CHECK(out == values);
  }
}

}  // namespace

TEST_CASE("a payload that is another file's is refused") {
  for (const char* other : {"an empty file", "a file of its size", "another mailbox's message", "another message"}) {
    CAPTURE(other);
    Boxes boxes = connected(2, 7), strangers = connected(2, 8);
    float mine = 1, theirs = 2;
    const std::uint64_t ticket = start_gather(*boxes[0], mine);
    const std::vector<int> before = block_descriptors();
    REQUIRE(before.size() == 1);
    int replacement = -1;
    const bool message = std::string(other).find("message") != std::string::npos;
    if (message) {
      // Its mailbox's next message, or that of ranks that have another token.
      Mailbox& sender = std::string(other) == "another message" ? *boxes[0] : *strangers[0];
      start_gather(sender, theirs);
      for (const int fd : block_descriptors())
        if (fd != before[0]) replacement = dup(fd);
    } else {
      replacement = static_cast<int>(memfd_create("other", MFD_CLOEXEC));
      REQUIRE(ftruncate(replacement, std::string(other) == "an empty file" ? 0 : 1 << 20) == 0);
    }
    REQUIRE(dup2(replacement, before[0]) == before[0]);
    close(replacement);

    const std::uint64_t own = start_gather(*boxes[1], theirs);
    std::vector<float> out(2, -7);
    const Status status = finish_gather(*boxes[1], own, out);
    CHECK(status.code == Code::peer);
    CHECK(status.text.find("rank 0") != std::string::npos);
    CHECK(status.text.find("/fd/" + std::to_string(before[0])) != std::string::npos);
    CHECK(out[0] == -7);
    CHECK(own == ticket);
  }
}

TEST_CASE("what a timed-out operation has of its peers stays mapped") {
  Boxes boxes = connected(3, 9);
  std::array<float, 3> values{1, 2, 4};
  std::array<std::uint64_t, 3> tickets{};
  for (const std::size_t rank : {0, 1})
    REQUIRE(boxes[rank]->start_reduce(5, {one(values[rank])}, tickets[rank]).ok());
  std::array<float, 3> sums{};
  const auto finish = [&](std::size_t rank, double timeout) {
    return boxes[rank]->finish_reduce(tickets[rank], {{reinterpret_cast<std::uint64_t>(&sums[rank]), DType::float32}}, 1.0,
                                      timeout);
  };
  CHECK(finish(1, 0.01).code == Code::timeout);  // it has rank 0's block now
  REQUIRE(boxes[2]->start_reduce(5, {one(values[2])}, tickets[2]).ok());
  CHECK(finish(0, kTimeout).ok());
  CHECK(finish(2, kTimeout).ok());

  // Rank 0 makes and closes more blocks than peers follow one by one.
  std::vector<std::array<std::uint64_t, 3>> flight(200);
  for (auto& each : flight)
    for (std::size_t rank = 0; rank < 3; ++rank) each[rank] = start_gather(*boxes[rank], values[rank]);
  std::vector<float> out(3);
  for (auto& each : flight)
    for (std::size_t rank = 0; rank < 3; ++rank) REQUIRE(finish_gather(*boxes[rank], each[rank], out).ok());
  for (std::uint64_t message = 0; message < 3 * Mailbox::kIdleMessages / 2; ++message) gather(boxes);

  REQUIRE(finish(1, kTimeout).ok());
  CHECK(sums[0] == 7);
}

TEST_CASE("after recover() nothing of the aborted generation is left") {
  Boxes boxes = connected(3, 11);
  gather(boxes);
  std::vector<float> out(3);
  for (std::uint64_t generation = 1; generation < 5; ++generation) {
    // Ranks stop at different places: one is operations ahead, one has finished some, one never began.
    float value = 1;
    std::uint64_t ticket = 0;
    for (int i = 0; i < 5; ++i) start_gather(*boxes[0], value);
    REQUIRE(boxes[1]->start_reduce(3, {one(value)}, ticket).ok());
    boxes[2]->abort("out of memory");
    CHECK(boxes[0]->aborted());
    const std::uint64_t next = start_gather(*boxes[0], value);
    const Status status = finish_gather(*boxes[0], next, out);
    CHECK(status.code == Code::peer);
    CHECK(status.text.find("rank 2") != std::string::npos);
    CHECK(status.text.find("out of memory") != std::string::npos);

    REQUIRE(boxes[0]->recover(generation).ok());
    CHECK_FALSE(boxes[0]->aborted());
    const std::uint64_t early = start_gather(*boxes[0], value);  // before the others have recovered
    REQUIRE(boxes[1]->recover(generation).ok());
    REQUIRE(boxes[2]->recover(generation).ok());
    CHECK(boxes[1]->recover(generation).code == Code::invalid);
    CHECK(finish_gather(*boxes[0], next, out).code == Code::invalid);
    float other = 2;
    const std::uint64_t first = start_gather(*boxes[1], other), second = start_gather(*boxes[2], other);
    CHECK(first == early);
    CHECK(finish_gather(*boxes[0], early, out).ok());
    CHECK(out == std::vector<float>{1, 2, 2});
    CHECK(finish_gather(*boxes[1], first, out).ok());
    CHECK(finish_gather(*boxes[2], second, out).ok());
    for (int i = 0; i < 50; ++i) gather(boxes);
  }
  CHECK(boxes[0]->bytes() < 2 << 20);  // blocks of messages that nobody read are used again
}

TEST_CASE("abort from another thread while mailboxes connect and close") {
  for (int round = 0; round < 20; ++round) {
    Boxes boxes(2);
    std::vector<std::pair<pid_t, int>> addresses;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      REQUIRE(Mailbox::create(rank, 2, 13, nullptr, boxes[rank]).ok());
      addresses.push_back({boxes[rank]->pid(), boxes[rank]->control_fd()});
    }
    std::thread aborting([&] {
      for (int i = 0; i < 200; ++i) {
        boxes[0]->abort("again");
        (void)boxes[0]->is_present(1);
      }
    });
    for (auto& box : boxes) CHECK(box->connect(addresses).ok());
    std::uint64_t generation = 0;
    for (int i = 0; i < 20; ++i) CHECK(boxes[0]->recover(++generation).ok());
    boxes[0]->close(0);
    aborting.join();
    CHECK_FALSE(boxes[1]->is_present(0));
  }
}
