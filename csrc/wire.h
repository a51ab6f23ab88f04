// Elements in fewer bits, as messages between ranks carry them.
//
// A message is all elements and then, at the next multiple of 4 bytes, a float32 for each block of kWireBlock elements: its
// scale, by which the largest magnitude of the block is the largest of the format. fp8 is e4m3. int4 holds two elements
// in a byte, the first in its low half, each with 8 added. A block with an infinity or a NaN comes back as NaN.
//
// sign holds eight elements in a byte, the first in its lowest bit, which is set where the element is not negative. Its
// scale is the mean magnitude of the block's elements.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace zg {

enum class Wire : uint32_t { fp8 = 0, int8 = 1, int4 = 2, sign = 3 };

constexpr size_t kWireBlock = 256;

}  // namespace zg
