#pragma once
#include <c10/util/Exception.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include "liger/models/file.h"

namespace liger {

/// The JSON object in a file; raises c10::Error, naming the file, where there is none.
inline nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.good(), path, ": ", std::strerror(errno));
  auto content = nlohmann::json::parse(file, nullptr, false);
  TORCH_CHECK(content.is_object(), path, ": no JSON object");
  return content;
}

/// Writes an object next to `path`, whose folder it makes, and then moves it there. Raises c10::Error where it cannot.
inline void write_json(const std::string& path, const nlohmann::json& content) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TORCH_CHECK(!error, folder.string(), ": ", error.message());
  NewFile file(path);
  file.write(content.dump(2) + "\n").finish();
}

}  // namespace liger
