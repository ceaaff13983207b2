// The gradient of a linear layer's weight and bias: g^T x and the column sums of g, over the batch.
//
// Each thread owns a rectangle of the weight and sums it over the whole batch in order, BATCH_BLOCK
// rows at a time: no reduction over threads, so the bits are the same for any number of them.
#ifndef WEIGHT_GRADIENT_H
#define WEIGHT_GRADIENT_H
#include "layer.h"

constexpr Int BATCH_BLOCK = 256;  // rows of g and x packed at a time; even, for pairs of bf16

template <class T> struct WeightGradient {
  const T* g;  // (batch, outputs)
  Int g_row;
  const T* x;  // (batch, inputs)
  Int x_row;
  Int batch, outputs, inputs;
  float* weight;  // (outputs, inputs)
  Int weight_row;
  float* bias;  // (outputs) or null
  bool add;     // add to what is there, instead of setting it
};

// The gradient of outputs [o0, o1) and inputs [i0, i1), and of the bias if asked.
template <class T>
void gradient_part(const WeightGradient<T>& w, Int o0, Int o1, Int i0, Int i1, bool bias) {
  if (o0 == o1 || (i0 == i1 && !bias)) return;
  constexpr Int strip = BATCH_BLOCK * STRIP;  // numbers of one packed strip of g
  Int strips = ceiling(o1 - o0, TILE_ROWS), outputs = o1 - o0;
  Scratch<T> g(strips * strip), panel(BATCH_BLOCK * PANEL);
  alignas(64) float c[TILE_ROWS * PANEL];
  auto start = [&](Int s) { return o0 + outputs * s / strips; };
  for (Int o = o0; o < o1 && !w.add; o++) {
    for (Int i = i0; i < i1; i++) w.weight[o * w.weight_row + i] = 0;
    if (bias) w.bias[o] = 0;
  }
  for (Int row = 0; row < w.batch; row += BATCH_BLOCK) {
    Int depth = std::min(BATCH_BLOCK, w.batch - row);
    for (Int s = 0; s < strips; s++) {
      const T* from = w.g + row * w.g_row + start(s);
      Int height = start(s + 1) - start(s);
      pack_rows(from, w.g_row, depth, height, STRIP, g.data + s * strip);
      if (bias)
        for (Int v = 0; v < height; v += LANES) {
          int n = (int)std::min<Int>(LANES, height - v);
          Vec total{};
          for (Int k = 0; k < depth; k++) total += load_some(from + k * w.g_row + v, n);
          for (int lane = 0; lane < n; lane++) w.bias[start(s) + v + lane] += total[lane];
        }
    }
    for (Int i = i0; i < i1; i += PANEL) {
      Int columns = std::min(PANEL, i1 - i);
      Int width = columns > LANES ? PANEL : LANES;
      pack_rows(w.x + row * w.x_row + i, w.x_row, depth, columns, width, panel.data);
      for (Int s = 0; s < strips; s++) {
        Int height = start(s + 1) - start(s);
        any_tile<T>((int)height, (int)(width / LANES), g.data + s * strip, DEPTH<T>,
                    STRIP * DEPTH<T>, panel.data, width * DEPTH<T>,
                    ceiling(depth, DEPTH<T>) * DEPTH<T>,
                    false, c);
        for (Int r = 0; r < height; r++)
          for (Int j = 0; j < columns; j += LANES) {
            int n = (int)std::min<Int>(LANES, columns - j);
            float* to = w.weight + (start(s) + r) * w.weight_row + i + j;
            Vec sum = load_some(to, n) + load(c + r * PANEL + j);
            store_some(to, sum, n);
          }
      }
    }
  }
}

// Thread `thread` of `threads`: its rectangle, of a grid cut so that little is packed twice.
template <class T> void gradient_share(const WeightGradient<T>& w, Int thread, Int threads) {
  Int down = 1;  // rows of the grid: each thread packs outputs / down + inputs / (threads / down)
  double best = 1e30;
  for (Int d = 1; d <= threads; d++)
    if (threads % d == 0) {
      Int o = ceiling(ceiling(w.outputs, TILE_ROWS), d) * TILE_ROWS;
      Int i = ceiling(ceiling(std::max<Int>(w.inputs, 1), PANEL), threads / d) * PANEL;
      double cost = (double)o * i + 16.0 * (o + i);  // products, and numbers packed
      if (cost < best) best = cost, down = d;
    }
  Int across = threads / down, o = thread / across, i = thread % across;
  Int strips = ceiling(w.outputs, TILE_ROWS), panels = ceiling(w.inputs, PANEL);
  auto cut = [](Int units, Int part, Int parts, Int unit, Int end) {
    return std::min(end, units * part / parts * unit);
  };
  Int o0 = cut(strips, o, down, TILE_ROWS, w.outputs);
  Int o1 = cut(strips, o + 1, down, TILE_ROWS, w.outputs);
  Int i0 = cut(panels, i, across, PANEL, w.inputs);
  Int i1 = cut(panels, i + 1, across, PANEL, w.inputs);
  bool leftmost = w.inputs ? i0 == 0 && i1 > 0 : i == 0;  // one thread of each row of the grid
  gradient_part(w, o0, o1, i0, i1, w.bias && leftmost);
}
#endif
