// Gaussian noise by number: the normal at a place of a stream at a step follows from a secret key.
//
// ChaCha20 (RFC 8439), sixteen blocks at a time, turns (key, place, stream, step) into 16 words a
// block; Box and Muller's transform turns two words into two normals. So noise needs no state, is
// the same for any number of threads, and cannot be guessed without the key.
//
// A radius is made of 40 bits: normals reach 7.4 standard deviations, past which a Gaussian has
// 1e-13 of its mass.
#ifndef __FAST_MATH__
// glibc has vectors of logf and cosf for code that is built so. The flag itself is not given: GCC
// would let the library turn subnormal numbers off in the whole process when it is loaded.
#define __FAST_MATH__ 1
#endif
#include <algorithm>
#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int BLOCKS = 16;  // worked on together, one in each lane
constexpr int WORDS = 16;   // of a block: as many normals
typedef uint32_t Words __attribute__((vector_size(4 * BLOCKS)));

struct Stream {
  const uint32_t* key;  // 8 words
  uint32_t stream, step;
};

static inline Words rotate(Words x, int n) { return (x << n) | (x >> (32 - n)); }

static inline void quarter(Words& a, Words& b, Words& c, Words& d) {
  a += b, d = rotate(d ^ a, 16);
  c += d, b = rotate(b ^ c, 12);
  a += b, d = rotate(d ^ a, 8);
  c += d, b = rotate(b ^ c, 7);
}

// Blocks `places` of the stream: out[w][lane] is word w of block places[lane].
static void chacha(const Stream& s, const uint64_t* places, Words out[WORDS]) {
  const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
  Words start[WORDS], x[WORDS];
  for (int lane = 0; lane < BLOCKS; lane++) {
    for (int i = 0; i < 4; i++) start[i][lane] = constants[i];
    for (int i = 0; i < 8; i++) start[4 + i][lane] = s.key[i];
    start[12][lane] = uint32_t(places[lane]);
    start[13][lane] = uint32_t(places[lane] >> 32);
    start[14][lane] = s.stream;
    start[15][lane] = s.step;
  }
  for (int i = 0; i < WORDS; i++) x[i] = start[i];
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < 4; i++) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
    for (int i = 0; i < 4; i++)
      quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
  }
  for (int i = 0; i < WORDS; i++) out[i] = x[i] + start[i];
}

// Normals of the blocks: out[w * BLOCKS + lane] is number w of block places[lane].
static void normals(const Stream& s, const uint64_t* places, float* out) {
  Words words[WORDS];
  chacha(s, places, words);
  constexpr int PAIRS = WORDS / 2 * BLOCKS;
  uint32_t raw[2 * PAIRS];
  std::memcpy(raw, words, sizeof raw);
  float radius[PAIRS], angle[PAIRS];
  // loops of one function each: the vectors of GCC's math library, where there are any
#pragma omp simd
  for (int i = 0; i < PAIRS; i++) {
    const uint32_t a = raw[i], b = raw[PAIRS + i];
    const float u = float(a) * 0x1p-32f + float((b & 255) + 1) * 0x1p-40f;  // in (0, 1]
    angle[i] = float(b >> 8) * (6.283185307179586f * 0x1p-24f);
    radius[i] = std::sqrt(std::max(0.0f, -2.0f * logf(u)));
  }
#pragma omp simd
  for (int i = 0; i < PAIRS; i++) out[i] = radius[i] * cosf(angle[i]);
#pragma omp simd  // a sine beside the cosine of the same angle would not be vectorised
  for (int i = 0; i < PAIRS; i++) out[PAIRS + i] = radius[i] * cosf(angle[i] - 1.5707963267948966f);
}

// Sixteen words of block `place`, for the tests.
EXPORT void noise_words(const uint32_t* key, uint32_t stream, uint32_t step, uint64_t place,
                        uint32_t* out) {
  uint64_t places[BLOCKS];
  std::fill(places, places + BLOCKS, place);
  Words words[WORDS];
  chacha({key, stream, step}, places, words);
  for (int i = 0; i < WORDS; i++) out[i] = words[i][0];
}

// out[i] += scale * normal(i).
EXPORT void noise_add(float* out, int64_t count, const uint32_t* key, uint32_t stream,
                      uint32_t step, float scale, int threads) {
  const int64_t groups = (count + BLOCKS * WORDS - 1) / (BLOCKS * WORDS);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t g = 0; g < groups; g++) {
    uint64_t places[BLOCKS];
    for (int lane = 0; lane < BLOCKS; lane++) places[lane] = g * BLOCKS + lane;
    float made[BLOCKS * WORDS];
    normals({key, stream, step}, places, made);
    for (int lane = 0; lane < BLOCKS; lane++) {
      const int64_t first = (g * BLOCKS + lane) * WORDS;
      const int width = int(std::min<int64_t>(WORDS, count - first));
      for (int w = 0; w < width; w++) out[first + w] += scale * made[w * BLOCKS + lane];
    }
  }
}

struct Row {
  float* at;
  uint64_t number;
  float scale;
};

// row += scale * normals, for each of `rows`; width numbers a row.
static void add_to_rows(const Stream& s, const Row* rows, int64_t count, int64_t width) {
  const int64_t per_row = (width + WORDS - 1) / WORDS;
  const int64_t blocks = count * per_row;
  float made[BLOCKS * WORDS];
  for (int64_t b = 0; b < blocks; b += BLOCKS) {
    uint64_t places[BLOCKS];
    const int used = int(std::min<int64_t>(BLOCKS, blocks - b));
    for (int lane = 0; lane < BLOCKS; lane++) {
      const int64_t one = b + std::min(lane, used - 1);
      places[lane] = rows[one / per_row].number * per_row + one % per_row;
    }
    normals(s, places, made);
    for (int lane = 0; lane < used; lane++) {
      const Row& row = rows[(b + lane) / per_row];
      const int64_t first = (b + lane) % per_row * WORDS;
      const int some = int(std::min<int64_t>(WORDS, width - first));
      for (int w = 0; w < some; w++) row.at[first + w] += row.scale * made[w * BLOCKS + lane];
    }
  }
}

struct Table {  // all members are 8 bytes, as Python gives them
  float* values;
  int64_t stride, width, stream;
  const int64_t* ids;  // null: rows 0 to count - 1
  int64_t count;
  int32_t* last;  // the step up to which a row has its noise
};

// Bring rows up to date: each gets what steps last[row] to step - 1 owe it, in one draw whose
// variance is the sum of theirs. variance[t] is that sum over steps 0 to t - 1. An id may occur
// several times: the second finds nothing owed.
EXPORT void noise_settle(const Table* tables, int64_t count, const double* variance, int32_t step,
                         const uint32_t* key, int threads) {
  constexpr int64_t CHUNK = 4096;
  struct Piece { int64_t table, first, stop; int part; };
  std::vector<Piece> pieces;
  for (int64_t f = 0; f < count; f++) {
    // ids may repeat, so each thread looks at all of them for rows of its own
    if (tables[f].ids)
      for (int part = 0; part < threads; part++) pieces.push_back({f, 0, tables[f].count, part});
    else
      for (int64_t a = 0; a < tables[f].count; a += CHUNK)
        pieces.push_back({f, a, std::min(a + CHUNK, tables[f].count), 0});
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t p = 0; p < int64_t(pieces.size()); p++) {
    const Table& t = tables[pieces[p].table];
    std::vector<Row> rows;
    rows.reserve(pieces[p].stop - pieces[p].first);
    for (int64_t i = pieces[p].first; i < pieces[p].stop; i++) {
      const int64_t row = t.ids ? t.ids[i] : i;
      if (t.ids && row % threads != pieces[p].part) continue;
      const double owed = variance[step] - variance[t.last[row]];
      t.last[row] = step;
      if (owed > 0) rows.push_back({t.values + row * t.stride, uint64_t(row), float(std::sqrt(owed))});
    }
    add_to_rows({key, uint32_t(t.stream), uint32_t(step)}, rows.data(), rows.size(), t.width);
  }
}

// values[i] += scale * normals of row rows[i]: gradients (count, width) side by side.
EXPORT void noise_rows(float* values, const int64_t* rows, int64_t count, int64_t width,
                       const uint32_t* key, uint32_t stream, uint32_t step, float scale,
                       int threads) {
  constexpr int64_t CHUNK = 1024;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t a = 0; a < count; a += CHUNK) {
    std::vector<Row> some;
    for (int64_t i = a; i < std::min(a + CHUNK, count); i++)
      some.push_back({values + i * width, uint64_t(rows[i]), scale});
    add_to_rows({key, stream, step}, some.data(), some.size(), width);
  }
}
