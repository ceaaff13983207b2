// bf16, the upper half of an f32, one number at a time: for the kernels and for generated loops.
// Free of branches, so that a loop over it becomes vector code.
#ifndef BF16_H
#define BF16_H
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};

INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The bits of x with the upper half rounded to nearest even; NaN stays NaN.
INLINE uint32_t rounded(float x) {
  uint32_t bits = to_bits(x);
  uint32_t even = bits + (0x7fffu + ((bits >> 16) & 1u));
  return x != x ? (bits | 0x400000u) : even;
}

INLINE float to_float(bf16 x) { return from_bits((uint32_t)x.bits << 16); }

INLINE bf16 to_bf16(float x) { return {(uint16_t)(rounded(x) >> 16)}; }
#endif
