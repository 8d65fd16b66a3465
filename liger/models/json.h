#pragma once
#include <c10/util/Exception.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace liger {

/// The JSON object in a file; raises c10::Error, naming the file, where there is none.
inline nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.good(), path, ": cannot be read");
  auto content = nlohmann::json::parse(file, nullptr, false);
  TORCH_CHECK(content.is_object(), path, ": no JSON object");
  return content;
}

/// Writes an object next to `path`, whose folder it makes, and then moves it there. Raises c10::Error where it cannot.
inline void write_json(const std::string& path, const nlohmann::json& content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  const std::string beside = path + ".tmp";
  std::ofstream file(beside);
  file << content.dump(2) << "\n";
  file.close();
  TORCH_CHECK(file.good(), beside, ": cannot be written");
  std::error_code error;
  std::filesystem::rename(beside, path, error);
  TORCH_CHECK(!error, path, ": ", error.message());
}

}  // namespace liger
