// What the programs beside this header share: buffers that end where they end, and numbers.
#include <cstdio>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

// `size` numbers with nothing behind them that may be touched: each in an allocation of its own.
template <class T> struct Exact {
  std::unique_ptr<T[]> data;
  int64_t size;
  explicit Exact(int64_t size) : data(new T[size]()), size(size) {}
  T* get() { return data.get(); }
  T& operator[](int64_t i) { return data[i]; }
};

static uint32_t state = 1;
static uint32_t draw() { return state = state * 1664525u + 1013904223u, state >> 8; }
static float number() { return (float)(draw() % 2001) / 1000 - 1; }
static void set(float& to, float x) { to = x; }
static void set(bf16& to, float x) { to = to_bf16(x); }

// Mostly ordinary numbers; a few NaN, infinite, tiny and huge ones where `wild`.
template <class T> void fill(Exact<T>& to, bool wild) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 1e-42f, 3e38f, -0.0f};
  for (int64_t i = 0; i < to.size; i++)
    set(to[i], wild && draw() % 9 == 0 ? odd[draw() % 6] : number());
}

// A line to hold against another machine's: a sum that any wrong number changes, and its size.
template <class T> void tell(Exact<T>& values) {
  double sum = 0, size = 0;
  for (int64_t i = 0; i < values.size; i++) {
    float x = to_float(values[i]);
    sum += x * (1 + i % 7 * 0.25), size += std::fabs(x);
  }
  std::printf("%lld %.9g %.9g\n", (long long)values.size, sum, size);
}

static void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(3);
}
