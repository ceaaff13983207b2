// Linear layers: packing of weights, y = activation(x W^T + b), and the gradients.
#include "weight_gradient.h"

constexpr double THREAD_WORK = 2e5;  // multiply-adds below which a second thread does not pay

template <class T>
void pack(const T* weight, Int output_stride, Int input_stride, Int outputs, Int inputs, T* packed,
          Int threads) {
#pragma omp parallel for num_threads(threads) if (outputs * inputs > 65536)
  for (Int first = 0; first < outputs; first += PANEL)
    pack_panel(weight, output_stride, input_stride, outputs, inputs, first,
               packed + panel_offset<T>(first, inputs));
}

// `weight_row` is 0 for a packed weight.
template <class T>
void linear(const T* x, Int x_row, Int batch, const T* weight, Int weight_row, Int inputs,
            Int outputs, const Epilogue<T>& epilogue, Int threads) {
  if ((double)batch * inputs * outputs < THREAD_WORK) threads = 1;
  bool by_rows = !weight_row && batch >= threads * TILE_ROWS;  // else each thread takes panels
  Int blocks = by_rows ? block_count(batch, inputs * sizeof(T), threads) : 1;
  Int panels = ceiling(outputs, PANEL), parts = by_rows ? 1 : std::min(threads, panels);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
  for (Int i = 0; i < blocks * parts; i++) {
    Int row = batch * (i / parts) / blocks, rows = batch * (i / parts + 1) / blocks - row;
    Int begin = panels * (i % parts) / parts * PANEL;
    Int end = std::min(outputs, panels * (i % parts + 1) / parts * PANEL);
    Epilogue<T> e = epilogue;
    e.out += row * e.out_row;
    if (e.saved) e.saved += row * e.saved_row;
    const T* from = x + row * x_row;
    if (weight_row)
      plain_block(from, x_row, rows, weight, weight_row, inputs, outputs, begin, end, e);
    else
      layer_block(from, x_row, rows, weight, inputs, outputs, begin, end, batch == 1, e);
  }
}

template <class T>
void deactivate_all(const T* g, Int g_row, const T* y, Int y_row, Int batch, Int columns,
                    Int activation, T* out, Int out_row) {
  for (Int r = 0; r < batch; r++)
    for (Int j = 0; j < columns; j += LANES) {
      int n = (int)std::min<Int>(LANES, columns - j);
      Vec v = load_some(y + r * y_row + j, n);
      v = deactivate(load_some(g + r * g_row + j, n), v, activation);
      store_some(out + r * out_row + j, v, n);
    }
}

template <class T> void weight_gradient(const WeightGradient<T>& w, Int threads) {
  if ((double)w.batch * w.inputs * w.outputs < THREAD_WORK) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (Int t = 0; t < threads; t++) gradient_share(w, t, threads);
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define LINEAR(T, NAME)                                                                           \
  EXPORT Int packed_size_##NAME(Int outputs, Int inputs) {                                        \
    return packed_size<T>(outputs, inputs);                                                       \
  }                                                                                               \
  EXPORT void pack_##NAME(const T* weight, Int output_stride, Int input_stride, Int outputs,      \
                          Int inputs, T* packed, Int threads) {                                   \
    pack(weight, output_stride, input_stride, outputs, inputs, packed, threads);                  \
  }                                                                                               \
  EXPORT void linear_##NAME(const T* x, Int x_row, Int batch, const T* weight, Int weight_row,    \
                            Int inputs, Int outputs, T* out, Int out_row, const T* bias,          \
                            const T* saved, Int saved_row, Int activation, Int threads) {         \
    linear<T>(x, x_row, batch, weight, weight_row, inputs, outputs,                               \
              {out, out_row, bias, saved, saved_row, activation}, threads);                       \
  }                                                                                               \
  EXPORT void deactivate_##NAME(const T* g, Int g_row, const T* y, Int y_row, Int batch,          \
                                Int columns, Int activation, T* out, Int out_row) {               \
    deactivate_all(g, g_row, y, y_row, batch, columns, activation, out, out_row);                 \
  }                                                                                               \
  EXPORT void weight_gradient_##NAME(const T* g, Int g_row, const T* x, Int x_row, Int batch,     \
                                     Int outputs, Int inputs, float* weight, Int weight_row,      \
                                     float* bias, Int threads) {                                  \
    weight_gradient<T>(                                                                           \
        {g, g_row, x, x_row, batch, outputs, inputs, weight, weight_row, bias, false}, threads);  \
  }
LINEAR(float, f32)
LINEAR(bf16, bf16)
