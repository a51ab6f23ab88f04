// The memory of the fake device: one arena with two addresses. The one that tensors show cannot be read or written by
// anybody; the other one is what kernels use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>

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

}  // namespace fake
