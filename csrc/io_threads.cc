// The engine that works everywhere: a pool of threads, each with one pread or pwrite in flight.
#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "io_queue.h"

namespace zg {

namespace {

class Threads final : public IoBackend {
 public:
  Threads(IoQueue& queue, std::uint32_t count) : queue_(queue), count_(count) {}

  const char* name() const override { return "threads"; }

  Status start() override {
    try {
      for (std::uint32_t i = 0; i < count_; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      if (threads_.empty()) return fail(Code::system, "cannot start a thread for I/O", error.code().value());
    }
    return {};
  }

  void join() override {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void work() {
    while (IoPiece* piece = queue_.take_blocking()) {
      queue_.load(*piece);
      for (bool more = true; more;) {
        const IoTransfer transfer = queue_.transfer(*piece);
        more = queue_.finish(*piece, transfer, run(transfer));
        if (more && piece->pause.count() > 0) std::this_thread::sleep_for(piece->pause);
      }
    }
  }

  static long run(const IoTransfer& transfer) {
    if (transfer.injected) return transfer.result;
    const auto offset = static_cast<off_t>(transfer.offset);
    const ssize_t moved = transfer.write ? pwrite(transfer.fd, transfer.memory, transfer.bytes, offset)
                                         : pread(transfer.fd, transfer.memory, transfer.bytes, offset);
    return moved < 0 ? -errno : moved;
  }

  IoQueue& queue_;
  std::uint32_t count_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoBackend> make_threads(IoQueue& queue, const IoOptions& options) {
  return std::make_unique<Threads>(queue, std::min(options.threads, options.depth));
}

}  // namespace zg
