#pragma once

#include <ATen/core/Tensor.h>

#include <set>
#include <string>

namespace fake {

// The memory of a tensor of the device as kernels see it; it is not kept alive.
at::Tensor seen_by_kernels(const at::Tensor& tensor);

// The operators that the caller waited for, as their results' shapes depend on values.
std::set<std::string> waited_for();

}  // namespace fake
