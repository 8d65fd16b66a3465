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

  /// Of all tokens and rows: that of other data is another.
  uint64_t fingerprint() const { return hash_; }

 private:
  struct Document {
    std::vector<int64_t> ids, labels;
  };
  void add(const Document& document);
  void read_lines(const std::string& file, const class Texts& texts);
  void read_tensors(const std::string& file);
  void cut();
  void hash();

  Options options_;
  int64_t classes_;
  int64_t of_item_ = 1;
  std::vector<int32_t> ids_, labels_;
  std::vector<char> begins_;                       // a document, at this token
  std::vector<std::pair<int64_t, int64_t>> rows_;  // from, to
  bool whole_rows_ = false;                        // of --packing none, pairs and tensors
  uint64_t hash_ = 0;
  mutable int64_t epoch_ = -1;
  mutable std::vector<int64_t> order_;
};

}  // namespace liger::train
