// Optimizer steps, compiled once per instruction set (csrc/elements.h).
#include "update.h"

#include "elements.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define ZG_INLINE inline __attribute__((always_inline))
#define ZG_INLINE_LAMBDA __attribute__((always_inline))
// The rows of one span do not overlap.
#ifdef __clang__
#define ZG_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ZG_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace zg {
namespace {

constexpr size_t kLine = 1024;  // elements worked on at a time: gradient, parameter and states stay in L1 together
constexpr uint32_t kExponent = 0x00800000u;

// The sign bit of the result is set if `value` is infinite or NaN: adding one to a full exponent carries into it.
inline uint32_t note(float value) { return (bits_of(value) & 0x7fffffffu) + kExponent; }

inline const float* read(const std::byte* base, DType dtype, size_t at, size_t count, float* buffer) {
  switch (dtype) {
    case DType::float32: return reinterpret_cast<const float*>(base) + at;
    case DType::bfloat16: load(buffer, reinterpret_cast<const BFloat16*>(base) + at, count); return buffer;
    default: load(buffer, reinterpret_cast<const Float16*>(base) + at, count); return buffer;
  }
}

inline void write(std::byte* base, DType dtype, size_t at, size_t count, const float* row) {
  switch (dtype) {
    case DType::float32: __builtin_memcpy(reinterpret_cast<float*>(base) + at, row, count * sizeof(float)); return;
    case DType::bfloat16: store(reinterpret_cast<BFloat16*>(base) + at, row, count); return;
    default: store(reinterpret_cast<Float16*>(base) + at, row, count); return;
  }
}

// Past the caches: memory that is only written need not be read first.
inline void write_through(std::byte* dst, const std::byte* src, size_t bytes) {
#ifdef __SSE2__
  const size_t head = -reinterpret_cast<uintptr_t>(dst) & 63u;
  if (bytes >= head + 64) {
    __builtin_memcpy(dst, src, head);
    size_t i = head;
#ifdef __AVX512F__
    for (; i + 64 <= bytes; i += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#else
    for (; i + 16 <= bytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
#endif
    __builtin_memcpy(dst + i, src + i, bytes - i);
    return;
  }
#endif
  __builtin_memcpy(dst, src, bytes);
}

inline void finish_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// One row as the cores see it.
struct Row {
  float* param;
  const void* grad;  // of type G, as each core has it
  float* states[kSlots];
  size_t count;
  size_t streams;  // tensors read from memory, and what of them comes kAhead elements after this row
  const std::byte* ahead[2 + kSlots];
  size_t sizes[2 + kSlots];  // of their elements
};

constexpr size_t kBlock = 64;  // elements between two requests for what comes kAhead elements later
constexpr size_t kAhead = 512;  // 1024 of float32 are a page, and loads that far apart disturb one another

// Asks for memory that is needed later: the processor's own prefetchers stop at every page, and the divisions leave
// them idle.
inline void fetch(const Row& row, size_t begin) {
  for (size_t k = 0; k < row.streams; ++k) {
    const std::byte* first = row.ahead[k] + begin * row.sizes[k];
    for (size_t at = 0; at < kBlock * row.sizes[k]; at += 64) __builtin_prefetch(first + at);
  }
}

// Calls `body(begin, end)` for blocks of the row, with a constant distance for all but the last.
template <typename Body>
ZG_INLINE void in_blocks(const Row& row, Body body) {
  size_t begin = 0;
  for (; begin + kBlock <= row.count; begin += kBlock) {
    fetch(row, begin);
    body(begin, begin + kBlock);
  }
  if (begin < row.count) body(begin, row.count);
}

template <typename G, bool kCoupled, bool kAmsgrad>
uint32_t adam(const Coefficients& by, const Row& row) {
  const float factor = by.factor, decay = by.decay, weight_decay = by.weight_decay, rest = by.rest, beta2 = by.beta2;
  const float rest2 = by.rest2, root = by.root, eps = by.eps, rate = by.rate;
  // torch.lerp counts from the nearer end.
  const bool near = rest < 0.5f;
  const float weight = near ? rest : rest - 1.0f;
  float* __restrict p = row.param;
  const G* __restrict gradient = static_cast<const G*>(row.grad);
  float* __restrict average = row.states[0];
  float* __restrict square = row.states[1];
  float* __restrict largest = row.states[2];
  uint32_t noted = 0;
  in_blocks(row, [&](size_t begin, size_t end) ZG_INLINE_LAMBDA {
    ZG_INDEPENDENT
    for (size_t i = begin; i < end; ++i) {
      float g = widen(gradient[i]) * factor;
      noted |= note(g);
      float value = p[i] * decay;
      if constexpr (kCoupled) g = g + weight_decay * value;
      const float m = (near ? average[i] : g) + weight * (g - average[i]);
      const float v = square[i] * beta2 + rest2 * g * g;
      average[i] = m;
      square[i] = v;
      float top = v;
      if constexpr (kAmsgrad) {
        const float before = largest[i];
        top = v > before || v != v ? v : before;  // NaN stays, as in torch.maximum
        largest[i] = top;
      }
      p[i] = value + rate * m / (__builtin_sqrtf(top) * root + eps);
    }
  });
  return noted;
}

template <typename G, bool kCoupled, bool kMomentum, bool kNesterov, bool kFresh>
uint32_t sgd(const Coefficients& by, const Row& row) {
  const float factor = by.factor, weight_decay = by.weight_decay, momentum = by.momentum, rest = by.rest;
  const float rate = by.rate;
  float* __restrict p = row.param;
  const G* __restrict gradient = static_cast<const G*>(row.grad);
  float* __restrict buffer = row.states[0];
  uint32_t noted = 0;
  in_blocks(row, [&](size_t begin, size_t end) ZG_INLINE_LAMBDA {
    ZG_INDEPENDENT
    for (size_t i = begin; i < end; ++i) {
      float g = widen(gradient[i]) * factor;
      noted |= note(g);
      const float value = p[i];
      if constexpr (kCoupled) g = g + weight_decay * value;
      if constexpr (kMomentum) {
        const float velocity = kFresh ? g : buffer[i] * momentum + rest * g;
        buffer[i] = velocity;
        g = kNesterov ? g + momentum * velocity : velocity;
      }
      p[i] = value + rate * g;
    }
  });
  return noted;
}

template <typename G, bool kCoupled>
uint32_t adagrad(const Coefficients& by, const Row& row) {
  const float factor = by.factor, weight_decay = by.weight_decay, eps = by.eps, rate = by.rate;
  float* __restrict p = row.param;
  const G* __restrict gradient = static_cast<const G*>(row.grad);
  float* __restrict sum = row.states[0];
  uint32_t noted = 0;
  in_blocks(row, [&](size_t begin, size_t end) ZG_INLINE_LAMBDA {
    ZG_INDEPENDENT
    for (size_t i = begin; i < end; ++i) {
      float g = widen(gradient[i]) * factor;
      noted |= note(g);
      const float value = p[i];
      if constexpr (kCoupled) g = g + weight_decay * value;
      const float total = sum[i] + g * g;
      sum[i] = total;
      p[i] = value + rate * g / (__builtin_sqrtf(total) + eps);
    }
  });
  return noted;
}

// Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", in the order of the authors' PyTorch code.
template <typename G>
uint32_t lion(const Coefficients& by, const Row& row) {
  const float factor = by.factor, decay = by.decay, beta1 = by.momentum, rest = by.rest, beta2 = by.beta2;
  const float rest2 = by.rest2, rate = by.rate;
  float* __restrict p = row.param;
  const G* __restrict gradient = static_cast<const G*>(row.grad);
  float* __restrict average = row.states[0];
  uint32_t noted = 0;
  in_blocks(row, [&](size_t begin, size_t end) ZG_INLINE_LAMBDA {
    ZG_INDEPENDENT
    for (size_t i = begin; i < end; ++i) {
      const float g = widen(gradient[i]) * factor;
      noted |= note(g);
      const float m = average[i];
      const float direction = m * beta1 + rest * g;
      const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f;  // of NaN: 0, as torch.sign
      average[i] = m * beta2 + rest2 * g;
      p[i] = p[i] * decay + rate * sign;
    }
  });
  return noted;
}

using Core = uint32_t (*)(const Coefficients&, const Row&);

template <typename G, bool kCoupled>
Core core_of(const Coefficients& by) {
  switch (by.algorithm) {
    case Algorithm::adam: return by.amsgrad ? adam<G, kCoupled, true> : adam<G, kCoupled, false>;
    case Algorithm::sgd:
      if (by.momentum == 0.0f) return sgd<G, kCoupled, false, false, false>;
      if (by.fresh) return by.nesterov ? sgd<G, kCoupled, true, true, true> : sgd<G, kCoupled, true, false, true>;
      return by.nesterov ? sgd<G, kCoupled, true, true, false> : sgd<G, kCoupled, true, false, false>;
    case Algorithm::adagrad: return adagrad<G, kCoupled>;
    default: return lion<G>;
  }
}

template <typename G>
Core core_of(const Coefficients& by) {
  return by.coupled ? core_of<G, true>(by) : core_of<G, false>(by);
}

bool update(const Coefficients& by, const Span& span) {
  alignas(64) float params[kLine], grads[kLine], states[kSlots][kLine];
  alignas(64) std::byte narrowed[kLine * sizeof(float)];
  // A gradient of bfloat16 costs one shift where it is used; one of float16 goes through a buffer.
  const bool shifted = span.grad_dtype == DType::bfloat16;
  const Core core = shifted ? core_of<BFloat16>(by) : core_of<float>(by);
  uint32_t noted = 0;
  for (size_t at = 0; at < span.count; at += kLine) {
    const size_t count = span.count - at < kLine ? span.count - at : kLine;
    Row row{};
    row.count = count;
    row.grad = shifted ? static_cast<const void*>(span.grad + at * sizeof(BFloat16))
                       : read(span.grad, span.grad_dtype, at, count, grads);
    row.param = const_cast<float*>(read(span.param, span.param_dtype, at, count, params));
    for (size_t slot = 0; slot < kSlots; ++slot)
      if (span.states[slot] != nullptr)
        row.states[slot] = const_cast<float*>(read(span.states[slot], span.state_dtype, at, count, states[slot]));
    const auto fetch = [&](const std::byte* base, DType dtype) {
      const size_t size = dtype == DType::float32 ? 4 : 2;
      row.ahead[row.streams] = base + (at + kAhead) * size;
      row.sizes[row.streams++] = size;
    };
    fetch(span.param, span.param_dtype);
    fetch(span.grad, span.grad_dtype);
    for (size_t slot = 0; slot < kSlots; ++slot)
      if (span.states[slot] != nullptr) fetch(span.states[slot], span.state_dtype);
    noted |= core(by, row);
    if (span.param_dtype != DType::float32) write(span.param, span.param_dtype, at, count, row.param);
    if (span.state_dtype != DType::float32)
      for (size_t slot = 0; slot < kSlots; ++slot)
        if (span.states[slot] != nullptr) write(span.states[slot], span.state_dtype, at, count, row.states[slot]);
    if (span.copy == nullptr) continue;
    if (span.stream) {
      const size_t size = span.copy_dtype == DType::float32 ? 4 : 2;
      write(narrowed, span.copy_dtype, 0, count, row.param);
      write_through(span.copy + at * size, narrowed, count * size);
    } else {
      write(span.copy, span.copy_dtype, at, count, row.param);
    }
  }
  if (span.copy != nullptr && span.stream) finish_stream();
  return (noted & 0x80000000u) != 0;
}

// Sixteen sums side by side on every target, so that all add in the same order.
constexpr size_t kLanes = 16;

template <typename W>
inline void add_squares(double* __restrict lanes, const W* __restrict row, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(row[i + j]) * static_cast<double>(row[i + j]);
  for (size_t j = 0; i + j < count; ++j) lanes[j] += static_cast<double>(row[i + j]) * static_cast<double>(row[i + j]);
}

double sum_squares(const void* src, DType dtype, size_t count) {
  double lanes[kLanes] = {};
  with_type(dtype, [&](auto s) {
    using S = decltype(s);
    using W = typename WideOf<S>::type;
    const S* from = static_cast<const S*>(src);
    if constexpr (__is_same(S, W)) {
      add_squares(lanes, from, count);
    } else {
      W row[kLine];
      for (size_t at = 0; at < count; at += kLine) {
        const size_t n = count - at < kLine ? count - at : kLine;
        load(row, from + at, n);
        add_squares(lanes, row, n);
      }
    }
  });
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

void accumulate(float* dst, const void* src, DType src_dtype, size_t count) {
  float buffer[kLine];
  for (size_t at = 0; at < count; at += kLine) {
    const size_t n = count - at < kLine ? count - at : kLine;
    float* __restrict to = dst + at;
    const float* __restrict from = read(static_cast<const std::byte*>(src), src_dtype, at, n, buffer);
    for (size_t i = 0; i < n; ++i) to[i] += from[i];
  }
}

template <typename G>
void stream_typed(const Span& span) {
  alignas(64) uint16_t narrowed[kLine];
  for (size_t at = 0; at < span.count; at += kLine) {
    const size_t n = span.count - at < kLine ? span.count - at : kLine;
    float* __restrict p = reinterpret_cast<float*>(span.param) + at;
    float* __restrict m = reinterpret_cast<float*>(span.states[0]) + at;
    float* __restrict v = reinterpret_cast<float*>(span.states[1]) + at;
    const G* __restrict g = reinterpret_cast<const G*>(span.grad) + at;
    for (size_t i = 0; i < n; ++i) {
      const float value = widen(g[i]);
      p[i] += value;
      m[i] += value;
      v[i] += value;
    }
    if (span.copy == nullptr) continue;
    for (size_t i = 0; i < n; ++i) narrowed[i] = static_cast<uint16_t>(bits_of(p[i]) >> 16);
    write_through(span.copy + at * 2, reinterpret_cast<const std::byte*>(narrowed), n * 2);
  }
  finish_stream();
}

void stream(const Span& span) {
  if (span.grad_dtype == DType::float32) return stream_typed<float>(span);
  stream_typed<BFloat16>(span);
}

}  // namespace

extern const UpdateKernels ZG_JOIN(update_kernels_, ZG_TARGET);
const UpdateKernels ZG_JOIN(update_kernels_, ZG_TARGET) = {update, sum_squares, accumulate, stream};

}  // namespace zg
