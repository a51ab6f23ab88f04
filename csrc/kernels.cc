#include "kernels.h"

namespace zg {

extern const Kernels kernels_baseline;
#ifdef ZG_HAS_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef ZG_HAS_AVX512
extern const Kernels kernels_avx512;
#endif

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> all = [] {
    std::vector<const Kernels*> found{&kernels_baseline};
#ifdef ZG_HAS_AVX2
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (avx2) found.push_back(&kernels_avx2);
#endif
#ifdef ZG_HAS_AVX512
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512) found.push_back(&kernels_avx512);
#endif
    return found;
  }();
  return all;
}

const Kernels& kernels() {
  static const Kernels& best = *all_kernels().back();
  return best;
}

}  // namespace zg
