// A vector as quads of four words. With a sample in each quad, dot products fill the machine's
// vectors whatever the length and number of the feature vectors.
#ifndef QUADS_H
#define QUADS_H
#include "gemm.h"

constexpr Int QUADS = LANES / 4;

// Of each quad (a0 a1 a2 a3) and (b0 b1 b2 b3): (a0 b0 a1 b1), (a2 b2 a3 b3), (a0 a1 b0 b1) and
// (a2 a3 b2 b3).
#if defined(VECTOR_MASKS) || defined(__AVX2__)
#if defined(VECTOR_MASKS)
#define OF_QUADS(NAME, OP)                                                                        \
  INLINE Vec NAME(Vec a, Vec b) { return (Vec)_mm512_##OP##_ps((__m512)a, (__m512)b); }
#define OF_HALVES(NAME, OP)                                                                       \
  INLINE Vec NAME(Vec a, Vec b) { return (Vec)_mm512_##OP##_pd((__m512d)a, (__m512d)b); }
#else
#define OF_QUADS(NAME, OP)                                                                        \
  INLINE Vec NAME(Vec a, Vec b) { return (Vec)_mm256_##OP##_ps((__m256)a, (__m256)b); }
#define OF_HALVES(NAME, OP)                                                                       \
  INLINE Vec NAME(Vec a, Vec b) { return (Vec)_mm256_##OP##_pd((__m256d)a, (__m256d)b); }
#endif
OF_QUADS(low_words, unpacklo)
OF_QUADS(high_words, unpackhi)
OF_HALVES(low_halves, unpacklo)
OF_HALVES(high_halves, unpackhi)
#else  // a vector is one quad
#define OF_QUADS(NAME, ...)                                                                       \
  INLINE Vec NAME(Vec a, Vec b) {                                                                 \
    static constexpr int32_t which[] = {__VA_ARGS__};                                             \
    return shuffle(a, b, which);                                                                  \
  }
OF_QUADS(low_words, 0, 4, 1, 5)
OF_QUADS(high_words, 2, 6, 3, 7)
OF_QUADS(low_halves, 0, 1, 4, 5)
OF_QUADS(high_halves, 2, 3, 6, 7)
#endif

struct Reverse {
  int32_t which[LANES]{};
  constexpr Reverse() {
    for (int lane = 0; lane < LANES; lane++) which[lane] = lane ^ 3;
  }
};

// Each quad's four sums: of a's words, of b's, of c's and of d's.
INLINE Vec quad_sums(Vec a, Vec b, Vec c, Vec d) {
  Vec ab = low_words(a, b) + high_words(a, b), cd = low_words(c, d) + high_words(c, d);
  return low_halves(ab, cd) + high_halves(ab, cd);
}

// Each quad's words in reverse.
INLINE Vec reverse_quads(Vec v) {
  static constexpr Reverse reverse;
  return shuffle(v, v, reverse.which);
}

// A square of QUADS x QUADS quads, transposed.
INLINE void transpose_quads(Vec (&rows)[QUADS]) {
  static constexpr Swaps swaps;
#pragma GCC unroll 2
  for (int round = 2; 1 << round < LANES; round++)
#pragma GCC unroll 4
    for (int i = 0; i < QUADS; i++)
      if (!(4 * i & 1 << round)) {
        Vec a = rows[i], b = rows[i + (1 << round) / 4];
        rows[i] = shuffle(a, b, swaps.low[round]);
        rows[i + (1 << round) / 4] = shuffle(a, b, swaps.high[round]);
      }
}

// Quad q's four numbers go to to[q] + offset.
INLINE void store_quads(float* const* to, Int offset, Vec v) {
#if defined(VECTOR_MASKS)
  _mm_storeu_ps(to[0] + offset, _mm512_castps512_ps128((__m512)v));
  _mm_storeu_ps(to[1] + offset, _mm512_extractf32x4_ps((__m512)v, 1));
  _mm_storeu_ps(to[2] + offset, _mm512_extractf32x4_ps((__m512)v, 2));
  _mm_storeu_ps(to[3] + offset, _mm512_extractf32x4_ps((__m512)v, 3));
#else
  for (Int q = 0; q < QUADS; q++) std::memcpy(to[q] + offset, (const float*)&v + 4 * q, 16);
#endif
}
INLINE void store_quads(bf16* const* to, Int offset, Vec v) {
  VecHalf halves = round_bf16(v);
  bf16 numbers[LANES];
  std::memcpy(numbers, &halves, sizeof halves);
  for (Int q = 0; q < QUADS; q++) std::memcpy(to[q] + offset, numbers + 4 * q, 8);
}

// The sum of a vector's quads, four numbers.
INLINE void store_quad(float* to, Vec v) {
#if defined(VECTOR_MASKS)
  __m512 a = (__m512)v;
  __m256 two = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
  float numbers[LANES];
  store(numbers, v);
  for (int j = 0; j < 4; j++) {
    float sum = numbers[j];
    for (int q = 1; q < QUADS; q++) sum += numbers[4 * q + j];
    to[j] = sum;
  }
#endif
}

// A vector of words, 0 beyond the first `numbers`.
INLINE Vec words_some(const float* p, Int numbers) { return load_some(p, (int)numbers); }
INLINE Vec words_some(const bf16* p, Int numbers) {
#if defined(VECTOR_MASKS)
  if (numbers >= 2 * LANES) return words(p);
  return (Vec)_mm512_maskz_loadu_epi16((__mmask32)((1u << numbers) - 1), p);
#else
  Vec v{};
  std::memcpy(&v, p, std::min<Int>(numbers * sizeof(bf16), sizeof v));
  return v;
#endif
}
#endif
