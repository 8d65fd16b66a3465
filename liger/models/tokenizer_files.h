#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>
#include "liger/models/config.h"
#include "liger/models/json.h"
#include "liger/models/tokenizer_tokens.h"

namespace liger {

/// What the files of a tokenizer say, as transformers 5 reads them.
struct TokenizerFiles {
  /// tokenizer.json. Where tokenizer_class builds its own pipeline, as it does in transformers, this has that one.
  nlohmann::json tokenizer;
  std::vector<std::vector<AddedToken>> added;  // added one after another
  std::optional<std::string> eos_token;
  bool split_special_tokens = false, has_chat_template = false;

  /// Of a tokenizer.json alone.
  static TokenizerFiles of_file(const std::string& path);

  /// Of a model's folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat
  /// templates, and model_type and tokenizer_class of config.json. Raises c10::Error, naming the file and the field,
  /// for what is not known.
  static TokenizerFiles of_folder(const std::string& folder);

  /// Every field of tokenizer_config.json that the code of transformers asks for. What is none of them, and does not
  /// end with _token, transformers keeps and does not look at; so do these.
  static const std::map<std::string, ConfigField>& config_fields();
};

}  // namespace liger
