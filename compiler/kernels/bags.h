// One table's bags of ids, as PyTorch gives them, and the first thing that is wrong with them.
#ifndef BAGS_H
#define BAGS_H
#include <algorithm>
#include <cstdint>

// All members are 8 bytes wide: Python fills an array of int64 (see bags.py, same order).
struct Bags {
  const void* ids;        // (count,) i32 or i64
  int64_t wide_ids;       // 1: i64
  int64_t count;          // number of ids
  const void* offsets;    // (bags,) or (bags + 1,) i32 or i64; null: every bag has `length` ids
  int64_t wide_offsets;   // 1: i64
  int64_t has_last;       // 1: offsets has bags + 1 entries
  int64_t length;
  int64_t bags;
  const float* weights;   // (count,) one per id, or null
  int64_t padding;        // this id counts for nothing; -1: none
  int64_t rows;           // ids are in [0, rows)

  __attribute__((always_inline)) int64_t id(int64_t p) const {
    return wide_ids ? ((const int64_t*)ids)[p] : ((const int32_t*)ids)[p];
  }
  // Bag b is ids[begin(b) : begin(b + 1)].
  __attribute__((always_inline)) int64_t begin(int64_t b) const {
    if (!offsets) return b * length;
    if (b == bags && !has_last) return count;
    return wide_offsets ? ((const int64_t*)offsets)[b] : ((const int32_t*)offsets)[b];
  }
};

// What is wrong first, in order of tables, bags and positions: the same for any number of threads.
struct Problem {
  enum Kind : int64_t { NONE, ID, OFFSET, ROW, POOLED, PRODUCT };  // the last three: corruption
  int64_t kind = NONE, table = 0, position = 0, value = 0;

  __attribute__((noinline)) void note(Kind what, int64_t at_table, int64_t at, int64_t found) {
    Problem other;
    other.kind = what, other.table = at_table, other.position = at, other.value = found;
    merge(other);
  }
  void merge(const Problem& other) {
    if (other.kind == NONE) return;
    auto before = [](const Problem& a, const Problem& b) {
      if (a.table != b.table) return a.table < b.table;
      if (a.kind != b.kind) return a.kind > b.kind;  // bad offsets explain bad ids
      return a.position < b.position;
    };
    if (kind == NONE || before(other, *this)) *this = other;
  }
};

// Walks the bags from `first` on, checking that offsets start at 0, do not fall and end in the ids.
struct Walk {
  const Bags& bags;
  int64_t table, begin, end;

  Walk(const Bags& of, int64_t f, int64_t first, Problem& bad) : bags(of), table(f) {
    end = bags.begin(first);
    if ((first == 0 && end != 0) || end < 0 || end > bags.count) mend(first, bad);
  }
  // Bag b is ids[begin : end]; called for each b in turn.
  void next(int64_t b, Problem& bad) {
    begin = end;
    end = bags.begin(b + 1);
    if ((uint64_t)(end - begin) > (uint64_t)(bags.count - begin)) mend(b + 1, bad);
  }
  __attribute__((noinline)) void mend(int64_t at, Problem& bad) {
    bad.note(Problem::OFFSET, table, at, end);
    end = std::clamp<int64_t>(end, 0, bags.count);
    begin = std::min(begin, end);
  }
};

// Asks for the cache lines of a row early; any address may be asked for, so ids need no check.
inline void prefetch(const void* base, int64_t index, int64_t stride, int64_t bytes) {
  uintptr_t p = (uintptr_t)base + (uintptr_t)index * (uintptr_t)stride;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void*)(p + i), 0, 2);  // into L2: more in flight
}

#endif  // BAGS_H
