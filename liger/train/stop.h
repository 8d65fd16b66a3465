#pragma once

namespace liger::train {

/// Ctrl-C (SIGINT) and SIGTERM, which ask a run to stop after the step that it makes.
class Stop {
 public:
  /// From now on signals only ask. In a run of one process a second Ctrl-C ends it at once; several get some signals
  /// twice, from the terminal and from torchrun. What is said at the first one is null where nothing is.
  static void listen(bool alone, const char* said);

  static bool asked();
};

}  // namespace liger::train
