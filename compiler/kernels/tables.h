// Tables as Python gives them to the kernels that pool bags, and the tiles that threads share.
#ifndef TABLES_H
#define TABLES_H
#include <cmath>
#include "vector.h"
#include "bags.h"

enum Type : int64_t { F32, BF16, INT8 };
enum Mode : int64_t { SUM, MEAN, MAX };

struct Table {
  Bags bags;
  const char* rows;    // (rows, width)
  int64_t stride;      // bytes from row to row
  int64_t type;
  int64_t width;
  int64_t mode;
  const char* scale;   // INT8: value = byte * scale + offset, both f32, one per row
  const char* offset;
  int64_t scale_stride;  // bytes
  char* out;           // (bags, width), f32 or bf16
  int64_t out_stride;  // bytes
  int64_t out_type;
  int32_t* argmax;     // MAX, or null: (bags, width) positions of the ids that won, -1 for none
};

constexpr int64_t AHEAD_BYTES = 4096, LEAST_AHEAD = 4, MOST_AHEAD = 64;  // measured
constexpr int64_t TILE = 256;  // bags that a thread takes at a time

static INLINE int64_t ahead(int64_t row_bytes) {
  return std::clamp(AHEAD_BYTES / std::max<int64_t>(row_bytes, 1), LEAST_AHEAD, MOST_AHEAD);
}

template <class T>
static INLINE Vec load_columns(const T* p, int n) {
  return n == LANES ? load(p) : load_part(p, n);
}

template <class T>
static INLINE void store_columns(T* p, Vec v, int n) {
  n == LANES ? store(p, v) : store_part(p, v, n);
}

// Runs work(table, first bag, last bag, problem) over tiles, table by table: the page table entries
// of one table fit into the caches, those of all tables do not.
template <class Work>
static void over_tiles(const Table* tables, int64_t count, int64_t threads, Problem* problem,
                       Work work) {
  int64_t bags = 0, numbers = 0;
  for (int64_t f = 0; f < count; f++) {
    bags = std::max(bags, tables[f].bags.bags);
    numbers += (tables[f].bags.count + tables[f].bags.bags) * tables[f].width;
  }
  const int64_t blocks = (bags + TILE - 1) / TILE;
  if (numbers < 20000) threads = 1;  // a team of threads costs more than that
  threads = std::max<int64_t>(1, std::min(threads, blocks * count));
  Problem first;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Problem bad;
#pragma omp for schedule(dynamic) nowait
    for (int64_t tile = 0; tile < blocks * count; tile++) {
      const int64_t f = tile / blocks, start = tile % blocks * TILE;
      const int64_t stop = std::min(start + TILE, tables[f].bags.bags);
      if (start < stop) work(f, start, stop, bad);
    }
#pragma omp critical
    first.merge(bad);
  }
  *problem = first;
}
#endif
