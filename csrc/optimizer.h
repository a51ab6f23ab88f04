// Optimizer steps over lists of tensors, and what goes with them: norms, accumulation, casts. All of it runs on the
// pool in pieces of about kPiece elements, counted over the whole list, so that many small tensors cost no more than one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "dtype.h"
#include "kernels.h"
#include "pool.h"
#include "status.h"
#include "update.h"

namespace zg {

constexpr std::size_t kPiece = 64 * 1024;

// The hyperparameters of one group, named as in torch.
struct Rule {
  Algorithm algorithm;
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, amsgrad;
  double momentum, dampening;
  bool nesterov;
  double lr_decay;
  bool maximize;
};

struct Tensor {
  std::uint64_t address;
  DType dtype;
  std::uint64_t count;
};

// The tensors of one group, which stay the same from step to step.
class TensorSet {
 public:
  // `states`: one list of addresses per slot. `copies` and `steps` may be empty.
  static Status create(std::vector<Tensor> params, const std::vector<std::vector<std::uint64_t>>& states,
                       DType state_dtype, std::vector<std::uint64_t> copies, DType copy_dtype,
                       std::vector<std::uint64_t> steps, std::shared_ptr<TensorSet>& out);

  std::size_t size() const { return params.size(); }

  std::vector<Tensor> params;
  std::size_t slots = 0;
  std::vector<std::array<std::byte*, kSlots>> states;
  DType state_dtype = DType::float32, copy_dtype = DType::float32;
  std::vector<std::uint64_t> copies, steps;
};

struct GroupStep {
  Rule rule;
  std::shared_ptr<const TensorSet> tensors;
  std::vector<std::uint64_t> grads;  // 0: this parameter has none and is left alone
  DType grad_dtype;
  std::vector<bool> fresh;  // sgd: the first step of this parameter; may be empty
};

// A step that runs. It does not keep the tensors' memory alive.
class Ticket {
 public:
  ~Ticket();
  bool done() const { return job_->done(); }
  std::int64_t ended() const { return job_->ended(); }  // by now(); 0 while it runs
  Status wait(bool& nonfinite);

 private:
  friend Status update(const Kernels&, const std::vector<GroupStep>&, double, std::unique_ptr<Ticket>&);
  std::shared_ptr<Job> job_;
  std::shared_ptr<std::atomic<bool>> nonfinite_;
};

// Increments the steps of all parameters with a gradient, and starts to update them.
Status update(const Kernels& kernels, const std::vector<GroupStep>& groups, double factor,
              std::unique_ptr<Ticket>& ticket);

// Sums in float64 of the squares of every kPiece elements of each tensor, counted from its beginning. They depend on the
// elements alone, not on threads, addresses or neighbours.
Status squares(const Kernels& kernels, const std::vector<Tensor>& tensors, std::vector<double>& sums);

// dst += src; dst is float32.
Status accumulate(const Kernels& kernels, const Tensor& dst, const Tensor& src);

Status cast(const Kernels& kernels, const Tensor& src, const Tensor& dst);

// For benchmarks: a pass over memory with the traffic of an AdamW step, which adds the gradient to parameter, exp_avg
// and exp_avg_sq (float32). `copy`, if not 0, gets the upper halves of the parameters.
Status stream(const Kernels& kernels, const Tensor& param, const Tensor& grad, std::uint64_t exp_avg,
              std::uint64_t exp_avg_sq, std::uint64_t copy);

}  // namespace zg
