// The memory of the fake device: one arena with two addresses. The one that tensors show cannot be read or written by
// anybody; the other one is what kernels use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Allocator* memory();
// Memory of the host that copies may use while the caller goes on.
c10::Allocator* pinned();
bool is_pinned(const void* address);
// Makes memory of somebody's such memory, as cudaHostRegister does, and no longer.
void pin(void* address, std::size_t size);
void unpin(void* address);

// The address by which kernels use what tensors show at `address`.
void* kernel_address(const void* address);

// Keeps the block that `context` of a DataPtr stands for until what `stream` is told by the time of its end is done.
void record(void* context, std::int64_t stream);

// Bytes that tensors hold.
std::size_t held();

// Memory that was taken, or given back, while the history was kept.
struct Allocation {
  bool taken;
  std::uintptr_t address;
  std::size_t size;
  std::int64_t stream;
  std::int64_t microseconds;  // since 1970
};

// From here on and of nothing before, or no longer.
void keep_history(bool keep);
std::vector<Allocation> history();

// All memory that was ever taken, and whether a tensor has it now.
struct Piece {
  std::uintptr_t address;
  std::size_t size;
  bool used;
};
std::vector<Piece> pieces();

}  // namespace fake
