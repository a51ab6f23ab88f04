// The threads of this process. Work is a number of pieces; threads take them one by one until none is left.
//
// As many pieces run at a time as the pool has threads, whoever runs them: a thread that waits for a job takes the
// place of one of the pool's, which stays asleep. So a job that is waited for at once needs no more cores than one that
// runs beside its caller.
//
// Fork. The child's memory holds jobs that its parent's threads were working on. There they are over: waiting for one
// fails, and the next job starts a pool of the child's own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cores.h"
#include "status.h"

namespace zg {

class Pool;

class Job {
 public:
  bool done() const { return left_.load(std::memory_order_acquire) == 0; }

  // When its last piece ended, by now(); 0 while it is not done.
  std::int64_t ended() const { return done() ? ended_.load(std::memory_order_relaxed) : 0; }

  // Helps, then waits. Fails if a piece threw, or if this job was submitted before a fork of which this is the child.
  Status wait();

 private:
  friend class Pool;
  Job(std::weak_ptr<Pool> pool, std::size_t pieces, std::function<void(std::size_t)> work);
  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= pieces_; }
  void run();  // pieces until none is left to take

  std::weak_ptr<Pool> pool_;
  std::uint64_t generation_;  // forks before it
  std::size_t pieces_;
  std::function<void(std::size_t)> work_;
  std::atomic<std::size_t> next_{0}, left_;
  std::atomic<std::int64_t> ended_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::exception_ptr thrown_;  // by the first piece that did
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(std::size_t threads, const std::vector<int>& cpus);
  ~Pool() { close(); }

  // Finishes what was submitted and ends the threads. What is submitted later is done before submit returns.
  void close();

  std::size_t threads() const { return seats_; }
  std::shared_ptr<Job> submit(std::size_t pieces, std::function<void(std::size_t)> work);

 private:
  friend class Job;
  void serve();
  void help(Job& job);  // if a seat is free
  void leave();         // a seat
  std::shared_ptr<Job> next_job();

  const std::size_t seats_;
  std::size_t taken_ = 0;
  bool stopping_ = false;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Runs `work(0)`, ..., `work(pieces - 1)` on this process's pool, which the first job starts: as many threads as cores
// this process may use, divided by the ranks that may use the same ones (find_sharers), or as it has the time for
// (cpu_quota, divided by LOCAL_WORLD_SIZE), at least one, kept on this rank's share of them.
std::shared_ptr<Job> submit(std::size_t pieces, std::function<void(std::size_t)> work);

// The same, and waits. Without a thread where there is one piece.
Status run_pieces(std::size_t pieces, std::function<void(std::size_t)> work);

std::size_t pool_threads();
Status set_pool_threads(std::size_t threads);  // finishes what was submitted

// Finishes what was submitted and ends the threads. A later job starts new ones.
void close_pool();

}  // namespace zg
