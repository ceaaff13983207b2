// Grouped embedding bag: many tables pooled in one call.
//
// A lookup reads one row from a random place, so the time goes into waiting for memory. Ids are
// known long before their rows are needed: rows are asked for AHEAD ids early, and meanwhile the
// sums run in registers. Ids are checked where they are used: no second pass, nothing read outside.
#include "tables.h"

// Columns `column` to `column + (N - 1) * LANES + last` of the bags [start, stop).
template <class T, int N, bool IS_MAX>
static void pool(const Table& t, int64_t table, int64_t column, int last, int64_t start,
                 int64_t stop, Problem& bad) {
  const Bags bags = t.bags;  // a copy of its own stays in registers
  const char* rows = t.rows + column * sizeof(T);
  const int64_t bytes = ((N - 1) * LANES + last) * sizeof(T), early = ahead(bytes);
  const int64_t stride = t.stride;
  Walk walk(bags, table, start, bad);
  int64_t asked = walk.end;  // rows of ids before this one were asked for
  for (int64_t b = start; b < stop; b++) {
    walk.next(b, bad);
    Vec acc[N] = {};
    VecInt winner[N];
    for (int k = 0; k < N; k++) winner[k] = VecInt{} - 1;
    int64_t used = 0;
    for (int64_t p = walk.begin; p < walk.end; p++) {
      if (p + early > asked) {  // in bursts: a tight loop keeps more page walks in flight
        const int64_t until = std::min(p + 2 * early, bags.count);
        for (asked = std::max(asked, p); asked < until; asked++)
          prefetch(rows, bags.id(asked), stride, bytes);
        asked = p + 2 * early;
      }
      const int64_t id = bags.id(p);
      if ((uint64_t)id >= (uint64_t)bags.rows) {
        bad.note(Problem::ID, table, p, id);
        continue;
      }
      if (id == bags.padding) continue;
      const T* row = (const T*)(rows + id * stride);
      const Vec weight = splat(bags.weights ? bags.weights[p] : 1.0f);
      Vec scale{}, offset{};
      if (sizeof(T) == 1) {
        scale = splat(*(const float*)(t.scale + id * t.scale_stride));
        offset = splat(*(const float*)(t.offset + id * t.scale_stride));
      }
      for (int k = 0; k < N; k++) {
        Vec value = load_columns(row + k * LANES, k + 1 < N ? LANES : last);
        if (sizeof(T) == 1) value = fma(value, scale, offset);
        if (IS_MAX) {  // as in PyTorch, the first of equals wins, and a NaN only in first place
          VecInt wins = used ? value > acc[k] : VecInt{} - 1;
          acc[k] = select(wins, value, acc[k]);
          winner[k] = wins ? VecInt{} + (int32_t)p : winner[k];
        } else {
          acc[k] = fma(weight, value, acc[k]);
        }
      }
      used++;
    }
    if (t.mode == MEAN && used > 1)
      for (int k = 0; k < N; k++) acc[k] /= splat((float)used);
    char* out = t.out + b * t.out_stride;
    for (int k = 0; k < N; k++) {
      const int n = k + 1 < N ? LANES : last;
      const int64_t at = column + k * LANES;
      t.out_type == F32 ? store_columns((float*)out + at, acc[k], n)
                        : store_columns((bf16*)out + at, acc[k], n);
      if (IS_MAX && t.argmax) store_columns((float*)t.argmax + b * t.width + at, (Vec)winner[k], n);
    }
  }
}

// Strips of up to 8 vectors: the sums of a strip fit into the registers.
template <class T, bool IS_MAX>
static void pool_row(const Table& t, int64_t table, int64_t start, int64_t stop, Problem& bad) {
  for (int64_t column = 0; column < t.width; column += 8 * LANES) {
    const int64_t left = std::min<int64_t>(t.width - column, 8 * LANES);
    const int last = (int)((left - 1) % LANES + 1);
    switch ((left + LANES - 1) / LANES) {
#define CASE(N) case N: pool<T, N, IS_MAX>(t, table, column, last, start, stop, bad); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
  }
}

template <bool IS_MAX>
static void pool_any(const Table& t, int64_t table, int64_t start, int64_t stop, Problem& bad) {
  if (t.type == F32) pool_row<float, IS_MAX>(t, table, start, stop, bad);
  if (t.type == BF16) pool_row<bf16, IS_MAX>(t, table, start, stop, bad);
  if (t.type == INT8) pool_row<uint8_t, IS_MAX>(t, table, start, stop, bad);
}

extern "C" __attribute__((visibility("default"))) void embedding_bags(const Table* tables,
                                                                      int64_t count,
                                                                      int64_t threads,
                                                                      Problem* problem) {
  over_tiles(tables, count, threads, problem,
             [&](int64_t f, int64_t start, int64_t stop, Problem& bad) {
               tables[f].mode == MAX ? pool_any<true>(tables[f], f, start, stop, bad)
                                     : pool_any<false>(tables[f], f, start, stop, bad);
             });
}

// The gradient of per-id weights: dot(gradient of the bag, row), written to the table's `scale`
// (count,); `out` is the gradient of the pooled output here, only read. Padding gets 0.
template <class T>
static void weight_gradient(const Table& t, int64_t table, int64_t start, int64_t stop,
                            Problem& bad) {
  const Bags bags = t.bags;
  const int64_t bytes = t.width * sizeof(T), early = ahead(bytes);
  Walk walk(bags, table, start, bad);
  for (int64_t b = start; b < stop; b++) {
    walk.next(b, bad);
    const char* gradient = t.out + b * t.out_stride;
    for (int64_t p = walk.begin; p < walk.end; p++) {
      if (p + early < bags.count) prefetch(t.rows, bags.id(p + early), t.stride, bytes);
      const int64_t id = bags.id(p);
      if ((uint64_t)id >= (uint64_t)bags.rows) {
        bad.note(Problem::ID, table, p, id);
        continue;
      }
      Vec dot{};
      const T* row = (const T*)(t.rows + id * t.stride);
      for (int64_t c = 0; c < t.width; c += LANES) {
        const int n = (int)std::min<int64_t>(LANES, t.width - c);
        const Vec g = t.out_type == F32 ? load_columns((const float*)gradient + c, n)
                                        : load_columns((const bf16*)gradient + c, n);
        dot = fma(g, load_columns(row + c, n), dot);
      }
      ((float*)t.scale)[p] = id == bags.padding ? 0.0f : sum(dot);
    }
  }
}

extern "C" __attribute__((visibility("default"))) void bag_weight_gradients(const Table* tables,
                                                                            int64_t count,
                                                                            int64_t threads,
                                                                            Problem* problem) {
  over_tiles(tables, count, threads, problem,
             [&](int64_t f, int64_t start, int64_t stop, Problem& bad) {
               tables[f].type == F32 ? weight_gradient<float>(tables[f], f, start, stop, bad)
                                     : weight_gradient<bf16>(tables[f], f, start, stop, bad);
             });
}
