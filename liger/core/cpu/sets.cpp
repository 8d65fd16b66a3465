#include "liger/core/cpu/sets.h"
#include <ATen/Version.h>
#include <string>

namespace liger::cpu {

int rank_of(Set set) {
  const std::string machine = at::get_cpu_capability();
  const Set best = machine == "AVX512" ? Set::AVX512 : machine == "AVX2" ? Set::AVX2 : Set::Default;
  return set <= best ? int(set) : -1;
}

}  // namespace liger::cpu
