#include "liger/train/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include "liger/models/json.h"
#include "liger/models/safetensors.h"
#include "liger/models/tokenizer.h"

namespace liger::train {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kIgnored = -100;

std::ifstream opened(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  TORCH_CHECK(in.good(), file, ": ", std::strerror(errno));
  return in;
}

/// The text of a file; what is none is refused.
std::string content(const std::string& file) {
  std::ifstream in = opened(file);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t zero = text.find('\0');
  TORCH_CHECK(zero == std::string::npos, file, ": no text: byte ", zero, " is 0");
  return text;
}

/// A field of a line that has it as a string.
const std::string& string_of(const json& line, const char* name) {
  TORCH_CHECK(line.contains(name), "there is no \"", name, "\"");
  TORCH_CHECK(line[name].is_string(), "\"", name, "\" is no string");
  return line[name].get_ref<const std::string&>();
}

std::vector<int64_t> ids_of(const json& line, const char* name) {
  const json& ids = line[name];
  TORCH_CHECK(
      ids.is_array() && std::all_of(ids.begin(), ids.end(), [](const json& id) { return id.is_number_integer(); }),
      "\"", name, "\" is no list of whole numbers");
  return ids.get<std::vector<int64_t>>();
}

}  // namespace

/// What turns a model folder's texts into ids: loaded when the first text comes, for data may be tokens already.
class Texts {
 public:
  Texts(const std::string& folder, const LlamaConfig& config) : folder_(folder) {
    if (!config.eos_token_ids.empty()) end_ = config.eos_token_ids[0];
  }

  const Tokenizer& tokenizer() const {
    if (!tokenizer_) tokenizer_.emplace(folder_);
    return *tokenizer_;
  }

  /// As TRL has it: text that does not end with the end token gets it, as text. Where the tokenizer names none, the ids
  /// get that of config.json.
  std::vector<int64_t> ended(std::string text) const {
    const auto& end = tokenizer().eos_token();
    if (end && !text.ends_with(*end)) text += *end;
    std::vector<int64_t> ids = tokenizer().encode(text, false);
    if (!end && end_ && (ids.empty() || ids.back() != *end_)) ids.push_back(*end_);
    return ids;
  }

  std::string chat(const json& messages) const {
    TORCH_CHECK(!tokenizer().has_chat_template(),
                "the tokenizer has a chat template, which this cannot apply: give \"text\" or \"input_ids\"");
    TORCH_CHECK(messages.is_array(), "\"messages\" is no list");
    std::string text;
    for (const json& message : messages) {
      const std::string role = string_of(message, "role");
      text += (text.empty() ? "" : "\n") + role + ": " + string_of(message, "content");
    }
    return text;
  }

 private:
  std::string folder_;
  mutable std::optional<Tokenizer> tokenizer_;
  std::optional<int64_t> end_;
};

Data::Data(const std::vector<std::string>& files, const Options& options, const LlamaConfig& config)
    : options_(options), classes_(config.vocab_size), of_item_(options.loss == "dpo" ? 2 : 1) {
  const Texts texts(options.model, config);
  whole_rows_ = options.packing == "none" || of_item_ == 2;
  for (const std::string& file : files) {
    std::string extension = fs::path(file).extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(), ::tolower);
    if (extension == ".safetensors") {
      read_tensors(file);
    } else if (extension == ".jsonl") {
      read_lines(file, texts);
    } else {
      TORCH_CHECK(of_item_ == 1, file, ": --loss dpo needs *.jsonl with \"prompt\", \"chosen\" and \"rejected\"");
      try {
        add(text(texts, content(file)));
      } catch (const c10::Error& error) {
        const std::string why = error.what_without_backtrace();
        TORCH_CHECK(false, why.starts_with(file) ? "" : file + ": ", why);
      }
    }
  }
  if (!whole_rows_) cut();
  hash();
  TORCH_CHECK(size() > 0, files[0], ": no row of ", options.length, " tokens: give more data, or a smaller --length");
  check_labels(files[0]);
}

void Data::check_labels(const std::string& file) {
  for (const auto& row : rows_) without_labels_ += learnt(row) == 0;
  TORCH_CHECK(without_labels_ < int64_t(rows_.size()), file, ": no row has a label that is learnt",
              whole_rows_ ? ": prompts fill --length " + std::to_string(options_.length) + ", or labels are -100" : "");
}

int64_t Data::learnt(const std::pair<int64_t, int64_t>& row) const {
  int64_t count = 0;
  for (int64_t i = row.first + 1; i < row.second; ++i) count += labels_[i] != kIgnored && !(apart() && begins_[i]);
  return count;
}

void Data::add(const Document& document) {
  const auto& [ids, given] = document;
  TORCH_CHECK(given.empty() || given.size() == ids.size(), "labels must be as many as input_ids");
  size_t count = ids.size();
  if (whole_rows_) {
    count = std::min(count, size_t(options_.length));
    rows_.emplace_back(ids_.size(), ids_.size() + count);
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t label = given.empty() ? ids[i] : given[i];
    TORCH_CHECK(ids[i] >= 0 && ids[i] < classes_, "there is no token ", ids[i], " in a model of ", classes_);
    TORCH_CHECK(label == kIgnored || (label >= 0 && label < classes_), "there is no token ", label, ", a label");
    ids_.push_back(int32_t(ids[i])), labels_.push_back(int32_t(label)), begins_.push_back(i == 0);
  }
}

std::vector<int64_t> Data::framed(const Texts& texts, std::vector<int64_t> ids) {
  if (!options_.special_tokens) return ids;
  const int64_t before = int64_t(ids.size());
  ids = texts.tokenizer().with_special_tokens(std::move(ids));
  special_tokens_ += int64_t(ids.size()) - before;
  return ids;
}

/// As TRL's SFTTrainer: text that does not end with the end token gets it, then come the special tokens around both.
Data::Document Data::text(const Texts& texts, const std::string& text) {
  return {framed(texts, texts.ended(text)), {}};
}

/// Prompt and completion as one text, of which the beginning that it shares with the prompt alone is not learnt: the
/// special tokens before it neither. A completion has none before it.
Data::Document Data::answer(const Texts& texts, const std::string& prompt, const std::string& completion) {
  const auto asked = texts.tokenizer().encode(prompt, false);
  std::vector<int64_t> ids = texts.ended(completion);
  ids.insert(ids.begin(), asked.begin(), asked.end());
  Document document{framed(texts, std::move(ids)), {}};
  document.labels = document.ids;
  const auto alone = options_.special_tokens ? texts.tokenizer().with_special_tokens(asked) : asked;
  const auto learnt = std::mismatch(document.labels.begin(), document.labels.end(), alone.begin(), alone.end()).first;
  std::fill(document.labels.begin(), learnt, kIgnored);
  return document;
}

void Data::read_lines(const std::string& file, const Texts& texts) {
  std::ifstream in = opened(file);
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      TORCH_CHECK(!too_deep(line), "its brackets are too deep in each other");
      const json row = json::parse(line);
      TORCH_CHECK(row.is_object(), "no JSON object");
      const auto answered = [&](const char* name) {
        const std::string& prompt = string_of(row, "prompt");
        return answer(texts, prompt, string_of(row, name));
      };
      if (of_item_ == 2) {
        for (const char* name : {"chosen", "rejected"}) {
          add(answered(name));
          TORCH_CHECK(learnt(rows_.back()) > 0, "nothing of ", name, " is learnt: the prompt fills --length ",
                      options_.length);
        }
      } else if (row.contains("input_ids")) {
        Document document{ids_of(row, "input_ids"), {}};
        if (row.contains("labels")) document.labels = ids_of(row, "labels");
        add(document);
      } else if (row.contains("completion")) {
        add(answered("completion"));
      } else {
        TORCH_CHECK(row.contains("text") || row.contains("messages"),
                    "expected \"text\", \"messages\", \"prompt\" with \"completion\", or \"input_ids\"");
        add(text(texts, row.contains("text") ? string_of(row, "text") : texts.chat(row["messages"])));
      }
    } catch (const json::parse_error& error) {
      TORCH_CHECK(false, file, ", line ", number, ": no JSON at its byte ", error.byte);
    } catch (const json::exception& error) {
      TORCH_CHECK(false, file, ", line ", number, ": ", error.what());
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, file, ", line ", number, ": ", error.what_without_backtrace());
    }
  }
}

void Data::read_tensors(const std::string& file) {
  TORCH_CHECK(of_item_ == 1, file, ": --loss dpo needs *.jsonl with \"prompt\", \"chosen\" and \"rejected\"");
  const SafetensorsFile tensors(file);
  const at::Tensor ids = tensors.tensor("input_ids").to(at::kLong);
  TORCH_CHECK(ids.dim() == 2, file, ": input_ids must be [rows, tokens], got ", ids.sizes());
  const at::Tensor labels = tensors.contains("labels") ? tensors.tensor("labels").to(at::kLong) : ids;
  TORCH_CHECK(labels.sizes() == ids.sizes(), file, ": labels must be of input_ids' shape ", ids.sizes(), ", got ",
              labels.sizes());
  TORCH_CHECK(ids_.empty() || whole_rows_, file, ": give all data as tensors, or none");
  whole_rows_ = true;
  options_.length = std::max(options_.length, ids.size(1));  // they are rows already
  for (int64_t row = 0; row < ids.size(0); ++row) {
    const auto values = [&](const at::Tensor& of) {
      const at::Tensor line = of[row].contiguous();
      return std::vector<int64_t>(line.const_data_ptr<int64_t>(), line.const_data_ptr<int64_t>() + line.numel());
    };
    add({values(ids), values(labels)});
  }
}

/// Documents one after another, in an order drawn from the seed where there are several; what does not fill a row is
/// left out.
void Data::cut() {
  std::vector<std::pair<int64_t, int64_t>> documents;
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (begins_[i]) documents.emplace_back(i, i);
    documents.back().second = int64_t(i) + 1;
  }
  if (options_.shuffle && documents.size() > 1) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed);
    const at::Tensor drawn = at::randperm(int64_t(documents.size()), generator, at::kLong);
    std::vector<int32_t> ids, labels;
    std::vector<char> begins;
    for (int64_t i = 0; i < drawn.numel(); ++i) {
      const auto [from, to] = documents[drawn.const_data_ptr<int64_t>()[i]];
      ids.insert(ids.end(), ids_.begin() + from, ids_.begin() + to);
      labels.insert(labels.end(), labels_.begin() + from, labels_.begin() + to);
      begins.insert(begins.end(), begins_.begin() + from, begins_.begin() + to);
    }
    ids_.swap(ids), labels_.swap(labels), begins_.swap(begins);
  }
  for (int64_t at = 0; at + options_.length <= int64_t(ids_.size()); at += options_.length)
    rows_.emplace_back(at, at + options_.length);
}

/// FNV-1a (Fowler, Noll, Vo).
void Data::hash() {
  hash_ = 14695981039346656037u;
  const auto take = [&](uint64_t value) { hash_ = (hash_ ^ value) * 1099511628211u; };
  for (const auto& [from, to] : rows_) {
    take(uint64_t(to - from));
    for (int64_t i = from; i < to; ++i) take(uint32_t(ids_[i])), take(uint32_t(labels_[i]));
  }
}

int64_t Data::longest() const {
  int64_t longest = 0;
  for (const auto& [from, to] : rows_)
    for (int64_t i = from, begin = from; i < to; ++i) {
      if (apart() && begins_[i]) begin = i;
      longest = std::max(longest, i + 1 - begin);
    }
  return longest;
}

int64_t Data::sample(int64_t sample) const {
  const int64_t epoch = sample / size();
  if (!options_.shuffle) return sample % size();
  if (epoch != epoch_) {
    // As accelerate's SeedableRandomSampler draws it: transformers' Trainer has the same order.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed + epoch);
    const at::Tensor drawn = at::randperm(size(), generator, at::kLong);
    order_.assign(drawn.const_data_ptr<int64_t>(), drawn.const_data_ptr<int64_t>() + drawn.numel());
    epoch_ = epoch;
  }
  return order_[sample % size()];
}

Batch Data::batch(const std::vector<int64_t>& items) const {
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t part = 0; part < of_item_; ++part)
    for (const int64_t item : items) rows.push_back(rows_[item * of_item_ + part]);
  int64_t longest = 0;
  for (const auto& [from, to] : rows) longest = std::max(longest, to - from);
  const int64_t count = int64_t(rows.size());
  Batch batch{at::zeros({count, longest}, at::kLong), at::full({count, longest}, kIgnored, at::kLong), {}, 0};
  if (apart()) batch.positions = at::zeros({count, longest}, at::kLong);
  for (int64_t r = 0; r < count; ++r) {
    int64_t* ids = batch.ids.mutable_data_ptr<int64_t>() + r * longest;
    int64_t* labels = batch.labels.mutable_data_ptr<int64_t>() + r * longest;
    int64_t* positions = apart() ? batch.positions.mutable_data_ptr<int64_t>() + r * longest : nullptr;
    const auto [from, to] = rows[r];
    batch.packed = batch.packed || (apart() && to - from < longest);
    for (int64_t i = 0; i < to - from; ++i) {
      const bool begins = apart() && begins_[from + i];
      batch.packed = batch.packed || (begins && i > 0);
      ids[i] = ids_[from + i];
      labels[i] = begins ? kIgnored : labels_[from + i];  // nothing before it says what it is
      if (apart()) positions[i] = i == 0 || begins ? 0 : positions[i - 1] + 1;
    }
    batch.counted += learnt(rows[r]);
  }
  if (of_item_ == 2) batch.counted = int64_t(items.size());
  return batch;
}

}  // namespace liger::train
