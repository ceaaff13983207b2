// Pairwise dot products of a sample's K feature vectors (Naumov et al. 2019), and their gradient.
//
// Z = X X^T by the register tile of gemm.h, a sample at a time: the transpose of X (K, d) is
// made in the L1 cache, and only tiles that touch the lower triangle are computed. Its rows go side by side
// into the output: [the dense vector,] z(1,0), z(2,0), z(2,1), ... The gradient is (G + G^T) X with
// G the lower triangle of the gradients: the tile reads G by rows and by columns.
#include "pack.h"

constexpr double INTERACTION_WORK = 1e5;  // multiply-adds below which a second thread does not pay

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
};

INLINE Int row_start(Int i, Int self) { return self ? i * (i + 1) / 2 : i * (i - 1) / 2; }

template <class T> INLINE void copy(const T* from, Int count, T* to) {
  Int j = 0;
  for (; j + LANES <= count; j += LANES) store(to + j, load(from + j));
  if (j < count) store_part(to + j, load_part(from + j, count - j), count - j);
}

template <class T> struct Sample {
  Int count, depth, row, columns;
  Scratch<T> x, turned;  // (K, row), and its words transposed, (depth, columns)

  Sample(Int count, Int width)
      : count(count), depth(steps<T>(width)),
        row(ceiling(width, LANES * DEPTH<T>) * LANES * DEPTH<T>),
        columns(ceiling(count, PANEL) * PANEL), x(columns * row),
        turned(row / DEPTH<T> * columns * DEPTH<T>) {
    std::memset((void*)x.data, 0, columns * row * sizeof(T));  // past count and width it stays 0
  }

  INLINE void take(const Features<T>& features, Int b) {
    for (Int f = 0; f < count; f++) copy(features.at(f, b), features.width, x.data + f * row);
    for (Int f = 0; f < columns; f += LANES)
      for (Int k = 0; k < depth; k += LANES) {
        if (f >= count) continue;
        Vec block[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = words(x.data + (f + i) * row + k * DEPTH<T>);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
          std::memcpy(turned.data + ((k + i) * columns + f) * DEPTH<T>, &block[i], sizeof(Vec));
      }
  }
};

template <class T>
void forward(const Features<const T>& features, const Shape& shape, T* out, Int threads) {
  Int K = features.count, self = shape.self_pairs;
  Int pairs = row_start(K, self), lead = shape.dense ? features.width : 0;
  if ((double)shape.batch * pairs * features.width < INTERACTION_WORK) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Sample<T> sample(K, features.width);
    alignas(64) float c[TILE_ROWS * PANEL];
#pragma omp for schedule(static)
    for (Int b = 0; b < shape.batch; b++) {
      T* to = out + b * shape.out_row;
      sample.take({(T* const*)features.bases, features.strides, (T*)features.first,
                   features.feature_stride, features.sample_stride, K, features.width}, b);
      if (lead) copy(features.at(0, b), lead, to);
      T* z = to + lead;
      // Rows whose last column falls into the same vector make tiles of the same width.
      for (Int begin = self ? 0 : 1, end; begin < K; begin = end) {
        Int last = (self ? begin : begin - 1) / LANES;  // the vector of the last column
        end = std::min(K, (last + 1) * LANES + (self ? 0 : 1));
        pieces(end - begin, TILE_ROWS, [&](Int i, Int rows) {
          for (Int first = 0; first <= last * LANES; first += PANEL) {
            int vecs = first + LANES <= last * LANES ? 2 : 1;
            any_tile<T>((int)rows, vecs, sample.x.data + (begin + i) * sample.row, sample.row,
                        DEPTH<T>, sample.turned.data + first * DEPTH<T>,
                        sample.columns * DEPTH<T>, sample.depth * DEPTH<T>, false, c);
            Int row = begin + i;
            T* at = z + row_start(row, self) + first;
            for (Int r = 0; r < rows; at += row + r + self, r++) {
              const float* sums = c + r * PANEL;
              // Numbers past the row's end are overwritten by the next row's, if there is one.
              if (last < 2 && at + vecs * LANES <= z + pairs) {
                store(at, load(sums));
                if (vecs == 2) store(at + LANES, load(sums + LANES));
              } else {
                int left = (int)(row + r + self - first);
                store_some(at, load(sums), left);
                if (vecs == 2) store_some(at + LANES, load(sums + LANES), left - LANES);
              }
            }
          }
        });
      }
      for (Int j = lead + pairs; j < shape.padded; j++) to[j] = T{};
    }
  }
}

template <class T>
void backward(const Features<const T>& features, const Shape& shape, const T* g,
              const Features<T>& gradients, Int threads) {
  Int K = features.count, d = features.width, self = shape.self_pairs;
  Int pairs = row_start(K, self), lead = shape.dense ? d : 0;
  if ((double)shape.batch * pairs * d < INTERACTION_WORK) threads = 1;
  Int row = ceiling(d, PANEL) * PANEL, g_row = ceiling(K, LANES) * LANES + LANES;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<float> x(K * row), triangle(K * g_row);
    std::memset(x.data, 0, K * row * sizeof(float));
    alignas(64) float c[TILE_ROWS * PANEL];
#pragma omp for schedule(static)
    for (Int b = 0; b < shape.batch; b++) {
      const T* from = g + b * shape.out_row;
      for (Int f = 0; f < K; f++) {
        const T* feature = features.at(f, b);
        for (Int j = 0; j < d; j += LANES) {
          int n = (int)std::min<Int>(LANES, d - j);
          Vec v = load_some(feature + j, n);
          store(x.data + f * row + j, v);
        }
        const T* z = from + lead + row_start(f, self);
        float* to = triangle.data + f * g_row;
        Int count = f + self;
        for (Int j = 0; j < K; j += LANES) {
          Int n = std::clamp<Int>(count - j, 0, LANES);
          store(to + j, load_some(z + j, (int)n));
        }
      }
      pieces(K, TILE_ROWS, [&](Int i, Int rows) {
        for (Int first = 0; first < d; first += PANEL) {
          int vecs = d - first > LANES ? 2 : 1;
          // G's rows i.. reach back to the first feature, its columns i.. on to the last.
          any_tile<float>((int)rows, vecs, triangle.data + i * g_row, g_row, 1, x.data + first, row,
                          i + rows, false, c);
          any_tile<float>((int)rows, vecs, triangle.data + i * g_row + i, 1, g_row,
                          x.data + i * row + first, row, K - i, true, c);
          for (Int r = 0; r < rows; r++)
            for (Int j = first; j < std::min(d, first + PANEL); j += LANES) {
              int n = (int)std::min<Int>(LANES, d - j);
              Vec v = load(c + r * PANEL + j - first);
              if (lead && i + r == 0) v += load_some(from + j, n);
              T* to = gradients.at(i + r, b) + j;
              store_some(to, v, n);
            }
        }
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
