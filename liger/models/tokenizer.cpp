#include "liger/models/tokenizer.h"

#include <utf8proc.h>
#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include "liger/models/tokenizer_files.h"

namespace liger {
namespace {

using nlohmann::json;
using Ids = std::vector<int64_t>;

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
template <class T>
using Map = std::unordered_map<std::string, T, Hash, std::equal_to<>>;

constexpr size_t kCachedWords = 1 << 17;
constexpr int64_t kMostIds = 1 << 24;  // a table of them fits into memory, whatever a broken file says

/// What GPT-2 cuts text into: the pattern of a ByteLevel step that says use_regex.
constexpr const char* kWords = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr struct {
  const char* name;
  int options;
} kNormalizers[] = {{"NFC", UTF8PROC_COMPOSE},
                    {"NFD", UTF8PROC_DECOMPOSE},
                    {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                    {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};

/// The letters that stand for bytes in the file: those that print stand for themselves, the others follow from 256 on.
std::array<int32_t, 256> letters_of_bytes() {
  std::array<int32_t, 256> letters;
  int32_t next = 256;
  for (int b = 0; b < 256; ++b) {
    const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    letters[b] = prints ? b : next++;
  }
  return letters;
}

/// The bytes that a token of the file stands for; nothing where one of its characters stands for none.
std::optional<std::string> bytes_of(const std::string& token) {
  static const auto bytes = [] {
    std::unordered_map<int32_t, char> found;
    const auto letters = letters_of_bytes();
    for (int b = 0; b < 256; ++b) found[letters[b]] = static_cast<char>(b);
    return found;
  }();
  std::string result;
  for (size_t at = 0; at < token.size();) {
    int32_t letter;
    const auto length =
        utf8proc_iterate(reinterpret_cast<const uint8_t*>(token.data()) + at, token.size() - at, &letter);
    const auto byte = length > 0 ? bytes.find(letter) : bytes.end();
    if (byte == bytes.end()) return std::nullopt;
    result += byte->second;
    at += length;
  }
  return result;
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x80; });
}

void check_utf8(std::string_view text) {
  if (is_ascii(text)) return;
  for (size_t at = 0; at < text.size();) {
    int32_t letter;
    const auto length = utf8proc_iterate(reinterpret_cast<const uint8_t*>(text.data()) + at, text.size() - at, &letter);
    TORCH_CHECK(length > 0, "liger::Tokenizer: text is no UTF-8 at byte ", at);
    at += length;
  }
}

std::string normalized(std::string_view text, int options) {
  if (options == 0 || is_ascii(text)) return std::string(text);
  uint8_t* made = nullptr;
  const auto length = utf8proc_map(reinterpret_cast<const uint8_t*>(text.data()), text.size(), &made,
                                   static_cast<utf8proc_option_t>(options | UTF8PROC_STABLE));
  TORCH_CHECK(length >= 0, "liger::Tokenizer: ", utf8proc_errmsg(length));
  std::string result(reinterpret_cast<char*>(made), length);
  std::free(made);
  return result;
}

struct Merge {
  int32_t rank, id;
};

uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

/// What puts special tokens around the ids of one text, or of two: it makes other parts of parts.
using Parts = std::vector<Ids>;
using Processor = std::function<Parts(Parts parts, bool add_special_tokens)>;

/// An entry of a template: a text, or the ids of a special token.
struct Piece {
  size_t text = 0;
  std::optional<Ids> special = {};
};

/// One step of cutting text into words.
struct Step {
  bool prefix_space = false;
  std::optional<Regex> words;  // each of which stands for itself, as does what lies between
};

}  // namespace

struct Tokenizer::Content {
  Content(const std::string& path, const TokenizerFiles& files)
      : path(path), eos_token(files.eos_token), has_chat_template(files.has_chat_template) {
    try {
      read(files);
    } catch (const json::exception& error) { TORCH_CHECK(false, path, ": ", error.what()); }
  }

  template <class... Why>
  void check(bool holds, const Why&... why) const {
    TORCH_CHECK(holds, path, ": ", why...);
  }

  static json field(const json& of, const char* name) { return of.contains(name) ? of[name] : json(); }

  void read(const TokenizerFiles& files) {
    const json& file = files.tokenizer;
    refuse_fields(file);
    const json bpe = field(file, "model");
    check(bpe.is_object() && bpe.value("type", "BPE") == "BPE" && bpe.contains("merges") && bpe.contains("vocab"),
          "model is no BPE: only byte-level BPE is known");
    for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
      const json value = field(bpe, name);
      check(value.is_null() || value == "" || value == false || value == 0.0, "model.", name, " ", value.dump(),
            " is not known");
    }
    ignore_merges = bpe.value("ignore_merges", false);
    read_vocabulary(bpe);
    read_normalizer(field(file, "normalizer"));
    bool byte_level = false;
    read_steps(field(file, "pre_tokenizer"), byte_level);
    check(byte_level, "pre_tokenizer is not byte-level: only byte-level BPE is known");
    read_processors(field(file, "post_processor"));
    const json decoder = field(file, "decoder");
    check(decoder.is_object() && decoder.at("type") == "ByteLevel", "decoder is not ByteLevel");
    for (const auto& tokens : files.added)
      added.add(tokens, int64_t(bpe.at("vocab").size()), [&](const std::string& name) { return id(name); });
    for (const auto& [id, token] : added.by_id()) add(id, token, files.split_special_tokens);
    for (const int64_t id : processed({{}}, true))
      check(id >= 0 && id < int64_t(tokens.size()), "post_processor: there is no token ", id);
  }

  /// `tokenizers` takes no other.
  void refuse_fields(const json& file) const {
    for (const auto& [name, value] : file.items()) {
      const std::vector<std::string> known{"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                           "pre_tokenizer", "post_processor", "decoder", "model"};
      check(std::find(known.begin(), known.end(), name) != known.end(), name, " is not known");
      check(name != "version" || value == "1.0", "version ", value.dump(), " is not known");
    }
  }

  void add(int64_t id, const AddedToken& token, bool split_special_tokens) {
    check(id < kMostIds, "added_tokens: ", token.content, " has the id ", id);
    if (int64_t(tokens.size()) <= id) tokens.resize(id + 1);
    by_name[token.content] = id;
    const bool is_special = added.is_special(token.content);
    if (is_special) special.insert(id);
    const std::string text = token.normalized() ? normalized(token.content, normalizer) : token.content;
    tokens[id] = bytes_of(text).value_or(text);
    (token.normalized() ? added_normalized : added_raw)
        .add({text, id, token.single_word, token.lstrip, token.rstrip, split_special_tokens && is_special});
  }

  std::optional<int64_t> id(const std::string& token) const {
    const auto found = by_name.find(token);
    return found == by_name.end() ? std::nullopt : std::optional(found->second);
  }

  void read_vocabulary(const json& bpe) {
    for (const auto& [name, value] : bpe.at("vocab").items()) {
      const int64_t id = value.get<int64_t>();
      check(id >= 0 && id < kMostIds, "model.vocab: ", name, " has the id ", id);
      if (int64_t(tokens.size()) <= id) tokens.resize(id + 1);
      by_name[name] = id;
      const auto bytes = bytes_of(name);
      tokens[id] = bytes.value_or(name);
      if (bytes) vocabulary[*bytes] = static_cast<int32_t>(id);
    }
    for (int b = 0; b < 256; ++b) {
      const auto found = vocabulary.find(std::string(1, static_cast<char>(b)));
      check(found != vocabulary.end(), "model.vocab has no token for byte ", b, ": only byte-level BPE is known");
      bytes[b] = found->second;
    }
    const auto id_of = [&](const std::string& name) {
      const auto found = by_name.find(name);
      check(found != by_name.end(), "model.merges: ", name, " is not in the vocabulary");
      return static_cast<int32_t>(found->second);
    };
    int32_t rank = 0;
    for (const json& merge : bpe.at("merges")) {
      std::string left, right;
      if (merge.is_string()) {
        const std::string both = merge;
        const size_t space = both.find(' ');
        check(space != std::string::npos, "model.merges: ", both, " is no pair");
        left = both.substr(0, space), right = both.substr(space + 1);
      } else {
        check(merge.is_array() && merge.size() == 2, "model.merges: ", merge.dump(), " is no pair");
        left = merge[0], right = merge[1];
      }
      merges[pair_of(id_of(left), id_of(right))] = {rank++, id_of(left + right)};
    }
  }

  void read_normalizer(const json& from) {
    if (from.is_null()) return;
    if (from.at("type") == "Sequence" && from.at("normalizers").size() <= 1) {
      for (const json& one : from["normalizers"]) read_normalizer(one);
      return;
    }
    for (const auto& [name, options] : kNormalizers)
      if (from["type"] == name) normalizer = options;
    check(normalizer != 0, "normalizer ", from["type"].dump(), " is not known");
  }

  void read_steps(const json& from, bool& byte_level) {
    if (from.is_null()) return;
    const std::string type = from.at("type");
    check(!byte_level, "pre_tokenizer: ", type, " after ByteLevel is not known");
    if (type == "Sequence") {
      for (const json& step : from.at("pretokenizers")) read_steps(step, byte_level);
    } else if (type == "ByteLevel") {
      byte_level = true;
      Step step{from.value("add_prefix_space", true), {}};
      if (from.value("use_regex", true)) step.words.emplace(kWords);
      steps.push_back(std::move(step));
    } else if (type == "Digits") {
      steps.push_back({false, Regex(from.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)")});
    } else if (type == "Split") {
      check(from.at("behavior") == "Isolated" && !from.value("invert", false), "pre_tokenizer: Split with behavior ",
            from.value("behavior", json()).dump(), " is not known");
      const json& pattern = from.at("pattern");
      check(pattern.contains("Regex") || pattern.contains("String"), "pre_tokenizer: Split without a pattern");
      const bool is_regex = pattern.contains("Regex");
      const std::string text = pattern.at(is_regex ? "Regex" : "String");
      check(is_regex || text.find("\\E") == std::string::npos, "pre_tokenizer: the pattern ", text, " is not known");
      steps.push_back({false, Regex(is_regex ? text : "\\Q" + text + "\\E", path)});
    } else {
      check(false, "pre_tokenizer ", type, " is not known: only byte-level BPE is");
    }
  }

  void read_processors(const json& from) {
    if (from.is_null()) return;
    const std::string type = from.at("type");
    if (type == "ByteLevel") return;  // changes only offsets
    if (type == "Sequence") {
      for (const json& one : from.at("processors")) read_processors(one);
    } else if (type == "TemplateProcessing") {
      processors.push_back([single = read_template(from, "single", 1), pair = read_template(from, "pair", 2), this](
                               const Parts& parts, bool add) {
        check(parts.size() == 1 || parts.size() == 2, "post_processor: a TemplateProcessing after one that makes ",
              parts.size(), " parts is not known");
        Parts made;
        for (const Piece& piece : parts.size() == 1 ? single : pair)
          if (!piece.special || add) made.push_back(piece.special.value_or(parts[piece.text]));
        return made;
      });
    } else if (type == "BertProcessing" || type == "RobertaProcessing") {
      const int64_t begin = from.at("cls").at(1), end = from.at("sep").at(1);
      const Ids between = type == "BertProcessing" ? Ids() : Ids{end};  // before the second text
      processors.push_back([=](Parts parts, bool add) {
        for (size_t i = 0; add && i < parts.size(); ++i) {
          const Ids before = i == 0 ? Ids{begin} : between;
          parts[i].insert(parts[i].begin(), before.begin(), before.end());
          parts[i].push_back(end);
        }
        return parts;
      });
    } else {
      check(false, "post_processor ", type, " is not known");
    }
  }

  std::vector<Piece> read_template(const json& from, const char* name, size_t texts) const {
    std::vector<Piece> pieces;
    for (const json& piece : from.at(name)) {
      if (piece.contains("SpecialToken")) {
        const std::string token = piece["SpecialToken"].at("id");
        pieces.push_back({.special = from.at("special_tokens").at(token).at("ids").get<Ids>()});
      } else {
        pieces.push_back({.text = piece.at("Sequence").at("id") == "A" ? 0u : 1u});
        check(pieces.back().text < texts, "post_processor: ", name, " has a second text");
      }
    }
    const auto count = std::count_if(pieces.begin(), pieces.end(), [](const Piece& piece) { return !piece.special; });
    check(texts > 1 || count == 1, "post_processor: ", name, " has its text ", count, " times");
    return pieces;
  }

  Ids processed(Parts parts, bool add_special_tokens) const {
    for (const Processor& process : processors) parts = process(std::move(parts), add_special_tokens);
    Ids all;
    for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }

  Ids encode(std::string_view text) const {
    check_utf8(text);
    Ids ids;
    const auto token = [&](int64_t id) { ids.push_back(id); };
    const auto words = [&](std::string_view piece) { encode_piece(piece, 0, ids); };
    split(
        text, added_raw,
        [&](std::string_view piece) { split(normalized(piece, normalizer), added_normalized, words, token); }, token);
    return ids;
  }

  void encode_word(std::string_view word, Ids& into) const {
    {
      const std::lock_guard lock(mutex);
      if (const auto found = cache.find(word); found != cache.end()) {
        into.insert(into.end(), found->second.begin(), found->second.end());
        return;
      }
    }
    const size_t before = into.size();
    if (const auto whole = ignore_merges ? vocabulary.find(word) : vocabulary.end(); whole != vocabulary.end())
      into.push_back(whole->second);
    else merge(word, into);
    const std::lock_guard lock(mutex);
    if (cache.size() < kCachedWords) cache.emplace(word, Ids(into.begin() + before, into.end()));
  }

  /// Joins the pair of the lowest rank, the first of several, until there is none.
  void merge(std::string_view word, Ids& into) const {
    struct Symbol {
      int32_t id;
      int64_t previous, next;
    };
    struct Candidate {
      Merge merge;
      int64_t place;
      bool operator<(const Candidate& o) const {
        return std::pair(merge.rank, place) > std::pair(o.merge.rank, o.place);
      }
    };
    const int64_t length = int64_t(word.size());
    std::vector<Symbol> symbols(length);
    std::priority_queue<Candidate> queue;
    const auto find = [&](int64_t place) -> const Merge* {
      const int64_t next = symbols[place].next;
      if (next < 0) return nullptr;
      const auto found = merges.find(pair_of(symbols[place].id, symbols[next].id));
      return found == merges.end() ? nullptr : &found->second;
    };
    const auto consider = [&](int64_t place) {
      if (place < 0) return;
      if (const Merge* found = find(place)) queue.push({*found, place});
    };
    for (int64_t i = 0; i < length; ++i)
      symbols[i] = {bytes[static_cast<unsigned char>(word[i])], i - 1, i + 1 < length ? i + 1 : -1};
    for (int64_t i = 0; i < length; ++i) consider(i);
    while (!queue.empty()) {
      const Candidate best = queue.top();
      queue.pop();
      Symbol& left = symbols[best.place];
      const Merge* still = left.id < 0 ? nullptr : find(best.place);
      if (!still || still->id != best.merge.id) continue;
      Symbol& right = symbols[left.next];
      left.id = best.merge.id, left.next = right.next, right.id = -1;
      if (left.next >= 0) symbols[left.next].previous = best.place;
      consider(left.previous), consider(best.place);
    }
    for (int64_t i = 0; i >= 0 && i < length; i = symbols[i].next) into.push_back(symbols[i].id);
  }

  void encode_piece(std::string_view piece, size_t step, Ids& into) const {
    if (step == steps.size()) return encode_word(piece, into);
    std::string longer;
    if (steps[step].prefix_space && !piece.starts_with(' ')) piece = longer = " " + std::string(piece);
    if (!steps[step].words) return encode_piece(piece, step + 1, into);
    size_t done = 0;
    for (size_t from = 0; from < piece.size();) {
      const auto [begin, end] = steps[step].words->find(piece, from);
      if (begin == std::string_view::npos) break;
      if (begin > done) encode_piece(piece.substr(done, begin - done), step + 1, into);
      if (end > begin) encode_piece(piece.substr(begin, end - begin), step + 1, into);
      done = end;
      from = std::max(end, from + 1);
    }
    if (done < piece.size()) encode_piece(piece.substr(done), step + 1, into);
  }

  std::string path;
  std::optional<std::string> eos_token;
  bool has_chat_template;
  bool ignore_merges = false;
  int normalizer = 0;
  Map<int32_t> vocabulary;  // by bytes
  Map<int64_t> by_name;     // as the file writes them
  std::vector<std::string> tokens;
  std::array<int32_t, 256> bytes;
  std::unordered_map<uint64_t, Merge> merges;
  std::vector<Step> steps;
  std::vector<Processor> processors;
  AddedVocabulary added;
  AddedTokens added_raw, added_normalized;
  std::unordered_set<int64_t> special;
  mutable std::mutex mutex;
  mutable Map<Ids> cache;
};

Tokenizer::Tokenizer(const std::string& path) {
  const bool folder = std::filesystem::is_directory(path);
  const std::string file = folder ? (std::filesystem::path(path) / "tokenizer.json").string() : path;
  content_ =
      std::make_shared<const Content>(file, folder ? TokenizerFiles::of_folder(path) : TokenizerFiles::of_file(path));
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  return content_->processed({content_->encode(text)}, add_special_tokens);
}

std::vector<int64_t> Tokenizer::encode_pair(std::string_view first, std::string_view second,
                                            bool add_special_tokens) const {
  return content_->processed({content_->encode(first), content_->encode(second)}, add_special_tokens);
}

std::vector<int64_t> Tokenizer::with_special_tokens(std::vector<int64_t> ids) const {
  return content_->processed({std::move(ids)}, true);
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids, bool skip_special_tokens) const {
  std::string text;
  for (const int64_t id : ids) {
    TORCH_CHECK_INDEX(id >= 0 && id < size(), "liger::Tokenizer: there is no token ", id);
    if (!skip_special_tokens || !content_->special.contains(id)) text += content_->tokens[id];
  }
  return text;
}

std::optional<int64_t> Tokenizer::id(const std::string& token) const { return content_->id(token); }

const std::optional<std::string>& Tokenizer::eos_token() const { return content_->eos_token; }

bool Tokenizer::has_chat_template() const { return content_->has_chat_template; }

int64_t Tokenizer::size() const { return int64_t(content_->tokens.size()); }

}  // namespace liger
