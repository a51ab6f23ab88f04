#include "io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "io_queue.h"

namespace zg {

bool has_uring() {
#ifdef ZG_HAS_URING
  return true;
#else
  return false;
#endif
}

#ifndef ZG_HAS_URING
int probe_uring() { return ENOSYS; }
#endif

namespace {

Status unavailable(const std::string& reason) {
  return fail(Code::invalid, "the I/O engine 'uring' was asked for, and is not to be had: " + reason +
                                 "\n\nhint: ZEROGRAPH_IO=threads, or leave it unset");
}

Status make_backend(IoQueue& queue, const IoOptions& options, std::string& notes, std::unique_ptr<IoBackend>& out) {
  const bool forced = options.engine == "uring";
#ifdef ZG_HAS_URING
  if (options.engine != "threads") {
    const Status made = make_uring(queue, options, notes, out);
    if (made.ok()) return {};
    const std::string reason = "the kernel refuses " + made.text;
    if (forced) return unavailable(reason);
    notes = reason + "; I/O goes through a pool of threads, which takes more CPU time per transfer\n";
  }
#else
  const std::string reason = "this build has no liburing";
  if (forced) return unavailable(reason);
  if (options.engine == "auto") notes = reason + "; I/O goes through a pool of threads, which takes more CPU time per transfer\n";
#endif
  out = make_threads(queue, options);
  queue.set_capacity(std::min(options.threads, options.depth));
  return {};
}

}  // namespace

IoEngine::IoEngine(Interrupted interrupted, std::unique_ptr<IoQueue> queue)
    : interrupted_(interrupted), pid_(getpid()), queue_(std::move(queue)) {}

Status IoEngine::create(const IoOptions& options, Interrupted interrupted, std::unique_ptr<IoEngine>& out) {
  if (options.engine != "auto" && options.engine != "uring" && options.engine != "threads")
    return fail(Code::invalid, "there is no I/O engine '" + options.engine + "'\n\nhint: ZEROGRAPH_IO=uring or threads");
  std::unique_ptr<IoQueue> queue;
  ZG_TRY(IoQueue::create(options, queue));
  std::unique_ptr<IoEngine> engine(new IoEngine(interrupted, std::move(queue)));
  ZG_TRY(make_backend(*engine->queue_, options, engine->notes_, engine->backend_));
  ZG_TRY(engine->backend_->start());
  out = std::move(engine);
  return {};
}

IoEngine::~IoEngine() {
  if (getpid() != pid_) {  // a child's copy: its threads do not exist, and its locks may be held for ever
    static_cast<void>(backend_.release());
    static_cast<void>(queue_.release());
    return;
  }
  static_cast<void>(close());
}

Status IoEngine::check_owner() const {
  const pid_t pid = getpid();
  if (pid == pid_) return {};
  return fail(Code::invalid, "this I/O engine belongs to process " + std::to_string(pid_) + ", not to its child " +
                                 std::to_string(pid) + "\n\nhint: make a new one after the fork");
}

const char* IoEngine::name() const { return backend_->name(); }
const std::string& IoEngine::notes() const { return notes_; }

Status IoEngine::attach(int fd, std::string path, std::size_t memory_alignment, std::size_t offset_alignment,
                        std::uint32_t& file) {
  ZG_TRY(check_owner());
  return queue_->attach(fd, std::move(path), memory_alignment, offset_alignment, file);
}

Status IoEngine::detach(std::uint32_t file) {
  ZG_TRY(check_owner());
  return queue_->detach(file);
}

Status IoEngine::register_memory(std::uint64_t address, std::uint64_t bytes, bool& registered) {
  ZG_TRY(check_owner());
  registered = address != 0 && bytes != 0 && backend_->register_memory(address, bytes);
  return {};
}

Status IoEngine::submit(Direction direction, const std::vector<Segment>& segments, Priority priority,
                        std::uint64_t& ticket) {
  ZG_TRY(check_owner());
  return queue_->submit(direction, segments, priority, ticket);
}

Status IoEngine::wait(std::uint64_t ticket, double timeout, IoTimes* times) {
  ZG_TRY(check_owner());
  return queue_->wait(ticket, timeout, interrupted_, times);
}

Status IoEngine::done(std::uint64_t ticket, bool& out) {
  ZG_TRY(check_owner());
  return queue_->done(ticket, out);
}

Status IoEngine::finished(std::vector<std::uint64_t>& tickets) {
  ZG_TRY(check_owner());
  queue_->finished(tickets);
  return {};
}

Status IoEngine::close() {
  ZG_TRY(check_owner());
  if (backend_ == nullptr) return {};
  queue_->close();
  std::lock_guard lock(closing_);
  backend_->join();
  queue_->release();
  return {};
}

IoStats IoEngine::stats() const { return check_owner().ok() ? queue_->stats() : IoStats{}; }

Status IoEngine::inject(std::vector<Fault> faults) {
  ZG_TRY(check_owner());
  queue_->inject(std::move(faults));
  return {};
}

}  // namespace zg
