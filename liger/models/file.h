#pragma once
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace liger {

/// A file that is written next to its place, and moved there when all of it is on the disk: a reader sees the old file
/// or the new one. What fails raises c10::Error with the system's reason.
class NewFile {
 public:
  explicit NewFile(std::string path) : path_(std::move(path)), beside_(path_ + ".tmp" + std::to_string(::getpid())) {
    file_ = ::open(beside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    check(file_ >= 0);
  }
  ~NewFile() {
    if (file_ >= 0) ::close(file_);
    if (!beside_.empty()) ::unlink(beside_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  NewFile& write(std::string_view bytes) {
    constexpr size_t kMost = size_t(1) << 30;  // Linux writes less than 2 GiB at once
    while (!bytes.empty()) {
      const auto written = ::write(file_, bytes.data(), std::min(bytes.size(), kMost));
      check(written >= 0 || errno == EINTR);
      if (written > 0) bytes.remove_prefix(size_t(written));
    }
    return *this;
  }

  /// Puts it in its place.
  void finish() {
    check(::fsync(file_) == 0);
    check(::close(std::exchange(file_, -1)) == 0);
    check(std::rename(beside_.c_str(), path_.c_str()) == 0);
    beside_.clear();
  }

 private:
  void check(bool holds) const { TORCH_CHECK(holds, path_, ": ", std::strerror(errno)); }

  std::string path_, beside_;
  int file_ = -1;
};

}  // namespace liger
