// A linear layer on a block of rows: tiles over the panels of a packed weight, then bias and
// activation (forward) or the derivative of the activation before it (backward).
#ifndef LAYER_H
#define LAYER_H
#include "activation.h"
#include "pack.h"
#include "quads.h"

constexpr Int BLOCK_ROWS = 56;          // rows that share a panel while it is in the cache
constexpr Int BLOCK_BYTES = 256 << 10;  // of a row block's input, about a fourth of an L2 cache

// What becomes of a product: out = activate(product + bias), or, where `saved` is given,
// out = product * derivative of `activation` at its output `saved`.
template <class T> struct Epilogue {
  T* out;
  Int out_row;
  const T* bias;
  const T* saved;
  Int saved_row;
  Int activation;
};

// Calls change(vector, column, row) on a tile's sums plus bias and stores what it returns.
template <class T, class F>
INLINE void each(const Epilogue<T>& e, const float* c, Int row, Int rows, Int column, Int columns,
                 F&& change) {
  T* to = e.out + row * e.out_row + column;
  for (Int j = 0; j < columns; j += LANES) {
    int n = (int)std::min<Int>(LANES, columns - j);
    Vec bias = e.bias ? load_some(e.bias + column + j, n) : Vec{};
    if (n == LANES)
      for (Int r = 0; r < rows; r++)
        store(to + r * e.out_row + j,
              change(load(c + r * PANEL + j) + bias, row + r, column + j, n));
    else
      for (Int r = 0; r < rows; r++)
        store_part(to + r * e.out_row + j,
                   change(load(c + r * PANEL + j) + bias, row + r, column + j, n), n);
  }
}

template <class T>
void finish(const Epilogue<T>& e, const float* c, Int row, Int rows, Int column, Int columns) {
  auto run = [&](auto&& change) { each(e, c, row, rows, column, columns, change); };
  auto undo = [&](auto activation) {
    run([&](Vec v, Int r, Int j, int n) __attribute__((always_inline)) {
      return deactivate(v, load_some(e.saved + r * e.saved_row + j, n), activation);
    });
  };
  auto apply = [&](auto activation) {
    run([&](Vec v, Int, Int, int) __attribute__((always_inline)) {
      return activate(v, activation);
    });
  };
  auto known = [&](auto&& act) {  // the activation as a constant, so that it is asked for only once
    switch (e.activation) {
      case RELU: return act(std::integral_constant<Int, RELU>());
      case SIGMOID: return act(std::integral_constant<Int, SIGMOID>());
      case GELU: return act(std::integral_constant<Int, GELU>());
      default: return act(std::integral_constant<Int, NONE>());
    }
  };
  e.saved ? known(undo) : known(apply);
}

// Dot products of ROWS rows with COLUMNS rows of a weight, along the inputs.
template <class T, int ROWS, int COLUMNS>
INLINE void dots(const T* x, Int x_row, const T* w, Int w_row, Int inputs, float* c) {
  Vec sums[ROWS][COLUMNS] = {};
  auto step = [&](Int k, auto&& take) __attribute__((always_inline)) {
    Vec row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = take(x + r * x_row + k);
    for (int j = 0; j < COLUMNS; j++) {
      Vec column = take(w + j * w_row + k);
      for (int r = 0; r < ROWS; r++) sums[r][j] = fma(row[r], column, sums[r][j]);
    }
  };
  Int k = 0;
  for (; k + LANES <= inputs; k += LANES)
    step(k, [](const T* p) __attribute__((always_inline)) { return load(p); });
  if (int n = (int)(inputs - k))
    step(k, [n](const T* p) __attribute__((always_inline)) { return load_part(p, n); });
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLUMNS; j++) c[r * PANEL + j] = sum(sums[r][j]);
}

// One row times a panel, by four sums for each output to hide the latency of the adds.
template <class T, int VECS>
void thin_tile(const T* a, const T* b, Int depth, float* c) {
  constexpr int CHAINS = 4;
  constexpr Int step = VECS * LANES * DEPTH<T>;
  Vec sums[CHAINS][VECS] = {};
  Int k = 0;
  for (; k + CHAINS <= depth / DEPTH<T>; k += CHAINS)
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
      Vec x = word(a + (k + i) * DEPTH<T>);
#pragma GCC unroll 2
      for (int v = 0; v < VECS; v++) {
        Vec columns = words(b + (k + i) * step + v * LANES * DEPTH<T>);
        sums[i][v] = multiply_add(a, x, columns, sums[i][v]);
      }
    }
  for (; k < steps<T>(depth); k++) {
    Vec x = (k + 1) * DEPTH<T> <= depth ? word(a + k * DEPTH<T>) : last_word(a + k * DEPTH<T>);
    for (int v = 0; v < VECS; v++)
      sums[0][v] = multiply_add(a, x, words(b + k * step + v * LANES * DEPTH<T>), sums[0][v]);
  }
  for (int v = 0; v < VECS; v++)
    store(c + v * LANES, (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]));
}

// The outputs from `first` on that are in one panel, b, of a packed weight, for a block of rows. A
// row's bits do not depend on the block it comes in; `single` says that it is alone in its batch.
// E is Epilogue<T>, or one with a `finish` of its own.
template <class T, class E>
void layer_panel(const T* x, Int x_row, Int rows, const T* b, Int inputs, Int outputs, Int first,
                 bool single, const E& epilogue) {
  alignas(64) float c[TILE_ROWS * PANEL];
  Int width = panel_width(outputs, first), columns = std::min(width, outputs - first);
  int vecs = width == PANEL ? 2 : 1;
  if (width == 1)
    pieces(rows, 4, [&](Int row, Int height) {
      const T* from = x + row * x_row;
      if (height == 4)
        dots<T, 4, 1>(from, x_row, b, 0, inputs, c);
      else
        for (Int r = 0; r < height; r++)
          dots<T, 1, 1>(from + r * x_row, 0, b, 0, inputs, c + r * PANEL);
      finish(epilogue, c, row, height, first, columns);
    });
  else if (single) {
    if (vecs == 2)
      thin_tile<T, 2>(x, b, inputs, c);
    else
      thin_tile<T, 1>(x, b, inputs, c);
    finish(epilogue, c, 0, 1, first, columns);
  } else
    pieces(rows, TILE_ROWS, [&](Int row, Int height) {
      any_tile<T>((int)height, vecs, x + row * x_row, x_row, DEPTH<T>, b, width * DEPTH<T>, inputs,
                  false, c);
      finish(epilogue, c, row, height, first, columns);
    });
}

// Outputs [begin, end) of a packed weight; begin is a multiple of PANEL, and so is end unless it is
// the last output.
template <class T, class E>
void layer_block(const T* x, Int x_row, Int rows, const T* packed, Int inputs, Int outputs,
                 Int begin, Int end, bool single, const E& epilogue) {
  for (Int first = begin; first < end; first += PANEL)
    layer_panel(x, x_row, rows, packed + panel_offset<T>(first, inputs), inputs, outputs, first,
                single, epilogue);
}

// Products along the inputs take a vector of T at a time: as f32, or pairs of bf16 as they are where
// the machine multiplies them.
#if defined(__AVX512BF16__) && defined(VECTOR_MASKS)
template <class T> constexpr Int DOT = LANES * DEPTH<T>;  // numbers in a step
INLINE Vec dot_vector(const bf16* p) { return words(p); }
INLINE Vec dot_part(const bf16* p, int n) { return words_some(p, n); }
INLINE Vec dot_add(const bf16* p, Vec a, Vec b, Vec c) { return multiply_add(p, a, b, c); }
#else
template <class T> constexpr Int DOT = LANES;
INLINE Vec dot_vector(const bf16* p) { return load(p); }
INLINE Vec dot_part(const bf16* p, int n) { return load_part(p, n); }
INLINE Vec dot_add(const bf16*, Vec a, Vec b, Vec c) { return fma(a, b, c); }
#endif
INLINE Vec dot_vector(const float* p) { return load(p); }
INLINE Vec dot_part(const float* p, int n) { return load_part(p, n); }
INLINE Vec dot_add(const float*, Vec a, Vec b, Vec c) { return fma(a, b, c); }

#if defined(VECTOR_MASKS) || !defined(__x86_64__)
constexpr Int PLAIN_TILE = 6;  // 6 x 4 sums, 6 of x, 1 of the weight: 31 of 32 registers
#else
constexpr Int PLAIN_TILE = 3;  // 3 x 4 sums, 3 of x, 1 of the weight: 16 of 16 registers
#endif

// ROWS rows of x by four rows of a weight, both along the inputs: to c, rows PANEL apart.
template <class T, Int ROWS>
__attribute__((noinline)) void plain_tile(const T* x, Int x_row, const T* const (&w)[4], Int inputs,
                                          float* c) {
  Vec sums[ROWS][4] = {};
  auto step = [&](Int k, auto&& take) __attribute__((always_inline)) {
    Vec rows[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) hold(rows[r] = take(x + r * x_row + k));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      Vec weight = take(w[j] + k);
      hold(weight);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sums[r][j] = dot_add(x, rows[r], weight, sums[r][j]);
    }
  };
  Int k = 0;
  for (; k + DOT<T> <= inputs; k += DOT<T>)
    step(k, [](const T* p) __attribute__((always_inline)) { return dot_vector(p); });
  if (int n = (int)(inputs - k))
    step(k, [n](const T* p) __attribute__((always_inline)) { return dot_part(p, n); });
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    store_quad(c + r * PANEL, quad_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
}

template <class T, Int ROWS = PLAIN_TILE>
INLINE void any_plain_tile(Int rows, const T* x, Int x_row, const T* const (&w)[4], Int inputs,
                           float* c) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return plain_tile<T, ROWS>(x, x_row, w, inputs, c);
    any_plain_tile<T, ROWS - 1>(rows, x, x_row, w, inputs, c);
  }
}

// Rows up to which packing does not pay, measured.
template <class T> constexpr Int PLAIN_FEW = DEPTH<T> == 1 ? 48 : 24;

// Outputs [begin, end) of a weight as PyTorch stores it, (outputs, inputs), for all rows of a batch.
// A few rows are multiplied along the inputs; for more each panel is packed on the way, and then
// lies in the cache. Nothing is kept: the weight may be another one in the next call.
template <class T, class E>
void plain_block(const T* x, Int x_row, Int rows, const T* weight, Int weight_row, Int inputs,
                 Int outputs, Int begin, Int end, const E& epilogue) {
  if (rows > PLAIN_FEW<T> && begin < end) {
    Scratch<T> panel(PANEL * steps<T>(inputs) * DEPTH<T>);
    for (Int first = begin; first < end; first += PANEL) {
      pack_panel(weight, weight_row, 1, outputs, inputs, first, panel.data);
      layer_panel(x, x_row, rows, panel.data, inputs, outputs, first, false, epilogue);
    }
    return;
  }
  alignas(64) float c[PLAIN_TILE * PANEL] = {};
  for (Int first = begin; first < end; first += PANEL) {
    Int columns = std::min<Int>(PANEL, end - first);
    pieces(rows, PLAIN_TILE, [&](Int r, Int height) {
      for (Int j = 0; j < columns; j += 4) {
        const T* w[4];
        for (Int i = 0; i < 4; i++)  // the last one again in the place of missing ones
          w[i] = weight + (first + std::min(j + i, columns - 1)) * weight_row;
        any_plain_tile(height, x + r * x_row, x_row, w, inputs, c + j);
      }
      finish(epilogue, c, r, height, first, columns);
    });
  }
}

// How many row blocks a batch is cut into: a whole number for each thread while there are few, and
// none without rows, which would do the work of a single row once more, beside its own thread.
INLINE Int block_count(Int batch, Int row_bytes, Int threads) {
  Int most = std::clamp<Int>(BLOCK_BYTES / std::max<Int>(row_bytes, 1), TILE_ROWS, BLOCK_ROWS);
  Int count = ceiling(batch, most);
  return std::min(batch, count < 8 * threads ? ceiling(count, threads) * threads : count);
}
#endif
