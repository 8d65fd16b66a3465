#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace liger {

/// Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019), as Llama 3, Qwen and GPT-2 have it.
/// Text becomes the ids that transformers 5 gives, added and special tokens included; what the files say of truncation
/// and padding is left to the caller.
class Tokenizer {
 public:
  /// A model's folder, of which all files of the tokenizer are read, as AutoTokenizer does; or a tokenizer.json alone.
  /// Raises c10::Error, naming the file and the field, for another kind of tokenizer.
  explicit Tokenizer(const std::string& path);

  /// The ids of UTF-8 text; with add_special_tokens also those that the file's post_processor puts around it. Raises
  /// c10::Error for text that is no UTF-8. Several threads may call it.
  std::vector<int64_t> encode(std::string_view text, bool add_special_tokens = true) const;

  /// The ids of two texts that belong together, as a template for pairs joins them.
  std::vector<int64_t> encode_pair(std::string_view first, std::string_view second,
                                   bool add_special_tokens = true) const;

  /// The ids of a text that has been encoded without special tokens, with them.
  std::vector<int64_t> with_special_tokens(std::vector<int64_t> ids) const;

  /// The bytes that ids stand for: no valid UTF-8 where they begin or end within a character. Raises c10::Error for an
  /// id that is none.
  std::string decode(const std::vector<int64_t>& ids, bool skip_special_tokens = true) const;

  /// The id of a token as the file writes it; nothing where it has none.
  std::optional<int64_t> id(const std::string& token) const;

  /// The token that ends a text, where a file names one.
  const std::optional<std::string>& eos_token() const;

  /// Whether the folder has a chat template, which this does not apply.
  bool has_chat_template() const;

  /// One more than the largest id.
  int64_t size() const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace liger
