#pragma once

#include <ATen/core/Generator.h>

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

  mutable at::Generator numbers;  // which kernels draw from

 private:
  Generator* clone_impl() const override;
  at::Generator& settled() const;
};

const at::Generator& default_generator();
void manual_seed(std::uint64_t seed);

}  // namespace fake
