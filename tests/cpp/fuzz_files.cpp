// Reads broken files of models: fuzz_files <seconds> <seed> <folder of seeds> <folder to work in>, for a build with
// sanitizers (CMakePresets.json: asan). A seed is a folder that liger::models reads. One of its files is changed at a
// few places, and then everything is read: with a result, or c10::Error. What else happens is an error of a parser; the
// folder to work in then holds the files that showed it.
#include <ATen/ATen.h>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>
#include "liger/models/config.h"
#include "liger/models/lora.h"
#include "liger/models/safetensors.h"
#include "liger/models/tokenizer.h"

namespace {

namespace fs = std::filesystem;
using Random = std::mt19937_64;

/// What parsers of JSON, numbers and UTF-8 go wrong on.
const std::vector<std::string> kWords{"0",
                                      "-1",
                                      "1e999",
                                      "18446744073709551615",
                                      "9223372036854775808",
                                      "0.5",
                                      "null",
                                      "true",
                                      "[]",
                                      "{}",
                                      "[",
                                      "}",
                                      "\"",
                                      "\\u0000",
                                      "\\ud800",
                                      "\\",
                                      "\xff",
                                      "\xc0\x80",
                                      "\xf0\x9f\x98\x80",
                                      std::string(1, '\0'),
                                      "(?<=a*)b",
                                      "(a|b|ab)*c\\1",
                                      "[[:^alpha:]]",
                                      ",",
                                      ":",
                                      "\n",
                                      "[[[[[[[[",
                                      "F64",
                                      "I4",
                                      "U64",
                                      "\"\""};

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

size_t below(size_t n, Random& random) { return n == 0 ? 0 : size_t(random() % n); }

/// Changes one place of `bytes`.
void change(std::string& bytes, const std::string& other, Random& random) {
  const size_t at = below(bytes.size() + 1, random),
               length = below(std::min<size_t>(bytes.size() - at, 64) + 1, random);
  switch (random() % 9) {
    case 0:
      if (at < bytes.size()) bytes[at] = char(bytes[at] ^ (1 << random() % 8));
      break;
    case 1:
      if (at < bytes.size()) bytes[at] = char(random());
      break;
    case 2: bytes.erase(at, length); break;
    case 3: bytes.insert(at, bytes.substr(at, length)); break;
    case 4: bytes.insert(at, kWords[below(kWords.size(), random)]); break;
    case 5: bytes.replace(at, length, kWords[below(kWords.size(), random)]); break;
    case 6: bytes.resize(at); break;
    case 7: bytes.insert(at, other.substr(below(other.size(), random), below(200, random))); break;
    default: {  // a number, of JSON or of a safetensors header, becomes another
      const size_t digit = bytes.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const size_t end = std::min(bytes.find_first_not_of("0123456789", digit), bytes.size());
      bytes.replace(digit, end - digit,
                    random() % 2 ? std::to_string(random() >> random() % 64) : kWords[random() % 6]);
    }
  }
}

/// Reads everything that is in a folder; returns how many files were accepted.
int read(const fs::path& folder) {
  int accepted = 0;
  const auto attempt = [&](const char* file, auto&& reads) {
    if (!fs::exists(folder / file)) return;
    try {
      reads();
      ++accepted;
    } catch (const c10::Error&) {}  // a refusal
  };
  attempt("config.json", [&] { liger::LlamaConfig::load(folder.string()); });
  attempt("adapter_config.json", [&] { liger::LoraConfig::load(folder.string()); });
  const auto sum = [](const auto& file) {
    for (const std::string& name : file.names()) {
      const at::Tensor tensor = file.tensor(name);
      const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
      [[maybe_unused]] volatile unsigned total = 0;
      for (size_t i = 0; i < tensor.nbytes(); ++i) total = total + bytes[i];
    }
  };
  attempt("model.safetensors", [&] { sum(liger::SafetensorsFile((folder / "model.safetensors").string())); });
  attempt("model.safetensors.index.json", [&] { sum(liger::Checkpoint(folder.string())); });
  attempt("tokenizer.json", [&] {
    const liger::Tokenizer tokenizer(folder.string());
    for (const char* text : {"", "Hello, don't  stop\n 12345 <|end|>", "\u00e9e\u0301 \u4e2d\u6587 \U0001f600"}) {
      const auto ids = tokenizer.encode(text);
      tokenizer.decode(ids), tokenizer.decode(ids, false);
      tokenizer.encode_pair(text, text);
    }
    tokenizer.size(), tokenizer.has_chat_template();
  });
  return accepted;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return std::cerr << "fuzz_files <seconds> <seed> <folder of seeds> <folder to work in>\n", 2;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::stod(argv[1]));
  Random random(std::stoull(argv[2]));
  const fs::path work(argv[4]);
  std::vector<fs::path> seeds;
  std::vector<std::string> files;
  for (const auto& seed : fs::directory_iterator(argv[3])) {
    seeds.push_back(seed.path());
    if (read(seed.path()) == 0) return std::cerr << seed.path() << ": nothing in it can be read\n", 1;
    for (const auto& file : fs::directory_iterator(seed.path())) files.push_back(content(file.path()));
  }
  int64_t rounds = 0, accepted = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds) {
    fs::remove_all(work);
    fs::copy(seeds[below(seeds.size(), random)], work);
    std::vector<fs::path> held;
    for (const auto& file : fs::directory_iterator(work)) held.push_back(file.path());
    const fs::path& broken = held[below(held.size(), random)];
    std::string bytes = content(broken);
    for (size_t changes = 1 + random() % 4; changes > 0; --changes)
      change(bytes, files[below(files.size(), random)], random);
    std::ofstream(broken, std::ios::binary) << bytes;
    try {
      accepted += read(work) > 0;
    } catch (const std::exception& error) {
      std::cerr << broken << ": " << error.what() << "\n";
      return 1;
    }
  }
  std::cout << rounds << " broken files, of which " << accepted << " could be read\n";
}
