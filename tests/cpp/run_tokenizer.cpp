// What compare_tokenizers.py compares with `tokenizers`:
//   run_tokenizer <tokenizer.json> <documents.jsonl>
// with one string per line. Prints, for each, a JSON object of its ids, with and without special tokens, alone and as a
// pair with the document before, and what they decode to.
#include <cstdio>
#include <fstream>
#include <iostream>
#include "liger/models/json.h"
#include "liger/models/tokenizer.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const liger::Tokenizer tokenizer(argv[1]);
    std::ifstream documents(argv[2]);
    std::string before;
    for (std::string line; std::getline(documents, line);) {
      const std::string text = nlohmann::json::parse(line);
      const auto ids = tokenizer.encode(text);
      nlohmann::json found = {{"ids", ids},
                              {"bare", tokenizer.encode(text, false)},
                              {"added", tokenizer.with_special_tokens(tokenizer.encode(text, false))},
                              {"text", tokenizer.decode(ids)},
                              {"all", tokenizer.decode(ids, false)}};
      for (const bool add : {false, true}) {
        try {
          found[add ? "pair" : "bare pair"] = tokenizer.encode_pair(before, text, add);
        } catch (const c10::Error& error) { found[add ? "pair" : "bare pair"] = error.what_without_backtrace(); }
      }
      before = text;
      std::cout << found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    }
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
