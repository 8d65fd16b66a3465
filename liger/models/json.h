#pragma once
#include <c10/util/Exception.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include "liger/models/file.h"

namespace liger {

/// Whether brackets stand so deep in each other that code which goes down them may run out of stack. (serde_json, by
/// which `tokenizers` and safetensors read, has the same limit.)
inline bool too_deep(std::string_view text) {
  constexpr int kMostBrackets = 128;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      while (++i < text.size() && text[i] != '"') i += text[i] == '\\';
    } else if (text[i] == '[' || text[i] == '{') {
      if (++depth > kMostBrackets) return true;
    } else if (text[i] == ']' || text[i] == '}') {
      --depth;
    }
  }
  return false;
}

/// JSON, or a value that is discarded where there is none.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text) {
  return too_deep(text) ? Json(Json::value_t::discarded) : Json::parse(text, nullptr, false);
}

/// The JSON object in a file; raises c10::Error, naming the file, where there is none.
template <class Json = nlohmann::json>
Json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), path, ": ", std::strerror(errno));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto content = parse_json<Json>(text);
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
