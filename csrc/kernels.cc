#include "kernels.h"

#include <cstdlib>
#include <string>

#ifdef ZG_HAS_AVX2
#include <cpuid.h>
#endif

#include "update.h"

namespace zg {

extern const Kernels kernels_baseline;
#ifdef ZG_HAS_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef ZG_HAS_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef ZG_HAS_NEON
extern const Kernels kernels_neon;
#endif

namespace {

#ifdef ZG_HAS_AVX2
// Clang before 17 does not know the name in __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

constexpr const char* kVariable = "ZEROGRAPH_SIMD";

// What that variable said when the first kernel was asked for.
struct Choice {
  std::string wanted;
  const Kernels* kernels;  // null if there is no such target
};

const Choice& choice() {
  static const Choice chosen = [] {
    const char* wanted = std::getenv(kVariable);
    if (wanted == nullptr || *wanted == '\0') return Choice{{}, all_kernels().back()};
    for (const Kernels* kernels : all_kernels())
      if (std::string(wanted) == kernels->name) return Choice{wanted, kernels};
    return Choice{wanted, nullptr};
  }();
  return chosen;
}

}  // namespace

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> all = [] {
    std::vector<const Kernels*> found{&kernels_baseline};
#ifdef ZG_HAS_AVX2
    const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
    if (avx2) found.push_back(&kernels_avx2);
#endif
#ifdef ZG_HAS_AVX512
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512) found.push_back(&kernels_avx512);
#endif
#ifdef ZG_HAS_NEON
    found.push_back(&kernels_neon);  // part of every 64-bit Arm processor
#endif
    return found;
  }();
  return all;
}

const Kernels& kernels() { return *choice().kernels; }

Status find_target(const std::string& name, const Kernels*& out) {
  if (name.empty()) {
    ZG_TRY(check_target());
    out = &kernels();
    return {};
  }
  std::string names;
  for (const Kernels* kernels : all_kernels()) {
    if (name == kernels->name) {
      out = kernels;
      return {};
    }
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  return fail(Code::invalid, "'" + name + "' is no target that this processor runs; it runs " + names);
}

Status check_target() {
  const Kernels* found = choice().kernels;
  if (found != nullptr) return {};
  Status status = find_target(choice().wanted, found);
  status.text = std::string(kVariable) + "=" + choice().wanted + ": " + status.text + "\n\nhint: unset " + kVariable +
                " to use " + all_kernels().back()->name;
  return status;
}

}  // namespace zg
