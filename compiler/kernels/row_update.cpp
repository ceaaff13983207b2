// The backward pass of embedding bags on the looked-up rows only, with the optimizer's update in it.
//
// 1. Group: the ids of each table are sorted by row (stable radix sort), all checked on the way.
// 2. Reduce: each run of equal rows is one row of the gradient: its bags' gradients are summed in
//    the order of the ids, in registers, and the row is updated while it is in the cache.
// A hot row must not keep one thread busy while others wait, and the sum must not depend on the
// number of threads: so sorted ids are cut into blocks of BLOCK, whatever the number of threads.
// A run that crosses blocks leaves a partial sum in each; those are added in order at the end.
// No dense gradient, no gradient per id, no atomics.
#include <cmath>
#include <memory>
#include <vector>
#include "vector.h"
#include "bags.h"

enum Mode : int64_t { SUM, MEAN, MAX };
enum Rule : int64_t { WRITE, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM };

struct Table {
  Bags bags;
  int64_t mode;
  int64_t width;
  const char* gradient;    // (bags, width) f32 or bf16, of the pooled output
  int64_t gradient_stride;  // bytes
  int64_t gradient_half;   // 1: bf16
  const int32_t* argmax;   // MAX: (bags, width), see embedding_bag.cpp
  int64_t rule;
  char* rows;              // (rows, width) f32 or bf16 to update; WRITE: where gradients go
  int64_t stride;          // bytes
  int64_t half;            // 1: bf16
  float* squares;          // (rows,) for row-wise Adagrad, else (rows, width); contiguous
  float* moment;           // ADAM: (rows, width)
  int64_t* indices;        // WRITE: the row number of each gradient, which are then packed; or null
  uint64_t* sorted;        // (count,) row << 32 | payload; payload: bag, or position with `sides`
  uint64_t* spare;         // (count,)
  uint64_t* sides;         // (count,) scale << 32 | bag, of each position; null for plain sums
  int64_t used;            // written by group(): ids that are not padding
  int64_t unique;          // written by group(): different rows
};

struct Hyper {  // of a table; f64 in Python
  double lr, eps, decay, first_beta, second_beta, first_correction, second_correction;
};

constexpr int64_t BLOCK = 2048;  // sorted ids per piece of work; part of the result's definition
constexpr int64_t AHEAD = 24;    // rows asked for early; measured
constexpr int64_t LARGE = 1 << 17;  // tables with more ids are sorted by all threads together
constexpr int DIGIT = 11, BUCKETS = 1 << DIGIT;

static INLINE uint32_t row_of(uint64_t entry) { return (uint32_t)(entry >> 32); }
static INLINE uint32_t low(uint64_t entry) { return (uint32_t)entry; }

// Entries of the bags [start, stop). Padding becomes row `rows`, which sorts to the end.
static void fill(const Table& t, int64_t table, int64_t start, int64_t stop, Problem& bad) {
  const Bags bags = t.bags;
  Walk walk(bags, table, start, bad);
  for (int64_t b = start; b < stop; b++) {
    walk.next(b, bad);
    int64_t used = 0;
    for (int64_t p = walk.begin; p < walk.end; p++) {
      uint64_t row = (uint64_t)bags.id(p);
      if (row >= (uint64_t)bags.rows) bad.note(Problem::ID, table, p, (int64_t)row), row = 0;
      if ((int64_t)row == bags.padding) row = (uint64_t)bags.rows;
      else used++;
      t.sorted[p] = row << 32 | (uint64_t)(t.sides ? p : b);
    }
    if (!t.sides) continue;
    const float mean = t.mode == MEAN && used > 1 ? 1.0f / (float)used : 1.0f;
    for (int64_t p = walk.begin; p < walk.end; p++) {
      const float scale = bags.weights ? bags.weights[p] : mean;
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      t.sides[p] = (uint64_t)bits << 32 | (uint64_t)b;
    }
  }
}

static int64_t filled(const Table& t) {
  if (t.bags.bags == 0) return 0;  // no bag, no ids, whatever there is
  return std::clamp<int64_t>(t.bags.begin(t.bags.bags), 0, t.bags.count);
}

// The digits to sort by: enough bits for row numbers 0 to rows.
struct Digits {
  int passes, bits;
  explicit Digits(int64_t rows) {
    int all = 1;
    while (rows >> all) all++;
    passes = (all + DIGIT - 1) / DIGIT;
    bits = (all + passes - 1) / passes;
  }
  INLINE uint32_t of(uint64_t entry, int pass) const {
    return (uint32_t)(entry >> (32 + pass * bits)) & ((1u << bits) - 1);
  }
};

// Stable: entries of one row keep the order of their ids. The result is in t.sorted.
static void sort(Table& t, int64_t n) {
  if (n < 64) {  // payloads grow with the position, so order by the whole entry is the same order
    std::sort(t.sorted, t.sorted + n);
    return;
  }
  const Digits digits(t.bags.rows);
  uint32_t places[3][BUCKETS] = {};
  for (int64_t i = 0; i < n; i++)
    for (int pass = 0; pass < digits.passes; pass++) places[pass][digits.of(t.sorted[i], pass)]++;
  for (int pass = 0; pass < digits.passes; pass++) {
    uint32_t total = 0;
    for (int k = 0; k < 1 << digits.bits; k++) {
      const uint32_t here = places[pass][k];
      places[pass][k] = total;
      total += here;
    }
    for (int64_t i = 0; i < n; i++) {
      const uint64_t entry = t.sorted[i];
      t.spare[places[pass][digits.of(entry, pass)]++] = entry;
    }
    std::swap(t.sorted, t.spare);
  }
}

// The same by all threads: each piece of the entries has its own places.
static void sort_together(Table& t, int64_t n, int64_t threads) {
  const Digits digits(t.bags.rows);
  const int64_t pieces = threads, buckets = 1 << digits.bits;
  std::vector<uint32_t> places(pieces * buckets);
  for (int pass = 0; pass < digits.passes; pass++) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {
      uint32_t* own = &places[piece * buckets];
      std::fill(own, own + buckets, 0);
      for (int64_t i = n * piece / pieces; i < n * (piece + 1) / pieces; i++)
        own[digits.of(t.sorted[i], pass)]++;
    }
    uint32_t total = 0;
    for (int64_t k = 0; k < buckets; k++)
      for (int64_t piece = 0; piece < pieces; piece++) {
        const uint32_t here = places[piece * buckets + k];
        places[piece * buckets + k] = total;
        total += here;
      }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {
      uint32_t* own = &places[piece * buckets];
      for (int64_t i = n * piece / pieces; i < n * (piece + 1) / pieces; i++)
        t.spare[own[digits.of(t.sorted[i], pass)]++] = t.sorted[i];
    }
    std::swap(t.sorted, t.spare);
  }
}

static void count_rows(Table& t, int64_t n) {
  t.used = std::lower_bound(t.sorted, t.sorted + n, (uint64_t)t.bags.rows << 32) - t.sorted;
  t.unique = 0;
  for (int64_t i = 0; i < t.used; i++)
    t.unique += i == 0 || row_of(t.sorted[i]) != row_of(t.sorted[i - 1]);
}

static void group(Table* tables, int64_t count, int64_t threads, Problem* problem) {
  Problem first;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Problem bad;
#pragma omp for schedule(dynamic) nowait
    for (int64_t f = 0; f < count; f++) {
      Table& t = tables[f];
      if (t.bags.count > LARGE) continue;
      fill(t, f, 0, t.bags.bags, bad);
      const int64_t n = filled(t);
      if (bad.kind == Problem::NONE) sort(t, n), count_rows(t, n);
    }
#pragma omp critical
    first.merge(bad);
  }
  for (int64_t f = 0; f < count; f++) {
    Table& t = tables[f];
    if (t.bags.count <= LARGE) continue;
    const int64_t bags = t.bags.bags;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Problem bad;
#pragma omp for schedule(dynamic) nowait
      for (int64_t start = 0; start < bags; start += BLOCK)
        fill(t, f, start, std::min(start + BLOCK, bags), bad);
#pragma omp critical
      first.merge(bad);
    }
    if (first.kind == Problem::NONE) sort_together(t, filled(t), threads), count_rows(t, filled(t));
  }
  *problem = first;
}

static INLINE Vec load_columns(const char* row, bool half, int64_t column, int n) {
  if (half) {
    const bf16* p = (const bf16*)row + column;
    return n == LANES ? load(p) : load_part(p, n);
  }
  const float* p = (const float*)row + column;
  return n == LANES ? load(p) : load_part(p, n);
}

static INLINE void store_columns(char* row, bool half, int64_t column, int n, Vec v) {
  if (half) {
    bf16* p = (bf16*)row + column;
    n == LANES ? store(p, v) : store_part(p, v, n);
  } else {
    float* p = (float*)row + column;
    n == LANES ? store(p, v) : store_part(p, v, n);
  }
}

static INLINE int columns(const Table& t, int64_t k) {
  return (int)std::min<int64_t>(LANES, t.width - k * LANES);
}

// The row's whole gradient g (n vectors) goes into the row; `place` is its place if packed.
static INLINE void apply(const Table& t, const Hyper& h, int64_t row, int64_t place, Vec* g,
                         const int n) {
  const bool half = t.half;
  if (t.rule == WRITE) {
    char* to = t.rows + (t.indices ? place : row) * t.stride;
    if (t.indices) t.indices[place] = row;
    for (int k = 0; k < n; k++) store_columns(to, half, k * LANES, columns(t, k), g[k]);
    return;
  }
  char* w = t.rows + row * t.stride;
  const Vec lr = splat((float)h.lr), eps = splat((float)h.eps);
  if (h.decay != 0)
    for (int k = 0; k < n; k++)
      g[k] = fma(splat((float)h.decay), load_columns(w, half, k * LANES, columns(t, k)), g[k]);
  Vec step = lr;
  if (t.rule == ROWWISE_ADAGRAD) {
    Vec total{};
    for (int k = 0; k < n; k++) total = fma(g[k], g[k], total);
    const float now = t.squares[row] += sum(total) / (float)t.width;
    step = splat((float)h.lr / (std::sqrt(now) + (float)h.eps));
  }
  for (int k = 0; k < n; k++) {
    const int c = columns(t, k);
    const Vec old = load_columns(w, half, k * LANES, c);
    Vec change = g[k];
    if (t.rule == ADAGRAD || t.rule == ADAM) {
      char* squares = (char*)(t.squares + row * t.width);
      Vec s = load_columns(squares, false, k * LANES, c);
      if (t.rule == ADAGRAD) {
        s = fma(g[k], g[k], s);
        step = lr / (root(s) + eps);
      } else {
        char* moment = (char*)(t.moment + row * t.width);
        Vec m = load_columns(moment, false, k * LANES, c);
        m = m * splat((float)h.first_beta) + g[k] * splat((float)(1 - h.first_beta));
        s = s * splat((float)h.second_beta) + g[k] * g[k] * splat((float)(1 - h.second_beta));
        store_columns(moment, false, k * LANES, c, m);
        step = splat((float)(h.lr / h.first_correction)) /
               (root(s / splat((float)h.second_correction)) + eps);
        change = m;
      }
      store_columns(squares, false, k * LANES, c, s);
    }
    store_columns(w, half, k * LANES, c, old - change * step);
  }
}

struct Block {
  int64_t table, start, stop;  // sorted entries of one table
  int64_t place;               // how many rows of a packed gradient come before it
  float *head, *tail;          // partial sums of the runs that it shares with its neighbours
};

static INLINE bool continues(const Table& t, int64_t i) {  // does the run of i - 1 go on at i?
  return 0 < i && i < t.used && row_of(t.sorted[i]) == row_of(t.sorted[i - 1]);
}

static INLINE void ask_for(const Table& t, uint64_t entry, int64_t bytes) {
  const int64_t row = row_of(entry);
  const uint32_t bag = t.sides ? low(t.sides[low(entry)]) : low(entry);
  prefetch(t.gradient, bag, t.gradient_stride, t.width * (t.gradient_half ? 2 : 4));
  if (t.rule == WRITE) return;
  prefetch(t.rows, row, t.stride, bytes);
  if (t.rule == ROWWISE_ADAGRAD) prefetch(t.squares, row, 4, 4);
  if (t.rule == ADAGRAD || t.rule == ADAM) prefetch(t.squares, row, t.width * 4, t.width * 4);
  if (t.rule == ADAM) prefetch(t.moment, row, t.width * 4, t.width * 4);
}

// N vectors per row, in registers; N = 0: any number, in `room`.
template <int N>
static void reduce(const Table& table, const Hyper& hyper, const Block& block, Vec* room) {
  const Table t = table;  // copies of their own stay in registers
  const Hyper h = hyper;
  const int n = N ? N : (int)((t.width + LANES - 1) / LANES);
  const int64_t bytes = t.width * (t.half ? 2 : 4);
  Vec own[N ? N : 1];
  Vec* g = N ? own : room;
  int64_t place = block.place;
  for (int64_t i = block.start; i < block.stop;) {
    const uint32_t row = row_of(t.sorted[i]);
    const bool from_before = i == block.start && continues(t, i);
    for (int k = 0; k < n; k++) g[k] = Vec{};
    do {
      if (i + AHEAD < t.used) ask_for(t, t.sorted[i + AHEAD], bytes);
      const uint32_t payload = low(t.sorted[i]);
      const uint64_t side = t.sides ? t.sides[payload] : (uint64_t)0x3f800000 << 32 | payload;
      const char* from = t.gradient + (int64_t)low(side) * t.gradient_stride;
      const Vec scale = splat(from_bits(row_of(side)));
      for (int k = 0; k < n; k++) {
        Vec value = load_columns(from, t.gradient_half, k * LANES, columns(t, k));
        if (t.argmax) {  // only the columns that this id gave
          const int32_t* won = t.argmax + (int64_t)low(side) * t.width;
          VecInt who = (VecInt)load_columns((const char*)won, false, k * LANES, columns(t, k));
          value = select(who == (VecInt{} + (int32_t)payload), value, Vec{});
        }
        g[k] = fma(scale, value, g[k]);
      }
      i++;
    } while (i < block.stop && row_of(t.sorted[i]) == row);
    if (from_before || (i == block.stop && continues(t, i))) {
      float* partial = from_before ? block.head : block.tail;
      for (int k = 0; k < n; k++) store(partial + k * LANES, g[k]);
    } else {
      apply(t, h, row, place, g, n);
    }
    place += !from_before;
  }
}

static void reduce_any(const Table& t, const Hyper& h, const Block& block, Vec* room) {
  switch ((t.width + LANES - 1) / LANES) {
    case 1: return reduce<1>(t, h, block, room);
    case 2: return reduce<2>(t, h, block, room);
    case 4: return reduce<4>(t, h, block, room);
    case 8: return reduce<8>(t, h, block, room);
    default: return reduce<0>(t, h, block, room);
  }
}

// Add up the run that starts in blocks[b] and goes on in the next ones, and apply it.
static void finish(const Table& t, const Hyper& h, const std::vector<Block>& blocks, size_t b,
                   Vec* room) {
  const int n = (int)((t.width + LANES - 1) / LANES);
  const uint32_t row = row_of(t.sorted[blocks[b].stop - 1]);
  for (int k = 0; k < n; k++) room[k] = load(blocks[b].tail + k * LANES);
  for (size_t next = b + 1;; next++) {
    for (int k = 0; k < n; k++) room[k] += load(blocks[next].head + k * LANES);
    const int64_t stop = blocks[next].stop;
    if (!continues(t, stop) || row_of(t.sorted[stop]) != row) break;
  }
  apply(t, h, row, blocks[b + 1].place - 1, room, n);
}

static void update(const Table* tables, const Hyper* hypers, int64_t count, int64_t threads) {
  std::vector<Block> blocks;
  std::vector<size_t> shared;  // blocks in which a run starts that goes on in the next
  int64_t room = 0, numbers = 0;
  for (int64_t f = 0; f < count; f++) {
    const Table& t = tables[f];
    const int64_t width = (t.width + LANES - 1) / LANES * LANES;
    if (t.width == 0) continue;
    for (int64_t i = 0; i < t.used; i += BLOCK) {
      blocks.push_back({f, i, std::min(i + BLOCK, t.used), 0, nullptr, nullptr});
      if (t.used > BLOCK) numbers += 2 * width;
    }
    room = std::max(room, width);
  }
  std::vector<float> partials(numbers);
  float* next = partials.data();
  for (size_t b = 0; b < blocks.size(); b++) {
    Block& block = blocks[b];
    const Table& t = tables[block.table];
    if (t.used <= BLOCK) continue;
    const int64_t width = (t.width + LANES - 1) / LANES * LANES;
    block.head = next, block.tail = next + width, next += 2 * width;
    if (t.indices && block.start > 0) {
      const Block& before = blocks[b - 1];
      block.place = before.place;
      for (int64_t i = before.start; i < before.stop; i++) block.place += !continues(t, i);
    }
    const uint32_t row = row_of(t.sorted[block.stop - 1]);
    const bool all_one_run = continues(t, block.start) && row_of(t.sorted[block.start]) == row;
    if (continues(t, block.stop) && !all_one_run) shared.push_back(b);
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<char> space((room / LANES + 1) * sizeof(Vec));
    void* at = space.data();
    size_t size = space.size();
    Vec* own = (Vec*)std::align(alignof(Vec), room / LANES * sizeof(Vec), at, size);
#pragma omp for schedule(dynamic)
    for (size_t b = 0; b < blocks.size(); b++)
      reduce_any(tables[blocks[b].table], hypers[blocks[b].table], blocks[b], own);
#pragma omp for schedule(dynamic)
    for (size_t s = 0; s < shared.size(); s++) {
      const int64_t f = blocks[shared[s]].table;
      finish(tables[f], hypers[f], blocks, shared[s], own);
    }
  }
}

static int64_t useful_threads(const Table* tables, int64_t count, int64_t threads) {
  int64_t numbers = 0;
  for (int64_t f = 0; f < count; f++) numbers += tables[f].bags.count * (tables[f].width + 8);
  return numbers < 10000 ? 1 : std::max<int64_t>(threads, 1);  // a team costs more than that
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sorts and counts: `used`, `unique`, and where `sorted` now lies. Nothing else is changed.
EXPORT void group_rows(Table* tables, int64_t count, int64_t threads, Problem* problem) {
  group(tables, count, useful_threads(tables, count, threads), problem);
}

// What follows group_rows: gradients are summed and written, or rows updated.
EXPORT void reduce_rows(const Table* tables, const Hyper* hypers, int64_t count, int64_t threads) {
  update(tables, hypers, count, useful_threads(tables, count, threads));
}

// Both. A bad id or offset is found before anything is updated.
EXPORT void update_rows(Table* tables, const Hyper* hypers, int64_t count, int64_t threads,
                        Problem* problem) {
  threads = useful_threads(tables, count, threads);
  group(tables, count, threads, problem);
  if (problem->kind == Problem::NONE) update(tables, hypers, count, threads);
}
