#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>
#include "liger/models/config.h"
#include "liger/train/options.h"

namespace liger::train {

/// A pass's rows [rows, tokens], int64, as wide as the longest. With --loss dpo the first half is chosen, the second
/// rejected.
struct Batch {
  at::Tensor ids, labels;
  at::Tensor positions;  // where documents are apart, else undefined
  int64_t counted = 0;   // labels that are learnt; pairs of --loss dpo
  bool packed = false;   // whether a document begins within a row
};

/// The tokens of files, in rows.
class Data {
 public:
  /// Raises c10::Error, naming file and line, for what it cannot read.
  Data(const std::vector<std::string>& files, const Options& options, const LlamaConfig& config);

  /// Rows; pairs of --loss dpo.
  int64_t size() const { return int64_t(rows_.size()) / of_item_; }

  /// The sample-th of all samples of all epochs.
  int64_t sample(int64_t sample) const;

  Batch batch(const std::vector<int64_t>& items) const;

  /// The most positions that a row has: with --packing apart they begin again with each document.
  int64_t longest() const;

  int64_t rows() const { return int64_t(rows_.size()); }

  /// The tokens that the tokenizer's post_processor added.
  int64_t special_tokens() const { return special_tokens_; }

  /// Rows of which nothing is learnt: they add nothing to a step's loss.
  int64_t without_labels() const { return without_labels_; }

  /// Of all tokens and rows: that of other data is another.
  uint64_t fingerprint() const { return hash_; }

 private:
  struct Document {
    std::vector<int64_t> ids, labels;
  };
  void add(const Document& document);
  Document text(const class Texts& texts, const std::string& text);
  Document answer(const class Texts& texts, const std::string& prompt, const std::string& completion);
  std::vector<int64_t> framed(const class Texts& texts, std::vector<int64_t> ids);
  void read_lines(const std::string& file, const class Texts& texts);
  void read_tensors(const std::string& file);
  void cut();
  void hash();
  void check_labels(const std::string& file);

  /// The labels of a row that are learnt: its first token's is not, nor, where documents are apart, theirs.
  int64_t learnt(const std::pair<int64_t, int64_t>& row) const;
  bool apart() const { return options_.packing == "apart" && !whole_rows_; }

  Options options_;
  int64_t classes_;
  int64_t of_item_ = 1;
  int64_t special_tokens_ = 0, without_labels_ = 0;
  std::vector<int32_t> ids_, labels_;
  std::vector<char> begins_;                       // a document, at this token
  std::vector<std::pair<int64_t, int64_t>> rows_;  // from, to
  bool whole_rows_ = false;                        // of --packing none, pairs and tensors
  uint64_t hash_ = 0;
  mutable int64_t epoch_ = -1;
  mutable std::vector<int64_t> order_;
};

}  // namespace liger::train
