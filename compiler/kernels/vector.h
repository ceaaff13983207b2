// A vector of floats as wide as the machine's registers, by the vector extensions that GCC and
// Clang share: one source for AVX-512 (16 lanes), AVX2 (8), NEON and everything else (4).
// `a * b + c` becomes one fused instruction where the machine has it.
#ifndef VECTOR_H
#define VECTOR_H
#include <cmath>
#include <cstdint>
#include <cstring>
#include "bf16.h"
#if defined(__AVX2__) || defined(__AVX512F__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own intrinsics
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VECTOR_MASKS 1  // masked loads and stores serve as the tail of a row
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));  // also what a comparison gives
typedef uint32_t VecBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * LANES)));
typedef uint8_t VecByte __attribute__((vector_size(LANES)));

INLINE Vec splat(float x) { return x - Vec{}; }

INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

INLINE Vec select(VecInt mask, Vec yes, Vec no) { return mask ? yes : no; }

// The larger of each pair; b where a or b is NaN.
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

INLINE Vec relu(Vec a) { return a < Vec{} ? Vec{} : a; }  // NaN stays NaN, as in PyTorch

INLINE Vec root(Vec a) {
#if defined(__AVX512F__) && defined(VECTOR_MASKS)
  return (Vec)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (Vec)_mm256_sqrt_ps((__m256)a);
#else
  for (int i = 0; i < LANES; i++) a[i] = std::sqrt(a[i]);
  return a;
#endif
}

// The sum of the lanes, in an order that depends on LANES only.
INLINE float sum(Vec a) {
#if defined(VECTOR_MASKS)
  return _mm512_reduce_add_ps((__m512)a);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}

// Keeps v in a register: GCC would load it again from memory for each of its uses.
INLINE void hold(Vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
}

// f32

INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

#if defined(VECTOR_MASKS)
INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
#elif defined(__AVX2__)
INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first n of LANES (0 <= n < LANES); the other lanes are 0, and their memory is not touched.
INLINE Vec load_part(const float* p, int n) {
#if defined(VECTOR_MASKS)
  return (Vec)_mm512_maskz_loadu_ps(first(n), p);
#elif defined(__AVX2__)
  return (Vec)_mm256_maskload_ps(p, first(n));
#else
  Vec v{};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
#endif
}

INLINE void store_part(float* p, Vec v, int n) {
#if defined(VECTOR_MASKS)
  _mm512_mask_storeu_ps(p, first(n), (__m512)v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(p, first(n), (__m256)v);
#else
  for (int i = 0; i < n; i++) p[i] = v[i];
#endif
}

// bf16: the upper half of an f32, rounded to nearest even

INLINE Vec from_bf16(VecHalf h) {
#if defined(VECTOR_MASKS)  // GCC 12 widens in halves
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
  return (Vec)(__builtin_convertvector(h, VecBits) << 16);
#endif
}

INLINE VecHalf round_bf16(Vec v) {
  VecBits bits = (VecBits)v;
  VecBits rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  VecInt nan = v != v;  // rounding could carry a NaN over to infinity
  VecBits kept = ((VecBits)nan & (bits | 0x400000u)) | (~(VecBits)nan & rounded);
  return __builtin_convertvector(kept >> 16, VecHalf);
}

INLINE Vec load(const bf16* p) {
  VecHalf h;
  std::memcpy(&h, p, sizeof h);
  return from_bf16(h);
}

INLINE void store(bf16* p, Vec v) {
  VecHalf h = round_bf16(v);
  std::memcpy(p, &h, sizeof h);
}

INLINE Vec load_part(const bf16* p, int n) {
#if defined(VECTOR_MASKS)
  return from_bf16((VecHalf)_mm256_maskz_loadu_epi16(first(n), p));
#else
  VecHalf h{};
  for (int i = 0; i < n; i++) h[i] = p[i].bits;
  return from_bf16(h);
#endif
}

INLINE void store_part(bf16* p, Vec v, int n) {
  VecHalf h = round_bf16(v);
#if defined(VECTOR_MASKS)
  _mm256_mask_storeu_epi16(p, first(n), (__m256i)h);
#else
  for (int i = 0; i < n; i++) p[i].bits = h[i];
#endif
}

// Bytes 0 to 255, as numbers

INLINE Vec load(const uint8_t* p) {
#if defined(VECTOR_MASKS)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  VecByte b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, VecInt), Vec);
#endif
}

INLINE Vec load_part(const uint8_t* p, int n) {
#if defined(VECTOR_MASKS)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
#else
  uint8_t bytes[LANES] = {};
  for (int i = 0; i < n; i++) bytes[i] = p[i];
  return load(bytes);
#endif
}

// One number

INLINE float to_float(float x) { return x; }

#endif  // VECTOR_H
