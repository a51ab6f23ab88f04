#include "streams.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "trace.h"

namespace fake {
namespace {

using Clock = std::chrono::steady_clock;

std::mutex error_lock;
std::exception_ptr first_error;

void keep_error() {
  std::lock_guard hold(error_lock);
  if (!first_error) first_error = std::current_exception();
}

void raise_error() {
  std::lock_guard hold(error_lock);
  if (auto error = std::exchange(first_error, nullptr)) std::rethrow_exception(error);
}

std::uint64_t seed = 0;

// One of these threads never ends: a process may end while it still has work, as it may on a GPU.
class Stream {
 public:
  explicit Stream(std::int64_t number) : random_(seed + 1000 * number) { std::thread([this] { work(); }).detach(); }

  void launch(Job job) {
    std::lock_guard hold(lock_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard hold(lock_);
    return jobs_.empty();
  }

  void wait() {
    std::unique_lock hold(lock_);
    changed_.wait(hold, [this] { return jobs_.empty(); });
  }

 private:
  [[noreturn]] void work() {
    for (;;) {
      Job job;
      {
        std::unique_lock hold(lock_);
        changed_.wait(hold, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
      }
      if (seed != 0 && random_() % 32 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
      }
      try {
        job();
      } catch (...) {
        keep_error();
      }
      job = nullptr;  // what it refers to goes before it counts as done
      std::lock_guard hold(lock_);
      jobs_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // with the one that is done now
  std::mt19937_64 random_;
};

std::mutex streams_lock;
std::map<std::int64_t, Stream*> streams;  // which live as long as the process
std::int64_t last_stream = 0;
thread_local std::int64_t chosen = 0;

Stream& stream_of(std::int64_t number) {
  std::lock_guard hold(streams_lock);
  auto& found = streams[number];
  if (found == nullptr) found = new Stream(number);
  return *found;
}

std::mutex waits_lock;
std::map<std::string, int> counted;

std::map<std::int64_t, Stream*> all_streams() {
  std::lock_guard hold(streams_lock);
  return streams;
}

}  // namespace

std::int64_t current_stream() { return chosen; }

std::int64_t exchange_stream(std::int64_t stream) { return std::exchange(chosen, stream); }

std::int64_t new_stream() {
  std::lock_guard hold(streams_lock);
  return ++last_stream;
}

void launch(std::int64_t stream, Job job) { stream_of(stream).launch(std::move(job)); }

bool is_idle(std::int64_t stream) { return stream_of(stream).is_idle(); }

void synchronize(std::int64_t stream) {
  stream_of(stream).wait();
  tell({"drain", stream, 0, "", {}, {}});
  raise_error();
}

void synchronize() {
  for (auto& [number, stream] : all_streams()) stream->wait();
  tell({"drain", -1, 0, "", {}, {}});
  raise_error();
}

void count_wait(const std::string& what) {
  std::lock_guard hold(waits_lock);
  ++counted[what];
}

std::map<std::string, int> waits() {
  std::lock_guard hold(waits_lock);
  return counted;
}

void forget_waits() {
  std::lock_guard hold(waits_lock);
  counted.clear();
}

void delay(std::uint64_t new_seed) { seed = new_seed; }

struct Mark::State {
  static std::int64_t next() {
    static std::atomic<std::int64_t> last = 0;
    return ++last;
  }

  const std::int64_t number = next();
  std::mutex lock;
  std::condition_variable changed;
  bool passed = false;
  std::int64_t nanoseconds = 0;

  void wait() {
    std::unique_lock hold(lock);
    changed.wait(hold, [this] { return passed; });
  }
};

std::shared_ptr<Mark> Mark::set(std::int64_t stream) {
  auto mark = std::make_shared<Mark>();
  mark->state_ = std::make_shared<State>();
  tell({"record", stream, mark->state_->number, "", {}, {}});
  launch(stream, [state = mark->state_] {
    std::lock_guard hold(state->lock);
    state->passed = true;
    state->nanoseconds = Clock::now().time_since_epoch().count();
    state->changed.notify_all();
  });
  return mark;
}

std::vector<std::shared_ptr<Mark>> mark_all() {
  std::vector<std::shared_ptr<Mark>> marks;
  for (auto& [number, stream] : all_streams()) marks.push_back(Mark::set(number));
  return marks;
}

bool Mark::passed() const {
  std::lock_guard hold(state_->lock);
  return state_->passed;
}

void Mark::wait() const {
  state_->wait();
  tell({"wait", 0, state_->number, "", {}, {}});
}

void Mark::hold(std::int64_t stream) const {
  tell({"hold", stream, state_->number, "", {}, {}});
  launch(stream, [state = state_] { state->wait(); });
}

std::int64_t Mark::nanoseconds() const {
  std::lock_guard hold(state_->lock);
  return state_->nanoseconds;
}

}  // namespace fake
