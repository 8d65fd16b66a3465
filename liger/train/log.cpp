#include "liger/train/log.h"

#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <fstream>
#include "liger/models/json.h"

namespace liger::train {

using nlohmann::json;
namespace fs = std::filesystem;

Log::Log(const std::string& folder, bool first) : path_((fs::path(folder) / "log.jsonl").string()), first_(first) {}

Log::~Log() {
  if (file_) std::fclose(file_);
}

void Log::open(int64_t done) {
  if (!first_) return;
  std::string kept;
  std::ifstream in(path_);
  for (std::string line; done > 0 && std::getline(in, line);) {
    const json entry = parse_json(line);
    if (entry.is_object() && entry.value("step", done + 1) <= done) kept += line + "\n";
  }
  NewFile(path_).write(kept).finish();
  file_ = std::fopen(path_.c_str(), "a");
  TORCH_CHECK(file_, path_, ": ", std::strerror(errno));
}

void Log::line(const json& content) {
  if (!first_) return;
  const std::string text = content.dump() + "\n";
  TORCH_CHECK(std::fwrite(text.data(), 1, text.size(), file_) == text.size() && std::fflush(file_) == 0, path_, ": ",
              std::strerror(errno));
}

void Log::say(const std::string& text) {
  if (!first_) return;
  std::fprintf(stderr, "%s%s\n", pending_ ? "\n" : "", text.c_str());
  pending_ = false;
}

void Log::progress(const std::string& text) {
  if (!first_) return;
  const bool terminal = ::isatty(2);
  std::fprintf(stderr, "%s%s%s", terminal ? "\r\033[K" : "", text.c_str(), terminal ? "" : "\n");
  pending_ = terminal;
}

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string duration(double seconds) {
  const auto whole = static_cast<long long>(std::ceil(seconds));
  if (whole < 60) return text("%llds", whole);
  if (whole < 3600) return text("%lldm %llds", whole / 60, whole % 60);
  return text("%lldh %lldm", whole / 3600, whole / 60 % 60);
}

std::string size(double bytes) {
  for (const char* unit : {"bytes", "KiB", "MiB", "GiB"}) {
    if (bytes < 1024) return text(*unit == 'b' ? "%.0f %s" : "%.1f %s", bytes, unit);
    bytes /= 1024;
  }
  return text("%.1f TiB", bytes);
}

}  // namespace liger::train
