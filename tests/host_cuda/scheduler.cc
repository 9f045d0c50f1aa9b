// Reads lines "rows columns span band workers", tiles of one expert and CTAs of a cluster, from the standard
// input -> of each line the tiles in the order of items, "row column" of every CTA, then "share" and the
// items of each worker in turn.
#include <cstdio>

#include "gemm/gemm_grouped_scheduler.cuh"

int main() {
  int rows, columns, span, band, workers;
  while (std::scanf("%d %d %d %d %d", &rows, &columns, &span, &band, &workers) == 5) {
    const te::grouped::Items items{rows, columns, span, band};
    for (int i = 0; i < items.Count(); ++i)
      for (int rank = 0; rank < span; ++rank)
        std::printf("%d %d ", items.At(i).RowOf(rank), items.At(i).ColumnOf(rank));
    std::printf("share");
    for (int worker = 0; worker < workers; ++worker)
      for (int round = 0; te::grouped::ItemOf(round, worker, workers) < items.Count(); ++round)
        std::printf(" %d", te::grouped::ItemOf(round, worker, workers));
    std::printf("\n");
  }
}
