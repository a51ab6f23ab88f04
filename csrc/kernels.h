// Conversion and reduction over host memory. Every instruction set gives the same bits as the baseline.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "dtype.h"
#include "status.h"
#include "wire.h"

namespace zg {

struct UpdateKernels;

// Between float32, bfloat16 or float16 and a wire.
struct WireKernels {
  void (*encode)(Wire wire, const void* src, DType dtype, std::size_t count, void* dst);
  void (*decode)(Wire wire, const void* src, std::size_t count, void* dst, DType dtype);
};

struct Kernels {
  const char* name;

  // dst[i] = src[i], rounded to nearest even; NaN stays NaN. Both types are floating point.
  void (*convert)(const void* src, DType src_dtype, void* dst, DType dst_dtype, std::size_t count);

  // out[i] = (sources[0][i] + sources[1][i] + ... in that order) * scale. The sum is kept in float32, or in
  // float64 when the inputs are. `out` may be one of the sources if the types have the same size.
  void (*reduce)(const void* const* sources, std::size_t ranks, DType dtype, std::size_t count, double scale,
                 void* out, DType out_dtype);

  const UpdateKernels* update;
  const WireKernels* wire;
};

// The target in use: the one ZEROGRAPH_SIMD names, else the best this processor runs.
const Kernels& kernels();

// Fails if ZEROGRAPH_SIMD names no target that this processor runs. Everything that calls kernels() asks first.
Status check_target();

// The target called `name`; of the empty name, the one in use.
Status find_target(const std::string& name, const Kernels*& out);

// Every target in this binary that this processor runs, the baseline first.
const std::vector<const Kernels*>& all_kernels();

}  // namespace zg
