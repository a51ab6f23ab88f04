#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fake {

// Collectives of tensors on the device, in a stream of their own, over `below`, whose ones are for the host's memory.
c10::intrusive_ptr<c10d::Backend> group_over(c10::intrusive_ptr<c10d::Backend> below);

}  // namespace fake
