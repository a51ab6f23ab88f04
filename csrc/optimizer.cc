#include "optimizer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace zg {

namespace {

constexpr std::size_t kCacheLine = 64;
// A step that writes more than this has driven the first copies out of the caches before it ends.
constexpr std::size_t kStreamed = std::size_t{64} << 20;

template <typename T>
T* pointer(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

bool is_row_type(DType dtype) { return dtype <= DType::float16; }  // float32, bfloat16, float16

Status check_address(const char* what, std::size_t index, std::uint64_t address, DType dtype, std::uint64_t count) {
  if (address % size_of(dtype) == 0 && (address != 0 || count == 0)) return {};
  return fail(Code::invalid, std::string(what) + " " + std::to_string(index) + " is at address " +
                                 std::to_string(address) + ", not that of " + std::to_string(count) + " elements of " +
                                 name_of(dtype) + "\n\nhint: pass Tensor.data_ptr() of a contiguous host tensor");
}

Status check_count(const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return {};
  return fail(Code::invalid, std::to_string(found) + " " + what + " for " + std::to_string(expected) +
                                 " parameters\n\nhint: pass one for each parameter, in the same order");
}

Status check_type(const char* what, DType dtype, bool accepted, const char* types) {
  if (accepted) return {};
  return fail(Code::invalid, std::string(what) + " of " + name_of(dtype) + "\n\nhint: " + types + " are supported");
}

constexpr const char* kRowTypes = "float32, bfloat16 and float16";
constexpr const char* kFloatTypes = "float32, bfloat16, float16 and float64";

// Elements [begin, begin + count) of tensor `tensor` in a list.
struct Range {
  std::uint32_t tensor;
  std::size_t begin, count;
};

// A list cut into pieces of about kPiece elements: piece i is ranges[starts[i]] up to ranges[starts[i + 1]].
class Pieces {
 public:
  // `head`: elements of the tensor before its first cache line begins.
  void add(std::size_t tensor, std::size_t count, std::size_t head = 0) {
    std::size_t begin = 0;
    while (begin < count) {
      std::size_t take = std::min(count - begin, kPiece - filled_);
      if (begin + take < count) {
        // The next piece begins on a cache line, or two threads would write to the one between them.
        take -= (begin + take - head) % kCacheLine;
      }
      ranges_.push_back({static_cast<std::uint32_t>(tensor), begin, take});
      begin += take;
      filled_ += take;
      if (filled_ + kCacheLine >= kPiece) {
        starts_.push_back(ranges_.size());
        filled_ = 0;
      }
    }
  }

  std::size_t size() {
    if (starts_.back() != ranges_.size()) starts_.push_back(ranges_.size());
    return starts_.size() - 1;
  }

  template <typename Visit>
  void visit(std::size_t piece, Visit visit) const {
    for (std::size_t i = starts_[piece]; i < starts_[piece + 1]; ++i) visit(ranges_[i]);
  }

 private:
  std::vector<Range> ranges_;
  std::vector<std::size_t> starts_{0};
  std::size_t filled_ = 0;
};

// Elements up to the first cache line, so that ranges begin on one.
std::size_t head_of(std::uint64_t address, DType dtype) {
  return (kCacheLine - address % kCacheLine) % kCacheLine / size_of(dtype);
}

float to_float(double value) { return static_cast<float>(value); }

Coefficients coefficients_of(const Rule& rule, double factor, double step, bool fresh) {
  Coefficients by{};
  by.algorithm = rule.algorithm;
  by.amsgrad = rule.amsgrad;
  by.nesterov = rule.nesterov;
  by.fresh = fresh;
  by.factor = to_float(rule.maximize ? -factor : factor);
  const bool decoupled = rule.algorithm == Algorithm::lion || (rule.algorithm == Algorithm::adam && rule.decoupled);
  by.coupled = !decoupled && rule.weight_decay != 0.0;
  by.weight_decay = to_float(rule.weight_decay);
  by.decay = decoupled ? to_float(1.0 - rule.lr * rule.weight_decay) : 1.0f;
  by.eps = to_float(rule.eps);
  by.momentum = to_float(rule.beta1);
  by.rest = to_float(1.0 - rule.beta1);
  by.beta2 = to_float(rule.beta2);
  by.rest2 = to_float(1.0 - rule.beta2);
  by.rate = to_float(-rule.lr);
  switch (rule.algorithm) {
    case Algorithm::adam:
      by.rate = to_float(-(rule.lr / (1.0 - std::pow(rule.beta1, step))));
      by.root = to_float(1.0 / std::sqrt(1.0 - std::pow(rule.beta2, step)));
      break;
    case Algorithm::sgd:
      by.momentum = to_float(rule.momentum);
      by.rest = to_float(1.0 - rule.dampening);
      break;
    case Algorithm::adagrad: by.rate = to_float(-(rule.lr / (1.0 + (step - 1.0) * rule.lr_decay))); break;
    case Algorithm::lion: break;
  }
  return by;
}

std::size_t slots_of(const Rule& rule) {
  switch (rule.algorithm) {
    case Algorithm::adam: return rule.amsgrad ? 3 : 2;
    case Algorithm::sgd: return rule.momentum != 0.0 ? 1 : 0;
    default: return 1;
  }
}

bool counts_steps(const Rule& rule) {
  return rule.algorithm == Algorithm::adam || rule.algorithm == Algorithm::adagrad;
}

Status check_group(const GroupStep& group) {
  const TensorSet& set = *group.tensors;
  ZG_TRY(check_count("gradients", group.grads.size(), set.size()));
  ZG_TRY(check_type("gradients", group.grad_dtype, is_row_type(group.grad_dtype), kRowTypes));
  if (!group.fresh.empty()) ZG_TRY(check_count("flags of a first step", group.fresh.size(), set.size()));
  const std::size_t slots = slots_of(group.rule);
  if (set.slots < slots) {
    return fail(Code::invalid, "this algorithm has " + std::to_string(slots) + " states, and the tensors came with " +
                                   std::to_string(set.slots) + "\n\nhint: pass one list of addresses for each state");
  }
  if (counts_steps(group.rule)) ZG_TRY(check_count("steps", set.steps.size(), set.size()));
  const bool narrow = set.state_dtype == DType::bfloat16;
  if (narrow && slots > 0 && (group.rule.algorithm != Algorithm::adam || group.rule.amsgrad)) {
    return fail(Code::invalid,
                "states of bfloat16 for an algorithm that keeps float32\n\n"
                "hint: only Adam and AdamW without amsgrad may keep their moments in bfloat16");
  }
  for (std::size_t i = 0; i < set.size(); ++i)
    if (group.grads[i] != 0)
      ZG_TRY(check_address("gradient", i, group.grads[i], group.grad_dtype, set.params[i].count));
  return {};
}

// One parameter of a step.
struct Work {
  Coefficients by;
  Span span;  // all of it
};

struct Step {
  std::vector<Work> works;
  Pieces pieces;
  std::atomic<bool> nonfinite{false};
};

void add_group(const GroupStep& group, double factor, Step& step) {
  const TensorSet& set = *group.tensors;
  const std::size_t slots = slots_of(group.rule);
  Coefficients by{};
  double computed = 0.0;  // for this step: all parameters of a group are usually at the same
  for (std::size_t i = 0; i < set.size(); ++i) {
    if (group.grads[i] == 0) continue;
    float count = 0.0f;
    if (!set.steps.empty()) {
      float* counter = pointer<float>(set.steps[i]);
      count = *counter = *counter + 1.0f;
    }
    const bool fresh = !group.fresh.empty() && group.fresh[i];
    if (computed == 0.0 || computed != count || by.fresh != fresh) by = coefficients_of(group.rule, factor, count, fresh);
    computed = count;
    const Tensor& param = set.params[i];
    Span span{};
    span.param = pointer<std::byte>(param.address);
    span.grad = pointer<const std::byte>(group.grads[i]);
    for (std::size_t slot = 0; slot < slots; ++slot) span.states[slot] = set.states[i][slot];
    if (!set.copies.empty()) span.copy = pointer<std::byte>(set.copies[i]);
    span.param_dtype = param.dtype;
    span.grad_dtype = group.grad_dtype;
    span.state_dtype = set.state_dtype;
    span.copy_dtype = set.copy_dtype;
    span.count = param.count;
    step.pieces.add(step.works.size(), param.count, head_of(param.address, param.dtype));
    step.works.push_back({by, span});
  }
}

// Elements [range.begin, range.begin + range.count) of a span.
Span part(Span span, const Range& range) {
  span.param += range.begin * size_of(span.param_dtype);
  span.grad += range.begin * size_of(span.grad_dtype);
  for (std::byte*& state : span.states)
    if (state != nullptr) state += range.begin * size_of(span.state_dtype);
  if (span.copy != nullptr) span.copy += range.begin * size_of(span.copy_dtype);
  span.count = range.count;
  return span;
}

Status check_tensor(const char* what, const Tensor& tensor) {
  ZG_TRY(check_type(what, tensor.dtype, is_float(tensor.dtype), kFloatTypes));
  return check_address(what, 0, tensor.address, tensor.dtype, tensor.count);
}

}  // namespace

Status TensorSet::create(std::vector<Tensor> params, const std::vector<std::vector<std::uint64_t>>& states,
                         DType state_dtype, std::vector<std::uint64_t> copies, DType copy_dtype,
                         std::vector<std::uint64_t> steps, std::shared_ptr<TensorSet>& out) {
  const std::size_t size = params.size();
  const bool plain_states = state_dtype == DType::float32 || state_dtype == DType::bfloat16;
  ZG_TRY(check_type("states", state_dtype, plain_states, "float32 and, for Adam, bfloat16"));
  ZG_TRY(check_type("copies", copy_dtype, is_row_type(copy_dtype), kRowTypes));
  if (states.size() > kSlots)
    return fail(Code::invalid, std::to_string(states.size()) + " states of a parameter, where no algorithm has more than " +
                                   std::to_string(kSlots) + "\n\nhint: pass one list of addresses for each state");
  if (!copies.empty()) ZG_TRY(check_count("copies", copies.size(), size));
  if (!steps.empty()) ZG_TRY(check_count("steps", steps.size(), size));
  for (const auto& slot : states) ZG_TRY(check_count("states", slot.size(), size));
  auto set = std::make_shared<TensorSet>();
  set->states.resize(size);
  for (std::size_t i = 0; i < size; ++i) {
    const Tensor& param = params[i];
    ZG_TRY(check_type("a parameter", param.dtype, is_row_type(param.dtype), kRowTypes));
    ZG_TRY(check_address("parameter", i, param.address, param.dtype, param.count));
    if (!copies.empty()) ZG_TRY(check_address("copy", i, copies[i], copy_dtype, param.count));
    if (!steps.empty()) ZG_TRY(check_address("step", i, steps[i], DType::float32, 1));
    for (std::size_t slot = 0; slot < states.size(); ++slot) {
      ZG_TRY(check_address("state", i, states[slot][i], state_dtype, param.count));
      set->states[i][slot] = pointer<std::byte>(states[slot][i]);
    }
  }
  set->params = std::move(params);
  set->slots = states.size();
  set->state_dtype = state_dtype;
  set->copy_dtype = copy_dtype;
  set->copies = std::move(copies);
  set->steps = std::move(steps);
  out = std::move(set);
  return {};
}

// Memory that threads write to must not be freed under them, however its owner came to drop the ticket.
Ticket::~Ticket() {
  if (job_ != nullptr) (void)job_->wait();
}

Status Ticket::wait(bool& nonfinite) {
  ZG_TRY(job_->wait());
  nonfinite = nonfinite_->load();
  return {};
}

Status update(const Kernels& kernels, const std::vector<GroupStep>& groups, double factor,
              std::unique_ptr<Ticket>& ticket) {
  for (const GroupStep& group : groups) ZG_TRY(check_group(group));
  auto step = std::make_shared<Step>();
  for (const GroupStep& group : groups) add_group(group, factor, *step);
  std::size_t written = 0;
  for (const Work& work : step->works) written += work.span.count * 3 * sizeof(float);
  for (Work& work : step->works) work.span.stream = written > kStreamed;
  ticket.reset(new Ticket);
  ticket->nonfinite_ = std::shared_ptr<std::atomic<bool>>(step, &step->nonfinite);
  const std::size_t pieces = step->pieces.size();
  ticket->job_ = submit(pieces, [step, kernel = kernels.update->update](std::size_t piece) {
    step->pieces.visit(piece, [&](const Range& range) {
      const Work& work = step->works[range.tensor];
      if (kernel(work.by, part(work.span, range))) step->nonfinite.store(true, std::memory_order_relaxed);
    });
  });
  return {};
}

Status squares(const Kernels& kernels, const std::vector<Tensor>& tensors, std::vector<double>& sums) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ZG_TRY(check_tensor("a tensor", tensors[i]));
    for (std::size_t begin = 0; begin < tensors[i].count; begin += kPiece)
      ranges.push_back({static_cast<std::uint32_t>(i), begin, std::min(kPiece, tensors[i].count - begin)});
  }
  sums.resize(ranges.size());
  return run_pieces(ranges.size(), [&, kernel = kernels.update->sum_squares](std::size_t piece) {
    const Range& range = ranges[piece];
    const Tensor& tensor = tensors[range.tensor];
    sums[piece] = kernel(pointer<const std::byte>(tensor.address) + range.begin * size_of(tensor.dtype), tensor.dtype,
                         range.count);
  });
}

Status accumulate(const Kernels& kernels, const Tensor& dst, const Tensor& src) {
  ZG_TRY(check_type("a sum", dst.dtype, dst.dtype == DType::float32, "sums of float32"));
  ZG_TRY(check_type("a term", src.dtype, is_row_type(src.dtype), kRowTypes));
  ZG_TRY(check_tensor("the sum", dst));
  ZG_TRY(check_tensor("the term", src));
  Pieces pieces;
  pieces.add(0, dst.count, head_of(dst.address, dst.dtype));
  return run_pieces(pieces.size(), [&, kernel = kernels.update->accumulate](std::size_t piece) {
    pieces.visit(piece, [&](const Range& range) {
      kernel(pointer<float>(dst.address) + range.begin,
             pointer<const std::byte>(src.address) + range.begin * size_of(src.dtype), src.dtype, range.count);
    });
  });
}

Status cast(const Kernels& kernels, const Tensor& src, const Tensor& dst) {
  ZG_TRY(check_tensor("the source", src));
  ZG_TRY(check_tensor("the destination", dst));
  Pieces pieces;
  pieces.add(0, dst.count, head_of(dst.address, dst.dtype));
  return run_pieces(pieces.size(), [&, kernel = kernels.convert](std::size_t piece) {
    pieces.visit(piece, [&](const Range& range) {
      kernel(pointer<const std::byte>(src.address) + range.begin * size_of(src.dtype), src.dtype,
             pointer<std::byte>(dst.address) + range.begin * size_of(dst.dtype), dst.dtype, range.count);
    });
  });
}

Status stream(const Kernels& kernels, const Tensor& param, const Tensor& grad, std::uint64_t exp_avg,
              std::uint64_t exp_avg_sq, std::uint64_t copy) {
  Span span{};
  span.param = pointer<std::byte>(param.address);
  span.grad = pointer<const std::byte>(grad.address);
  span.states[0] = pointer<std::byte>(exp_avg);
  span.states[1] = pointer<std::byte>(exp_avg_sq);
  span.copy = pointer<std::byte>(copy);
  span.param_dtype = span.state_dtype = DType::float32;
  span.grad_dtype = grad.dtype;
  span.copy_dtype = DType::bfloat16;
  Pieces pieces;
  pieces.add(0, param.count, head_of(param.address, param.dtype));
  return run_pieces(pieces.size(), [&, kernel = kernels.update->stream](std::size_t piece) {
    pieces.visit(piece, [&](const Range& range) { kernel(part(span, range)); });
  });
}

}  // namespace zg
