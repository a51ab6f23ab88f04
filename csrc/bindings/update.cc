// Optimizer steps on the pool. Tensors are tuples of address, dtype and number of elements.
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/support.h"
#include "kernels.h"
#include "optimizer.h"
#include "pool.h"

namespace zg::bindings {

namespace {

using TensorTuple = std::tuple<std::uint64_t, DType, std::uint64_t>;
using GroupTuple = std::tuple<Rule, std::shared_ptr<TensorSet>, std::vector<std::uint64_t>, DType, std::vector<bool>>;

std::vector<Tensor> tensors(const std::vector<TensorTuple>& tuples) {
  std::vector<Tensor> out;
  out.reserve(tuples.size());
  for (const auto& [address, dtype, count] : tuples) out.push_back({address, dtype, count});
  return out;
}

// The target in use, or for tests the one with that name.
const Kernels& target(const std::optional<std::string>& name) {
  const Kernels* found = nullptr;
  check(find_target(name.value_or(""), found));
  return *found;
}

bool wait(Ticket& ticket) {
  bool nonfinite = false;
  run([&] { return ticket.wait(nonfinite); });
  return nonfinite;
}

// A ticket waits as it goes: without the GIL, which the thread that owns the memory may need.
struct DropTicket {
  void operator()(Ticket* ticket) const {
    WithoutGil release;
    delete ticket;
  }
};
using TicketHolder = std::unique_ptr<Ticket, DropTicket>;

void bind_steps(py::module_& m) {
  py::enum_<Algorithm>(m, "Algorithm")
      .value("adam", Algorithm::adam)
      .value("sgd", Algorithm::sgd)
      .value("adagrad", Algorithm::adagrad)
      .value("lion", Algorithm::lion);
  py::class_<Rule>(m, "Rule", "How the parameters of one group are updated; names as in torch.")
      .def(py::init([](Algorithm algorithm, double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled, bool amsgrad, double momentum, double dampening, bool nesterov, double lr_decay,
                       bool maximize) {
             return Rule{algorithm, lr,       beta1,     beta2,    eps,      weight_decay, decoupled,
                         amsgrad,   momentum, dampening, nesterov, lr_decay, maximize};
           }),
           py::arg("algorithm"), py::kw_only(), py::arg("lr"), py::arg("beta1") = 0.0, py::arg("beta2") = 0.0,
           py::arg("eps") = 0.0, py::arg("weight_decay") = 0.0, py::arg("decoupled") = false,
           py::arg("amsgrad") = false, py::arg("momentum") = 0.0, py::arg("dampening") = 0.0,
           py::arg("nesterov") = false, py::arg("lr_decay") = 0.0, py::arg("maximize") = false);
  py::class_<TensorSet, std::shared_ptr<TensorSet>>(m, "TensorSet", "The tensors of one group.")
      .def(py::init([](const std::vector<TensorTuple>& params, const std::vector<std::vector<std::uint64_t>>& states,
                       DType state_dtype, std::vector<std::uint64_t> copies, DType copy_dtype,
                       std::vector<std::uint64_t> steps) {
             std::shared_ptr<TensorSet> set;
             check(TensorSet::create(tensors(params), states, state_dtype, std::move(copies), copy_dtype,
                                     std::move(steps), set));
             return set;
           }),
           py::arg("params"), py::arg("states"), py::arg("state_dtype"), py::arg("copies"), py::arg("copy_dtype"),
           py::arg("steps"));
  py::class_<Ticket, TicketHolder>(m, "Ticket", "A step that runs beside its caller.")
      .def("done", &Ticket::done)
      .def_property_readonly("ended", &Ticket::ended)
      .def("wait", &wait);
  m.def(
      "update",
      [](const std::vector<GroupTuple>& groups, double factor, const std::optional<std::string>& name) {
        const Kernels& kernels = target(name);
        std::vector<GroupStep> steps;
        steps.reserve(groups.size());
        for (const auto& [rule, set, grads, dtype, fresh] : groups) steps.push_back({rule, set, grads, dtype, fresh});
        std::unique_ptr<Ticket> ticket;
        run([&] { return update(kernels, steps, factor, ticket); });
        return TicketHolder(ticket.release());
      },
      py::arg("groups"), py::arg("factor") = 1.0, py::arg("target") = py::none());
}

void bind_passes(py::module_& m) {
  m.def(
      "squares",
      [](const std::vector<TensorTuple>& pieces, const std::optional<std::string>& name) {
        const Kernels& kernels = target(name);
        std::vector<double> sums;
        run([&] { return squares(kernels, tensors(pieces), sums); });
        return sums;
      },
      py::arg("pieces"), py::arg("target") = py::none());
  m.def(
      "accumulate",
      [](std::uint64_t dst, DType dst_dtype, std::uint64_t src, DType src_dtype, std::uint64_t count,
         const std::optional<std::string>& name) {
        const Kernels& kernels = target(name);
        run([&] { return accumulate(kernels, {dst, dst_dtype, count}, {src, src_dtype, count}); });
      },
      py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("count"),
      py::arg("target") = py::none());
  m.def(
      "cast",
      [](std::uint64_t src, DType src_dtype, std::uint64_t dst, DType dst_dtype, std::uint64_t count) {
        const Kernels& kernels = target({});
        run([&] { return cast(kernels, {src, src_dtype, count}, {dst, dst_dtype, count}); });
      },
      py::arg("src"), py::arg("src_dtype"), py::arg("dst"), py::arg("dst_dtype"), py::arg("count"));
  m.def(
      "stream",
      [](std::uint64_t param, std::uint64_t grad, DType grad_dtype, std::uint64_t exp_avg, std::uint64_t exp_avg_sq,
         std::uint64_t copy, std::uint64_t count) {
        const Kernels& kernels = target({});
        const Tensor params{param, DType::float32, count}, grads{grad, grad_dtype, count};
        run([&] { return stream(kernels, params, grads, exp_avg, exp_avg_sq, copy); });
      },
      py::arg("param"), py::arg("grad"), py::arg("grad_dtype"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
      py::arg("copy"), py::arg("count"));
}

}  // namespace

void bind_update(py::module_& m) {
  bind_steps(m);
  bind_passes(m);
  m.def("pool_threads", &pool_threads, py::call_guard<WithoutGil>());
  m.def(
      "set_pool_threads", [](std::size_t threads) { run([&] { return set_pool_threads(threads); }); },
      py::arg("threads"));
  m.def("simd_target", [] {
    check(check_target());
    return std::string(kernels().name);
  });
  // Before Python frees what the threads may be working on.
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&close_pool, py::call_guard<WithoutGil>()));
}

}  // namespace zg::bindings
