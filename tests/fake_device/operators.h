#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fake {

// The memory of a tensor of the device as kernels see it; it is not kept alive.
at::Tensor seen_by_kernels(const at::Tensor& tensor);

// Where the memory begins that a tensor of the device shows.
std::uintptr_t block_of(const at::Tensor& tensor);

}  // namespace fake
