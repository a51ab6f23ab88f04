// Lets a torch without CUDA believe that there is a device of it, far enough to compile for it: a guard that changes
// nothing, hooks that say yes, and the choice among fused attentions. No kernel can run. SHIM_DEVICE in the environment
// is the index of the device that is current, and of the last one; 0 if it is not there.
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace {

// Asked for each time: a process is forked from one that has loaded this, and has an environment of its own.
c10::DeviceIndex index() {
  const char* given = std::getenv("SHIM_DEVICE");
  return given == nullptr ? 0 : static_cast<c10::DeviceIndex>(std::atoi(given));
}

c10::Device device() { return {c10::DeviceType::CUDA, index()}; }
c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return given; }
  c10::DeviceIndex deviceCount() const noexcept override { return index() + 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return index() + 1; }
  at::DeviceIndex deviceCount() const override { return index() + 1; }
  at::DeviceIndex current_device() const override { return index(); }
  at::DeviceIndex getCurrentDevice() const override { return index(); }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return index(); }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return index(); }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {

// As torch chooses for what every GPU since the A100 can do: FlashAttention has no masks and no float32.
static int64_t fused_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask,
                               double, bool, std::optional<double>, bool) {
  const bool flash = !mask.has_value() && query.scalar_type() != kFloat;
  return static_cast<int64_t>(flash ? SDPBackend::flash_attention : SDPBackend::efficient_attention);
}

REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &fused_attention)

}  // namespace native
}  // namespace at
