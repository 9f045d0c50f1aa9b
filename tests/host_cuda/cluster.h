// Clusters of CTAs on the CPU, for kernels that copy and multiply asynchronously: the threads of one cluster
// are fibers that take turns in random order. A copy happens some time after it was asked for, a product at
// once or no sooner than it is waited for, what is stored for products no sooner than it is fenced, and
// shared memory is NaN before: what a kernel forgets to wait for shows as a wrong result. Addresses of shared
// memory count from its begin in the CTA of who runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#undef __grid_constant__
#define __grid_constant__
#define __CUDA_ARCH_FEAT_SM90_ALL

inline uint3 threadIdx, blockIdx;  // of the fiber that runs
inline dim3 gridDim, blockDim;

namespace cluster {

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// What a program's standard input has.
inline void Read(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) Fail("the input ends early");
}
// An array behind the number of its bytes; nullptr where that is 0.
template <typename T>
T* ReadArray(size_t* bytes = nullptr) {
  int64_t size;
  Read(&size, sizeof(size));
  void* data = size ? std::aligned_alloc(16, (size + 15) / 16 * 16) : nullptr;
  Read(data, size);
  if (bytes) *bytes = size;
  return static_cast<T*>(data);
}

// An array with what shows that nothing was written.
template <typename T>
T* Fresh(size_t count) {
  T* data = static_cast<T*>(std::aligned_alloc(256, (count * sizeof(T) + 255) / 256 * 256));
  std::memset(static_cast<void*>(data), 0xff, count * sizeof(T));
  return data;
}

// An mbarrier: a phase ends with its last arrival and the last byte that it expects.
struct Barrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;
  unsigned phases = 0;

  void Arrive() {
    if (missing == 0) Fail("an arrival too many in a phase");
    --missing;
    EndPhase();
  }
  void Bring(int64_t n) {
    bytes -= n;
    EndPhase();
  }
  void EndPhase() {
    if (missing == 0 && bytes == 0) ++phases, missing = arrivals;
  }
};

// Threads that wait for each other.
struct Meeting {
  int members = 0, there = 0;
  unsigned round = 0;
};

using Action = std::function<void()>;

// Started by a ucontext, then switched to by jumps: swapcontext makes two system calls.
struct Thread {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  int cta, index;
  bool started = false, done = false;
  std::function<bool()> may_go;  // of one that waits: until then its turns pass
  int unread = 0, outgoing = 0;  // copies out of shared memory that have not read it, or not written
  bool fenced = true;            // behind what it wrote there for those copies
  uint32_t shown = 0;            // to the other lanes
  std::vector<Action> stores;    // that copies and products do not see yet
  std::vector<std::vector<Action>> fetches{{}};  // by groups, the last one of which is open
  std::vector<Action> open;                      // products that are not committed
  std::vector<std::vector<Action>> batches;      // those that are
};

struct Cta {
  std::vector<uint8_t> memory;
  std::map<uint32_t, Barrier> barriers;  // by address
  Meeting all;
  std::vector<Meeting> warps;
  std::map<unsigned, Meeting> named;  // NamedBarrier's

  uint8_t* shared() {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 1023) / 1024 * 1024);
  }
};

inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Cta> ctas;
inline Meeting everyone;
inline std::vector<Action> copies;  // asked for
inline Thread* self = nullptr;
inline bool is_last = false;  // the cluster that runs
inline jmp_buf scheduler;
inline std::mt19937 random{0};
inline Action kernel;

inline Cta& Mine() { return ctas[self->cta]; }
inline void Pause() {
  if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
}
inline uint64_t moves = 0;  // of threads past what they waited for
template <typename Condition>
void Await(Condition&& holds) {
  if (!holds()) {
    self->may_go = holds;
    Pause();
    self->may_go = nullptr;
  }
  ++moves;
}

inline void Meet(Meeting& m) {
  const unsigned round = m.round;
  if (++m.there == m.members)
    m.there = 0, ++m.round;
  else
    Await([&] { return m.round != round; });
}
inline void MeetWarp() { Meet(Mine().warps[self->index / 32]); }

// What lane `from` shows.
inline uint32_t Exchange(uint32_t shown, int from) {
  self->shown = shown;
  MeetWarp();
  const uint32_t theirs = threads[self->cta * Mine().all.members + self->index / 32 * 32 + from]->shown;
  MeetWarp();
  return theirs;
}

inline void Start() {
  kernel();
  if (self->outgoing) Fail("a thread leaves while what it stores is under way");
  self->done = true;
  Pause();
}

inline void MakeThread(int cta, int index) {
  constexpr size_t kStack = 128 << 10;
  threads.push_back(std::make_unique<Thread>());
  Thread& t = *threads.back();
  t.cta = cta, t.index = index;
  t.stack.reset(new char[kStack]);
  getcontext(&t.start);
  t.start.uc_stack.ss_sp = t.stack.get(), t.start.uc_stack.ss_size = kStack;
  makecontext(&t.start, Start, 0);
  ++everyone.members, ++ctas[cta].all.members, ++ctas[cta].warps[index / 32].members;
}

// Until the thread pauses.
inline void Continue(Thread* t) {
  if (_setjmp(scheduler)) return;
  if (std::exchange(t->started, true)) _longjmp(t->resume, 1);
  setcontext(&t->start);
}

inline void CopySomething() {
  const size_t at = random() % copies.size();
  const Action copy = std::move(copies[at]);
  copies.erase(copies.begin() + at);
  copy();
}

inline void RunCluster(int first) {
  std::vector<Thread*> ready;
  // Now and then a warpgroup, or a warp of the only one, is held back until nothing else moves: others run as
  // far ahead as barriers let them.
  constexpr int kNone = -1;
  const int size = blockDim.x > 128 ? 128 : 32;
  int held = random() % 4;
  for (const auto& t : threads) ready.push_back(t.get());
  for (int turns = 0, copied = 0; !ready.empty(); ++turns) {
    if (turns > copied + 100000) Fail("the threads wait for what does not come");
    std::shuffle(ready.begin(), ready.end(), random);
    const uint64_t before = moves;
    if (held == kNone && random() % 64 == 0) held = random() % 4;
    for (Thread* t : ready) {
      if (t->index / size == held) continue;
      self = t;
      const unsigned block = first + t->cta, x = gridDim.x, y = gridDim.y;
      threadIdx = {unsigned(t->index), 0, 0}, blockIdx = {block % x, block / x % y, block / x / y};
      if (!t->may_go || t->may_go()) Continue(t);
      if (!copies.empty() && random() % 64 == 0) CopySomething(), copied = turns;
    }
    if (moves == before && (copies.empty() || random() % 64 == 0)) held = kNone;
    std::erase_if(ready, [](Thread* t) { return t->done; });
  }
  if (!copies.empty()) Fail("a CTA leaves while a copy is under way");
}

// `grid` CTAs, the clusters of `size` one after the other.
inline void Launch(const dim3& grid, int size, int block, size_t shared, Action run) {
  kernel = std::move(run), gridDim = grid, blockDim = dim3(block);
  const int count = grid.x * grid.y * grid.z;
  for (int first = 0; first < count; first += size) {
    threads.clear(), ctas.clear(), everyone = {};
    ctas.resize(size);
    for (int cta = 0; cta < size; ++cta) {
      ctas[cta].memory.assign(shared + 1024, 0xff), ctas[cta].warps.resize(block / 32);
      for (int i = 0; i < block; ++i) MakeThread(cta, i);
    }
    is_last = first + size >= count;
    RunCluster(first);
  }
}

}  // namespace cluster

// A count of what clusters take. All but the last one hear at some time that the others took the rest.
inline int atomicAdd(int* count, int more) {
  if (!cluster::is_last && cluster::random() % 4 == 0) return 1 << 30;
  return std::exchange(*count, *count + more);
}
inline void __syncthreads() { cluster::Meet(cluster::Mine().all); }
inline void __syncwarp() { cluster::MeetWarp(); }
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, cluster::Exchange(__builtin_bit_cast(uint32_t, value), from));
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  return T(cluster::Exchange(uint32_t(value), lane >= distance ? lane - distance : lane));
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(~0u, value, threadIdx.x % 32 ^ mask);
}
unsigned __reduce_max_sync(unsigned, unsigned value);
unsigned __reduce_add_sync(unsigned, unsigned value);
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<const uint8_t*>(p) - cluster::Mine().shared();
}
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors);
template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? std::common_type_t<A, B>(a) : std::common_type_t<A, B>(b);
}
template <typename A, typename B>
auto max(A a, B b) {
  return a > b ? std::common_type_t<A, B>(a) : std::common_type_t<A, B>(b);
}
