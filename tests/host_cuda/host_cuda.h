// CUDA kernels on the CPU: a CTA's threads are fibers of one thread of the host, which take turns at barriers
// and shuffles in a random order: a barrier that is missing shows as a wrong result. For the kernels that
// need no more than shared memory, barriers and warp shuffles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#undef __shared__
#define __shared__ static  // CTAs run one after the other
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __forceinline__
#define __forceinline__ inline

inline uint3 threadIdx, blockIdx;  // of the fiber that runs
inline dim3 blockDim, gridDim;

namespace host_cuda {

// Serves one thread of a CTA after the other. Started by a ucontext, then switched to by jumps: swapcontext
// makes two system calls.
struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  uint3 index;
  int rank;
  bool done = false;
};

// Threads that wait for each other.
struct Barrier {
  int alive = 0, arrived = 0;
  unsigned round = 0;
  void Release() { arrived = 0, ++round; }
};

class Cta {
 public:
  static Cta& Get() {
    static Cta cta;
    return cta;
  }

  void Run(dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
    const int threads = block.x * block.y * block.z;
    kernel_ = &kernel;
    shared_.assign(shared_bytes / 16 + 1, {});
    std::memset(shared_.data(), 0xff, shared_.size() * 16);  // NaN to who reads what none wrote
    cta_ = {threads};
    warps_.assign((threads + 31) / 32, {});
    slots_.assign(threads, 0);
    fibers_.resize(std::max<size_t>(fibers_.size(), threads));
    std::vector<int> ready;
    for (int i = 0; i < threads; ++i) {
      Fiber& f = fibers_[i];
      f.index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
      f.rank = i, f.done = false;
      ++warps_[i / 32].alive;
      ready.push_back(i);
    }
    while (!ready.empty()) {
      std::shuffle(ready.begin(), ready.end(), random_);
      for (int i : ready) {
        current_ = &fibers_[i];
        threadIdx = current_->index;
        Resume(*current_);
      }
      std::erase_if(ready, [&](int i) { return fibers_[i].done; });
    }
  }

  void Sync() { Wait(cta_); }
  void Sync(unsigned index, int threads) {  // of `threads` threads
    named_[index].alive = threads;
    Wait(named_[index]);
  }
  void SyncWarp() { Wait(warps_[current_->rank / 32]); }
  int rank() const { return current_->rank; }
  void* shared() { return shared_.data(); }

  // What lane `from` of the warp has.
  uint32_t Exchange(uint32_t mine, int from) {
    slots_[current_->rank] = mine;
    SyncWarp();
    const uint32_t theirs = slots_[current_->rank / 32 * 32 + from];
    SyncWarp();
    return theirs;
  }

  // What the lanes of the warp have.
  template <typename T>
  std::array<T, 32> Gather(const T& mine) {
    static T all[1024];
    std::array<T, 32> theirs;
    all[current_->rank] = mine;
    SyncWarp();
    std::copy_n(all + current_->rank / 32 * 32, 32, theirs.begin());
    SyncWarp();
    return theirs;
  }

 private:
  static void Enter() {
    Cta& cta = Get();
    Fiber& self = *cta.current_;
    for (;; cta.Pause(self)) {
      (*cta.kernel_)();
      self.done = true;
      for (Barrier* b : {&cta.cta_, &cta.warps_[self.rank / 32]})
        if (--b->alive == b->arrived && b->arrived > 0) b->Release();
    }
  }

  // Returns when the fiber pauses.
  void Resume(Fiber& f) {
    constexpr size_t kStack = 256 << 10;
    if (_setjmp(scheduler_)) return;
    if (f.stack) _longjmp(f.resume, 1);
    f.stack.reset(new char[kStack]);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get(), f.start.uc_stack.ss_size = kStack;
    makecontext(&f.start, &Cta::Enter, 0);
    setcontext(&f.start);
  }

  // Returns when the fiber is resumed.
  void Pause(Fiber& f) {
    if (!_setjmp(f.resume)) _longjmp(scheduler_, 1);
  }

  void Wait(Barrier& b) {
    Fiber& self = *current_;
    const unsigned round = b.round;
    if (++b.arrived == b.alive) return b.Release();
    while (b.round == round) Pause(self);
  }

  struct alignas(16) Bytes16 {
    char bytes[16];
  };
  const std::function<void()>* kernel_ = nullptr;
  std::vector<Bytes16> shared_;
  std::vector<uint32_t> slots_;
  std::deque<Fiber> fibers_;  // a fiber stays where it is
  Barrier cta_, named_[16];
  std::vector<Barrier> warps_;
  jmp_buf scheduler_;
  Fiber* current_ = nullptr;
  std::mt19937 random_{0};
};

// XLA's CPU backend may run calls of one program at the same time; kernels take turns.
inline void Launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  gridDim = grid, blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        Cta::Get().Run(block, shared_bytes, kernel);
      }
}

}  // namespace host_cuda

template <typename... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), P... args) {
  host_cuda::Launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(args...); });
  return cudaSuccess;
}

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace host_cuda {

template <typename To, typename From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::Cta::Get().Sync(); }
namespace te {
inline void NamedBarrier(unsigned index, unsigned threads) { host_cuda::Cta::Get().Sync(index, threads); }
}  // namespace te
inline void __syncwarp(unsigned = ~0u) { host_cuda::Cta::Get().SyncWarp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = host_cuda::Cta::Get().rank() % 32;
  return host_cuda::Bits<T>(host_cuda::Cta::Get().Exchange(host_cuda::Bits<uint32_t>(value), lane ^ mask));
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return host_cuda::Bits<T>(host_cuda::Cta::Get().Exchange(host_cuda::Bits<uint32_t>(value), from));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int mask = 16; mask > 0; mask /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned peers = 0;
  for (int other = 0; other < 32; ++other)
    peers |= unsigned(int(host_cuda::Cta::Get().Exchange(unsigned(value), other)) == value) << other;
  return peers;
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline float __uint_as_float(unsigned bits) { return host_cuda::Bits<float>(bits); }
inline unsigned __float_as_uint(float f) { return host_cuda::Bits<unsigned>(f); }
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, const T& value) {
  *p = value;
}
template <typename T>
void __stcg(T* p, const T& value) {
  *p = value;
}
inline int atomicAdd(int* p, int value) {  // a fiber runs until it waits
  return std::exchange(*p, *p + value);
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
// CTAs run in the order of their indices: who waits for another would wait for ever, so none may have to.
inline void __nanosleep(unsigned) { std::abort(); }
// Of dynamic shared memory: addresses of 32 bits count from where it begins.
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<const char*>(p) - static_cast<const char*>(host_cuda::Cta::Get().shared());
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? std::common_type_t<A, B>(a) : std::common_type_t<A, B>(b);
}
template <typename A, typename B>
auto max(A a, B b) {
  return a > b ? std::common_type_t<A, B>(a) : std::common_type_t<A, B>(b);
}

#include "tensor_cores.h"
