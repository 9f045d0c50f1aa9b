#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <vector>

#include "gemm/gemm.h"

namespace te {
namespace {

// Memory only of this call, from the stream's pool: cudaMalloc and cudaFree would wait for the whole device,
// and the operands themselves must not be touched (results may share memory with live values).
class Scratch {
 public:
  explicit Scratch(cudaStream_t stream) : stream_(stream) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    for (void* p : blocks_) cudaFreeAsync(p, stream_);
  }

  // nullptr: no memory.
  void* Take(size_t bytes) {
    void* p = nullptr;
    if (cudaMallocAsync(&p, std::max<size_t>(bytes, 1), stream_) != cudaSuccess) {
      cudaGetLastError();  // not sticky: clear it
      return nullptr;
    }
    blocks_.push_back(p);
    return p;
  }

  // Random values of about unit size: power draw, and with it the clock, depends on the bits.
  void* TakeRandom(size_t bytes, Type type);

 private:
  cudaStream_t stream_;
  std::vector<void*> blocks_;
};

// The sign and exponent bits of the top byte of each element: magnitudes from 1/8 to 2, never inf or NaN.
struct TopByte {
  uint8_t keep, set;
};

TopByte Finite(Type type) {
  switch (type) {
    case F8E4M3FN:
      return {0x9f, 0x20};  // s 01xx mmm: 2^-3 .. 2^0
    case F8E5M2:
    case F16:
      return {0x8f, 0x30};  // s 011xx mm: 2^-3 .. 2^0
    default:
      return {0x81, 0x3e};  // bf16, f32: s 0111 11xx: 2^-3 .. 2^0
  }
}

void* Scratch::TakeRandom(size_t bytes, Type type) {
  auto* p = static_cast<char*>(Take(bytes));
  if (!p) return nullptr;
  constexpr size_t kChunk = 1 << 20;
  std::vector<uint8_t> host(std::min(bytes, kChunk));
  const size_t width = size_t(Width(type));
  const TopByte top = Finite(type);
  uint32_t state = 0x9e3779b9u;
  for (size_t i = 0; i < host.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    host[i] = uint8_t(state >> 24);
    if (i % width == width - 1) host[i] = uint8_t((host[i] & top.keep) | top.set);
  }
  // The source is pageable: the copy has read it when the call returns.
  if (cudaMemcpyAsync(p, host.data(), host.size(), cudaMemcpyHostToDevice, stream_) != cudaSuccess)
    return nullptr;
  for (size_t done = host.size(); done < bytes;) {
    const size_t step = std::min(done, bytes - done);
    if (cudaMemcpyAsync(p + done, p, step, cudaMemcpyDeviceToDevice, stream_) != cudaSuccess) return nullptr;
    done += step;
  }
  return p;
}

bool TakeOperands(Scratch& scratch, const GemmKey& key, GemmOperands* operands) {
  operands->lhs = scratch.TakeRandom(size_t(key.m * key.k * Width(key.lhs)), key.lhs);
  operands->rhs = scratch.TakeRandom(size_t(key.n * key.k * Width(key.rhs)), key.rhs);
  operands->out = scratch.Take(size_t(key.m * key.n * Width(key.out)));
  if (!operands->lhs || !operands->rhs || !operands->out) return false;
  if (key.workspace && !(operands->workspace = scratch.Take(key.workspace))) return false;
  if (key.bias != kNoType &&
      !(operands->bias = scratch.TakeRandom(size_t(key.n * Width(key.bias)), key.bias)))
    return false;
  if (key.c && !(operands->c = scratch.TakeRandom(size_t(key.m * key.n * Width(key.out)), key.out)))
    return false;
  if (key.fp8()) {
    const size_t rows = std::max(key.m, key.n),
                 blocks = (key.k + 511) / 512 * 4;  // as many as any layout has
    const size_t count = key.scales == Scales::kTensor ? 1 : rows * blocks;
    auto* scale = static_cast<float*>(scratch.TakeRandom(count * sizeof(float), F32));
    if (!scale) return false;
    operands->lhs_scale_inv = operands->rhs_scale_inv = scale;
  }
  return true;
}

// Two events on a stream, for the time between them.
class Clock {
 public:
  explicit Clock(cudaStream_t stream) : stream_(stream) {
    ok_ = cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  Clock(const Clock&) = delete;
  ~Clock() {
    if (begin_) cudaEventDestroy(begin_);
    if (end_) cudaEventDestroy(end_);
  }

  // ms of one of `repeats` calls in a row; infinite if one fails.
  template <typename Fn>
  double Time(int repeats, Fn&& enqueue) const {
    bool ok = ok_ && cudaEventRecord(begin_, stream_) == cudaSuccess;
    for (int i = 0; i < repeats && ok; ++i) ok = enqueue();
    float ms = 0;
    ok = ok && cudaEventRecord(end_, stream_) == cudaSuccess && cudaEventSynchronize(end_) == cudaSuccess &&
         cudaEventElapsedTime(&ms, begin_, end_) == cudaSuccess;
    return ok ? double(ms) / repeats : INFINITY;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  bool ok_ = false;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Entrant {
  int64_t index;
  std::vector<double> times, shares;  // ms of its call in each round, and over the mean of the round
};

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}

// The better half; the heuristic's first stays in front.
void Halve(std::vector<Entrant>* field, size_t least) {
  std::sort(field->begin() + 1, field->end(),
            [](const Entrant& a, const Entrant& b) { return Mean(a.shares) < Mean(b.shares); });
  field->erase(field->begin() + std::max(least, field->size() / 2), field->end());
}

}  // namespace

// A large GEMM draws all the power a GPU may take: its clock, and with it what is fastest, settle only under
// load, and there the clock still wanders by 5 % within 0.1 s. So: heat up, then go round by round, everyone
// once, and count each time against the mean of its round; half of the field leaves after each of the first
// rounds. On an H200 the shares of the last rounds repeat to 0.3 %. A GEMM of 0.8 ms takes 0.4 s to tune.
Timing TuneGemm(cudaStream_t stream, const GemmKey& key, int64_t candidates, const RunCandidate& run) {
  constexpr double kHeatMs = 40, kFirstRoundMs = 150;
  constexpr size_t kFinalists = 8;
  constexpr int kFinalRounds = 9;
  Scratch scratch(stream);
  GemmOperands operands;
  if (!TakeOperands(scratch, key, &operands)) return {};
  const Clock clock(stream);
  const auto time = [&](int64_t i, int repeats) {
    return clock.Time(repeats, [&] { return run(i, operands); });
  };
  time(0, 2);  // the first run of a candidate loads its kernel
  const double guess = time(0, 3);
  if (!std::isfinite(guess)) return {};
  const auto repeats = [&](double ms, int least, int most) {
    return std::clamp(int(ms / std::max(guess, 1e-3)), least, most);
  };
  time(0, repeats(kHeatMs, 1, 1000));

  std::vector<Entrant> field;
  const auto began = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  };
  for (int64_t i = 0; i < candidates && (i < 2 || spent() < kFirstRoundMs); ++i)
    if (run(i, operands)) {
      const double ms = time(i, repeats(0.4, 1, 20));
      if (std::isfinite(ms)) field.push_back({i, {ms}, {ms / guess}});
    }
  cudaGetLastError();  // a refused candidate must not fail the next launch
  if (field.empty() || field[0].index != 0) return {};

  for (int final_rounds = 0, round = 1; final_rounds < kFinalRounds; ++round) {
    if (field.size() > kFinalists) Halve(&field, kFinalists);
    const bool is_final = field.size() <= kFinalists;
    const int calls = is_final ? repeats(1.5, 2, 100) : repeats(0.4, 1, 20);
    final_rounds += is_final;
    double sum = 0;
    for (size_t turn = 0; turn < field.size(); ++turn) {
      Entrant& entrant = field[(turn + round) % field.size()];  // nobody always runs behind the same one
      entrant.times.push_back(time(entrant.index, calls));
      sum += entrant.times.back();
    }
    for (Entrant& entrant : field) entrant.shares.push_back(entrant.times.back() * field.size() / sum);
  }
  const auto last = [](const std::vector<double>& values) {
    return Median({values.end() - kFinalRounds, values.end()});
  };
  const Entrant* best = &field[0];
  double best_share = 0.995 * last(best->shares);  // less is noise
  for (const Entrant& entrant : field)
    if (const double share = last(entrant.shares); share < best_share) best = &entrant, best_share = share;
  return {best->index, last(best->times)};
}

}  // namespace te
