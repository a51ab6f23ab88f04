// The operators of the fake device: torch's own for a CPU, in a stream's thread, on the memory that tensors of the
// device show. A few are done at once; every other one is told to the current stream.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "trace.h"

namespace fake {
namespace {

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

}  // namespace

at::Tensor seen_by_kernels(const at::Tensor& tensor) {
  void* at = tensor.numel() == 0 ? nullptr : kernel_address(tensor.const_data_ptr());
  const auto options = at::TensorOptions(at::kCPU).dtype(tensor.dtype());
  auto found = at::from_blob(at, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

std::uintptr_t block_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.storage().data());
}

namespace {

using Stack = torch::jit::Stack;
using c10::IValue;

// Applies `change` to each tensor of a value, and leaves everything else.
template <typename Change>
IValue mapped(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& one : value.toTensorList()) changed.push_back(one.defined() ? change(one) : one);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
      changed.push_back(one.has_value() && one->defined() ? std::optional(change(*one)) : one);
    }
    return changed;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList changed(list.elementType());
    for (const IValue& one : list) changed.push_back(mapped(one, change));
    return changed;
  }
  return value;
}

at::Tensor shape_of(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor kernel_argument(const at::Tensor& tensor) {
  if (is_here(tensor)) return seen_by_kernels(tensor);
  TORCH_CHECK(tensor.dim() == 0 || tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kBool,
              "expected all tensors on one device, found some on the fake device and one of ", tensor.sizes(), " on ",
              tensor.device());
  // A number goes along with the call; indices are copied first.
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

IValue on(c10::DeviceType device, const c10::Argument& argument, const IValue& value) {
  if (value.isDevice()) return c10::Device(device);
  if (value.isGenerator() && value.toGenerator().device().type() == kType) {
    return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->drawn_from();
  }
  // What draws without a generator draws from the device's.
  if (value.isNone() && argument.type()->str() == "Generator?") {
    return static_cast<Generator*>(default_generator().unsafeGetGeneratorImpl())->drawn_from();
  }
  if (device == at::kMeta) return mapped(value, shape_of);
  return mapped(value, kernel_argument);
}

Stack arguments(const c10::OperatorHandle& op, const Stack& given, c10::DeviceType device) {
  Stack found;
  const auto& schema = op.schema().arguments();
  for (std::size_t i = 0; i < schema.size(); ++i) found.push_back(on(device, schema[i], given[i]));
  return found;
}

// The argument that a result is, of an operator that writes to it.
std::optional<std::size_t> written(const c10::FunctionSchema& schema, std::size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return std::nullopt;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

at::Tensor made_as(const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(kType));
}

void copy(const IValue& from, const IValue& to) {
  if (to.isTensor() && to.toTensor().defined()) {
    to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    for (std::size_t i = 0; i < to.toTensorList().size(); ++i) {
      to.toTensorList().get(i).copy_(from.toTensorList().get(i));
    }
  }
}

// Where the memory begins that tensors of a value show.
void find(const IValue& value, std::vector<std::uintptr_t>& found) {
  mapped(value, [&found](const at::Tensor& tensor) {
    if (is_here(tensor)) found.push_back(block_of(tensor));
    return tensor;
  });
}

void trace(const c10::FunctionSchema& schema, const Stack& given, const Stack& outputs) {
  if (!is_traced()) return;
  Told told{"kernel", current_stream(), 0, schema.name(), {}, {}};
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    find(given[i], alias != nullptr && alias->isWrite() ? told.writes : told.reads);
  }
  for (const auto& output : outputs) find(output, told.writes);
  tell(std::move(told));
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

// The shapes of the results tell what to make for them, if torch knows them before it has computed.
std::optional<Stack> shapes(const c10::OperatorHandle& op, const Stack& given) {
  auto stack = arguments(op, given, at::kMeta);
  try {
    call(op, stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (pybind11::error_already_set& error) {  // of a kernel that is written in Python
    pybind11::gil_scoped_acquire held;
    if (!error.matches(PyExc_NotImplementedError)) throw;
    return std::nullopt;
  }
  return stack;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  const Stack given(stack->end() - count, stack->end());
  auto kernels = arguments(op, given, at::kCPU);
  auto results = shapes(op, given);
  const bool waits = !results.has_value();
  if (waits) {
    count_wait(schema.name());
    synchronize(current_stream());
    call(op, kernels);
    results = std::move(kernels);
  }
  Stack outputs, into;
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    if (const auto place = written(schema, i)) {
      const auto& own = given[*place];
      if (!waits && own.isTensor() && (*results)[i].toTensor().sizes() != own.toTensor().sizes()) {
        own.toTensor().resize_((*results)[i].toTensor().sizes());  // an `out=` that was empty
        kernels = arguments(op, given, at::kCPU);
      }
      outputs.push_back(own);
      into.emplace_back();
    } else {
      outputs.push_back(mapped((*results)[i], made_as));
      into.push_back(mapped(outputs.back(), seen_by_kernels));
    }
  }
  trace(schema, given, outputs);
  launch(current_stream(), [op, waits, call_with = std::move(waits ? *results : kernels), into]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!waits) call(op, call_with);
    for (std::size_t i = 0; i < into.size(); ++i) copy(call_with[i], into[i]);
  });
  stack->erase(stack->end() - count, stack->end());
  stack->insert(stack->end(), outputs.begin(), outputs.end());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
}

// As on a GPU: memory that copies may use is read and written later, without being kept; other memory at once.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto& host = is_here(source) ? target : source;
  const bool later = is_here(host) || (non_blocking && host.numel() != 0 && is_pinned(host.const_data_ptr()));
  const auto from = is_here(source) ? seen_by_kernels(source) : later ? on_host(source) : source.clone();
  const auto to = is_here(target) ? seen_by_kernels(target) : later ? on_host(target) : target;
  Told told{"kernel", current_stream(), 0, "copy", {}, {}};
  find(source, told.reads);
  find(target, told.writes);
  tell(std::move(told));
  launch(current_stream(), [from, to] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  if (!later && !is_here(target)) {
    count_wait("copy");
    synchronize(current_stream());
  }
  return target;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  tell({"kernel", current_stream(), 0, "a number that is read", {block_of(tensor)}, {}});
  count_wait("number");
  synchronize(current_stream());
  return seen_by_kernels(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const auto bytes = (tensor.storage_offset() + tensor.numel()) * static_cast<std::int64_t>(tensor.itemsize());
  if (static_cast<std::size_t>(bytes) > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto size = static_cast<std::int64_t>(storage.nbytes() / tensor.itemsize());
  return tensor.set_(std::move(storage), 0, {size}, {});
}

at::Tensor& set_nothing(at::Tensor& tensor) { return tensor.set_(c10::make_intrusive<c10::StorageImpl>(
    c10::StorageImpl::use_byte_size_t(), 0, memory(), true), 0, {0}, {}); }

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record(tensor.storage().data_ptr().get_context(), stream.id());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("record_stream", &record_stream);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_nothing);
}

std::int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return static_cast<std::int64_t>(at::SDPBackend::math);
}

}  // namespace

}  // namespace fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::attention)
}  // namespace at::native
