// What compare_tokenizers.py compares with `tokenizers` and transformers:
//   run_tokenizer <documents.jsonl> <tokenizer.json or folder>...
// with one string per line. Prints, for each tokenizer and each string, a JSON object of its ids, with and without
// special tokens, alone and as a pair with the document before, and what they decode to. Of a tokenizer that is refused
// it prints one object with the error. Without arguments it prints the table of tokenizer_config.json's fields.
#include <fstream>
#include <iostream>
#include "liger/models/json.h"
#include "liger/models/tokenizer.h"
#include "liger/models/tokenizer_files.h"

namespace {

void run(const liger::Tokenizer& tokenizer, std::istream& documents) {
  std::string before;
  for (std::string line; std::getline(documents, line);) {
    const std::string text = nlohmann::json::parse(line);
    const auto ids = tokenizer.encode(text);
    nlohmann::json found = {{"ids", ids},
                            {"bare", tokenizer.encode(text, false)},
                            {"added", tokenizer.with_special_tokens(tokenizer.encode(text, false))},
                            {"text", tokenizer.decode(ids)},
                            {"all", tokenizer.decode(ids, false)},
                            {"end", nullptr},
                            {"template", tokenizer.has_chat_template()}};
    if (tokenizer.eos_token()) found["end"] = tokenizer.id(*tokenizer.eos_token()).value_or(-1);
    for (const bool add : {false, true}) {
      try {
        found[add ? "pair" : "bare pair"] = tokenizer.encode_pair(before, text, add);
      } catch (const c10::Error& error) { found[add ? "pair" : "bare pair"] = error.what_without_backtrace(); }
    }
    before = text;
    std::cout << found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    nlohmann::json fields;
    for (const auto& [name, field] : liger::TokenizerFiles::config_fields())
      fields[name] = {{"use", static_cast<int>(field.use)}, {"allowed", nlohmann::json::parse(field.allowed)}};
    std::cout << fields << "\n";
  }
  for (int i = 2; i < argc; ++i) {
    std::ifstream documents(argv[1]);
    try {
      run(liger::Tokenizer(argv[i]), documents);
    } catch (const c10::Error& error) {
      std::cout << nlohmann::json{{"error", error.what_without_backtrace()}} << "\n";
    }
  }
}
