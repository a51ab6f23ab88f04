// Transfers between memory and files in the background: one interface, two engines.
//
// `uring` (io_uring.cc) keeps up to `depth` transfers in the kernel from one thread, `threads` (io_threads.cc) runs
// pread and pwrite in a pool. Both take their work from one queue (io_queue.h), which knows about tickets, priorities,
// order, staging buffers, and what becomes of the result of a transfer. So they differ in speed and in nothing else.
//
// Order. Two requests that touch the same bytes of a file, at least one of them writing, run in the order in which they
// were submitted, whatever their priorities; the earlier one then inherits the later one's. All others run in any order.
//
// Memory belongs to the engine until the ticket is done: the caller keeps it alive and does not write to it (nor read,
// where the engine reads a file into it).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

namespace zg {

enum class Direction : std::uint8_t { read, write };

enum class Priority : std::uint8_t { now, soon, later };  // someone waits; will be needed; write-back
inline constexpr std::size_t kPriorities = 3;

// `bytes` of `file` (see attach) from `offset`, to or from `address`. Where the file needs whole blocks and a write ends
// inside one, the rest of that block is kept, which costs a read; `padded` says that it may be zeroed instead.
struct Segment {
  std::uint32_t file;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint64_t bytes;
  bool padded;
};

struct IoOptions {
  std::string engine = "auto";         // "uring", "threads"; "auto" is uring where the kernel permits it
  std::uint32_t depth = 32;            // transfers in flight
  std::uint32_t threads = 8;           // of the engine `threads`; no more than `depth`
  std::size_t block = 8u << 20;        // longest transfer, from the caller's own memory
  std::size_t buffer = 4u << 20;       // bytes of a staging buffer
  std::uint32_t buffers = 8;           // of them
  int refuse = 0;                      // for tests: errno that the start of io_uring fails with
};

struct IoStats {
  std::uint64_t transfers = 0, retries = 0;
  std::uint64_t bytes_read = 0, bytes_written = 0;  // as the disk sees them
  std::uint64_t bytes_staged = 0;                   // of them, through staging buffers
};

// When a request's first transfer was begun and its last one ended, by now(): 0 where nothing was to be
// moved.
struct IoTimes {
  std::int64_t began = 0, ended = 0;
};

// For tests: the `nth` transfer of that kind from now on (1 is the next), and the `times` - 1 that follow, do not
// happen as the kernel would have them.
struct Fault {
  enum class Point : std::uint8_t { read, write, submit };  // submit: handing transfers to the kernel (uring)
  enum class Effect : std::uint8_t { error, cut, nothing };  // errno `value`; `value` bytes short; 0 bytes moved
  Point point;
  std::uint64_t nth, times;
  Effect effect;
  std::uint64_t value;
};

// Called now and then while waiting; true ends the wait with Code::interrupted.
using Interrupted = bool (*)();

class IoQueue;
class IoBackend;

// Thread-safe. Belongs to the process that made it: after a fork, the child's calls fail and its copy is inert.
class IoEngine {
 public:
  static Status create(const IoOptions& options, Interrupted interrupted, std::unique_ptr<IoEngine>& out);
  ~IoEngine();

  const char* name() const;              // "uring" or "threads"
  const std::string& notes() const;      // why not the faster way, one line each; empty: nothing is missed

  // `fd` stays the caller's, and open until detached. For files with O_DIRECT: the multiples that memory addresses, and
  // offsets and sizes, must have; else 1.
  Status attach(int fd, std::string path, std::size_t memory_alignment, std::size_t offset_alignment,
                std::uint32_t& file);
  Status detach(std::uint32_t file);  // not while a request uses it

  // Memory that is used again and again: io_uring then pins it once. `registered` is false where that is not possible.
  Status register_memory(std::uint64_t address, std::uint64_t bytes, bool& registered);

  Status submit(Direction direction, const std::vector<Segment>& segments, Priority priority, std::uint64_t& ticket);
  // What became of it. After an answer other than timeout or interrupted the ticket is forgotten. Seconds, below 0: ever.
  Status wait(std::uint64_t ticket, double timeout, IoTimes* times = nullptr);
  Status done(std::uint64_t ticket, bool& out);
  // Tickets that were done since the last call.
  Status finished(std::vector<std::uint64_t>& tickets);

  Status close();  // waits for everything that was submitted
  IoStats stats() const;
  Status inject(std::vector<Fault> faults);  // in place of earlier ones

 private:
  IoEngine(Interrupted interrupted, std::unique_ptr<IoQueue> queue);
  Status check_owner() const;

  Interrupted interrupted_;
  pid_t pid_;
  std::mutex closing_;  // a thread is joined once
  std::string notes_;
  std::unique_ptr<IoQueue> queue_;
  std::unique_ptr<IoBackend> backend_;
};

// Whether this build has io_uring, and if so whether the kernel permits it (0, else an errno).
bool has_uring();
int probe_uring();

}  // namespace zg
