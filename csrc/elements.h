// Element types and rows of them, for the files that are compiled once per instruction set with ZG_TARGET naming it.
// Nothing there may emit a symbol shared between targets (an inline function compiled for AVX-512 could win at link
// time), so everything is in the unnamed namespace and no C++ library header is included.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "dtype.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#define ZG_JOIN_(a, b) a##b
#define ZG_JOIN(a, b) ZG_JOIN_(a, b)
#define ZG_STRING_(a) #a
#define ZG_STRING(a) ZG_STRING_(a)

namespace zg {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Widening is exact. Sums use Wide<T>.
template <typename T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Shift exponent and mantissa into place and correct the bias by a multiplication, exact for subnormals too.
  const uint32_t finite = bits_of(float_of(magnitude << 13) * float_of(0x77800000u));
  const uint32_t special = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}

inline void narrow(float value, float& out) { out = value; }
inline void narrow(float value, double& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }
inline void narrow(double value, float& out) { out = static_cast<float>(value); }
inline void narrow(float value, BFloat16& out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
inline void narrow(float value, Float16& out) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x03ffu);  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa, and the addition itself rounds to nearest even.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}
// Through float: twice rounded, as torch does it.
inline void narrow(double value, BFloat16& out) { narrow(static_cast<float>(value), out); }
inline void narrow(double value, Float16& out) { narrow(static_cast<float>(value), out); }

// Rows of elements to and from the wide type. The F16C forms replace the scalar ones for whole vectors.
template <typename T, typename W>
inline void load(W* __restrict wide, const T* __restrict src, size_t count) {
  for (size_t i = 0; i < count; ++i) wide[i] = widen(src[i]);
}
template <typename T, typename W>
inline void store(T* __restrict dst, const W* __restrict wide, size_t count) {
  for (size_t i = 0; i < count; ++i) narrow(wide[i], dst[i]);
}
#ifdef __F16C__
inline void load(float* __restrict wide, const Float16* __restrict src, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) wide[i] = widen(src[i]);
}
inline void store(Float16* __restrict dst, const float* __restrict wide, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  for (; i < count; ++i) narrow(wide[i], dst[i]);
}
#endif

// Calls `visit` with a value of the C++ type that `dtype` names.
template <typename Visit>
inline void with_type(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(float{});
    case DType::bfloat16: return visit(BFloat16{});
    case DType::float16: return visit(Float16{});
    case DType::float64: return visit(double{});
    default: return;
  }
}

}  // namespace
}  // namespace zg
