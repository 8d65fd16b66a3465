#include "liger/train/stop.h"

#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <initializer_list>

namespace liger::train {
namespace {

volatile std::sig_atomic_t asked_by = 0;
bool ends_at_second = false;  // these two are set before there is a handler
const char* what_is_said = nullptr;

void ask(int number) {
  const int error = errno;
  if (asked_by == 0) {
    asked_by = number;
    if (what_is_said && ::write(2, what_is_said, std::strlen(what_is_said)) < 0) {}
  } else if (number == SIGINT && ends_at_second) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  errno = error;
}

}  // namespace

void Stop::listen(bool alone, const char* said) {
  ends_at_second = alone, what_is_said = said;
  struct sigaction action{};
  action.sa_handler = ask;
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGINT, SIGTERM}) ::sigaction(number, &action, nullptr);
}

bool Stop::asked() { return asked_by != 0; }

}  // namespace liger::train
