#include "group.h"

#include <c10/core/InferenceMode.h>

#include <map>
#include <utility>

#include "operators.h"
#include "streams.h"
#include "trace.h"

namespace fake {
namespace {

using c10d::Work;
using Works = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

// Threads that write to them are in no inference mode, as no kernel of a GPU is.
Tensors kernels(const Tensors& tensors) {
  const c10::InferenceMode everywhere(false);
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(tensor.is_cpu() ? tensor : seen_by_kernels(tensor));
  return found;
}

// As NCCL's: to wait for it lets the current stream wait, and the caller go on. Tensors live until then.
class Collective final : public Work {
 public:
  Collective(std::int64_t stream, Tensors alive) : end_(Mark::set(stream)), alive_(std::move(alive)) {}
  bool isCompleted() override { return end_->passed(); }
  bool isSuccess() const override { return end_->passed(); }
  void synchronize() override {
    end_->hold(current_stream());
    alive_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

 private:
  std::shared_ptr<Mark> end_;
  Tensors alive_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> below)
      : Backend(below->getRank(), below->getSize()), below_(std::move(below)), stream_(new_stream()) {}

  const std::string getBackendName() const override { return "fakeccl"; }

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin(options.asyncOp, tensors, [below = below_, own = kernels(tensors), options]() mutable {
      below->allreduce(own, options)->wait();
    });
  }

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return begin(options.asyncOp, tensors, [below = below_, own = kernels(tensors), options]() mutable {
      below->broadcast(own, options)->wait();
    });
  }

  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> into;
    Tensors alive = inputs;
    for (const auto& output : outputs) {
      into.push_back(kernels(output));
      alive.insert(alive.end(), output.begin(), output.end());
    }
    return begin(options.asyncOp, alive, [below = below_, into, own = kernels(inputs), options]() mutable {
      below->allgather(into, own, options)->wait();
    });
  }

  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> from;
    Tensors alive = outputs;
    for (const auto& input : inputs) {
      from.push_back(kernels(input));
      alive.insert(alive.end(), input.begin(), input.end());
    }
    return begin(options.asyncOp, alive, [below = below_, from, own = kernels(outputs), options]() mutable {
      below->scatter(own, from, options)->wait();
    });
  }

  Works gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> into;
    Tensors alive = inputs;
    for (const auto& output : outputs) {
      into.push_back(kernels(output));
      alive.insert(alive.end(), output.begin(), output.end());
    }
    return begin(options.asyncOp, alive, [below = below_, into, own = kernels(inputs), options]() mutable {
      below->gather(into, own, options)->wait();
    });
  }

  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors both{output, input};
    return begin(options.asyncOp, both, [below = below_, own = kernels(both), options]() mutable {
      below->_allgather_base(own[0], own[1], options)->wait();
    });
  }

  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    Tensors both{output, input};
    return begin(options.asyncOp, both, [below = below_, own = kernels(both), options]() mutable {
      below->_reduce_scatter_base(own[0], own[1], options)->wait();
    });
  }

  Works alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& coming,
                      std::vector<std::int64_t>& going, const c10d::AllToAllOptions& options) override {
    Tensors both{output, input};
    return begin(options.asyncOp, both, [below = below_, own = kernels(both), coming, going, options]() mutable {
      below->alltoall_base(own[0], own[1], coming, going, options)->wait();
    });
  }

  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override {
    Tensors alive = outputs;
    alive.insert(alive.end(), inputs.begin(), inputs.end());
    auto job = [below = below_, into = kernels(outputs), own = kernels(inputs), options]() mutable {
      for (std::size_t i = 0; i < into.size(); ++i) below->_allgather_base(into[i], own[i], options)->wait();
    };
    return begin(options.asyncOp, alive, std::move(job));
  }

  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override {
    Tensors alive = outputs;
    alive.insert(alive.end(), inputs.begin(), inputs.end());
    auto job = [below = below_, into = kernels(outputs), own = kernels(inputs), options]() mutable {
      for (std::size_t i = 0; i < into.size(); ++i) below->_reduce_scatter_base(into[i], own[i], options)->wait();
    };
    return begin(options.asyncOp, alive, std::move(job));
  }

  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return begin(options.asyncOp, tensors, [below = below_, own = kernels(tensors), options]() mutable {
      for (auto& one : own) {
        Tensors alone{one};
        below->allreduce(alone, options)->wait();
      }
    });
  }

  Works send(Tensors& tensors, int to, int tag) override {
    return pass(to, false, tensors, [below = below_, own = kernels(tensors), to, tag]() mutable {
      below->send(own, to, tag)->wait();
    });
  }

  Works recv(Tensors& tensors, int from, int tag) override {
    return pass(from, true, tensors, [below = below_, own = kernels(tensors), from, tag]() mutable {
      below->recv(own, from, tag)->wait();
    });
  }

  Works barrier(const c10d::BarrierOptions& options) override {
    fake::synchronize();
    return below_->barrier(options);
  }

 private:
  // As NCCL: what the caller waits for at once runs in its stream, and the others in the group's, behind what the
  // caller's was told.
  Works begin(bool async, Tensors alive, Job job) {
    const auto stream = async ? stream_ : current_stream();
    if (async) Mark::set(current_stream())->hold(stream_);
    // One after the other, in whatever streams: ranks would else send each other what stands at different places.
    if (last_) last_->hold(stream);
    Told told{"kernel", stream, 0, "a collective", {}, {}};
    for (const auto& tensor : alive) {
      if (!tensor.is_cpu()) told.writes.push_back(block_of(tensor));
    }
    tell(std::move(told));
    launch(stream, std::move(job));
    last_ = Mark::set(stream);
    return c10::make_intrusive<Collective>(stream, std::move(alive));
  }

  // Between two ranks; each way has a stream of its own, as a rank may send before it receives, and so may the other.
  Works pass(int peer, bool coming, const Tensors& tensors, Job job) {
    const auto [place, is_new] = ways_.try_emplace({peer, coming}, 0);
    if (is_new) place->second = new_stream();
    const auto stream = place->second;
    Mark::set(current_stream())->hold(stream);
    Told told{"kernel", stream, 0, coming ? "recv" : "send", {}, {}};
    for (const auto& tensor : tensors) (coming ? told.writes : told.reads).push_back(block_of(tensor));
    tell(std::move(told));
    launch(stream, std::move(job));
    return c10::make_intrusive<Collective>(stream, tensors);
  }

  c10::intrusive_ptr<c10d::Backend> below_;
  std::int64_t stream_;
  std::map<std::pair<int, bool>, std::int64_t> ways_;
  std::shared_ptr<Mark> last_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> group_over(c10::intrusive_ptr<c10d::Backend> below) {
  return c10::make_intrusive<Group>(std::move(below));
}

}  // namespace fake
