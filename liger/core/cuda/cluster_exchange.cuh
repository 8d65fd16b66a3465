#pragma once
// Blocks of one cluster: which this is, and values that they send to one another through distributed shared memory.
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// This block's place among the blocks that share its row.
__device__ inline int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return int(r);
#else
  return 0;
#endif
}

__device__ inline int cluster_size() {
#if __CUDA_ARCH__ >= 900
  unsigned n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return int(n);
#else
  return 1;
#endif
}

/// What each block of a cluster has to tell the others, again and again: every block calls this as often. Values are
/// sent into the others' shared memory, where a barrier of the receiver's counts their bytes. (A barrier of the cluster
/// would wait until the whole device sees all that a thread has written, and drop what the multiprocessor has cached:
/// measured, a fifth of a wide norm.) kBuffers = 1: once.
template <class V, int kBuffers = 2>
class ClusterExchange {
 public:
  __device__ ClusterExchange() {
#if __CUDA_ARCH__ >= 900
    if (cluster_size() == 1) return;
    __shared__ Box mine;
    box_ = &mine;
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : box_->barriers)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  }

  /// f(v of each block, in their order). All threads of a block come here with one v.
  template <class F>
  __device__ void operator()(const V& v, F f) {
#if __CUDA_ARCH__ >= 900
    const int size = cluster_size();
    if (size == 1) return f(v);
    if (!open_) asm volatile("barrier.cluster.wait;" ::: "memory");  // until the others' memory is ready
    open_ = true;
    const unsigned barrier = shared_address(&box_->barriers[slot_]);
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size * int(sizeof(V)))
                   : "memory");
    if (int(threadIdx.x) < size) {
      unsigned to, its_barrier, words[kWords];
      memcpy(words, &v, sizeof(V));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(to)
          : "r"(shared_address(&box_->slots[slot_][cluster_rank()])), "r"(threadIdx.x));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_barrier) : "r"(barrier), "r"(threadIdx.x));
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to + 4 * i),
                     "r"(words[i]), "r"(its_barrier)
                     : "memory");
    }
    for (unsigned arrived = 0; !arrived;)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(arrived)
                   : "r"(barrier), "r"(parities_ >> slot_ & 1)
                   : "memory");
    for (int rank = 0; rank < size; ++rank) f(box_->slots[slot_][rank]);
    if (kBuffers > 1)
      parities_ ^= 1u << slot_,
          slot_ ^= 1;  // a block that is ahead writes next to what others still read; further ahead it cannot get
#else
    f(v);
#endif
  }

 private:
  static constexpr int kMost = 8, kWords = sizeof(V) / 4;
  static_assert(sizeof(V) % 4 == 0);
  struct Box {
    uint64_t barriers[kBuffers];
    V slots[kBuffers][kMost];
  };
  Box* box_ = nullptr;
  unsigned slot_ = 0, parities_ = 0;
  bool open_ = false;
};

}  // namespace liger::cuda
