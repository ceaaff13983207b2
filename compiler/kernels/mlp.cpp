// A chain of linear layers in one call. A block of rows goes through all layers while it is in the
// cache; forward keeps the activations only where backward needs them.
#include "chain.h"
#include "weight_gradient.h"

template <class T>
void forward(const T* x, Int x_row, Int batch, const Layer* layers, Int count, Int threads) {
  Int widest = 1;
  double work = 0;
  bool plain = false;
  for (Int l = 0; l < count; l++) {
    plain |= layers[l].weight_row != 0;
    widest = std::max(widest, layers[l].outputs);
    work += (double)layers[l].inputs * layers[l].outputs;
  }
  if (work * batch < CHAIN_WORK) threads = 1;
  Int row = scratch_row<T>(widest);
  auto chain = [&](Int first, Int rows, T* scratch, auto&& product) {
    const T* from = x + first * x_row;
    Int from_row = x_row;
    for (Int l = 0; l < count; l++) {
      const Layer& layer = layers[l];
      T* to = layer.out ? (T*)layer.out + first * layer.out_row : scratch + l % 2 * rows * row;
      Int to_row = layer.out ? layer.out_row : row;
      Epilogue<T> e{to, to_row, (const T*)layer.bias, nullptr, 0, layer.activation};
      product(layer, from, from_row, e);
      from = to, from_row = to_row;
    }
  };
  // With too few rows to share out, or weights to be packed, the threads share each layer's panels.
  if (plain || batch < threads * 4) {
    Scratch<T> scratch(2 * batch * row);
#pragma omp parallel num_threads(threads) if (threads > 1)
    chain(0, batch, scratch.data, [&](const Layer& layer, const T* from, Int from_row, auto& e) {
      Int panels = ceiling(layer.outputs, PANEL);
#pragma omp for schedule(static)
      for (Int t = 0; t < threads; t++)
        layer_part(layer, from, from_row, batch, panels * t / threads * PANEL,
                   std::min(layer.outputs, panels * (t + 1) / threads * PANEL), batch == 1, e);
    });
    return;
  }
  Int blocks = block_count(batch, widest * sizeof(T), threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<T> scratch(2 * (ceiling(batch, blocks) + 1) * row);
#pragma omp for schedule(dynamic, 1)
    for (Int i = 0; i < blocks; i++) {
      Int first = batch * i / blocks, rows = batch * (i + 1) / blocks - first;
      auto product = [&](const Layer& layer, const T* from, Int from_row, auto& e) {
        layer_part(layer, from, from_row, rows, 0, layer.outputs, batch == 1, e);
      };
      chain(first, rows, scratch.data, product);
    }
  }
}

// CHUNK rows at a time, so that the gradients of the activations take little memory: first these, a
// block of rows through all layers; then those of the weights, each thread a part of each weight.
constexpr Int CHUNK = BATCH_BLOCK / 2;  // as CHUNK in mlp.py

template <class T>
void backward(const T* x, Int x_row, const T* g, Int g_row, T* x_gradient, Int x_gradient_row,
              Int batch, const Layer* layers, Int count, Int threads) {
  double work = 0;
  Int widest = 1;
  for (Int l = 0; l < count; l++) {
    work += (double)layers[l].inputs * layers[l].outputs;
    widest = std::max(widest, layers[l].inputs);
  }
  if (work * batch < CHAIN_WORK) threads = 1;
  Int chunks = std::max<Int>(1, ceiling(batch, CHUNK));  // one for no rows: gradients become 0
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (Int chunk = 0; chunk < chunks; chunk++) {
    Int start = chunk * CHUNK, height = std::min(CHUNK, batch - start);
    Int blocks = height ? block_count(height, widest * sizeof(T), threads) : 0;
#pragma omp for schedule(dynamic, 1)
    for (Int i = 0; i < blocks; i++) {
      Int first = height * i / blocks, rows = height * (i + 1) / blocks - first;
      const Layer& last = layers[count - 1];
      for (Int r = first; r < first + rows; r++)
        for (Int j = 0; j < last.outputs; j += LANES) {
          int n = (int)std::min<Int>(LANES, last.outputs - j);
          Vec y = load_some((const T*)last.out + (start + r) * last.out_row + j, n);
          Vec v = deactivate(load_some(g + (start + r) * g_row + j, n), y, last.activation);
          T* to = (T*)last.gradient + r * last.gradient_row + j;
          store_some(to, v, n);
        }
      for (Int l = count - 1; l >= 0; l--) {
        const Layer& layer = layers[l];
        Epilogue<T> e{};
        if (l > 0) {
          const Layer& before = layers[l - 1];
          e = {(T*)before.gradient + first * before.gradient_row, before.gradient_row, nullptr,
               (const T*)before.out + (start + first) * before.out_row, before.out_row,
               before.activation};
        } else if (x_gradient) {
          e = {x_gradient + (start + first) * x_gradient_row, x_gradient_row, nullptr, nullptr, 0,
               NONE};
        } else {
          break;
        }
        const T* from = (const T*)layer.gradient + first * layer.gradient_row;
        layer_block(from, layer.gradient_row, rows, (const T*)layer.weight, layer.outputs,
                    layer.inputs, 0, layer.inputs, batch == 1, e);
      }
    }
#pragma omp for schedule(static, 1)
    for (Int t = 0; t < threads; t++)
      for (Int l = 0; l < count; l++) {
        const Layer& layer = layers[l];
        if (!layer.weight_gradient) continue;
        Int from_row = l ? layers[l - 1].out_row : x_row;
        const T* from = (l ? (const T*)layers[l - 1].out : x) + start * from_row;
        gradient_share<T>({(const T*)layer.gradient, layer.gradient_row, from, from_row, height,
                           layer.outputs, layer.inputs, layer.weight_gradient, layer.inputs,
                           layer.bias_gradient, chunk > 0},
                          t, threads);
      }
  }
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define MLP(T, NAME)                                                                               \
  EXPORT void mlp_forward_##NAME(const T* x, Int x_row, Int batch, const Layer* layers, Int count, \
                                 Int threads) {                                                    \
    forward(x, x_row, batch, layers, count, threads);                                              \
  }                                                                                                \
  EXPORT void mlp_backward_##NAME(const T* x, Int x_row, const T* g, Int g_row, T* x_gradient,     \
                                  Int x_gradient_row, Int batch, const Layer* layers, Int count,   \
                                  Int threads) {                                                   \
    backward(x, x_row, g, g_row, x_gradient, x_gradient_row, batch, layers, count, threads);       \
  }
MLP(float, f32)
MLP(bf16, bf16)
