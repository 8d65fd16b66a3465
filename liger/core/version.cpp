#include "liger/version.h"

/// The library's version and what it was built for, such as 1.0.0+pt213cu130. Who holds a libliger asks it before
/// loading another, whose operators would be registered a second time.
extern "C" const char* liger_version() { return LIGER_VERSION; }
const char* liger::version() { return LIGER_VERSION; }

/// What the library was built for, in two lines: the CPU's instruction sets, and the CUDA architectures or why there
/// are none.
extern "C" const char* liger_build() { return LIGER_CPU_SETS "\n" LIGER_CUDA_BUILT; }
