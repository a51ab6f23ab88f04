// The clock that recordings share with torch's profiler.
#pragma once

#include <chrono>
#include <cstdint>

namespace zg {

// Nanoseconds since 1970.
inline std::int64_t now() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace zg
