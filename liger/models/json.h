#pragma once
#include <c10/util/Exception.h>
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

}  // namespace liger
