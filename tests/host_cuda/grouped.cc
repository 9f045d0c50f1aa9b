// One call of the kernel of grouped products on the CPU, with threads of cluster.h: from the standard input
// its numbers and arrays, to the standard output the result.
#include "cluster.h"
//
#include "gemm/gemm_grouped.cuh"

namespace {

using namespace te;
using namespace te::grouped;

template <Factors kFactors, Sums kSums, Layout kLayout = Layout::kAlong>
bool RunIf(const KernelArgs& args, int cluster, Factors factors) {
  if (factors != kFactors || args.p.sums != kSums || args.p.layout != kLayout) return false;
  const auto launch = [&]<typename P>() {
    constexpr int kCtas = 4;
    cluster::Launch(kCtas, P::kCluster, kThreads, sizeof(Shared),
                    [&] { te_gemm_grouped<kFactors, kSums, kLayout, P>(args); });
  };
  cluster == 2 ? launch.template operator()<Plan<2>>() : launch.template operator()<Plan<1>>();
  return true;
}

}  // namespace

int main() {
  int32_t n[17];  // as below
  cluster::Read(n, sizeof(n));
  KernelArgs args{};
  Problem& p = args.p;
  p.sums = Sums(n[0]), p.wgrad = n[2], p.experts = n[3], p.rows = n[4], p.columns = n[5], p.k = n[6];
  p.result = Type(n[7]), p.left_each = n[8], p.right_each = n[9], p.layout = Layout(n[12]), p.line = n[13];
  int counter = 0;
  if (n[14]) p.counter = &counter;
  p.column_slots = n[15], p.k_slots = n[16];
  p.Cut();
  const Factors factors = Factors(n[1]);
  const int width = factors == Factors::kBF16 || factors == Factors::kF16 ? 2 : 1;
  p.left = cluster::ReadArray<void>(), p.right = cluster::ReadArray<void>();
  p.offsets = cluster::ReadArray<int>(), p.counts = cluster::ReadArray<int>();
  for (const float** scale : {&p.left_inv, &p.right_inv, &p.left_blocks, &p.right_blocks})
    *scale = cluster::ReadArray<float>();
  p.bias = cluster::ReadArray<void>(), p.c = cluster::ReadArray<void>();
  size_t bytes;
  p.out = cluster::ReadArray<void>(&bytes);  // filled with what shows that nothing was written
  if (n[11]) p.c = p.out;                    // added to in place
  const auto writable = [](const void* data) { return static_cast<uint8_t*>(const_cast<void*>(data)); };
  uint8_t *const of_left = writable(p.left), *const of_right = writable(p.right);
  const int count = p.wgrad ? 1 : p.experts;
  HostMap left = p.layout == Layout::kBothAcross ? HostMap::Of(of_left, p.rows, p.k, 1, 64, width)
                                                 : HostMap::Of(of_left, p.k, p.rows, 1, 64, width);
  HostMap right = p.layout == Layout::kAlong ? HostMap::Of(of_right, p.k, p.columns, count, 128, width)
                                             : HostMap::Of(of_right, p.columns, p.k, count, 64, width);
  if (p.sums == Sums::kSquares) {
    left = HostMap::OfSlots(of_left, {p.slot_k, p.k_slots, p.rows, 1}, 64, width);
    right = HostMap::OfSlots(of_right, {p.slot_k, p.k_slots, p.slot_columns, p.experts * p.column_slots}, 128,
                             width);
  }
  if (p.line && p.wgrad) right = HostMap::OfSquares(of_right + 128, p.columns / 128, p.k, 128, p.line);
  if (p.line && !p.wgrad) left = HostMap::OfSquares(of_left, p.k / 128, p.rows, 64, p.line);
  HostMap out = HostMap::Of(writable(p.out), p.columns, p.rows, p.wgrad ? p.experts : 1, kPieceRows, 2);
  if (p.sums == Sums::kSquares)
    out = HostMap::OfSlots(writable(p.out), {p.slot_columns, p.column_slots, p.rows, 1}, kPieceRows, 2);
  static_assert(sizeof(HostMap) <= sizeof(CUtensorMap));
  std::memcpy(&args.out, &out, sizeof(out));
  std::memcpy(&args.left, &left, sizeof(left)), std::memcpy(&args.right, &right, sizeof(right));
  if (!(RunIf<Factors::kE4M3, Sums::kFast>(args, n[10], factors) ||
        RunIf<Factors::kBF16, Sums::kFast>(args, n[10], factors) ||
        RunIf<Factors::kF16, Sums::kFast>(args, n[10], factors) ||
        RunIf<Factors::kBF16, Sums::kFast, Layout::kRightAcross>(args, n[10], factors) ||
        RunIf<Factors::kF16, Sums::kFast, Layout::kRightAcross>(args, n[10], factors) ||
        RunIf<Factors::kBF16, Sums::kFast, Layout::kBothAcross>(args, n[10], factors) ||
        RunIf<Factors::kF16, Sums::kFast, Layout::kBothAcross>(args, n[10], factors) ||
        RunIf<Factors::kE5M2E4M3, Sums::kSplit>(args, n[10], factors) ||
        RunIf<Factors::kE4M3, Sums::kSquares>(args, n[10], factors) ||
        RunIf<Factors::kE4M3E5M2, Sums::kRows>(args, n[10], factors)))
    cluster::Fail("no such kernel is compiled here");
  std::fwrite(p.out, 1, bytes, stdout);
}
