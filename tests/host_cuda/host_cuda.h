// CUDA kernels on the CPU: the threads of a cluster of CTAs are fibers of one thread of the host, which take
// turns at barriers and shuffles in a random order: a barrier that is missing shows as a wrong result.
// Asynchronous copies arrive when they are waited for, not before. Clusters of more than one CTA must have
// all their shared memory in the dynamic part.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#undef __shared__
#define __shared__ static  // clusters run one after the other
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

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint3 index, cta_index;
  int rank;  // in the cluster
  bool done = false;
  struct Copy {
    uint32_t to;
    const void* from;
  };
  std::vector<std::vector<Copy>> copies;  // on their way: groups, the last not yet committed
};

// Threads that wait for each other.
struct Barrier {
  int alive = 0, arrived = 0;
  unsigned round = 0;
  void Release() { arrived = 0, ++round; }
};

// Bytes that a CTA expects, and has got, in a round.
struct Messages {
  int bytes = 0;
  bool expected = false;
  unsigned round = 0;
  void Add(int more) {
    bytes += more;
    if (expected && bytes == 0) expected = false, ++round;
  }
};

class Cluster {
 public:
  static Cluster& Get() {
    static Cluster cluster;
    return cluster;
  }

  // first: the index of its first CTA; its `ctas` CTAs follow in x.
  void Run(uint3 first, int ctas, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
    constexpr size_t kStack = 64 << 10;
    const int threads = block.x * block.y * block.z;  // of a CTA; whole warps if there are several CTAs
    kernel_ = &kernel, threads_ = threads, ctas_ = ctas;
    shared_bytes_ = (shared_bytes / 16 + 1) * 16;
    shared_.assign(shared_bytes_ / 16 * ctas, {});
    std::memset(shared_.data(), 0xff, shared_.size() * 16);  // NaN to who reads what none wrote
    cluster_ = {threads * ctas};
    cta_barriers_.assign(ctas * kNamed, {});
    messages_.clear();
    warps_.assign((threads * ctas + 31) / 32, {});
    slots_.assign(threads * ctas, 0);
    fibers_.resize(std::max<size_t>(fibers_.size(), threads * ctas));
    std::vector<int> ready;
    for (int i = 0; i < threads * ctas; ++i) {
      Fiber& f = fibers_[i];
      if (!f.stack) f.stack.reset(new char[kStack]);
      const int t = i % threads;
      f.index = {t % block.x, t / block.x % block.y, t / (block.x * block.y)};
      f.cta_index = {first.x + i / threads, first.y, first.z};
      f.rank = i, f.done = false;
      f.copies.assign(1, {});
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = kStack;
      f.context.uc_link = &scheduler_;
      makecontext(&f.context, reinterpret_cast<void (*)()>(&Cluster::Enter), 0);
      ++warps_[i / 32].alive, ++cta_barriers_[i / threads * kNamed].alive;
      ready.push_back(i);
    }
    while (!ready.empty()) {
      std::shuffle(ready.begin(), ready.end(), random_);
      for (int i : ready) {
        current_ = &fibers_[i];
        threadIdx = current_->index, blockIdx = current_->cta_index;
        swapcontext(&scheduler_, &current_->context);
      }
      std::erase_if(ready, [&](int i) { return fibers_[i].done; });
    }
  }

  void Sync() { Wait(cta_barriers_[cta() * kNamed]); }
  void SyncWarp() { Wait(warps_[current_->rank / 32]); }
  void SyncNamed(int id, int threads) {
    Barrier& b = cta_barriers_[cta() * kNamed + id];
    b.alive = threads;
    Wait(b);
  }
  void Arrive() {
    if (++cluster_.arrived == cluster_.alive) cluster_.Release();
  }
  void AwaitCluster(unsigned round) {
    while (cluster_.round == round) Yield();
  }
  unsigned cluster_round() const { return cluster_.round; }
  int rank() const { return current_->rank; }
  int cta() const { return current_->rank / threads_; }
  void* shared() { return reinterpret_cast<char*>(shared_.data()) + cta() * shared_bytes_; }

  // Shared memory of all CTAs as one: the 32-bit addresses of the own part. Static __shared__ has none.
  uint32_t Address(const void* p) const { return static_cast<const char*>(p) - bytes(); }
  char* At(uint32_t address) {
    if (address >= shared_bytes_ * ctas_)
      std::fprintf(stderr, "no shared memory at %u\n", address), std::abort();
    return bytes() + address;
  }
  uint32_t AddressIn(uint32_t address, int cta) const {
    return address + (cta - this->cta()) * int(shared_bytes_);
  }

  void Copy16(uint32_t to, const void* from) {
    std::memset(At(to), 0xff, 16);  // until it arrives it is not what was there
    current_->copies.back().push_back({to, from});
  }
  void CommitCopies() { current_->copies.emplace_back(); }
  void AwaitCopies(size_t pending) {
    auto& groups = current_->copies;
    while (groups.size() - 1 > pending) {
      for (const auto& copy : groups.front()) std::memcpy(At(copy.to), copy.from, 16);
      groups.erase(groups.begin());
    }
  }

  Messages& messages(uint32_t barrier) { return messages_[barrier]; }
  void AwaitMessages(uint32_t barrier, unsigned round) {
    while (messages_[barrier].round <= round) Yield();
  }

  // What lane `from` of the warp has.
  uint32_t Exchange(uint32_t mine, int from) {
    slots_[current_->rank] = mine;
    SyncWarp();
    const uint32_t theirs = slots_[current_->rank / 32 * 32 + from];
    SyncWarp();
    return theirs;
  }

 private:
  static constexpr int kNamed = 16;  // barriers of a CTA; 0 is that of __syncthreads

  static void Enter() {
    Cluster& cluster = Get();
    (*cluster.kernel_)();
    Fiber& self = *cluster.current_;
    self.done = true;
    for (Barrier* b : {&cluster.cta_barriers_[cluster.cta() * kNamed], &cluster.warps_[self.rank / 32]})
      if (--b->alive == b->arrived && b->arrived > 0) b->Release();
  }

  void Yield() { swapcontext(&current_->context, &scheduler_); }
  void Wait(Barrier& b) {
    const unsigned round = b.round;
    if (++b.arrived == b.alive) return b.Release();
    while (b.round == round) Yield();
  }
  char* bytes() { return reinterpret_cast<char*>(shared_.data()); }
  const char* bytes() const { return reinterpret_cast<const char*>(shared_.data()); }

  struct alignas(16) Bytes16 {
    char bytes[16];
  };
  const std::function<void()>* kernel_ = nullptr;
  int threads_ = 0, ctas_ = 0;  // threads of a CTA
  size_t shared_bytes_ = 0;     // of a CTA
  std::vector<Bytes16> shared_;
  std::vector<uint32_t> slots_;
  std::vector<Fiber> fibers_;
  Barrier cluster_;
  std::vector<Barrier> cta_barriers_;
  std::vector<Barrier> warps_;
  std::map<uint32_t, Messages> messages_;
  ucontext_t scheduler_;
  Fiber* current_ = nullptr;
  std::mt19937 random_{0};
};

inline void Launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel,
                   int ctas = 1) {
  gridDim = grid, blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += ctas)
        Cluster::Get().Run({x, y, z}, ctas, block, shared_bytes, kernel);
}

template <typename... Parameters, typename... Args>
cudaError_t LaunchEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Args... args) {
  int ctas = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) ctas = config->attrs[i].val.clusterDim.x;
  Launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(args...); }, ctas);
  return cudaSuccess;
}

template <typename To, typename From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace host_cuda

// What the runtime is asked about kernels: a device where few clusters fit, so that kernels that stay walk
// far.
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, void (*)(Parameters...)) {
  return out->ptxVersion = 90, cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* n, void (*)(Parameters...), const cudaLaunchConfig_t*) {
  return *n = 2, cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void (*)(Parameters...), int, size_t) {
  return *n = 1, cudaSuccess;
}

inline void __syncthreads() { host_cuda::Cluster::Get().Sync(); }
inline void __syncwarp(unsigned = ~0u) { host_cuda::Cluster::Get().SyncWarp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = host_cuda::Cluster::Get().rank() % 32;
  return host_cuda::Bits<T>(
      host_cuda::Cluster::Get().Exchange(host_cuda::Bits<uint32_t>(value), lane ^ mask));
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return host_cuda::Bits<T>(host_cuda::Cluster::Get().Exchange(host_cuda::Bits<uint32_t>(value), from));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int mask = 16; mask > 0; mask /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
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
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
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
