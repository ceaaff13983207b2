// What generated loops call on one number at a time. Everything here is free of branches, so that the
// C++ compiler turns a loop over it into vector instructions: a choice is a ? b : c of numbers, and
// never || or && of conditions, for which g++ has no vectors. f32 results are within 4 ulp.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

typedef int64_t Int;

INLINE float get(bf16 x) { return to_float(x); }
template <class T> INLINE T get(T x) { return x; }

INLINE void put(bf16* p, float x) { *p = to_bf16(x); }
template <class T, class V> INLINE void put(T* p, V x) { *p = (T)x; }

INLINE void put_rounded(bf16* p, float x) { p->bits = (uint16_t)(to_bits(x) >> 16); }  // x is a bf16

INLINE float round_bf16(float x) { return from_bits(rounded(x) & 0xffff0000u); }

// An index that counts from the end if it is negative; `bad` becomes true if it is outside.
INLINE Int place(Int i, Int size, Int& bad) {
  Int at = i < 0 ? i + size : i;
  bool outside = (uint64_t)at >= (uint64_t)size;
  bad |= outside;
  return outside ? 0 : at;
}

INLINE Int place_unsigned(Int i, Int size, Int& bad) {
  bool outside = (uint64_t)i >= (uint64_t)size;
  bad |= outside;
  return outside ? 0 : i;
}

// The larger and the smaller; a NaN wins, as in PyTorch.
template <class T> INLINE T maximum(T a, T b) { return a != a ? a : (a > b ? a : b); }
template <class T> INLINE T minimum(T a, T b) { return a != a ? a : (a < b ? a : b); }
template <class T> INLINE T relu(T a) { return a < 0 ? (T)0 : a; }
template <class T> INLINE T sign(T a) { return (T)((a > 0) - (a < 0)); }
template <class T> INLINE T absolute(T a) { return a < 0 ? (T)-a : a; }
INLINE float absolute(float a) { return std::fabs(a); }
INLINE double absolute(double a) { return std::fabs(a); }

// Division and remainder as Python has them: rounded down, the sign of the divisor.
INLINE Int div_floor(Int a, Int b) {
  Int q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}
INLINE Int mod_floor(Int a, Int b) {
  Int r = a % b;
  return r + (r != 0 && (r < 0) != (b < 0) ? b : 0);
}
template <class T> INLINE T float_mod(T a, T b) {
  T r = std::fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class T> INLINE T float_div_floor(T a, T b) {  // as ATen: by the remainder
  if (b == 0) return a / b;
  T r = std::fmod(a, b), q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1;
  if (q == 0) return std::copysign((T)0, a / b);
  T down = std::floor(q);
  return q - down > (T)0.5 ? down + 1 : down;
}
INLINE float mod_floor(float a, float b) { return float_mod(a, b); }
INLINE double mod_floor(double a, double b) { return float_mod(a, b); }
INLINE float div_floor(float a, float b) { return float_div_floor(a, b); }
INLINE double div_floor(double a, double b) { return float_div_floor(a, b); }

// e^x = 2^n e^r with |r| <= ln(2) / 2 and the series of e^r.
INLINE float exp_(float x) {
  float held = x > 89.0f ? 89.0f : x;
  held = held < -104.0f ? -104.0f : held;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float shifted = held * 1.44269504f + magic;
  float n = shifted - magic;
  float r = held - n * 0.693145752f;  // ln 2 in two parts, the first exact in n * ln 2
  r = r - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t whole = (int32_t)(to_bits(shifted) - to_bits(magic));  // n
  int32_t half = whole >> 1;                                   // 2^n in two steps, for denormals
  return p * from_bits((uint32_t)(half + 127) << 23) *
         from_bits((uint32_t)(whole - half + 127) << 23);
}
INLINE double exp_(double x) { return std::exp(x); }

// ln x = e ln 2 + ln m with m in [sqrt(1/2), sqrt(2)).
INLINE float log_(float x) {
  bool tiny = x < 1.17549435e-38f;
  float scaled = tiny ? x * 8388608.0f : x;
  uint32_t bits = to_bits(scaled) - 0x3f3504f3u;  // less sqrt(1/2)
  int32_t e = (int32_t)bits >> 23;
  float f = from_bits((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 7.149753452e-02f;
  p = p * f - 1.157120107e-01f;
  p = p * f + 1.166151142e-01f;
  p = p * f - 1.241105064e-01f;
  p = p * f + 1.424993648e-01f;
  p = p * f - 1.666848024e-01f;
  p = p * f + 2.000070748e-01f;
  p = p * f - 2.499998905e-01f;
  p = p * f + 3.333333119e-01f;
  float n = (float)(e - (tiny ? 23 : 0));
  float y = f * f * f * p;
  y = y + n * 1.42860677e-6f;
  y = y - 0.5f * (f * f);
  y = (f + y) + n * 0.693145752f;
  y = x == 0 ? -INFINITY : y;
  y = x < 0 ? NAN : y;
  y = x == INFINITY ? x : y;
  return x != x ? x : y;
}
INLINE double log_(double x) { return std::log(x); }

INLINE float log1p_(float x) {
  float u = 1.0f + x, y = log_(u);
  float corrected = y + (x - (u - 1.0f)) / u;  // what 1 + x rounded away
  corrected = x > 1e30f ? y : corrected;
  corrected = x > -1.0f ? corrected : y;  // also for NaN
  return u == 1.0f ? x : corrected;
}
INLINE double log1p_(double x) { return std::log1p(x); }

INLINE float expm1_(float x) {
  float p = 1.0f / 40320;
  p = p * x + 1.0f / 5040;
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  p = p * x * x + x;
  float large = exp_(x) - 1.0f;
  return absolute(x) < 0.4f ? p : large;
}
INLINE double expm1_(double x) { return std::expm1(x); }

INLINE float tanh_(float x) {
  float s = x * x;
  float p = 2.218369114e-03f;
  p = p * s - 8.276133186e-03f;
  p = p * s + 2.174755353e-02f;
  p = p * s - 5.395655710e-02f;
  p = p * s + 1.333329185e-01f;
  p = p * s - 3.333333309e-01f;
  float small = x + x * s * p;
  float large = 1.0f - 2.0f / (exp_(2.0f * absolute(x)) + 1.0f);
  large = x < 0 ? -large : large;
  return absolute(x) < 0.65f ? small : large;
}
INLINE double tanh_(double x) { return std::tanh(x); }

template <class T> INLINE T sigmoid(T x) { return (T)1 / ((T)1 + exp_(-x)); }
template <class T> INLINE T silu(T x) { return x / ((T)1 + exp_(-x)); }

// x P(x^2) / Q(x^2), as XLA and Eigen have it; from 3.8325 on it rounds to 1.
INLINE float erf_(float x) {
  const float end = 3.832506856900711f;
  float u = x > end ? end : x;
  u = u < -end ? -end : u;
  float s = u * u;
  float p = 2.2905065861350646e-4f;
  p = p * s + 3.4082910107109506e-3f;
  p = p * s + 5.0955695062380861e-2f;
  p = p * s + 1.8520832239976145e-1f;
  p = p * s + 1.128379143519084f;
  float q = -1.1791602954361697e-7f;
  q = q * s + 2.3547966471313185e-5f;
  q = q * s + 1.0179625278914885e-3f;
  q = q * s + 1.4070470171167667e-2f;
  q = q * s + 1.1098505178285362e-1f;
  q = q * s + 4.9746925110067538e-1f;
  q = q * s + 1.0f;
  float y = u * p / q;
  y = x > end ? 1.0f : y;
  return x < -end ? -1.0f : y;
}
INLINE double erf_(double x) { return std::erf(x); }

template <class T> INLINE T gelu(T x) {
  return (T)0.5 * x * ((T)1 + erf_(x * (T)0.70710678118654752440));
}
template <class T> INLINE T gelu_tanh(T x) {
  T inner = (T)0.79788456080286535588 * (x + (T)0.044715 * x * x * x);
  return (T)0.5 * x * ((T)1 + tanh_(inner));
}
