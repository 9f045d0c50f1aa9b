// Reads lines "tokens piece chunks strips topk", as of te::GatherOrder, from the standard input -> of each
// line the tiles in the order of CTAs.
#include <cstdio>

#include "experts/gather_order.cuh"

int main() {
  long tokens, piece, chunks, strips, topk;
  while (std::scanf("%ld %ld %ld %ld %ld", &tokens, &piece, &chunks, &strips, &topk) == 5) {
    const te::GatherOrder order(tokens, piece, chunks, strips, topk);
    for (unsigned cta = 0; cta < chunks * strips; ++cta) std::printf("%u ", order.TileOf(cta));
    std::printf("\n");
  }
}
