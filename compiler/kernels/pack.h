// Matrices put in the order in which a tile reads them.
#ifndef PACK_H
#define PACK_H
#include "gemm.h"

// A packed weight, (outputs, inputs) in PyTorch's terms, is the b of x W^T: panels of PANEL
// outputs, each (inputs, PANEL) in words. A last panel of up to LANES outputs is one vector wide, and one of
// a single output is a plain row, multiplied as a dot product.
INLINE Int panel_width(Int outputs, Int first) {
  Int left = outputs - first;
  return left > LANES ? PANEL : left > 1 ? LANES : 1;
}

// Where the panel of output `first` starts, in numbers.
template <class T> INLINE Int panel_offset(Int first, Int inputs) {
  return first * steps<T>(inputs) * DEPTH<T>;
}

template <class T> INLINE Int packed_size(Int outputs, Int inputs) {
  Int last = outputs ? (outputs - 1) / PANEL * PANEL : 0;
  return panel_offset<T>(last + (outputs ? panel_width(outputs, last) : 0), inputs);
}

// One or two rows side by side as words of one step: to[j] = (first[j], second[j]).
INLINE void interleave(const float* first, const float*, Int columns, Int width, float* to) {
  Int j = 0;
  for (; j + LANES <= columns; j += LANES) store(to + j, load(first + j));
  for (; j < width; j += LANES)
    store(to + j, j < columns ? load_part(first + j, columns - j) : Vec{});
}
INLINE void interleave(const bf16* first, const bf16* second, Int columns, Int width, bf16* to) {
  for (Int j = 0; j < width; j += LANES) {
    int n = (int)std::clamp<Int>(columns - j, 0, LANES);
    auto take = [&](const bf16* row) {  // in the upper halves of words
      return (VecBits)(!row ? Vec{} : n == LANES ? load(row + j) : load_part(row + j, n));
    };
    VecBits pairs = take(second) | take(first) >> 16;
    std::memcpy(to + 2 * j, &pairs, sizeof pairs);
  }
}

// `depth` rows of a row-major matrix, `columns` of it, as words (steps, width), 0 beyond.
template <class T>
INLINE void pack_rows(const T* from, Int row, Int depth, Int columns, Int width, T* to) {
  for (Int k = 0; k < depth; k += DEPTH<T>, to += width * DEPTH<T>)
    interleave(from + k * row, k + 1 < depth ? from + (k + 1) * row : nullptr, columns, width, to);
}

template <class T> INLINE Vec words_part(const T* p, Int numbers) {  // 0 <= numbers < a vector's
  T part[LANES * DEPTH<T>] = {};
  std::memcpy(part, p, numbers * sizeof(T));
  return words(part);
}

// The transpose of `count` <= LANES rows of `depth` numbers as words (steps, step / DEPTH).
template <class T>
INLINE void pack_columns(const T* from, Int row, Int count, Int depth, Int step, T* to) {
  constexpr Int chunk = LANES * DEPTH<T>;
  for (Int k = 0; k < depth; k += chunk) {
    Vec block[LANES];
    if (count == LANES && k + chunk <= depth) {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) block[i] = words(from + i * row + k);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++, to += step) std::memcpy(to, &block[i], sizeof(Vec));
      continue;
    }
    for (int i = 0; i < LANES; i++)
      block[i] = i >= count           ? Vec{}
                 : k + chunk <= depth ? words(from + i * row + k)
                                      : words_part(from + i * row + k, depth - k);
    transpose(block);
    for (int i = 0; i < LANES && k + i * DEPTH<T> < depth; i++, to += step)
      std::memcpy(to, &block[i], sizeof(Vec));
  }
}

// Packs output rows [first, first + panel) of a weight whose element (o, i) lies at
// o * output_stride + i * input_stride; one of the strides is 1. The panel goes to `to`.
template <class T>
void pack_panel(const T* weight, Int output_stride, Int input_stride, Int outputs, Int inputs,
                Int first, T* to) {
  Int width = panel_width(outputs, first), count = std::min(width, outputs - first);
  const T* from = weight + first * output_stride;
  if (width == 1) {
    for (Int i = 0; i < inputs; i++) to[i] = from[i * input_stride];
    if (inputs % DEPTH<T>) to[inputs] = T{};
  } else if (input_stride == 1) {
    for (Int i = 0; i < width; i += LANES)
      pack_columns(from + i * output_stride, output_stride,
                   std::clamp<Int>(count - i, 0, LANES), inputs, width * DEPTH<T>,
                   to + i * DEPTH<T>);
  } else {
    pack_rows(from, input_stride, inputs, count, width, to);
  }
}
#endif
