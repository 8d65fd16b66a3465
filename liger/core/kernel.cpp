#include "liger/core/kernel.h"

namespace liger {

bool add_kernel(Slot& slot, int rank, void (*run)()) {
  if (rank > slot.rank) slot = {run, rank};
  return true;
}

}  // namespace liger
