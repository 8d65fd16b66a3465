// What compare_tokenizers.py compares with `tokenizers`:
//   run_tokenizer <tokenizer.json> <documents.jsonl>
// with one string per line. Prints, for each, a JSON object of its ids, with and without special tokens, and what they
// decode to.
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
    for (std::string line; std::getline(documents, line);) {
      const std::string text = nlohmann::json::parse(line);
      const auto ids = tokenizer.encode(text);
      const nlohmann::json found = {{"ids", ids},
                                    {"bare", tokenizer.encode(text, false)},
                                    {"text", tokenizer.decode(ids)},
                                    {"all", tokenizer.decode(ids, false)}};
      std::cout << found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    }
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
