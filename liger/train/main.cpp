// liger-train: fine-tunes a checkpoint; `liger-train --help` says how.
#include <cstdio>
#include <exception>
#include "liger/train/trainer.h"

int main(int argc, char** argv) {
  try {
    liger::train::Trainer(liger::train::parse(argc, argv)).run();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "\nliger-train: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "\nliger-train: %s\n", error.what());
  }
  return 1;
}
