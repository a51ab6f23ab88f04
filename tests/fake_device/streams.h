// The streams of the fake device: each is a thread that does what it was told, in that order, and some of it late.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fake {

using Job = std::function<void()>;

// The stream that this thread tells what to do; 0 is the default one.
std::int64_t current_stream();
std::int64_t exchange_stream(std::int64_t stream);
std::int64_t new_stream();

// Has `job` done behind what `stream` was told before. What it raises is raised by the next wait.
void launch(std::int64_t stream, Job job);
bool is_idle(std::int64_t stream);
// Raises what a job raised since the last wait.
void synchronize(std::int64_t stream);
void synchronize();

// A place in a stream: what was told before has been done once it is passed.
class Mark {
 public:
  static std::shared_ptr<Mark> set(std::int64_t stream);
  bool passed() const;
  // Without an error of what was done.
  void wait() const;
  // Lets `stream` do nothing more before this is passed.
  void hold(std::int64_t stream) const;
  std::int64_t nanoseconds() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Times that the host waited for the device, by what it waited for.
void count_wait(const std::string& what);
std::map<std::string, int> waits();
void forget_waits();

// A mark in each stream.
std::vector<std::shared_ptr<Mark>> mark_all();

// Jobs are late at random from here on; 0 for none that are.
void delay(std::uint64_t seed);

}  // namespace fake
