// What the kernels of one target do for an optimizer step: rows of float32, other dtypes pass through a buffer in L1.
// Arithmetic is torch's (torch/optim, the single-tensor forms) in float32, but for `root` below.
// Every target gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace zg {

enum class Algorithm : std::uint32_t { adam, sgd, adagrad, lion };

constexpr std::size_t kSlots = 3;  // states of one parameter: at most exp_avg, exp_avg_sq and max_exp_avg_sq

// The scalars of one parameter's step, computed in double and rounded once.
struct Coefficients {
  Algorithm algorithm;
  bool amsgrad;   // adam
  bool nesterov;  // sgd
  bool fresh;     // sgd: the momentum buffer starts as the gradient
  bool coupled;   // weight_decay * parameter is added to the gradient
  float factor;   // of every gradient as it is read; negative for maximize
  float decay;    // of the parameter before its update: 1 - lr * weight_decay where that is decoupled, else 1
  float weight_decay;
  float momentum;  // sgd; adam and lion: beta1
  float rest;      // sgd: 1 - dampening; adam and lion: 1 - beta1
  float beta2;
  float rest2;  // 1 - beta2
  float root;   // adam: 1 / sqrt(1 - beta2^step). torch divides by the root: one more division, for the last bit
  float eps;
  float rate;  // minus the step size, which adam divides by 1 - beta1^step
};

// Elements of one parameter that lie side by side, with everything that belongs to them.
struct Span {
  std::byte* param;
  const std::byte* grad;
  std::byte* states[kSlots];
  std::byte* copy;  // where the updated parameter is written once more, or null
  DType param_dtype, grad_dtype, state_dtype, copy_dtype;
  std::size_t count;
  bool stream;  // write the copy past the caches: nobody reads it before they were used for something else
};

struct UpdateKernels {
  // True if a gradient, multiplied by the factor, is not finite.
  bool (*update)(const Coefficients& coefficients, const Span& span);

  // The sum in float64. It depends on the elements alone.
  double (*sum_squares)(const void* src, DType dtype, std::size_t count);

  // dst[i] += src[i]
  void (*accumulate)(float* dst, const void* src, DType src_dtype, std::size_t count);

  // For benchmarks: AdamW's memory traffic with one addition per state.
  void (*stream)(const Span& span);
};

}  // namespace zg
