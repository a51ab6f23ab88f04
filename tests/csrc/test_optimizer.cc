// Steps over lists of tensors. What they compute is tested from Python; here they run under the sanitizers.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "optimizer.h"

using namespace zg;

namespace {

template <typename T>
std::uint64_t address(std::vector<T>& values) {
  return reinterpret_cast<std::uint64_t>(values.data());
}

struct Sizes {
  std::vector<std::size_t> counts{0, 1, 15, 63, 1023, 1024, 1025, 65535, 65536, 200001};
};

Rule adamw() { return {Algorithm::adam, 0.1, 0.9, 0.99, 1e-8, 0.1, true, false, 0, 0, false, 0, false}; }

}  // namespace

TEST_CASE("targets agree over every size") {
  std::vector<std::vector<float>> results;
  for (const Kernels* kernels : all_kernels()) {
    std::vector<float> all;
    for (const std::size_t count : Sizes{}.counts) {
      std::vector<float> param(count), first(count, 0.1f), second(count, 0.2f);
      std::vector<std::uint16_t> grad(count), copy(count);
      for (std::size_t i = 0; i < count; ++i) {
        param[i] = std::sin(static_cast<float>(i));
        const float value = std::cos(static_cast<float>(i));
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        grad[i] = static_cast<std::uint16_t>(bits >> 16);
      }
      float step = 4.0f;
      std::shared_ptr<TensorSet> set;
      REQUIRE(TensorSet::create({{address(param), DType::float32, count}}, {{address(first)}, {address(second)}},
                                DType::float32, {address(copy)}, DType::bfloat16,
                                {reinterpret_cast<std::uint64_t>(&step)}, set)
                  .ok());
      std::unique_ptr<Ticket> ticket;
      // Without elements a tensor has no address: that is no missing gradient then, but no work either.
      REQUIRE(update(*kernels, {{adamw(), set, {address(grad)}, DType::bfloat16, {}}}, 0.5, ticket).ok());
      bool nonfinite = true;
      CHECK(ticket->wait(nonfinite).ok());
      CHECK(!nonfinite);
      if (count > 0) CHECK(step == 5.0f);
      all.insert(all.end(), param.begin(), param.end());
      std::vector<double> sums;
      CHECK(squares(*kernels, {{address(param), DType::float32, count}}, sums).ok());
      for (const double sum : sums) all.push_back(static_cast<float>(sum));
      CHECK(accumulate(*kernels, {address(param), DType::float32, count}, {address(grad), DType::bfloat16, count}).ok());
      CHECK(cast(*kernels, {address(param), DType::float32, count}, {address(copy), DType::float16, count}).ok());
      for (const std::uint16_t bits : copy) all.push_back(bits);
    }
    results.push_back(all);
  }
  for (const auto& result : results) CHECK(result == results.front());
}

TEST_CASE("a dropped ticket waits") {
  const std::size_t count = 1 << 20;
  for (int round = 0; round < 10; ++round) {
    std::vector<float> param(count, 1.0f), grad(count, 1.0f);
    std::shared_ptr<TensorSet> set;
    REQUIRE(TensorSet::create({{address(param), DType::float32, count}}, {}, DType::float32, {}, DType::bfloat16, {}, set)
                .ok());
    const Rule sgd{Algorithm::sgd, 1.0, 0, 0, 0, 0, false, false, 0, 0, false, 0, false};
    {
      std::unique_ptr<Ticket> ticket;
      REQUIRE(update(kernels(), {{sgd, set, {address(grad)}, DType::float32, {}}}, 1.0, ticket).ok());
    }
    CHECK(param == std::vector<float>(count, 0.0f));
  }
}

TEST_CASE("an unknown target") {
  const Kernels* found = nullptr;
  CHECK(find_target("sse9", found).code == Code::invalid);
  CHECK(find_target("baseline", found).ok());
}
