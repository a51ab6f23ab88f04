// What the device was told, in the order of the host, for whoever looks for races.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fake {

struct Told {
  std::string what;  // "kernel", "record", "hold", "wait" (of the host for a mark), "drain" (a stream, -1 for all)
  std::int64_t stream;
  std::int64_t mark;
  std::string name;                           // of the kernel
  std::vector<std::uintptr_t> reads, writes;  // where their blocks of memory begin
};

// From here on, and no longer.
void begin_trace();
std::vector<Told> end_trace();
bool is_traced();
void tell(Told told);

}  // namespace fake
