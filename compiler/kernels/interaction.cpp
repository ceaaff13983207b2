// Pairwise dot products of a sample's K feature vectors (Naumov et al. 2019), and their gradient.
//
// Forward: z(i, j) = x_i . x_j for i > j, in the order z(1,0), z(2,0), z(2,1), ..., behind the dense
// vector if asked for. QUADS samples go at once, each in a quad of every vector (quads.h): a tile of
// some rows i by four columns j sums four words of the depth at a time in registers, and one
// reduction gives four neighbours of the output. Only tiles that touch the triangle are computed.
//
// Backward: x_i's gradient is the sum over j of g(i, j) x_j, where g is read from the triangle as it
// lies, and rows of it are held in registers.
//
// The other usual order, z(0,1), z(0,2), ..., z(1,2), ..., is the first one backwards with the
// features in reverse: `upper` turns both around.
#include "quads.h"

constexpr double INTERACTION_WORK = 1e5;  // multiply-adds below which a second thread does not pay
#if defined(VECTOR_MASKS) || !defined(__x86_64__)  // 32 registers
constexpr Int PAIR_ROWS = 6;      // 6 x 4 sums, 4 columns and a row
constexpr Int GRADIENT_ROWS = 9;  // 9 x up to 2 sums, and 2 of x
#else  // 16
constexpr Int PAIR_ROWS = 2;
constexpr Int GRADIENT_ROWS = 6;
#endif

// Where the features lie: feature f of sample b at bases[f] + b * strides[f], or, without bases, at
// first + f * feature_stride + b * sample_stride.
template <class T> struct Features {
  T* const* bases;
  const Int* strides;
  T* first;
  Int feature_stride, sample_stride;
  Int count, width;  // K and d

  INLINE T* at(Int f, Int b) const {
    return bases ? bases[f] + b * strides[f] : first + f * feature_stride + b * sample_stride;
  }
};

struct Shape {
  Int batch;
  Int dense;       // 1: the first feature vector comes before the pairs
  Int self_pairs;  // 1: with the diagonal
  Int out_row;     // numbers from one output row to the next
  Int padded;      // columns past the last pair are set to 0 up to here
  Int upper;       // 1: pairs (i, j) with i < j, i-major, instead of i > j
};

// How many pairs come before row i of the lower triangle.
INLINE Int row_start(Int i, Int self) { return self ? i * (i + 1) / 2 : i * (i - 1) / 2; }

template <class From, class To> INLINE void copy(const From* from, Int count, To* to) {
  Int j = 0;
  for (; j + LANES <= count; j += LANES) store(to + j, load(from + j));
  if (j < count) store_part(to + j, load_part(from + j, count - j), count - j);
}

// Features of QUADS samples: quads (K, chunk of 4 words, sample), 0 past the width and past K.
template <class T> struct Quads {
  static constexpr Int STEP = LANES * DEPTH<T>;  // numbers in a vector
  Int chunks, row;                               // row: from one feature to the next
  Scratch<T> data;

  Quads(Int count, Int width)
      : chunks(ceiling(steps<T>(width), 4)), row((chunks | 1) * STEP), data((count + 3) * row) {
    std::memset((void*)data.data, 0, (count + 3) * row * sizeof(T));
  }

  // Samples b to b + count - 1, the last one again in the place of missing ones.
  INLINE void take(const Features<const T>& features, bool reversed, Int b, Int count) {
    for (Int f = 0; f < features.count; f++) {
      const T* from[QUADS];
      for (Int q = 0; q < QUADS; q++) {
        from[q] = features.at(f, b + std::min(q, count - 1));
        __builtin_prefetch(features.at(f, b + QUADS + q));
      }
      T* to = data.data + (reversed ? features.count - 1 - f : f) * row;
      for (Int k = 0; k < chunks; k += QUADS) {
        Vec block[QUADS];
        for (Int q = 0; q < QUADS; q++)
          block[q] = words_some(from[q] + k * 4 * DEPTH<T>, features.width - k * 4 * DEPTH<T>);
        transpose_quads(block);
        for (Int c = 0; c < QUADS && k + c < chunks; c++)
          std::memcpy(to + (k + c) * STEP, &block[c], sizeof(Vec));
      }
    }
  }
};

// Where the products of some samples go: each sample's row of pairs, (i, j) at row_start(i) + j.
template <class T> struct Rows {
  T* at[QUADS];
  Int samples, pairs, self;
  bool upper;  // the row is filled from its end
};

// A quad for each sample, the pairs from number `first` on: some of them may be past the last pair.
template <class T> __attribute__((noinline)) void put_carefully(const Rows<T>& to, Int first, Vec v) {
  float numbers[LANES];
  store(numbers, v);
  for (Int q = 0; q < to.samples; q++)
    for (Int p = first; p < std::min(first + 4, to.pairs); p++) {
      T* place = to.at[q] + (to.upper ? to.pairs - 1 - p : p);
      if constexpr (DEPTH<T> == 1) *place = numbers[4 * q + p - first];
      else *place = to_bf16(numbers[4 * q + p - first]);
    }
}

// Products of ROWS features, from i on, by the four from `column` on.
template <class T, Int ROWS>
__attribute__((noinline)) void pair_tile(const Quads<T>& x, Int i, Int column, const Rows<T>& to) {
  const Int row = x.row;
  const T* a = x.data.data + i * row;
  const T* b = x.data.data + column * row;
  Vec sums[ROWS][4] = {};
  for (const T* end = a + x.chunks * x.STEP; a < end; a += x.STEP, b += x.STEP) {
    Vec columns[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) columns[j] = words(b + j * row);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      Vec feature = words(a + r * row);
      hold(feature);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[r][j] = multiply_add(a, feature, columns[j], sums[r][j]);
    }
  }
  Vec found[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    found[r] = quad_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  Int at = row_start(i, to.self) + column, step = i + to.self;
  if (to.upper || at + (ROWS - 1) * step + (ROWS - 1) * (ROWS - 2) / 2 + 4 > to.pairs) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; at += step + r, r++)
      if (at + 4 > to.pairs) put_carefully(to, at, found[r]);
      else if (to.upper) store_quads(to.at, to.pairs - 4 - at, reverse_quads(found[r]));
      else store_quads(to.at, at, found[r]);
    return;
  }
  // What a row writes past its end is written over by the next row's.
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; at += step + r, r++) store_quads(to.at, at, found[r]);
}

template <class T, Int ROWS = PAIR_ROWS>
INLINE void any_pair_tile(Int rows, const Quads<T>& x, Int i, Int column, const Rows<T>& to) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return pair_tile<T, ROWS>(x, i, column, to);
    any_pair_tile<T, ROWS - 1>(rows, x, i, column, to);
  }
}

template <class T>
void forward(const Features<const T>& features, const Shape& shape, T* out, Int threads) {
  Int K = features.count, self = shape.self_pairs;
  Int pairs = row_start(K, self), lead = shape.dense ? features.width : 0;
  if ((double)shape.batch * pairs * features.width < INTERACTION_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Quads<T> x(K, features.width);
    Scratch<T> unwanted(pairs);  // what missing samples give
#pragma omp for schedule(static)
    for (Int b = 0; b < shape.batch; b += QUADS) {
      Int samples = std::min(QUADS, shape.batch - b);
      x.take(features, shape.upper, b, samples);
      Rows<T> to{{}, samples, pairs, self, shape.upper != 0};
      for (Int q = 0; q < QUADS; q++) {
        T* row = out + (b + q) * shape.out_row;
        to.at[q] = q < samples ? row + lead : unwanted.data;
        if (q >= samples) continue;
        if (lead) copy(features.at(0, b + q), lead, row);
        for (Int j = lead + pairs; j < shape.padded; j++) row[j] = T{};
      }
      Int first = self ? 0 : 1;
      pieces(K - first, PAIR_ROWS, [&](Int i, Int rows) __attribute__((always_inline)) {
        i += first;
        // From the last column back, so that a row's end is written before the next row's start.
        for (Int column = (i + rows - 2 + self) / 4 * 4; column >= 0; column -= 4) {
          Int begin = std::max(i, column + 1 - self);
          any_pair_tile(i + rows - begin, x, begin, column, to);
        }
      });
    }
  }
}

// The sums over j of g(i + r, j) x_j for ROWS rows and VECS vectors of the width. `g` is the
// triangle; `x` (K, width) has rows `row` apart. Row r goes to to[r]: `last`
// numbers of the last vector.
template <Int ROWS, int VECS>
__attribute__((noinline)) void gradient_tile(const float* g, Int i, Int count, Int self,
                                             const float* x, Int row, float* const* to, int last) {
  Vec sums[ROWS][VECS], vectors[VECS];
  auto add = [&](int r, const float* weight) __attribute__((always_inline)) {
    Vec scale = splat(*weight);
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) sums[r][v] = fma(scale, vectors[v], sums[r][v]);
  };
  auto take = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) vectors[v] = load(x + v * LANES);
    x += row;
  };
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) sums[r][v] = Vec{};
  // Row i + r of the triangle starts r (i + self) + r (r - 1) / 2 after row i.
  const Int step = i + self;
  const float* bases[(ROWS + 2) / 3];  // x86 addresses base, base + step and base + 2 step
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r += 3) bases[r / 3] = g + row_start(i, self) + r * step;
  for (Int j = 0; j < i; j++) {
    take();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) add(r, bases[r / 3] + r % 3 * step + r * (r - 1) / 2);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r += 3) bases[r / 3]++;
  }
#pragma GCC unroll 16
  for (int j = 0; j < ROWS; j++) {  // where the rows cross the diagonal
    take();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const int low = std::min(r, j), high = std::max(r, j);
      const float* at = bases[high / 3] + high % 3 * step + high * (high - 1) / 2 + low;
      if (r != j || self) add(r, at);
      if (r == j && self) add(r, at);  // z(r, r) holds x_r twice
    }
  }
  const float* column = g + row_start(i + ROWS, self) + i;
  for (Int j = i + ROWS; j < count; column += j + self, j++) {
    take();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) add(r, column + r);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++)
      store_some(to[r] + v * LANES, sums[r][v], v + 1 < VECS ? LANES : last);
}

template <Int ROWS = GRADIENT_ROWS>
INLINE void any_gradient_tile(Int rows, int vecs, const float* g, Int i, Int count, Int self,
                              const float* x, Int row, float* const* to, int last) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS)
      return any_gradient_tile<ROWS - 1>(rows, vecs, g, i, count, self, x, row, to, last);
    if (vecs == 2) gradient_tile<ROWS, 2>(g, i, count, self, x, row, to, last);
    else gradient_tile<ROWS, 1>(g, i, count, self, x, row, to, last);
  }
}

template <class T>
void backward(const Features<const T>& features, const Shape& shape, const T* g,
              const Features<T>& gradients, Int threads) {
  Int K = features.count, d = features.width, self = shape.self_pairs;
  Int pairs = row_start(K, self), lead = shape.dense ? d : 0;
  auto turn = [&](Int f) { return shape.upper ? K - 1 - f : f; };
  if ((double)shape.batch * pairs * d < INTERACTION_WORK) threads = 1;
  Int row = ceiling(d, LANES) * LANES;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<float> x(K * row), triangle(ceiling(pairs, LANES) * LANES);
    alignas(64) float c[GRADIENT_ROWS * PANEL];
#pragma omp for schedule(static)
    for (Int b = 0; b < shape.batch; b++) {
      for (Int f = 0; f < K; f++) {
        const T* from = features.at(turn(f), b);
        for (Int j = 0; j < d; j += LANES)
          store(x.data + f * row + j, load_some(from + j, (int)std::min<Int>(LANES, d - j)));
      }
      const T* dense = g + b * shape.out_row;
      const T* from = dense + lead;
      const float* pair = triangle.data;
      if (shape.upper)
        for (Int j = 0; j < pairs; j++) triangle.data[j] = to_float(from[pairs - 1 - j]);
      else if constexpr (DEPTH<T> == 1)
        pair = from;
      else
        for (Int j = 0; j < pairs; j += LANES)
          store(triangle.data + j, load_some(from + j, (int)std::min<Int>(LANES, pairs - j)));
      for (Int first = 0; first < d; first += PANEL)
        pieces(K, GRADIENT_ROWS, [&](Int i, Int rows) __attribute__((always_inline)) {
          Int width = std::min(PANEL, d - first);
          float* to[GRADIENT_ROWS];
          for (Int r = 0; r < rows; r++)
            if constexpr (DEPTH<T> == 1) to[r] = gradients.at(turn(i + r), b) + first;
            else to[r] = c + r * PANEL;
          any_gradient_tile(rows, width > LANES ? 2 : 1, pair, i, K, self, x.data + first, row, to,
                            (int)(width - (width > LANES ? LANES : 0)));
          Int zero = turn(0) - i;  // the row of feature 0
          if (lead && zero >= 0 && zero < rows)
            for (Int j = 0; j < width; j += LANES) {
              int n = (int)std::min<Int>(LANES, width - j);
              float* at = to[zero] + j;
              store_some(at, load_some(at, n) + load_some(dense + first + j, n), n);
            }
          if constexpr (DEPTH<T> != 1)
            for (Int r = 0; r < rows; r++) copy(to[r], width, gradients.at(turn(i + r), b) + first);
        });
    }
  }
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INTERACTION(T, NAME)                                                                       \
  EXPORT void interaction_##NAME(const Features<const T>* features, const Shape* shape, T* out,    \
                                 Int threads) {                                                    \
    forward(*features, *shape, out, threads);                                                      \
  }                                                                                                \
  EXPORT void interaction_backward_##NAME(const Features<const T>* features, const Shape* shape,   \
                                          const T* g, const Features<T>* gradients, Int threads) { \
    backward(*features, *shape, g, *gradients, threads);                                           \
  }
INTERACTION(float, f32)
INTERACTION(bf16, bf16)
