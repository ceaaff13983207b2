// The layers of a chain, as Python gives them.
#ifndef CHAIN_H
#define CHAIN_H
#include "layer.h"

constexpr double CHAIN_WORK = 2e5;  // multiply-adds below which a second thread does not pay

// One layer, as in mlp.py: pointers and numbers of 8 bytes each.
struct Layer {
  const void* weight;  // forward: of W (outputs, inputs); backward: of its transpose
  Int weight_row;      // 0: packed; else PyTorch's layout with rows this far apart
  const void* bias;    // or null
  Int inputs, outputs, activation;
  void* out;    // (batch, outputs), or null: not kept
  Int out_row;
  // backward only
  void* gradient;  // (CHUNK or batch, outputs): work memory, the gradient before the activation
  Int gradient_row;
  float* weight_gradient;  // (outputs, inputs), or null: not wanted
  float* bias_gradient;    // (outputs), or null
};

// Rows apart by an odd number of cache lines: equal columns then fall into different cache sets.
template <class T> Int scratch_row(Int columns) {
  constexpr Int line = 64 / sizeof(T);
  return (ceiling(columns, line) | 1) * line;
}

template <class T, class E>
void layer_part(const Layer& layer, const T* x, Int x_row, Int rows, Int begin, Int end,
                bool single, const E& epilogue) {
  const T* weight = (const T*)layer.weight;
  if (layer.weight_row)
    plain_block(x, x_row, rows, weight, layer.weight_row, layer.inputs, layer.outputs, begin, end,
                epilogue);
  else
    layer_block(x, x_row, rows, weight, layer.inputs, layer.outputs, begin, end, single, epilogue);
}
#endif
