#pragma once
#include <c10/util/Exception.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace liger {

/// A pattern of PCRE2 on valid UTF-8, in which `\s` is Unicode's White_Space, as in the regular expressions of Rust and
/// Oniguruma. (PCRE2's own has U+180E besides.)
class Regex {
 public:
  /// Raises c10::Error, naming where the pattern comes from, if it is none.
  explicit Regex(const std::string& pattern, const std::string& source = "liger::Regex") {
    std::string rewritten;
    for (size_t i = 0; i < pattern.size(); ++i) {
      const bool escape = pattern[i] == '\\' && i + 1 < pattern.size();
      const char next = escape ? pattern[i + 1] : 0;
      if (next == 's' || next == 'S') rewritten += next == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      else rewritten += pattern.substr(i, 1 + escape);
      i += escape;
    }
    int error = 0;
    size_t place = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(rewritten.data()), rewritten.size(), PCRE2_UTF | PCRE2_UCP,
                              &error, &place, nullptr),
                pcre2_code_free);
    if (!code_) {
      unsigned char message[256];
      pcre2_get_error_message(error, message, sizeof message);
      TORCH_CHECK(false, source, ": the pattern ", pattern, ": ", reinterpret_cast<char*>(message));
    }
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // where it cannot, matching is slower
  }

  /// Begin and end of the first match from a place on; npos where there is none.
  std::pair<size_t, size_t> find(std::string_view text, size_t from) const { return match(text, from, 0); }

  /// The length of the match that begins at a place; 0 where none does.
  size_t at(std::string_view text, size_t place) const {
    const auto [begin, end] = match(text, place, PCRE2_ANCHORED);
    return begin == std::string_view::npos ? 0 : end - begin;
  }

 private:
  std::pair<size_t, size_t> match(std::string_view text, size_t from, uint32_t options) const {
    // A thread's own: several match at once.
    thread_local const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    const int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  options | PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) return {std::string_view::npos, std::string_view::npos};
    if (found < 0) {
      unsigned char message[256];
      pcre2_get_error_message(found, message, sizeof message);
      TORCH_CHECK(false, "liger::Regex: ", reinterpret_cast<char*>(message));
    }
    const size_t* ends = pcre2_get_ovector_pointer(data.get());
    return {ends[0], ends[1]};
  }

  std::shared_ptr<pcre2_code> code_;
};

}  // namespace liger
