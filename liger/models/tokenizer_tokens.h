#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>
#include "liger/models/json.h"
#include "liger/models/regex.h"

namespace liger {

/// A token added to the vocabulary, which is found in the text before anything else is.
struct AddedToken {
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, special = false;
  std::optional<bool> given_normalized = {};

  bool normalized() const { return given_normalized.value_or(!special); }
  bool operator==(const AddedToken& o) const {
    return content == o.content && single_word == o.single_word && lstrip == o.lstrip && rstrip == o.rstrip &&
           special == o.special && normalized() == o.normalized();
  }

  /// Of its JSON object, with Python's defaults for what is missing. Raises json::exception.
  static AddedToken of(const nlohmann::json& from) {
    AddedToken token{from.at("content"), from.value("single_word", false), from.value("lstrip", false),
                     from.value("rstrip", false), from.value("special", false)};
    if (from.contains("normalized")) token.given_normalized = from["normalized"].get<bool>();
    return token;
  }
};

/// The ids of added tokens, as `tokenizers` gives them: what a file says is not asked.
class AddedVocabulary {
 public:
  /// Adds some at once. A token of the vocabulary keeps its id; the others follow the vocabulary's number of tokens, or
  /// the largest id that was added before. What a content had before, but special, is forgotten.
  template <class Find>
  void add(const std::vector<AddedToken>& tokens, int64_t vocabulary, Find id_in_vocabulary) {
    const int64_t last = by_id_.empty() ? -1 : by_id_.rbegin()->first;
    int64_t next = std::max(vocabulary, last + 1);
    for (const AddedToken& token : tokens) {
      if (token.content.empty()) continue;
      if (token.special) special_.insert(token.content);
      const auto before = ids_.find(token.content);
      std::optional<int64_t> id = before == ids_.end() ? id_in_vocabulary(token.content) : before->second;
      if (!id) id = next++;
      ids_[token.content] = *id;
      by_id_[*id] = token;
    }
  }

  const std::map<int64_t, AddedToken>& by_id() const { return by_id_; }

  /// Whether the content was ever added as special.
  bool is_special(const std::string& content) const { return special_.contains(content); }

 private:
  std::map<int64_t, AddedToken> by_id_;
  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_set<std::string> special_;
};

/// Added tokens to look for, by their first byte, the longest first.
struct AddedTokens {
  struct Entry {
    std::string content;  // normalized, where the text is
    int64_t id;
    bool single_word, lstrip, rstrip;
    bool split;  // its text is not taken as the token
  };
  std::array<std::vector<Entry>, 256> by_first;

  void add(Entry token) {
    if (token.content.empty()) return;
    auto& group = by_first[static_cast<unsigned char>(token.content[0])];
    const auto longer = [](const Entry& a, const Entry& b) { return a.content.size() > b.content.size(); };
    group.insert(std::upper_bound(group.begin(), group.end(), token, longer), std::move(token));
  }

  const Entry* at(std::string_view text, size_t place) const {
    for (const Entry& token : by_first[static_cast<unsigned char>(text[place])])
      if (text.substr(place).starts_with(token.content)) return &token;
    return nullptr;
  }
};

/// Calls piece(text) for what lies between added tokens, and token(id) for these, in order.
template <class Piece, class Token>
void split(std::string_view text, const AddedTokens& added, Piece piece, Token token) {
  static const Regex word(R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])"), space(R"(\s)");
  const auto before = [&](size_t place) {  // where the character before begins
    do --place;
    while ((text[place] & 0xC0) == 0x80);
    return place;
  };
  size_t done = 0;
  for (size_t place = 0; place < text.size();) {
    const AddedTokens::Entry* found = added.at(text, place);
    if (!found) {
      ++place;
      continue;
    }
    size_t begin = place, end = place + found->content.size();
    place = end;
    if (found->split) continue;
    if (found->single_word &&
        ((begin > 0 && word.at(text, before(begin))) || (end < text.size() && word.at(text, end))))
      continue;
    if (found->lstrip)
      while (begin > done && space.at(text, before(begin))) begin = before(begin);
    if (found->rstrip)
      while (const size_t length = end < text.size() ? space.at(text, end) : 0) end += length;
    if (begin > done) piece(text.substr(done, begin - done));
    token(found->id);
    done = end;
    place = std::max(place, end);
  }
  if (done < text.size()) piece(text.substr(done));
}

}  // namespace liger
