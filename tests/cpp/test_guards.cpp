// Nothing is written past a tensor: every allocation of a test stands between two guards, which are looked at when it
// is freed.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <vector>
#include "liger/ops.h"

namespace {

using at::Tensor;

/// [bytes asked for, to 64][guard][what was asked for][guard]
class GuardedAllocator : public c10::Allocator {
 public:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kMark = 0xa5;
  inline static std::atomic<int> broken = 0;

  c10::DataPtr allocate(size_t bytes) override {
    auto* base = static_cast<unsigned char*>(std::aligned_alloc(64, (bytes + 3 * kGuard + 63) / 64 * 64));
    *reinterpret_cast<size_t*>(base) = bytes;
    unsigned char* p = base + 2 * kGuard;
    std::fill_n(p - kGuard, kGuard, kMark), std::fill_n(p + bytes, kGuard, kMark);
    return {p, p, release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    auto* p = static_cast<unsigned char*>(data);
    const size_t bytes = *reinterpret_cast<size_t*>(p - 2 * kGuard);
    const auto whole = [](const unsigned char* guard) {
      return std::all_of(guard, guard + kGuard, [](unsigned char c) { return c == kMark; });
    };
    broken += !whole(p - kGuard) + !whole(p + bytes);
    std::free(p - 2 * kGuard);
  }
};

class Guarded : public testing::Test {
 protected:
  void SetUp() override {
    GuardedAllocator::broken = 0;
    before = c10::GetAllocator(c10::kCPU);
    c10::SetCPUAllocator(&allocator, 255);
  }
  void TearDown() override { c10::SetCPUAllocator(before, 255); }

  inline static GuardedAllocator allocator;
  c10::Allocator* before;
};

class Guards : public Guarded, public testing::WithParamInterface<at::ScalarType> {};

Tensor leaf(at::IntArrayRef shape, at::ScalarType type) { return at::randn(shape, type).requires_grad_(); }

void backward(const Tensor& y) { y.sum().backward(); }

TEST_F(Guarded, Notice) {
  Tensor x = at::zeros({3});
  static_cast<char*>(x.data_ptr())[12] ^= 1;
  x.reset();
  EXPECT_EQ(GuardedAllocator::broken, 1);
}

TEST_P(Guards, Hold) {
  const auto type = GetParam();
  constexpr int64_t kRows = 5;
#ifdef LIGER_EMULATED
  const std::vector<int64_t> widths{1, 7, 9, 33};  // these take their time
#else
  std::vector<int64_t> widths(33);
  std::iota(widths.begin(), widths.end(), 1);
#endif
  for (const int64_t n : widths) {
    const auto row = [&] { return leaf({n}, type); };
    const auto x = [&] { return leaf({kRows, n}, type); };
    const Tensor labels = at::randint(n, {kRows}, at::kLong);
    backward(liger::rms_norm(x(), row()));
    backward(std::get<0>(liger::fused_add_rms_norm(x(), x(), row())));
    backward(liger::modulated_rms_norm(x(), row(), x(), x()));
    backward(liger::gated_rms_norm(x(), x(), row()));
    backward(liger::causal_conv1d(leaf({2, n, kRows}, type), leaf({n, 4}, type), row(), true));
    backward(liger::causal_conv1d(leaf({2, kRows, n}, type).transpose(1, 2), leaf({n, 4}, type), row(), true));
    backward(liger::layer_norm(x(), row(), row()));
    backward(liger::dyt(x(), leaf({1}, type), row(), row()));
    backward(liger::poly_norm(x(), leaf({3}, type), leaf({1}, type)));
    backward(liger::group_norm(leaf({2, 4, n}, type), leaf({4}, type), leaf({4}, type), 2));
    backward(liger::activate(x()));
    backward(liger::gated(x(), x()));
    backward(liger::gated_packed(leaf({kRows, 2 * n}, type)));
    backward(liger::activated_linear(x(), {leaf({7, n}, type)}));
    backward(liger::gated_linear(leaf({kRows, 2 * n}, type), {leaf({7, n}, type)}));
    backward(liger::gated_mlp(x(), {leaf({7, n}, type)}, {leaf({7, n}, type)}, {leaf({n, 7}, type)}));
    const Tensor angle = at::randn({1, kRows, 2 * n}, type);
    backward(
        std::get<0>(liger::rope(leaf({1, 2, kRows, 2 * n}, type), leaf({1, 1, kRows, 2 * n}, type), angle, angle)));
    backward(liger::rope_packed(leaf({1, kRows, 4 * 2 * n}, type), angle, angle, 2, 1));
    backward(liger::embedding(leaf({9, n}, type), at::randint(9, {kRows}, at::kLong)));
    liger::int2_matmul(at::randint(-128, 128, {kRows, 4 * n}, at::kChar),
                       liger::int2_pack(at::randint(-1, 3, {4 * n, 3}, at::kInt)));
    liger::CrossEntropyOptions smooth;
    smooth.label_smoothing = 0.1;
    backward(liger::cross_entropy(x(), labels).loss);
    backward(liger::cross_entropy(x(), labels, smooth).loss);
    backward(liger::fused_linear_cross_entropy(leaf({kRows, 6}, type), leaf({n, 6}, type), labels).loss);
    backward(liger::kl_div(x(), at::rand({kRows, n}, type)));
    backward(liger::jsd(x(), at::randn({kRows, n}, type)));
    backward(liger::tvd(x(), at::rand({kRows, n}, type)));
    backward(liger::softmax(x()));
    backward(liger::softmax(leaf({2, kRows, n}, type), true));
    backward(liger::attention_residuals(leaf({3, kRows, n}, type), row(), row()));
    backward(liger::mhc_pre(leaf({kRows, 3, n}, type), leaf({kRows, 3}, at::kFloat)));
    backward(liger::mhc_post_res(leaf({kRows, 3, n}, type), x(), leaf({kRows, 3}, at::kFloat),
                                 leaf({kRows, 3, 3}, at::kFloat)));
    const auto alpha = [] { return leaf({}, at::kFloat); };
    backward(std::get<2>(liger::mhc_coefficients(leaf({kRows, 3, n}, type), leaf({3 * n, 15}, type),
                                                 leaf({15}, at::kFloat), alpha(), alpha(), alpha())));
    backward(liger::neighborhood_attention(x(), x(), x(), 3));
    backward(liger::sparsemax(x()));
    backward(std::get<0>(liger::selective_log_softmax(x(), labels)));
    ASSERT_EQ(GuardedAllocator::broken, 0) << "width " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Guards, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& type) { return at::toString(type.param); });

}  // namespace
