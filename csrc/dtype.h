// Element types, as small integers that Python passes along with an address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zg {

enum class DType : std::uint32_t {
  float32 = 0,
  bfloat16 = 1,
  float16 = 2,
  float64 = 3,
  // Opaque elements: gathered byte for byte, never converted or reduced.
  raw1 = 4,
  raw2 = 5,
  raw4 = 6,
  raw8 = 7,
};

constexpr std::uint32_t kDTypes = 8;

constexpr std::size_t size_of(DType dtype) {
  constexpr std::size_t sizes[kDTypes] = {4, 2, 2, 8, 1, 2, 4, 8};
  return sizes[static_cast<std::uint32_t>(dtype)];
}

constexpr bool is_float(DType dtype) { return dtype <= DType::float64; }

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[kDTypes] = {"float32", "bfloat16", "float16", "float64",
                                          "raw1",    "raw2",     "raw4",    "raw8"};
  return names[static_cast<std::uint32_t>(dtype)];
}

}  // namespace zg
