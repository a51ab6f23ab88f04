// Conversion and reduction, compiled once per instruction set (csrc/elements.h).
#include "elements.h"
#include "kernels.h"
#include "update.h"

namespace zg {
namespace {

constexpr size_t kRow = 2048;  // elements worked on at a time: at most 32 KiB of wide values, which stay in L1

template <typename S, typename D>
void convert_typed(const void* src, void* dst, size_t count) {
  using W = typename WideOf<S>::type;
  W row[kRow];
  const S* from = static_cast<const S*>(src);
  D* to = static_cast<D*>(dst);
  for (size_t i = 0; i < count; i += kRow) {
    const size_t n = count - i < kRow ? count - i : kRow;
    load(row, from + i, n);
    store(to + i, row, n);
  }
}

template <typename S, typename D>
void reduce_typed(const void* const* sources, size_t ranks, size_t count, double scale, void* out) {
  using W = typename WideOf<S>::type;
  W sum[kRow], term[kRow];
  const W factor = static_cast<W>(scale);
  D* to = static_cast<D*>(out);
  for (size_t i = 0; i < count; i += kRow) {
    const size_t n = count - i < kRow ? count - i : kRow;
    load(sum, static_cast<const S*>(sources[0]) + i, n);
    for (size_t rank = 1; rank < ranks; ++rank) {
      load(term, static_cast<const S*>(sources[rank]) + i, n);
      for (size_t j = 0; j < n; ++j) sum[j] += term[j];
    }
    for (size_t j = 0; j < n; ++j) sum[j] *= factor;
    store(to + i, sum, n);
  }
}

void convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, size_t count) {
  if (src_dtype == dst_dtype) {
    constexpr size_t sizes[] = {4, 2, 2, 8, 1, 2, 4, 8};
    __builtin_memcpy(dst, src, count * sizes[static_cast<uint32_t>(src_dtype)]);
    return;
  }
  with_type(src_dtype, [&](auto s) {
    with_type(dst_dtype, [&](auto d) { convert_typed<decltype(s), decltype(d)>(src, dst, count); });
  });
}

void reduce(const void* const* sources, size_t ranks, DType dtype, size_t count, double scale, void* out,
            DType out_dtype) {
  with_type(dtype, [&](auto s) {
    with_type(out_dtype,
              [&](auto d) { reduce_typed<decltype(s), decltype(d)>(sources, ranks, count, scale, out); });
  });
}

}  // namespace

extern const UpdateKernels ZG_JOIN(update_kernels_, ZG_TARGET);
extern const WireKernels ZG_JOIN(wire_kernels_, ZG_TARGET);
extern const Kernels ZG_JOIN(kernels_, ZG_TARGET);
const Kernels ZG_JOIN(kernels_, ZG_TARGET) = {ZG_STRING(ZG_TARGET), convert, reduce,
                                              &ZG_JOIN(update_kernels_, ZG_TARGET),
                                              &ZG_JOIN(wire_kernels_, ZG_TARGET)};

}  // namespace zg
