#include "refuse.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> refusing{false};
thread_local bool served = false;

void* allocate(std::size_t bytes) noexcept {
  return refusing.load(std::memory_order_relaxed) && !served ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

RefuseMemory::RefuseMemory() { served = refusing = true; }
RefuseMemory::~RefuseMemory() { served = refusing = false; }

// In a file of its own, or the compiler sees malloc and delete together where it looks into these functions.
void* operator new(std::size_t bytes) {
  if (void* memory = allocate(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
