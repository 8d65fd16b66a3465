#pragma once

namespace liger::cpu {

/// The instruction sets that CPU files are built for.
enum class Set { Default, AVX2, AVX512 };

/// How good one is, or -1 where torch does not use it here (ATEN_CPU_CAPABILITY=avx2 asks for less).
int rank_of(Set set);

}  // namespace liger::cpu
