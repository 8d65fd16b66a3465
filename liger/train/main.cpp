// liger-train: fine-tunes a checkpoint; `liger-train --help` says how.
#include <cstdio>
#include <exception>
#include "liger/train/trainer.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // A step needs the memory that the step before it has freed: given back to the system, it comes again page by page,
  // which took 3 % of a step's time.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
#endif
  try {
    liger::train::Trainer(liger::train::parse(argc, argv)).run();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "\nliger-train: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) { std::fprintf(stderr, "\nliger-train: %s\n", error.what()); }
  return 1;
}
