// Elements to and from fewer bits (csrc/wire.h), compiled once per instruction set (csrc/elements.h).
#include "elements.h"
#include "kernels.h"

namespace zg {
namespace {

constexpr size_t kBehind = 16;  // elements behind those of a block: lanes and bytes are whole

constexpr float kSmallest = 1.17549435e-38f;  // a normal number, so that no quotient overflows

// Adding it leaves the nearest integer, ties to even, in the low bits.
constexpr float kRounding = 12582912.0f;

inline int32_t rounded(float value) {
  return static_cast<int32_t>(bits_of(value + kRounding)) - static_cast<int32_t>(bits_of(kRounding));
}

inline uint8_t to_fp8(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  // 2^14 aligns the mantissa to 2^-9, the step of subnormals, and the addition rounds to nearest even.
  const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  return static_cast<uint8_t>(sign | (magnitude < 0x3c800000u ? small : normal));
}

inline float from_fp8(uint8_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x80u) << 24;
  // Shift exponent and mantissa into place and correct the bias by a multiplication, exact for subnormals too.
  const float magnitude = float_of(static_cast<uint32_t>(value & 0x7fu) << 20) * float_of(0x7b800000u);
  return float_of(sign | bits_of(magnitude));
}

struct Fp8 {
  static constexpr float kMost = 448.0f;
  static constexpr size_t kPerByte = 1;
  static void write(const float* row, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < count; ++i) out[i] = to_fp8(row[i]);
  }
  static void read(const uint8_t* __restrict in, size_t count, float* __restrict row) {
    for (size_t i = 0; i < count; ++i) row[i] = from_fp8(in[i]);
  }
};

struct Int8 {
  static constexpr float kMost = 127.0f;
  static constexpr size_t kPerByte = 1;
  static void write(const float* row, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(rounded(row[i]));
  }
  static void read(const uint8_t* __restrict in, size_t count, float* __restrict row) {
    for (size_t i = 0; i < count; ++i) row[i] = static_cast<float>(static_cast<int8_t>(in[i]));
  }
};

struct Int4 {
  static constexpr float kMost = 7.0f;
  static constexpr size_t kPerByte = 2;
  // A block has an even number of elements; behind the last one of all there is a zero.
  static void write(const float* row, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < (count + 1) / 2; ++i)
      out[i] = static_cast<uint8_t>((rounded(row[2 * i]) + 8) | ((rounded(row[2 * i + 1]) + 8) << 4));
  }
  static void read(const uint8_t* __restrict in, size_t count, float* __restrict row) {
    for (size_t i = 0; i < (count + 1) / 2; ++i) {
      row[2 * i] = static_cast<float>((in[i] & 15) - 8);
      row[2 * i + 1] = static_cast<float>((in[i] >> 4) - 8);
    }
  }
};

struct Sign {
  static constexpr size_t kPerByte = 8;
  // Behind the last element of all there are seven zeros.
  static void write(const float* row, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < (count + 7) / 8; ++i) {
      uint32_t bits = 0;
      for (size_t j = 0; j < 8; ++j) bits |= static_cast<uint32_t>(row[8 * i + j] >= 0.0f) << j;
      out[i] = static_cast<uint8_t>(bits);
    }
  }
  static void read(const uint8_t* __restrict in, size_t count, float* __restrict row) {
    for (size_t i = 0; i < (count + 7) / 8; ++i)
      for (size_t j = 0; j < 8; ++j) row[8 * i + j] = (in[i] >> j) & 1 ? 1.0f : -1.0f;
  }
};

// Bring the elements of a block into the range of the format; returns the scale.
template <typename Format>
float scaled(float* row, size_t count) {
  int32_t most = 0;  // as bits, among which infinities and NaN are the largest
  for (size_t j = 0; j < count; ++j) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(row[j]) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  float scale = float_of(static_cast<uint32_t>(most)) / Format::kMost;
  if (scale < kSmallest) scale = kSmallest;
  const bool finite = most < 0x7f800000;
  for (size_t j = 0; j < count; ++j) row[j] = finite ? row[j] / scale : 0.0f;
  return scale;
}

// Signs need no range. Sums have an order of their own, so that every instruction set and torch's operators have the
// same bits: lanes, and then halves of these.
template <>
float scaled<Sign>(float* row, size_t count) {
  constexpr size_t kLanes = 16;
  float sums[kLanes] = {};
  for (size_t j = 0; j < count; j += kLanes)
    for (size_t k = 0; k < kLanes; ++k) sums[k] += float_of(bits_of(row[j + k]) & 0x7fffffffu);
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0] / static_cast<float>(count);
}

template <typename Visit>
void with_wire(Wire wire, Visit visit) {
  switch (wire) {
    case Wire::fp8: return visit(Fp8{});
    case Wire::int8: return visit(Int8{});
    case Wire::int4: return visit(Int4{});
    case Wire::sign: return visit(Sign{});
  }
}

template <typename Format>
size_t scales_at(size_t count) {
  const size_t bytes = (count + Format::kPerByte - 1) / Format::kPerByte;
  return (bytes + 3) / 4 * 4;
}

template <typename Format, typename S>
void encode_typed(const void* src, size_t count, void* dst) {
  const S* from = static_cast<const S*>(src);
  uint8_t* to = static_cast<uint8_t*>(dst);
  const size_t end = scales_at<Format>(count);
  for (size_t i = (count + Format::kPerByte - 1) / Format::kPerByte; i < end; ++i) to[i] = 0;
  uint8_t* scales = to + end;
  float row[kWireBlock + kBehind];
  for (size_t i = 0; i < count; i += kWireBlock, scales += sizeof(float)) {
    const size_t n = count - i < kWireBlock ? count - i : kWireBlock;
    load(row, from + i, n);
    for (size_t j = n; j < n + kBehind; ++j) row[j] = 0.0f;
    const float scale = scaled<Format>(row, n);
    Format::write(row, n, to + i / Format::kPerByte);
    __builtin_memcpy(scales, &scale, sizeof(float));
  }
}

template <typename Format, typename D>
void decode_typed(const void* src, size_t count, void* dst) {
  const uint8_t* from = static_cast<const uint8_t*>(src);
  D* to = static_cast<D*>(dst);
  const uint8_t* scales = from + scales_at<Format>(count);
  float row[kWireBlock + kBehind];
  for (size_t i = 0; i < count; i += kWireBlock, scales += sizeof(float)) {
    const size_t n = count - i < kWireBlock ? count - i : kWireBlock;
    float scale;
    __builtin_memcpy(&scale, scales, sizeof(float));
    Format::read(from + i / Format::kPerByte, n, row);
    const bool finite = bits_of(scale) < 0x7f800000u;
    for (size_t j = 0; j < n; ++j) row[j] = finite ? row[j] * scale : float_of(0x7fc00000u);
    store(to + i, row, n);
  }
}

template <typename Visit>
void with_float(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(float{});
    case DType::bfloat16: return visit(BFloat16{});
    case DType::float16: return visit(Float16{});
    default: return;
  }
}

void encode(Wire wire, const void* src, DType dtype, size_t count, void* dst) {
  with_wire(wire, [&](auto format) {
    with_float(dtype, [&](auto s) { encode_typed<decltype(format), decltype(s)>(src, count, dst); });
  });
}

void decode(Wire wire, const void* src, size_t count, void* dst, DType dtype) {
  with_wire(wire, [&](auto format) {
    with_float(dtype, [&](auto d) { decode_typed<decltype(format), decltype(d)>(src, count, dst); });
  });
}

}  // namespace

extern const WireKernels ZG_JOIN(wire_kernels_, ZG_TARGET);
const WireKernels ZG_JOIN(wire_kernels_, ZG_TARGET) = {encode, decode};

}  // namespace zg
