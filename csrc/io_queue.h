// What the two engines share: tickets, priorities, order, staging, and the meaning of a transfer's result.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "huge.h"
#include "io.h"
#include "memory.h"
#include "status.h"

namespace zg {

struct IoFile {
  std::uint32_t id;
  int fd;
  std::string path;
  std::size_t memory_alignment, offset_alignment;
  std::uint32_t users = 0;  // requests that are not done
};

struct IoRequest;
struct IoPiece;

// Pieces in a row. Nodes move from list to list and are made with the request: threads of a backend take no memory, so
// that none of them can fail for want of it.
using IoPieces = std::list<IoPiece*>;

// A part of a request that is moved by one transfer, if all goes well.
struct IoPiece {
  IoRequest* request;
  IoFile* file;
  std::uint64_t address, offset, bytes;  // the caller's, of the whole piece
  bool staged;
  bool merge;  // a write that must keep the rest of its first or last block: these are read first

  // While it runs. The range on disk, grown to whole blocks where staged, and how far it came.
  std::byte* buffer = nullptr;
  std::byte* memory = nullptr;
  std::uint64_t begin = 0, length = 0, moved = 0;
  Direction direction = Direction::read;
  std::uint32_t tries = 0;  // since it last moved
  std::chrono::milliseconds pause{0};  // before the next transfer
  Priority level = Priority::now;
  bool taken = false;

  IoPieces* row = nullptr;  // where its node is
  IoPieces::iterator place{};
  std::uint64_t order = 0;
};

// What a backend asks of the kernel; `injected`: the answer is `result` already.
struct IoTransfer {
  bool write;
  int fd;
  std::byte* memory;
  std::size_t bytes;
  std::uint64_t offset;
  std::uint64_t faked = 0;  // the result that a test makes of a success; 0: as it is
  bool injected = false;
  long result = 0;
};

class IoQueue {
 public:
  static Status create(const IoOptions& options, std::unique_ptr<IoQueue>& out);
  ~IoQueue();

  // The caller's side; see IoEngine.
  Status attach(int fd, std::string path, std::size_t memory_alignment, std::size_t offset_alignment,
                std::uint32_t& file);
  Status detach(std::uint32_t file);
  Status submit(Direction direction, const std::vector<Segment>& segments, Priority priority, std::uint64_t& ticket);
  Status wait(std::uint64_t ticket, double timeout, Interrupted interrupted, IoTimes* times = nullptr);
  Status done(std::uint64_t ticket, bool& out);
  void finished(std::vector<std::uint64_t>& tickets);
  void close();    // no further requests; what is there still runs
  void release();  // the staging memory, once the backend is joined
  IoStats stats() const;
  void inject(std::vector<Fault> faults);

  // The backend's side, which takes no memory. take: the next piece, or nullptr; it then says whether all is over, and otherwise `wake` is
  // called once there may be one. take_blocking waits instead; nullptr: all is over.
  IoPiece* take(bool& over);
  IoPiece* take_blocking();
  void load(IoPiece& piece);  // before its first transfer, by the thread that took it
  IoTransfer transfer(IoPiece& piece);
  bool finish(IoPiece& piece, const IoTransfer& transfer, long result);  // true: there is more, after `piece.pause`
  int injected_submit();                                                 // 0, or the errno of a test

  std::byte* staging() const { return staging_.data(); }
  std::size_t staging_bytes() const { return staging_.bytes(); }
  // How many transfers the backend has in flight at once. A quarter of them is never write-back: a fetch that someone
  // waits for finds room at once.
  void set_capacity(std::uint32_t count) { later_limit_ = std::max(1u, count - std::max(1u, count / 4)); }
  void set_wake(void (*wake)(void*), void* self) { wake_ = wake, wake_self_ = self; }

 private:
  using Owner = std::shared_ptr<IoRequest>;
  struct Level {
    IoPieces direct, staged;
  };

  explicit IoQueue(const IoOptions& options);
  void split(IoRequest& request, const Segment& segment, IoFile& file);
  void add_piece(IoRequest& request, IoFile& file, const Segment& segment, std::uint64_t from, std::uint64_t to,
                 bool staged);
  std::vector<Owner> blockers_of(const IoRequest& request) const;
  void enqueue(IoRequest& request);
  void raise(IoRequest& request, Priority priority);
  void drop(IoRequest& request);
  void complete(IoRequest& request);
  void end_piece(IoPiece& piece, std::optional<int> error = {});  // an errno, 0: nothing more moved
  bool ended(IoPiece& piece);
  IoPiece* pick();
  void notify();
  const Fault* fault(Fault::Point point);

  IoOptions options_;
  std::uint32_t later_limit_ = 1;
  Mapping staging_;
  std::vector<std::byte*> buffers_;  // free ones
  mutable std::mutex mutex_;
  std::condition_variable work_;
  bool closing_ = false, idle_ = false;
  void (*wake_)(void*) = nullptr;
  void* wake_self_ = nullptr;
  Level levels_[kPriorities];
  std::uint32_t running_later_ = 0;
  std::uint64_t next_ticket_ = 1, next_order_ = 0, active_ = 0;
  std::uint32_t next_file_ = 0;
  std::unordered_map<std::uint32_t, std::shared_ptr<IoFile>> files_;
  std::unordered_map<std::uint64_t, Owner> requests_;
  std::vector<Owner> pending_;  // not done, oldest first
  std::vector<std::uint64_t> finished_;  // has room for all that are pending
  IoStats stats_;
  std::vector<Fault> faults_;
  std::uint64_t fault_counts_[3] = {};
  std::atomic<bool> faulty_{false};
};

class IoBackend {
 public:
  virtual ~IoBackend() = default;
  virtual const char* name() const = 0;
  virtual Status start() = 0;
  virtual void join() = 0;  // after IoQueue::close: returns when the queue is empty, and lets go of everything
  virtual bool register_memory(std::uint64_t, std::uint64_t) { return false; }
};

std::unique_ptr<IoBackend> make_threads(IoQueue& queue, const IoOptions& options);
// Fails with the errno of io_uring_queue_init. `notes` gets a line for each thing the kernel does not permit.
Status make_uring(IoQueue& queue, const IoOptions& options, std::string& notes, std::unique_ptr<IoBackend>& out);

}  // namespace zg
