// What torch asks of a device: guards, streams and events, pinned memory and generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace fake {
namespace {

const c10::Device kDevice(kType, 0);

c10::Stream stream(std::int64_t number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }

using Event = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream given) const override { return stream(exchange_stream(given.id())); }
  bool queryStream(const c10::Stream& given) const override { return is_idle(given.id()); }
  void synchronizeStream(const c10::Stream& given) const override {
    count_wait("stream");
    synchronize(given.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    count_wait("device");
    synchronize();
  }

  void record(void** event, const c10::Stream& given, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = Mark::set(given.id());
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event != nullptr) (*static_cast<Event*>(event))->hold(given.id());
  }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<Event*>(event))->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    count_wait("event");
    (*static_cast<Event*>(event))->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto begin = (*static_cast<Event*>(from))->nanoseconds(), end = (*static_cast<Event*>(to))->nanoseconds();
    return static_cast<double>(end - begin) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    fake::record(data.get_context(), given.id());
  }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(kType, &guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned(); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    auto* held = storage.unsafeGetStorageImpl();
    auto data = held->allocator()->allocate(bytes);
    const auto size = std::min(bytes, held->nbytes());
    if (size != 0) {
      launch(current_stream(), [from = kernel_address(held->data()), to = kernel_address(data.get()), size] {
        std::memcpy(to, from, size);
      });
    }
    held->set_data_ptr_noswap(std::move(data));
    held->set_nbytes(bytes);
  }
};

}  // namespace

// Numbers are those of a generator on the CPU. Kernels draw them in their streams, so that whoever looks at the state
// waits for them.
Generator::Generator()
    : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      numbers_(at::detail::createCPUGenerator()) {}

void Generator::set_current_seed(std::uint64_t seed) { settled().set_current_seed(seed); }
void Generator::set_offset(std::uint64_t) { TORCH_CHECK(false, "generators of the fake device have no offset"); }
std::uint64_t Generator::get_offset() const { TORCH_CHECK(false, "generators of the fake device have no offset"); }
std::uint64_t Generator::current_seed() const { return settled().current_seed(); }
std::uint64_t Generator::seed() { return settled().seed(); }
void Generator::set_state(const c10::TensorImpl& state) {
  settled().set_state(at::Tensor::wrap_tensor_impl(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(
      const_cast<c10::TensorImpl*>(&state))));
}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const { return settled().get_state().getIntrusivePtr(); }
Generator* Generator::clone_impl() const {
  auto* other = new Generator;
  other->numbers_ = settled().clone();
  return other;
}
at::Generator Generator::drawn_from() {
  const std::lock_guard held(mutex_);
  streams_.insert(current_stream());
  return numbers_;
}
// Not for other streams, as no host waits for them on a GPU: messages in them may wait for this very host.
at::Generator& Generator::settled() const {
  count_wait("generator");
  std::set<std::int64_t> drawing;
  {
    const std::lock_guard held(mutex_);
    drawing.swap(streams_);
  }
  std::optional<pybind11::gil_scoped_release> others;  // torch asks with the GIL held, which a kernel may want
  if (PyGILState_Check() != 0) others.emplace();
  for (const auto stream : drawing) synchronize(stream);
  return numbers_;
}

const at::Generator& default_generator() {
  static const auto made = at::make_generator<Generator>();
  return made;
}

void manual_seed(std::uint64_t seed) {
  auto generator = default_generator();
  generator.set_current_seed(seed);
}

void register_device() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, memory());
}

}  // namespace fake
