#pragma once
#include <tuple>

namespace liger {

/// z = softcap · tanh(scale · y / softcap), or scale · y without a softcap (0), of what a head's GEMM gives.
struct LogitMap {
  float scale = 1, softcap = 0;
};

}  // namespace liger

/// The fields of a struct of options, in the order in which an operator's schema has them. Operators that are
/// registered with such a struct read their parameters' names, types and defaults from it:
///
///     struct Options {
///       double temperature = 1;
///       bool entropy = false;
///       LIGER_OPTIONS(temperature, entropy)
///     };
#define LIGER_OPTIONS(...)                                             \
  static constexpr const char* option_names() { return #__VA_ARGS__; } \
  auto option_values() const { return std::make_tuple(__VA_ARGS__); }
