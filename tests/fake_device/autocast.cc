// What torch.autocast casts on the fake device: what it casts on every other accelerator.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {
namespace {

#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_32_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_32_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS)
  AT_FORALL_FP32(IN_32_BITS)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_32_BITS)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

}  // namespace
}  // namespace at::autocast
