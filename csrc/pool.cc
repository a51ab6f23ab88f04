#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <system_error>

#include "clock.h"

namespace zg {

namespace {

std::atomic<std::uint64_t> forks{0};

// The pool of this process. Never destroyed: threads may outlive static objects at exit.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
  std::size_t threads = 0;                       // asked for by set_pool_threads
  std::vector<std::shared_ptr<Pool>> abandoned;  // of the processes this one was forked from
};

Shared& shared() {
  static Shared* const instance = new Shared;
  return *instance;
}

// Held across a fork, so that the child finds it free. What else the parent's threads held there is let lie.
void before_fork() { shared().mutex.lock(); }
void in_parent() { shared().mutex.unlock(); }
void in_child() {
  forks.fetch_add(1);
  if (shared().pool != nullptr) shared().abandoned.push_back(std::move(shared().pool));
  shared().pool.reset();
  shared().mutex.unlock();
}

std::size_t number_in(const char* variable, std::size_t otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const unsigned long number = std::strtoul(text, &end, 10);
  return end == text || *end != '\0' ? otherwise : number;
}

std::shared_ptr<Pool> start_pool(std::size_t asked) {
  const std::vector<int> allowed = allowed_cpus();
  const std::size_t ranks = std::max<std::size_t>(1, number_in("LOCAL_WORLD_SIZE", 1));
  const std::size_t rank = number_in("LOCAL_RANK", 0) % ranks;
  const Sharers sharers = ranks == 1 ? Sharers{0, 1} : find_sharers(rank, ranks, "/proc");
  const Slice slice = slice_cpus(describe_cpus(allowed, "/sys/devices/system"), sharers.place, sharers.ranks);
  // More threads than the container has time for would be stopped in turn, with others waiting for them.
  const double quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup") / static_cast<double>(ranks);
  const std::size_t affordable = quota < static_cast<double>(slice.cores) ? static_cast<std::size_t>(quota) : slice.cores;
  const std::size_t threads = asked > 0 ? asked : std::max<std::size_t>(1, affordable);
  return std::make_shared<Pool>(threads, threads <= slice.cpus.size() ? slice.cpus : allowed);
}

std::shared_ptr<Pool> current_pool() {
  [[maybe_unused]] static const int registered = pthread_atfork(before_fork, in_parent, in_child);
  Shared& state = shared();
  std::lock_guard lock(state.mutex);
  if (state.pool == nullptr) state.pool = start_pool(state.threads);
  return state.pool;
}

void keep_on(std::thread& thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const int size = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  const std::size_t bytes = CPU_ALLOC_SIZE(size);
  CPU_ZERO_S(bytes, set);
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  pthread_setaffinity_np(thread.native_handle(), bytes, set);  // refused: the threads run where the kernel likes
  CPU_FREE(set);
}

}  // namespace

Job::Job(std::weak_ptr<Pool> pool, std::size_t pieces, std::function<void(std::size_t)> work)
    : pool_(std::move(pool)), generation_(forks.load()), pieces_(pieces), work_(std::move(work)), left_(pieces) {}

void Job::run() {
  for (;;) {
    const std::size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= pieces_) return;
    try {
      work_(piece);
    } catch (...) {  // for want of memory, say: none is taken here
      std::lock_guard lock(mutex_);
      if (thrown_ == nullptr) thrown_ = std::current_exception();
    }
    ended_.store(now(), std::memory_order_relaxed);
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard lock(mutex_);
      finished_.notify_all();
    }
  }
}

Status Job::wait() {
  if (generation_ != forks.load()) {
    return fail(Code::internal,
                "this work was submitted before a fork, and its threads stayed with the parent process\n\n"
                "hint: wait for every ticket before a fork, or start processes with the 'spawn' method");
  }
  if (!exhausted())
    if (const std::shared_ptr<Pool> pool = pool_.lock()) pool->help(*this);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return done(); });
  if (thrown_ == nullptr) return {};
  try {
    std::rethrow_exception(thrown_);
  } catch (const std::exception& error) {
    return fail(Code::internal, std::string("a thread of the pool failed: ") + error.what());
  } catch (...) {
    return fail(Code::internal, "a thread of the pool failed");
  }
}

Pool::Pool(std::size_t threads, const std::vector<int>& cpus) : seats_(threads) {
  // Python's signal handlers run in the main thread, whose waits they interrupt.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (std::size_t i = 0; i < threads; ++i) {
      workers_.emplace_back([this] { serve(); });
      keep_on(workers_.back(), cpus);
      pthread_setname_np(workers_.back().native_handle(), "zerograph");
    }
  } catch (const std::system_error&) {
    // No more threads to be had: those there are, and whoever waits, do the work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::close() {
  std::vector<std::thread> workers;
  std::deque<std::shared_ptr<Job>> rest;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    workers.swap(workers_);
    if (workers.empty()) rest.swap(jobs_);
  }
  wake_.notify_all();
  for (const auto& job : rest) job->run();
  for (std::thread& worker : workers) worker.join();
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return taken_ == 0; });  // threads that help
}

std::shared_ptr<Job> Pool::submit(std::size_t pieces, std::function<void(std::size_t)> work) {
  std::shared_ptr<Job> job(new Job(weak_from_this(), pieces, std::move(work)));
  if (pieces == 0) return job;
  {
    std::unique_lock lock(mutex_);
    if (stopping_) {
      lock.unlock();
      job->run();
      return job;
    }
    jobs_.push_back(job);
  }
  for (std::size_t i = 0; i < std::min(pieces, seats_); ++i) wake_.notify_one();
  return job;
}

// The first job with pieces left to take; called with the mutex held.
std::shared_ptr<Job> Pool::next_job() {
  while (!jobs_.empty() && jobs_.front()->exhausted()) jobs_.pop_front();
  return jobs_.empty() ? nullptr : jobs_.front();
}

// Called with the mutex held.
void Pool::leave() {
  --taken_;
  if (stopping_) {
    wake_.notify_all();
  } else if (next_job() != nullptr) {
    wake_.notify_one();  // a worker that found no seat
  }
}

void Pool::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::shared_ptr<Job> job;
    wake_.wait(lock, [&] {
      job = next_job();
      return job == nullptr ? stopping_ : taken_ < seats_;
    });
    if (job == nullptr) return;
    ++taken_;
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    leave();
  }
}

void Pool::help(Job& job) {
  {
    std::lock_guard lock(mutex_);
    if (taken_ == seats_) return;
    ++taken_;
  }
  job.run();
  std::lock_guard lock(mutex_);
  leave();
}

std::shared_ptr<Job> submit(std::size_t pieces, std::function<void(std::size_t)> work) {
  return current_pool()->submit(pieces, std::move(work));
}

Status run_pieces(std::size_t pieces, std::function<void(std::size_t)> work) {
  if (pieces == 1) return work(0), Status{};
  return submit(pieces, std::move(work))->wait();
}

std::size_t pool_threads() { return current_pool()->threads(); }

Status set_pool_threads(std::size_t threads) {
  constexpr std::size_t most = 4096;
  if (threads < 1 || threads > most)
    return fail(Code::invalid, "a pool has 1 to " + std::to_string(most) + " threads, not " + std::to_string(threads));
  close_pool();
  Shared& state = shared();
  std::lock_guard lock(state.mutex);
  state.threads = threads;
  return {};
}

void close_pool() {
  Shared& state = shared();
  std::shared_ptr<Pool> pool;
  {
    std::lock_guard lock(state.mutex);
    pool = std::move(state.pool);
    state.pool.reset();
  }
  if (pool != nullptr) pool->close();
}

}  // namespace zg
