// One call of the kernels of te_gated_delta_bwd on Hopper on the CPU, slab by slab, with threads of
// cluster.h: from the standard input its numbers and arrays, to the standard output dq, dk, dv, dbeta, dgate
// and the gradient to the initial state.
#include "cluster.h"
//
#include "delta/delta_bwd_chunks_hopper.cuh"
#include "delta_maps.h"

namespace {

using namespace te;
using namespace te::delta;

struct Sizes {
  int rows, s, h, g, d, e, slab_rows, slab_tokens, parts;
};

HopperGradArgs WithMaps(const GradArgs& a, const Sizes& n) {
  const WalkArgs& of = a.again;
  return {a,
          n.parts,
          n.h / n.g / n.parts,
          MapOfKeys(of.q, of, n.rows),
          MapOfKeys(of.k, of, n.rows),
          MapOfValues(a.back.v, of, n.rows),
          MapOfWritten(a.written, a),
          MapOfWritten(a.gradients_written, a),
          MapOfStates(a.states, a),
          MapOfStates(a.gradients, a),
          MapOfKeys(a.dq, of, n.rows, kBand),
          MapOfKeys(a.dk, of, n.rows, kBand)};
}

// The slab's chunks out of those of all rows.
Chunk* OfSlab(const Chunk* all, const ChunkPart& part, const Sizes& n) {
  Chunk* const slab = cluster::Fresh<Chunk>(size_t(part.rows) * part.chunks * n.h);
  const ChunkPart whole{0, n.rows, 0, (n.s + kChunk - 1) / kChunk};
  for (int row = part.first_row; row < part.first_row + part.rows; ++row)
    for (int chunk = part.first_chunk; chunk < part.first_chunk + part.There(n.s); ++chunk)
      std::copy_n(all + whole.At(row, chunk, 0, n.h), n.h, slab + part.At(row, chunk, 0, n.h));
  return slab;
}

template <int kD>
void RunWalks(const GradArgs& a, const Sizes& n) {
  if constexpr (kD > kMostKeys)
    return RunWalksOfHalves(a, n.rows);
  else {
    const HopperGradWalkArgs walks = WalksWithMaps(a, n.rows);
    cluster::Launch(GradWalkGrid(a, 1), 1, kWalkThreads<1>, sizeof(HopperShared<kD, OfHead, 1, true>),
                    [&] { te_gated_delta_bwd_walk_hopper<kD, OfHead, 1>(walks); });
  }
}

template <int kD, bool kRuns>
void Run(const GradArgs& a, const Sizes& n) {
  RunWalks<kD>(a, n);
  constexpr int kOfCta = std::min(kD, kMostKeys), kHalves = kD / kOfCta;
  const HopperGradArgs given = WithMaps(a, n);
  const int cluster = n.parts * kHalves;
  cluster::Launch(dim3(n.g * cluster, a.part.There(n.s), a.part.rows), cluster, ssm::kHopperThreads,
                  sizeof(HopperGradShared<kOfCta, kRuns>),
                  [&] { te_gated_delta_bwd_chunks_hopper<kOfCta, kRuns, kHalves>(given); });
}

}  // namespace

int main() {
  Sizes n;
  cluster::Read(&n, sizeof(n));
  GradArgs a{};
  WalkArgs& again = a.again;
  using cluster::ReadArray, cluster::Fresh;
  again.s = a.of.s = n.s, again.h = a.of.h = n.h, again.g = a.of.g = n.g, again.d = a.of.d = n.d,
  again.e = n.e;
  again.q = ReadArray<Bf16>(), again.k = ReadArray<Bf16>(), again.v = ReadArray<Bf16>();
  const Chunk* all = ReadArray<Chunk>();
  a.back = again, a.back.v = ReadArray<Bf16>();
  a.kept = ReadArray<float>();
  const float* after = ReadArray<float>();
  a.of.runs = ReadArray<int>();
  a.of.scale = 1 / std::sqrt(float(n.d)), a.of.normalize = true;
  const size_t tokens = size_t(n.rows) * n.s, slab = size_t(n.slab_rows) * n.slab_tokens * n.h;
  const size_t state = size_t(n.rows) * n.h * n.d * n.e;
  a.dq = Fresh<Bf16>(tokens * n.g * n.d), a.dk = Fresh<Bf16>(tokens * n.g * n.d);
  a.dv = Fresh<Bf16>(tokens * n.h * n.e), a.dbeta = Fresh<float>(tokens * n.h);
  a.dgate = Fresh<float>(tokens * n.h), a.before = Fresh<float>(state);
  a.states = Fresh<Bf16>(slab / kChunk * n.d * n.e), a.gradients = Fresh<Bf16>(slab / kChunk * n.d * n.e);
  a.written = Fresh<Bf16>(slab * n.e), a.gradients_written = Fresh<Bf16>(slab * n.e);
  for (int row = 0; row < n.rows; row += n.slab_rows) {
    a.after = after;
    for (int i = (n.s + n.slab_tokens - 1) / n.slab_tokens; i-- > 0; a.after = a.before) {
      const int chunks = n.slab_tokens / kChunk;
      a.part = {row, std::min(n.slab_rows, n.rows - row), i * chunks, chunks};
      again.part = a.back.part = a.part;
      again.chunks = a.back.chunks = a.chunks = OfSlab(all, a.part, n);
      (void)DispatchKeys(n.d, a.of.runs, [&]<int kD, bool kRuns>() {
        Run<kD, kRuns>(a, n);
        return Status{};
      });
    }
  }
  for (const Bf16* keys : {a.dq, a.dk}) std::fwrite(keys, 2, tokens * n.g * n.d, stdout);
  std::fwrite(a.dv, 2, tokens * n.h * n.e, stdout);
  for (const float* heads : {a.dbeta, a.dgate}) std::fwrite(heads, 4, tokens * n.h, stdout);
  std::fwrite(a.before, 4, state, stdout);
}
