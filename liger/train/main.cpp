// liger-train: fine-tunes a checkpoint; `liger-train --help` says how.
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include "liger/train/trainer.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

int failed(const std::string& why) {
  std::fprintf(stderr, "%sliger-train: %s\n", ::isatty(2) ? "\n" : "", why.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // A step needs the memory that the step before it has freed: given back to the system, it comes again page by page,
  // which took 3 % of a step's time.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
#endif
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error, which has a message
  try {
    const bool finished = liger::train::Trainer(liger::train::parse(argc, argv)).run();
    return finished ? 0 : 130;  // as a shell has it after Ctrl-C
  } catch (const c10::Error& error) {
    return failed(error.what_without_backtrace());
  } catch (const std::filesystem::filesystem_error& error) {
    return failed(error.path1().string() + ": " + error.code().message());
  } catch (const std::bad_alloc&) { return failed("there is not enough memory"); } catch (const std::exception& error) {
    return failed(error.what());
  }
}
