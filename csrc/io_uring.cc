// The engine for Linux: one thread keeps up to `depth` transfers in the kernel, and sleeps in between.
//
// Files are not registered with the ring. That saves no time that can be measured (benchmarks/RESULTS.md), and the kernel
// lets go of registered files some time after the ring or its process has ended: until then a closed slab keeps its space.
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "io_queue.h"

namespace zg {

namespace {

constexpr unsigned kOwn = 2;  // entries beside those of transfers: the wake-up and the timer
constexpr unsigned kBufferSlots = 64;                       // the first is the staging area
constexpr std::uint64_t kMaxRegistered = std::uint64_t{1} << 30;  // what the kernel takes as one buffer

class Uring final : public IoBackend {
 public:
  Uring(IoQueue& queue, std::uint32_t depth) : queue_(queue), depth_(depth), slots_(depth) {
    for (Slot& slot : slots_) free_.push_back(&slot);
    answered_.reserve(depth);  // the thread takes no memory
    paused_.reserve(depth);
  }

  ~Uring() override { release(); }

  Status open(int refuse, std::string& notes) {
    wakeup_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wakeup_.get() < 0) return fail(Code::system, "cannot make an eventfd", errno);
    int error = refuse;
    for (const unsigned flags : {unsigned{IORING_SETUP_COOP_TASKRUN}, 0u}) {
      if (refuse == 0) error = -io_uring_queue_init(depth_ + kOwn, &ring_, flags);
      if (error != EINVAL) break;  // an older kernel does not know the flag
    }
    if (error != 0) return fail(Code::system, std::string("io_uring_queue_init: ") + strerror(error), error);
    made_ = true;
    io_uring_ring_dontfork(&ring_);
    fixed_buffers_ = io_uring_register_buffers_sparse(&ring_, kBufferSlots) == 0;
    if (!fixed_buffers_) notes += "the kernel registers no buffers: each transfer pins its memory anew\n";
    if (fixed_buffers_ && !put_buffer(0, queue_.staging(), queue_.staging_bytes()))
      notes += "staging buffers are not registered (ulimit -l is too low?): each transfer pins its memory anew\n";
    return {};
  }

  const char* name() const override { return "uring"; }

  Status start() override {
    queue_.set_wake([](void* self) { static_cast<Uring*>(self)->wake(); }, this);
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error& error) {
      return fail(Code::system, "cannot start a thread for I/O", error.code().value());
    }
    return {};
  }

  void join() override {
    if (thread_.joinable()) thread_.join();
    release();
  }

  bool register_memory(std::uint64_t address, std::uint64_t bytes) override {
    std::lock_guard lock(mutex_);
    if (!fixed_buffers_ || bytes > kMaxRegistered) return false;
    for (unsigned slot = 1; slot < kBufferSlots; ++slot) {
      const bool used =
          std::any_of(areas_.begin(), areas_.end(), [&](const auto& entry) { return entry.second.slot == slot; });
      if (!used) return put_buffer_locked(slot, reinterpret_cast<std::byte*>(address), bytes);
    }
    return false;
  }

 private:
  void release() {
    std::lock_guard lock(mutex_);
    if (fixed_buffers_) io_uring_unregister_buffers(&ring_);  // at once, and not some time after the ring has ended
    if (made_) io_uring_queue_exit(&ring_);
    made_ = fixed_buffers_ = false;
    areas_.clear();
    wakeup_ = FileDescriptor();
  }

  using Clock = std::chrono::steady_clock;

  struct Slot {
    IoPiece* piece = nullptr;
    IoTransfer transfer{};
    Clock::time_point due{};  // while it pauses
  };
  struct Area {
    std::uint64_t bytes;
    unsigned slot;
  };

  bool put_buffer(unsigned slot, std::byte* data, std::uint64_t bytes) {
    std::lock_guard lock(mutex_);
    return bytes <= kMaxRegistered && put_buffer_locked(slot, data, bytes);
  }

  bool put_buffer_locked(unsigned slot, std::byte* data, std::uint64_t bytes) {
    const iovec area{data, bytes};
    const __u64 tag = 0;
    if (io_uring_register_buffers_update_tag(&ring_, slot, &area, &tag, 1) != 1) return false;
    areas_[reinterpret_cast<std::uint64_t>(data)] = {bytes, slot};
    return true;
  }

  void wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wakeup_.get(), &one, sizeof one);  // full: it is awake already
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    for (std::uint32_t tries = 0; sqe == nullptr; ++tries) {  // the queue is full: hand over what is in it
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr && tries > 2) await_result();
    }
    return sqe;
  }

  // Until there is a result, for a moment at most, where the kernel takes no entries.
  void await_result() {
    pollfd ready{ring_.ring_fd, POLLIN, 0};
    poll(&ready, 1, 1);
  }

  void watch() {
    io_uring_sqe* sqe = entry();
    io_uring_prep_poll_add(sqe, wakeup_.get(), POLLIN);
    io_uring_sqe_set_data(sqe, nullptr);
    watching_ = true;
  }

  // Ends the wait for results when the first pause is over.
  void set_timer() {
    const auto first = std::min_element(paused_.begin(), paused_.end(), [](Slot* a, Slot* b) { return a->due < b->due; });
    const auto left = std::max(Clock::duration::zero(), (*first)->due - Clock::now());
    timer_ = {0, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count()};  // always below a second
    io_uring_sqe* sqe = entry();
    io_uring_prep_timeout(sqe, &timer_, 0, 0);
    io_uring_sqe_set_data(sqe, &timer_);
    timing_ = true;
  }

  // The transfers whose pause is over.
  void resume() {
    const Clock::time_point now = Clock::now();
    for (std::size_t i = paused_.size(); i-- > 0;) {
      if (paused_[i]->due > now) continue;
      Slot& slot = *std::exchange(paused_[i], paused_.back());
      paused_.pop_back();
      begin(slot);
    }
  }

  void begin(Slot& slot) {
    slot.transfer = queue_.transfer(*slot.piece);
    if (slot.transfer.injected) {
      answered_.push_back(&slot);
      return;
    }
    prepare(slot);
    // Each by itself: of three or more at once the kernel makes fewer requests where they are neighbours on disk, up to
    // max_sectors_kb long. A disk that was to have 8 of 1 MiB in flight then had 2 of 4 MiB, and wrote a fifth slower.
    hand_over(0);
  }

  void prepare(Slot& slot) {
    const IoTransfer& t = slot.transfer;
    io_uring_sqe* sqe = entry();
    std::lock_guard lock(mutex_);
    const auto length = static_cast<unsigned>(t.bytes);
    if (const int buffer = find_buffer(t.memory, t.bytes); buffer >= 0) {
      if (t.write)
        io_uring_prep_write_fixed(sqe, t.fd, t.memory, length, t.offset, buffer);
      else
        io_uring_prep_read_fixed(sqe, t.fd, t.memory, length, t.offset, buffer);
    } else if (t.write) {
      io_uring_prep_write(sqe, t.fd, t.memory, length, t.offset);
    } else {
      io_uring_prep_read(sqe, t.fd, t.memory, length, t.offset);
    }
    io_uring_sqe_set_data(sqe, &slot);
  }

  // The entries of the queue to the kernel; what it does not take now goes with the next ones.
  int hand_over(unsigned wait) {
    const int injected = queue_.injected_submit();
    return injected != 0 ? -injected : io_uring_submit_and_wait(&ring_, wait);
  }

  int find_buffer(const std::byte* memory, std::uint64_t bytes) const {
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    auto found = areas_.upper_bound(address);
    if (found == areas_.begin()) return -1;
    --found;
    return address + bytes <= found->first + found->second.bytes ? static_cast<int>(found->second.slot) : -1;
  }

  void end(Slot& slot, long result) {
    if (queue_.finish(*slot.piece, slot.transfer, result)) {
      if (slot.piece->pause.count() == 0) return begin(slot);
      slot.due = Clock::now() + slot.piece->pause;  // the others go on meanwhile
      paused_.push_back(&slot);
      return;
    }
    slot.piece = nullptr;
    free_.push_back(&slot);
  }

  // True once there is nothing left to do, ever.
  bool fill() {
    while (!free_.empty()) {
      bool over = false;
      IoPiece* piece = queue_.take(over);
      if (over) return free_.size() == slots_.size();
      if (piece == nullptr) return false;
      Slot& slot = *free_.back();
      free_.pop_back();
      slot.piece = piece;
      queue_.load(*piece);
      begin(slot);
    }
    return false;
  }

  void answer() {
    while (!answered_.empty()) {
      Slot& slot = *answered_.back();
      answered_.pop_back();
      end(slot, slot.transfer.result);
    }
  }

  void work() {
    for (;;) {
      if (!watching_) watch();
      resume();
      if (fill()) return;
      if (!answered_.empty()) {
        answer();
        continue;  // what was freed may be taken before anything is waited for
      }
      if (!paused_.empty() && !timing_) set_timer();
      const int submitted = hand_over(1);
      // EINTR: a signal. EAGAIN, EBUSY: the kernel is short of memory or of room for results, which follow now. Whatever
      // else it is, the transfers stay in the queue, and no result may be made up while the kernel can use the memory.
      if (submitted < 0 && submitted != -EINTR && io_uring_cq_ready(&ring_) == 0) await_result();
      collect();
    }
  }

  void collect() {
    io_uring_cqe* cqes[64];
    while (const unsigned count = io_uring_peek_batch_cqe(&ring_, cqes, 64)) {
      std::pair<void*, long> results[64];
      for (unsigned i = 0; i < count; ++i) results[i] = {io_uring_cqe_get_data(cqes[i]), cqes[i]->res};
      io_uring_cq_advance(&ring_, count);
      for (unsigned i = 0; i < count; ++i) {
        const auto [whose, result] = results[i];
        if (whose == nullptr) {
          std::uint64_t rung;
          [[maybe_unused]] const ssize_t got = read(wakeup_.get(), &rung, sizeof rung);
          watching_ = false;
        } else if (whose == &timer_) {
          timing_ = false;
        } else {
          end(*static_cast<Slot*>(whose), result);
          fill();  // at once: the next result may be a staging buffer to copy, with the disk idle meanwhile
        }
      }
    }
  }

  IoQueue& queue_;
  std::uint32_t depth_;
  io_uring ring_{};
  bool made_ = false, fixed_buffers_ = false, watching_ = false, timing_ = false;
  __kernel_timespec timer_{};
  FileDescriptor wakeup_;
  std::thread thread_;
  std::vector<Slot> slots_;
  std::vector<Slot*> free_, answered_, paused_;
  std::mutex mutex_;  // of what is registered
  std::map<std::uint64_t, Area> areas_;  // by address
};

}  // namespace

Status make_uring(IoQueue& queue, const IoOptions& options, std::string& notes, std::unique_ptr<IoBackend>& out) {
  auto uring = std::make_unique<Uring>(queue, options.depth);
  ZG_TRY(uring->open(options.refuse, notes));
  out = std::move(uring);
  return {};
}

int probe_uring() {
  io_uring ring{};
  const int error = -io_uring_queue_init(2, &ring, 0);
  if (error == 0) io_uring_queue_exit(&ring);
  return error;
}

}  // namespace zg
