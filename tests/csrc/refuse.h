// A machine without memory left, for every thread but one.
#pragma once

// While it lives, `new` throws std::bad_alloc in all threads but the one that made it.
class RefuseMemory {
 public:
  RefuseMemory();
  ~RefuseMemory();
};
