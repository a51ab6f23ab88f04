#pragma once

#include <ATen/core/Generator.h>

#include <mutex>
#include <set>

namespace fake {

struct Generator final : c10::GeneratorImpl {
  Generator();
  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  at::Generator drawn_from();  // by a kernel of the current stream

 private:
  Generator* clone_impl() const override;
  at::Generator& settled() const;

  mutable std::mutex mutex_;
  mutable std::set<std::int64_t> streams_;  // whose kernels draw since the host looked last
  mutable at::Generator numbers_;
};

const at::Generator& default_generator();
void manual_seed(std::uint64_t seed);

}  // namespace fake
