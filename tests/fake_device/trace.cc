#include "trace.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace fake {
namespace {

std::atomic<bool> traced = false;
std::mutex lock;
std::vector<Told> kept;

}  // namespace

void begin_trace() { traced = true; }

std::vector<Told> end_trace() {
  traced = false;
  std::lock_guard hold(lock);
  return std::exchange(kept, {});
}

bool is_traced() { return traced; }

void tell(Told told) {
  std::lock_guard hold(lock);
  if (traced) kept.push_back(std::move(told));
}

}  // namespace fake
