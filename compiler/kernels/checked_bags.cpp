// Pooling that verifies what it reads and what it computes, by checksums.
//
// Each row has a checksum of one byte, the sum of its bytes mod 251, taken when the table was last
// changed on purpose. The bytes of all rows that a tile of bags reads are added up on the way, and
// must give the sum of their checksums. A flipped bit changes the total by a power of two times the
// number of times its row is read: no multiple of the prime 251, unless that number is one. These
// are integers, so there are no false alarms.
//
// What the arithmetic makes of the rows is verified by its linearity (Huang and Abraham 1984): the
// weighted sum of a tile's rows must be the sum of its pooled vectors, up to rounding. Maxima are
// not linear: of these the rows are verified, not the choice.
#include "tables.h"

constexpr uint32_t MODULUS = 251;
constexpr int64_t OFTEN = 64;  // rows after which the arithmetic is verified

// What the rows of one table should be. As TableSums in checked.py.
struct Sums {
  const uint8_t* rows;   // (rows,) checksums
  const float* largest;  // the largest absolute value in the table
};

// A fault in the arithmetic, for tests: bit `bit` of one pooled number, before it is stored.
#ifdef PLANT
static int64_t plant_table = -1, plant_bag, plant_column, plant_bit;
extern "C" __attribute__((visibility("default"))) void plant(int64_t table, int64_t bag,
                                                             int64_t column, int64_t bit) {
  plant_table = table, plant_bag = bag, plant_column = column, plant_bit = bit;
}
static void planted(int64_t table, int64_t bag, int64_t at, Vec& pooled) {
  const int64_t lane = plant_column - at;
  if (table != plant_table || bag != plant_bag || lane < 0 || lane >= LANES) return;
  VecBits bits = (VecBits)pooled;
  bits[lane] ^= 1u << plant_bit;
  pooled = (Vec)bits;
}
#else
INLINE void planted(int64_t, int64_t, int64_t, Vec&) {}
#endif

typedef uint64_t VecLong __attribute__((vector_size(4 * LANES)));

// The sum of a vector's bytes, in parts.
INLINE VecLong byte_sums(Vec v) {
#if defined(VECTOR_MASKS)
  return (VecLong)_mm512_sad_epu8((__m512i)v, _mm512_setzero_si512());
#elif defined(__AVX2__)
  return (VecLong)_mm256_sad_epu8((__m256i)v, _mm256_setzero_si256());
#else
  const VecLong even = VecLong{} + 0x00ff00ff00ff00ffULL, pair = VecLong{} + 0xffffULL;
  const VecLong sums = ((VecLong)v & even) + (((VecLong)v >> 8) & even);  // four of 16 bits each
  return (sums & pair) + ((sums >> 16) & pair) + ((sums >> 32) & pair) + (sums >> 48);
#endif
}

static INLINE uint64_t total(VecLong v) {
  uint64_t words[LANES / 2], sum = 0;
  std::memcpy(words, &v, sizeof v);
  for (int i = 0; i < LANES / 2; i++) sum += words[i];
  return sum;
}

// What a tile of bags adds up to.
struct Tally {
  uint64_t bytes = 0, expected = 0;
  bool pooled = true;  // whether the pooled vectors are the sum of the rows
};

// As `pool` of embedding_bag.cpp.
template <class T, int N, bool IS_MAX, bool WEIGHTED>
static void pool(const Table& t, const Sums& sums, int64_t table, int64_t column, int last,
                 int64_t start, int64_t stop, Tally& tally, Problem& bad) {
  const Bags bags = t.bags;
  const char* rows = t.rows + column * sizeof(T);
  const uint8_t* known = column ? nullptr : sums.rows;  // a row counts once, in its first strip
  const int64_t bytes = ((N - 1) * LANES + last) * sizeof(T), early = ahead(bytes);
  const int64_t stride = t.stride;
  const bool mean = t.mode == MEAN, full = t.out_type == F32;
  VecLong seen{};
  uint64_t expected = 0;
  float weights = 0;
  Vec read[N] = {}, made[N] = {}, wrong{};
  Walk walk(bags, table, start, bad);
  int64_t asked = walk.end, first = walk.end;
  // Of n terms no partial sum exceeds `reach`, so neither side is off by more than n / 2 roundings
  // of that; often, so that n stays small. A table with numbers that are not finite has no limit.
  auto add_up = [&]() __attribute__((always_inline)) {
    const float n = (float)(walk.end - first), reach = *sums.largest * (WEIGHTED ? weights : n);
    const float limit = 0x1p-24f * reach * (n + 4);
#pragma GCC unroll 8
    for (int k = 0; k < N; k++) {
      const Vec error = read[k] - made[k];
      const VecInt good = (error <= splat(limit)) & (error >= splat(-limit));
      if (limit <= 3e38f) wrong += select(good, Vec{}, splat(1.0f));
      read[k] = made[k] = Vec{};
    }
    first = walk.end, weights = 0;
  };
  auto ask = [&](int64_t p) __attribute__((always_inline)) {  // for rows early, and in bursts
    if (p + early <= asked) return;
    const int64_t until = std::min(p + 2 * early, bags.count);
    for (asked = std::max(asked, p); asked < until; asked++) {
      prefetch(rows, bags.id(asked), stride, bytes);
      if (known) prefetch(known, bags.id(asked), 1, 1);
    }
    asked = p + 2 * early;
  };
  auto valid = [&](int64_t p, int64_t id) __attribute__((always_inline)) {
    if ((uint64_t)id >= (uint64_t)bags.rows) {
      bad.note(Problem::ID, table, p, id);
      return false;
    }
    return id != bags.padding;
  };
  auto put = [&](int64_t b, int k, Vec v) __attribute__((always_inline)) {
    char* out = t.out + b * t.out_stride;
    const int n = k + 1 < N ? LANES : last;
    const int64_t at = column + k * LANES;
    full ? store_columns((float*)out + at, v, n) : store_columns((bf16*)out + at, v, n);
  };
  for (int64_t b = start; b < stop; b++) {
    walk.next(b, bad);
    if (!WEIGHTED && !IS_MAX && walk.end - walk.begin == 1) {
      // A bag of one is a copy, with no arithmetic: what is verified is what is stored.
      const int64_t p = walk.begin, id = bags.id(p);
      ask(p);
      if (valid(p, id)) {
        if (known) expected += known[id];
        const T* row = (const T*)(rows + id * stride);
#pragma GCC unroll 8
        for (int k = 0; k < N; k++) {
          Vec value = load_columns(row + k * LANES, k + 1 < N ? LANES : last);
          planted(table, b, column + k * LANES, value);
          seen += byte_sums(value);
          put(b, k, value + Vec{});  // as in a sum, -0 becomes 0
        }
        first++;
        continue;
      }
    }
    Vec acc[N] = {};
    int64_t used = 0;
    for (int64_t p = walk.begin; p < walk.end; p++) {
      ask(p);
      const int64_t id = bags.id(p);
      if (!valid(p, id)) continue;
      if (known) expected += known[id];
      const T* row = (const T*)(rows + id * stride);
      const Vec weight = splat(WEIGHTED ? bags.weights[p] : 1.0f);
      if (WEIGHTED) weights += std::fabs(bags.weights[p]);
#pragma GCC unroll 8
      for (int k = 0; k < N; k++) {
        const Vec value = load_columns(row + k * LANES, k + 1 < N ? LANES : last);
        seen += byte_sums(value);
        if (IS_MAX) {
          acc[k] = select(used ? value > acc[k] : VecInt{} - 1, value, acc[k]);
        } else if (WEIGHTED) {
          read[k] = fma(weight, value, read[k]);
          acc[k] = fma(weight, value, acc[k]);
        } else {
          read[k] += value;
          acc[k] += value;
        }
      }
      used++;
    }
#pragma GCC unroll 8
    for (int k = 0; k < N; k++) {
      planted(table, b, column + k * LANES, acc[k]);
      if (!IS_MAX) made[k] += acc[k];
      if (mean && used > 1) acc[k] /= splat((float)used);
      put(b, k, acc[k]);
    }
    if (walk.end - first >= OFTEN) add_up();
  }
  tally.bytes += total(seen);
  tally.expected += expected;
  add_up();
  if (sum(wrong) != 0) tally.pooled = false;
}

static INLINE uint32_t row_sum(const char* row, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < bytes; i++) sum += (uint8_t)row[i];
  return (uint32_t)(sum % MODULUS);
}

// Says which row of a tile is damaged; if none is, the pooled vectors are wrong.
static void locate(const Table& t, const Sums& sums, int64_t table, int64_t start, int64_t stop,
                   Problem& bad) {
  const int64_t bytes = t.width * (t.type == F32 ? 4 : 2);
  for (int64_t p = t.bags.begin(start); p < t.bags.begin(stop); p++) {
    const int64_t id = t.bags.id(p);
    if (id != t.bags.padding && row_sum(t.rows + id * t.stride, bytes) != sums.rows[id])
      return bad.note(Problem::ROW, table, p, id);
  }
  bad.note(Problem::POOLED, table, start, stop);
}

template <class T, bool IS_MAX, bool WEIGHTED>
static void pool_tile(const Table& t, const Sums& sums, int64_t table, int64_t start, int64_t stop,
                      Problem& bad) {
  Problem own;
  Tally tally;
  for (int64_t column = 0; column < t.width; column += 8 * LANES) {
    const int64_t left = std::min<int64_t>(t.width - column, 8 * LANES);
    const int last = (int)((left - 1) % LANES + 1);
    switch ((left + LANES - 1) / LANES) {
#define CASE(N)                                                                                  \
  case N:                                                                                        \
    pool<T, N, IS_MAX, WEIGHTED>(t, sums, table, column, last, start, stop, tally, own);         \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
  }
  bad.merge(own);
  if (own.kind != Problem::NONE) return;  // an id or an offset out of range explains the rest
  if (tally.bytes % MODULUS != tally.expected % MODULUS || !(tally.pooled || IS_MAX))
    locate(t, sums, table, start, stop, bad);
}

template <class T>
static void pool_any(const Table& t, const Sums& sums, int64_t table, int64_t start, int64_t stop,
                     Problem& bad) {
  if (t.mode == MAX) return pool_tile<T, true, false>(t, sums, table, start, stop, bad);
  t.bags.weights ? pool_tile<T, false, true>(t, sums, table, start, stop, bad)
                 : pool_tile<T, false, false>(t, sums, table, start, stop, bad);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void embedding_bags_checked(const Table* tables, const Sums* sums, int64_t count,
                                   int64_t threads, Problem* problem) {
  over_tiles(tables, count, threads, problem,
             [&](int64_t f, int64_t start, int64_t stop, Problem& bad) {
               tables[f].type == F32 ? pool_any<float>(tables[f], sums[f], f, start, stop, bad)
                                     : pool_any<bf16>(tables[f], sums[f], f, start, stop, bad);
             });
}

template <class T>
static void sums_of(const char* rows, int64_t stride, int64_t width, int64_t count, uint8_t* sums,
                    float* largest, int64_t threads) {
  float most = 0;
#pragma omp parallel for num_threads(threads) reduction(max : most)
  for (int64_t r = 0; r < count; r++) {
    const T* row = (const T*)(rows + r * stride);
    VecLong bytes{};
    Vec top{};
    VecInt finite = VecInt{} - 1;
    for (int64_t c = 0; c < width; c += LANES) {
      const Vec v = load_columns(row + c, (int)std::min<int64_t>(LANES, width - c));
      const Vec size = (Vec)((VecBits)v & 0x7fffffffu);
      bytes += byte_sums(v);
      finite &= size <= splat(3.4e38f);
      top = larger(size, top);
    }
    sums[r] = (uint8_t)(total(bytes) % MODULUS);
    const Vec here = select(finite, top, splat(INFINITY));
    for (int i = 0; i < LANES; i++) most = std::max(most, here[i]);
  }
  *largest = most;
}

// The checksums (count,) of a table's rows, and its largest absolute value; infinity if one is not
// finite.
EXPORT void table_sums(const void* rows, int64_t stride, int64_t type, int64_t width, int64_t count,
                       uint8_t* sums, float* largest, int64_t threads) {
  type == F32 ? sums_of<float>((const char*)rows, stride, width, count, sums, largest, threads)
              : sums_of<bf16>((const char*)rows, stride, width, count, sums, largest, threads);
}
