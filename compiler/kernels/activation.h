// Activations and their derivatives on a vector of f32.
#ifndef ACTIVATION_H
#define ACTIVATION_H
#include "vector.h"

enum Activation : int64_t { NONE, RELU, SIGMOID, GELU };  // as ACTIVATIONS in linear.py

// e^x to about one unit in the last place: 2^n e^r with |r| <= ln(2) / 2 and the series of e^r.
// Arguments are held to [-87, 88], where the result is a normal f32; NaN stays NaN.
INLINE Vec exponential(Vec x) {
  x = select(x < splat(-87.0f), splat(-87.0f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = fma(x, splat(1.44269504f), magic);
  Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693145752f), x);  // ln 2 in two parts, the first exact in n * ln 2
  r = fma(n, splat(-1.42860677e-6f), r);
  Vec series = splat(1.0f / 5040);
  series = fma(series, r, splat(1.0f / 720));
  series = fma(series, r, splat(1.0f / 120));
  series = fma(series, r, splat(1.0f / 24));
  series = fma(series, r, splat(1.0f / 6));
  series = fma(series, r, splat(0.5f));
  series = fma(series, r, splat(1.0f));
  series = fma(series, r, splat(1.0f));
  return (Vec)((VecBits)series + ((VecBits)shifted << 23));  // n lies in the low bits of shifted
}

INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

// x Phi(x) with the normal distribution function by Abramowitz and Stegun 7.1.26, |error| < 1.5e-7.
INLINE Vec gelu(Vec x) {
  Vec z = select(x < Vec{}, -x, x) * splat(0.707106781f);
  Vec t = splat(1.0f) / fma(z, splat(0.3275911f), splat(1.0f));
  Vec series = splat(1.061405429f);
  series = fma(series, t, splat(-1.453152027f));
  series = fma(series, t, splat(1.421413741f));
  series = fma(series, t, splat(-0.284496736f));
  series = fma(series, t, splat(0.254829592f));
  Vec tail = splat(0.5f) * series * t * exponential(-z * z);  // Phi(-|x|)
  return x * select(x < Vec{}, tail, splat(1.0f) - tail);
}

INLINE Vec activate(Vec x, int64_t activation) {
  switch (activation) {
    case RELU: return relu(x);
    case SIGMOID: return sigmoid(x);
    case GELU: return gelu(x);
    default: return x;
  }
}

// The gradient before the activation, from the gradient after it and the activation's output y.
INLINE Vec deactivate(Vec gradient, Vec y, int64_t activation) {
  switch (activation) {
    case RELU: return select(y <= Vec{}, Vec{}, gradient);  // a NaN lets the gradient through
    case SIGMOID: return gradient * y * (splat(1.0f) - y);
    default: return gradient;
  }
}
#endif
