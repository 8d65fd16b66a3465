#include "liger/models/safetensors.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/types.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <nlohmann/json.hpp>
#include "liger/models/json.h"

namespace liger {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit

struct Name {
  const char* name;
  at::ScalarType dtype;
};
constexpr Name kStoredDtypes[] = {{"F64", at::kDouble},
                                  {"F32", at::kFloat},
                                  {"F16", at::kHalf},
                                  {"BF16", at::kBFloat16},
                                  {"F8_E4M3", at::kFloat8_e4m3fn},
                                  {"F8_E5M2", at::kFloat8_e5m2},
                                  {"I64", at::kLong},
                                  {"I32", at::kInt},
                                  {"I16", at::kShort},
                                  {"I8", at::kChar},
                                  {"U8", at::kByte},
                                  {"BOOL", at::kBool}};

}  // namespace

struct SafetensorsFile::Content {
  /// A file's bytes in memory, in pages that a write copies.
  struct Mapping {
    explicit Mapping(const std::string& path) {
      const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
      TORCH_CHECK(file >= 0, path, ": ", std::strerror(errno));
      struct stat info{};
      const bool known = ::fstat(file, &info) == 0;
      size = known ? uint64_t(info.st_size) : 0;
      if (size > 0) bytes = static_cast<char*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0));
      const int error = errno;
      ::close(file);
      TORCH_CHECK(known && bytes != MAP_FAILED, path, ": ", std::strerror(error));
    }
    ~Mapping() {
      if (bytes) ::munmap(bytes, size);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* bytes = nullptr;
    uint64_t size = 0;
  };

  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    uint64_t begin, end;
  };

  explicit Content(const std::string& path) : path(path), mapping(std::make_shared<Mapping>(path)) {
    const auto fail = [&](const auto&... why) { TORCH_CHECK(false, path, ": ", why...); };
    if (mapping->size < 8) fail("no safetensors file: it has ", mapping->size, " bytes");
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(mapping->bytes[i]);
    if (length > kLongestHeader) fail("no safetensors file: a header of ", length, " bytes");
    if (length > mapping->size - 8) fail("truncated: a header of ", length, " bytes in a file of ", mapping->size);
    first = 8 + length;
    const uint64_t data = mapping->size - first;
    const json header = parse_json({mapping->bytes + 8, length});
    if (!header.is_object()) fail("its header is no JSON object");
    std::vector<std::pair<uint64_t, uint64_t>> spans;
    for (const auto& [name, value] : header.items()) {
      try {
        if (name == "__metadata__") {
          metadata = value.get<std::map<std::string, std::string>>();
          continue;
        }
        const auto dtype_name = value.at("dtype").get<std::string>();
        const auto* dtype = std::find_if(std::begin(kStoredDtypes), std::end(kStoredDtypes),
                                         [&](const Name& n) { return n.name == dtype_name; });
        if (dtype == std::end(kStoredDtypes)) fail(name, " is of an unknown dtype, ", dtype_name);
        const auto offsets = value.at("data_offsets").get<std::vector<uint64_t>>();
        Entry entry{dtype->dtype, value.at("shape").get<std::vector<int64_t>>(), 0, 0};
        uint64_t bytes = c10::elementSize(entry.dtype);
        bool fits = offsets.size() == 2;
        for (const int64_t n : entry.shape)
          fits = fits && n >= 0 && !__builtin_mul_overflow(bytes, uint64_t(n), &bytes);
        if (!fits) fail(name, " has no valid shape and offsets");
        entry.begin = offsets[0], entry.end = offsets[1];
        if (entry.end > data) fail("truncated: ", name, " ends at byte ", entry.end, " of ", data);
        if (entry.begin > entry.end || entry.end - entry.begin != bytes)
          fail(name, " of shape ", at::IntArrayRef(entry.shape), " has ", entry.end - entry.begin, " bytes");
        spans.emplace_back(entry.begin, entry.end);
        entries.emplace(name, std::move(entry));
      } catch (const json::exception& error) { fail(name, ": ", error.what()); }
    }
    std::sort(spans.begin(), spans.end());
    uint64_t at = 0;
    for (const auto& [begin, end] : spans) {
      if (begin != at) fail("its tensors overlap, or leave bytes out");
      at = end;
    }
    if (at != data) fail("its tensors leave bytes out");
  }

  std::string path;
  std::shared_ptr<Mapping> mapping;
  uint64_t first = 0;
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(const std::string& path) : content_(std::make_shared<const Content>(path)) {}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> found;
  for (const auto& [name, entry] : content_->entries) found.push_back(name);
  return found;
}

bool SafetensorsFile::contains(const std::string& name) const { return content_->entries.contains(name); }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return content_->metadata; }

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = content_->entries.find(name);
  TORCH_CHECK(found != content_->entries.end(), content_->path, ": there is no ", name);
  const auto& [dtype, shape, begin, end] = found->second;
  char* bytes = content_->mapping->bytes + content_->first + begin;
  const auto options = at::TensorOptions().dtype(dtype);
  if (begin == end) return at::empty(shape, options);
  if (reinterpret_cast<uintptr_t>(bytes) % c10::elementSize(dtype) != 0) {
    const at::Tensor copy = at::empty(shape, options);
    std::memcpy(copy.data_ptr(), bytes, end - begin);
    return copy;
  }
  return at::from_blob(bytes, shape, [keep = content_->mapping](void*) {}, options);
}

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  // The largest elements come first, so that every tensor is aligned.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return tensors[a].second.element_size() > tensors[b].second.element_size();
  });
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t at = 0;
  for (const size_t i : order) {
    const auto& [name, tensor] = tensors[i];
    const auto* dtype = std::find_if(std::begin(kStoredDtypes), std::end(kStoredDtypes),
                                     [&, &tensor = tensor](const Name& n) { return n.dtype == tensor.scalar_type(); });
    TORCH_CHECK(dtype != std::end(kStoredDtypes), path, ": ", name, " is of ", tensor.scalar_type(),
                ", which safetensors does not have");
    TORCH_CHECK(!header.contains(name), path, ": two tensors are called ", name);
    const int64_t bytes = tensor.numel() * tensor.element_size();
    header[name] = {{"dtype", dtype->name}, {"shape", tensor.sizes().vec()}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  NewFile file(path);
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(uint64_t(text.size()) >> (8 * i));
  file.write({length, 8}).write(text);
  for (const size_t i : order) {
    const at::Tensor tensor = tensors[i].second.detach().to(at::kCPU).contiguous();
    if (tensor.numel() > 0)
      file.write({static_cast<const char*>(tensor.const_data_ptr()), size_t(tensor.numel() * tensor.element_size())});
  }
  file.finish();
}

Checkpoint::Checkpoint(const std::string& folder) {
  const fs::path index = fs::path(folder) / "model.safetensors.index.json",
                 whole = fs::path(folder) / "model.safetensors";
  if (fs::exists(whole) || !fs::exists(index)) {
    files_.emplace_back(whole.string());
    for (const auto& name : files_[0].names()) file_of_[name] = 0;
    return;
  }
  const json content = read_json(index.string());
  std::map<std::string, size_t> opened;
  TORCH_CHECK(content.contains("weight_map") && content["weight_map"].is_object(), index.string(),
              ": there is no weight_map");
  for (const auto& [name, file] : content["weight_map"].items()) {
    TORCH_CHECK(file.is_string() && !fs::path(file.get<std::string>()).has_parent_path(), index.string(), ": ", name,
                " has no file of this folder");
    const auto [place, is_new] = opened.emplace(file.get<std::string>(), files_.size());
    if (is_new) files_.emplace_back((fs::path(folder) / place->first).string());
    TORCH_CHECK(files_[place->second].contains(name), index.string(), ": ", place->first, " does not hold ", name);
    file_of_[name] = place->second;
  }
  for (const auto& [file, i] : opened)  // what the index forgets is of the checkpoint too
    for (const auto& name : files_[i].names())
      TORCH_CHECK(file_of_.emplace(name, i).first->second == i, index.string(), ": ", file, " holds ", name,
                  ", and another file does");
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> found;
  for (const auto& [name, file] : file_of_) found.push_back(name);
  return found;
}

at::Tensor Checkpoint::tensor(const std::string& name) const {
  const auto found = file_of_.find(name);
  TORCH_CHECK(found != file_of_.end(), "the checkpoint has no ", name);
  return files_[found->second].tensor(name);
}

void save_checkpoint(const std::string& folder, const NamedTensors& tensors, int64_t max_shard_bytes) {
  fs::create_directories(folder);
  std::vector<NamedTensors> shards(1);
  int64_t total = 0, in_shard = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t bytes = tensor.numel() * tensor.element_size();
    if (in_shard > 0 && in_shard + bytes > max_shard_bytes) shards.emplace_back(), in_shard = 0;
    shards.back().emplace_back(name, tensor);
    in_shard += bytes, total += bytes;
  }
  const auto path = [&](const std::string& name) { return (fs::path(folder) / name).string(); };
  const std::string index = path("model.safetensors.index.json");
  if (shards.size() == 1) {
    save_safetensors(path("model.safetensors"), shards[0]);
    fs::remove(index);  // of an earlier checkpoint in shards
    return;
  }
  json map = json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    save_safetensors(path(name), shards[i]);
    for (const auto& [tensor, value] : shards[i]) map[tensor] = name;
  }
  write_json(index, {{"metadata", {{"total_size", total}}}, {"weight_map", map}});
  fs::remove(path("model.safetensors"));  // of an earlier checkpoint, which a reader would prefer
}

}  // namespace liger
