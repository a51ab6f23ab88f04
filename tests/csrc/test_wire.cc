// Wires at every length around a block and a byte, in memory of exactly the size that a message has.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels.h"

namespace zg {
namespace {

std::size_t bytes_of(Wire wire, std::size_t count) {
  const std::size_t elements = wire == Wire::sign ? (count + 7) / 8 : wire == Wire::int4 ? (count + 1) / 2 : count;
  return (elements + 3) / 4 * 4 + 4 * ((count + kWireBlock - 1) / kWireBlock);
}

TEST_CASE("a wire reads and writes no more than its elements") {
  for (const Kernels* kernels : all_kernels()) {
    for (const Wire wire : {Wire::fp8, Wire::int8, Wire::int4, Wire::sign}) {
      for (const std::size_t count : {0, 1, 2, 3, 5, 8, 9, 255, 256, 257, 511, 513, 1024}) {
        std::vector<float> values(count), out(count);
        for (std::size_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<float>(i));
        std::vector<unsigned char> message(bytes_of(wire, count));
        kernels->wire->encode(wire, values.data(), DType::float32, count, message.data());
        kernels->wire->decode(wire, message.data(), count, out.data(), DType::float32);
        const float most = wire == Wire::sign   ? 1.0f
                           : wire == Wire::int4 ? 0.0715f
                           : wire == Wire::int8 ? 0.0040f
                                                : 0.0360f;
        for (std::size_t i = 0; i < count; ++i) CHECK(std::fabs(values[i] - out[i]) <= most);
      }
    }
  }
}

}  // namespace
}  // namespace zg
