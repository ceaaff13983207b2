// The register tile of every matrix product here: c (rows x columns) = a (rows x depth) b (depth x
// columns), a few rows by two vectors of columns, the sums held in registers (Goto and van de
// Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").
//
// One step along the depth takes a 32-bit word of a and a vector of words of b: an f32, or two bf16
// that lie next to each other, so that b holds bf16 as (depth / 2, columns, 2).
#ifndef GEMM_H
#define GEMM_H
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "vector.h"

typedef int64_t Int;

#if defined(VECTOR_MASKS)
constexpr int TILE_ROWS = 14;  // 14 x 2 sums, 2 of b, 1 of a: 31 of 32 registers
#elif defined(__x86_64__)
constexpr int TILE_ROWS = 6;  // 6 x 2 sums, 2 of b, 1 of a: 15 of 16 registers
#else
constexpr int TILE_ROWS = 12;  // 12 x 2 sums, 2 of b, up to 4 of a: 30 of 32 registers
#endif
constexpr Int PANEL = 2 * LANES;                                         // columns of a tile
constexpr Int STRIP = (TILE_ROWS + LANES - 1) / LANES * LANES;           // rows of a packed a
template <class T> constexpr Int DEPTH = sizeof(float) / sizeof(T);      // numbers in a word
template <class T> constexpr Int steps(Int depth) { return (depth + DEPTH<T> - 1) / DEPTH<T>; }

INLINE Int ceiling(Int a, Int b) { return (a + b - 1) / b; }

INLINE VecBits splat_word(uint32_t word) { return word + VecBits{}; }

INLINE Vec word(const float* p) { return splat(*p); }
INLINE Vec word(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return (Vec)splat_word(pair);
}
INLINE Vec last_word(const float* p) { return word(p); }
INLINE Vec last_word(const bf16* p) { return (Vec)splat_word(p->bits); }  // the other half is 0

INLINE Vec words(const float* p) { return load(p); }
INLINE Vec words(const bf16* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// c + a * b, for bf16 with both products of a word, summed in f32.
INLINE Vec multiply_add(const float*, Vec a, Vec b, Vec c) { return fma(a, b, c); }
INLINE Vec multiply_add(const bf16*, Vec a, Vec b, Vec c) {
#if defined(__AVX512BF16__) && defined(VECTOR_MASKS)
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
  const VecBits upper = splat_word(0xffff0000u);
  c = fma((Vec)((VecBits)a << 16), (Vec)((VecBits)b << 16), c);
  return fma((Vec)((VecBits)a & upper), (Vec)((VecBits)b & upper), c);
#endif
}

// One tile: c (ROWS, VECS * LANES), rows PANEL apart, is set, or added to when `add`.
// a's rows lie a_row apart and its words a_step; b's rows of words lie b_step apart.
template <class T, int ROWS, int VECS>
__attribute__((noinline)) void tile(const T* a, Int a_row, Int a_step, const T* b, Int b_step,
                                    Int depth, bool add, float* c) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) sums[r][v] = add ? load(c + r * PANEL + v * LANES) : Vec{};
  const T* bases[(ROWS + 2) / 3];  // x86 addresses base, base + row and base + 2 row
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r += 3) bases[r / 3] = a + r * a_row;
  auto step = [&](auto&& take) __attribute__((always_inline)) {
    Vec columns[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) columns[v] = words(b + v * LANES * DEPTH<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Vec x = take(bases[r / 3] + r % 3 * a_row);
#pragma GCC unroll 2
      for (int v = 0; v < VECS; v++) sums[r][v] = multiply_add(a, x, columns[v], sums[r][v]);
    }
  };
  for (Int k = 0; k < depth / DEPTH<T>; k++, b += b_step) {
    step([](const T* p) __attribute__((always_inline)) { return word(p); });
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r += 3) bases[r / 3] += a_step;
  }
  if (depth % DEPTH<T>)
    step([](const T* p) __attribute__((always_inline)) { return last_word(p); });
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) store(c + r * PANEL + v * LANES, sums[r][v]);
}

// A tile of any height up to TILE_ROWS, one or two vectors wide.
template <class T, int ROWS = TILE_ROWS>
INLINE void any_tile(int rows, int vecs, const T* a, Int a_row, Int a_step, const T* b, Int b_step,
                     Int depth, bool add, float* c) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS)
      return any_tile<T, ROWS - 1>(rows, vecs, a, a_row, a_step, b, b_step, depth, add, c);
    if (vecs == 2)
      tile<T, ROWS, 2>(a, a_row, a_step, b, b_step, depth, add, c);
    else
      tile<T, ROWS, 1>(a, a_row, a_step, b, b_step, depth, add, c);
  }
}

// Calls tile(row, rows) over `rows` in pieces of near equal height, at most `most`.
template <class F> INLINE void pieces(Int rows, Int most, F&& tile) {
  if (rows == 0) return;
  const Int count = ceiling(rows, most), height = rows / count, higher = rows % count;
  for (Int i = 0, row = 0; i < count; i++) {
    const Int own = height + (i < higher);
    tile(row, own);
    row += own;
  }
}

// n of a vector's numbers at p, all of them for n >= LANES.
template <class T> INLINE Vec load_some(const T* p, int n) {
  return n >= LANES ? load(p) : load_part(p, n);
}

template <class T> INLINE void store_some(T* p, Vec v, int n) {
  n >= LANES ? store(p, v) : store_part(p, v, n);
}

// For each round of a transpose, which word of (a, b) goes where in the two results.
struct Swaps {
  int32_t low[4][LANES]{}, high[4][LANES]{};
  constexpr Swaps() {
    for (int round = 0; round < 4; round++)
      for (int lane = 0, half = 1 << round; lane < LANES; lane++) {
        low[round][lane] = lane & half ? LANES + lane - half : lane;
        high[round][lane] = lane & half ? LANES + lane : lane + half;
      }
  }
};

INLINE Vec shuffle(Vec a, Vec b, const int32_t* which) {
  VecInt index;
  std::memcpy(&index, which, sizeof index);
#if defined(VECTOR_MASKS)
  return (Vec)_mm512_permutex2var_ps((__m512)a, (__m512i)index, (__m512)b);
#elif defined(__clang__)
  Vec v;
  for (int lane = 0; lane < LANES; lane++)
    v[lane] = which[lane] < LANES ? a[which[lane]] : b[which[lane] - LANES];
  return v;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// A square of LANES x LANES words, transposed in log2(LANES) rounds of swaps.
INLINE void transpose(Vec (&rows)[LANES]) {
  static constexpr Swaps swaps;
#pragma GCC unroll 4
  for (int round = 0; 1 << round < LANES; round++)
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & 1 << round)) {
        Vec a = rows[i], b = rows[i + (1 << round)];
        rows[i] = shuffle(a, b, swaps.low[round]);
        rows[i + (1 << round)] = shuffle(a, b, swaps.high[round]);
      }
}

// Scratch memory of one call, aligned for vectors.
template <class T> struct Scratch {
  T* data;
  explicit Scratch(Int size)
      : data((T*)std::aligned_alloc(64, ceiling(size * sizeof(T), 64) * 64)) {}
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
};
#endif
