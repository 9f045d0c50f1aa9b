// Reads lines "rows columns span band workers", tiles of one expert and CTAs of a cluster, from the standard
// input -> of each line the tiles in the order of items, "row column" of every CTA, then "share" and the
// items of each worker in turn, then again where items are counted and workers take them in random order.
#include <cstdio>
#include <random>
#include <vector>

#include "gemm/gemm_grouped_scheduler.cuh"

int main() {
  int rows, columns, span, band, workers;
  std::mt19937 random;
  while (std::scanf("%d %d %d %d %d", &rows, &columns, &span, &band, &workers) == 5) {
    const te::grouped::Items all{rows, columns, span, band};
    for (int i = 0; i < all.Count(); ++i)
      for (int rank = 0; rank < span; ++rank)
        std::printf("%d %d ", all.At(i).RowOf(rank), all.At(i).ColumnOf(rank));
    std::printf("share");
    for (int worker = 0; worker < workers; ++worker)
      for (int round = 0; te::grouped::ItemOf(round, worker, workers) < all.Count(); ++round)
        std::printf(" %d", te::grouped::ItemOf(round, worker, workers));
    std::printf("share");
    std::vector<int> items;  // that workers are at
    for (int worker = 0; worker < workers; ++worker) items.push_back(worker);
    for (int count = 0; !items.empty();) {
      int& item = items[random() % items.size()];
      if (item >= all.Count())
        std::swap(item, items.back()), items.pop_back();
      else
        std::printf(" %d", item), item = te::grouped::CountedItem(count++, workers);
    }
    std::printf("\n");
  }
}
