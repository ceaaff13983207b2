
// What a run reports: the first problem that it met, 0 if none.
struct Problem {
  Int where, kind, table, position, value;

  void report(Int at, Int what = 0, Int in_table = 0, Int at_position = 0, Int found = 0) {
    if (where) return;
    where = at, kind = what, table = in_table, position = at_position, value = found;
  }
};

INLINE Int aligned(Int bytes) { return (bytes + 63) / 64 * 64; }

#define EXPORT extern "C" __attribute__((visibility("default")))
