#pragma once
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace liger::train {

/// OUT/log.jsonl, and what a run says on the terminal. The first of several processes alone has both.
class Log {
 public:
  Log(const std::string& folder, bool first);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// Opens log.jsonl. What it has of steps after `done`, which run again, goes.
  void open(int64_t done);

  /// A line of log.jsonl.
  void line(const nlohmann::json& content);

  /// A line on the terminal.
  void say(const std::string& text);

  /// The same, which the next one of its kind replaces where there is a terminal.
  void progress(const std::string& text);

 private:
  std::string path_;
  bool first_, pending_ = false;
  std::FILE* file_ = nullptr;
};

/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

/// As 45s, 3m 20s or 2h 5m.
std::string duration(double seconds);

/// As 1.5 GiB.
std::string size(double bytes);

}  // namespace liger::train
