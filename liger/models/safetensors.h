#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Files of named tensors in the safetensors format (https://huggingface.co/docs/safetensors): 8 bytes that hold the
/// header's length, a JSON header with dtype, shape and offsets of each tensor, and the tensors' bytes.
namespace liger {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A memory-mapped file. Its tensors are views of the mapping, which lives as long as one of them; writing to one
/// changes memory, never the file.
class SafetensorsFile {
 public:
  /// Raises c10::Error, naming the file, if it cannot be read, is truncated, or its header is too long, no JSON, or
  /// does not describe the bytes that follow.
  explicit SafetensorsFile(const std::string& path);

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const;

  /// Raises c10::Error for a name that is not there. A tensor whose bytes are not aligned for its dtype is a copy.
  at::Tensor tensor(const std::string& name) const;

  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// Writes a file of the tensors, wherever they are and however they lie, next to `path`, and then moves it there: a
/// reader sees the old file or the new one. Raises c10::Error where it cannot be written, or for two tensors of one
/// name.
void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// The tensors of a Hugging Face checkpoint folder: of model.safetensors or, where there is none, all those of the
/// files that model.safetensors.index.json names.
class Checkpoint {
 public:
  /// Raises c10::Error, naming the file, for what SafetensorsFile refuses, and for an index that names what its files
  /// do not hold, and a tensor that two of them hold.
  explicit Checkpoint(const std::string& folder);

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return file_of_.contains(name); }
  at::Tensor tensor(const std::string& name) const;

 private:
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> file_of_;
};

/// Writes model.safetensors, or files of at most max_shard_bytes (but of one tensor at least) and their index.
void save_checkpoint(const std::string& folder, const NamedTensors& tensors,
                     int64_t max_shard_bytes = int64_t(5) << 30);

}  // namespace liger
