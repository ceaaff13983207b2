// A chain of linear layers whose products are verified by checksums (Huang and Abraham 1984).
//
// The outputs of a row x, before bias and activation, must add up to the product of x with the sums
// of the weight's columns: sum_o (x W^T)_o = x . (sum_o W_o). The sums are taken when the weight was
// last changed on purpose, so a bit that flipped in the weight since then shows as well as one in the
// product. It costs a dot product for each row and layer: 1 / outputs of the work. A row that is off
// by more than rounding usually explains is done again in double before anything is said.
#include "chain.h"
#include "bags.h"

#ifdef PLANT
// A fault in the arithmetic, for tests: bit `bit` of one number of a product.
static Int plant_layer = -1, plant_row, plant_column, plant_bit;
extern "C" __attribute__((visibility("default"))) void plant(Int layer, Int row, Int column,
                                                             Int bit) {
  plant_layer = layer, plant_row = row, plant_column = column, plant_bit = bit;
}
#endif

// An epilogue that adds up each row's products on the way.
template <class T> struct CheckedEpilogue : Epilogue<T> {
  float* totals;  // (rows, LANES)
#ifdef PLANT
  Int layer, first;
#endif
};

template <class T>
void finish(const CheckedEpilogue<T>& e, const float* c, Int row, Int rows, Int column,
            Int columns) {
#ifdef PLANT
  const Int r = plant_row - e.first - row, j = plant_column - column;
  if (e.layer == plant_layer && r >= 0 && r < rows && j >= 0 && j < columns) {
    uint32_t bits;
    std::memcpy(&bits, c + r * PANEL + j, 4);
    bits ^= 1u << plant_bit;
    std::memcpy((float*)c + r * PANEL + j, &bits, 4);
  }
#endif
  for (Int r = 0; r < rows; r++) {
    float* total = e.totals + (row + r) * LANES;
    Vec sum = load(total);
    for (Int j = 0; j < columns; j += LANES)
      sum += load_some(c + r * PANEL + j, (int)std::min<Int>(LANES, columns - j));
    store(total, sum);
  }
  finish(static_cast<const Epilogue<T>&>(e), c, row, rows, column, columns);
}

// Element (o, k) of a layer's weight, plain or packed (see pack.h).
template <class T> static float element(const Layer& layer, Int o, Int k) {
  const T* weight = (const T*)layer.weight;
  if (layer.weight_row) return to_float(weight[o * layer.weight_row + k]);
  const Int first = o / PANEL * PANEL, width = panel_width(layer.outputs, first);
  const T* panel = weight + panel_offset<T>(first, layer.inputs);
  if (width == 1) return to_float(panel[k]);
  return to_float(panel[(k / DEPTH<T> * width + o - first) * DEPTH<T> + k % DEPTH<T>]);
}

// Whether a suspicious row is wrong, by doing it again in double: an output, or `found`, the sum of
// the products, is further from the exact one than any rounding explains, or the columns of the
// weight do not have their sums.
template <class T>
static bool confirmed(const Layer& layer, const float* sums, const T* x, const T* out, float found) {
  const Int inputs = layer.inputs;
  double total = 0, expected = 0, slack = 0, all = 0;
  for (Int o = 0; o < layer.outputs; o++) {
    double exact = 0, size = 0;
    for (Int k = 0; k < inputs; k++) {
      const double product = (double)to_float(x[k]) * element<T>(layer, o, k);
      exact += product, size += std::fabs(product);
    }
    total += exact, all += size;
    const float bias = layer.bias ? to_float(((const T*)layer.bias)[o]) : 0.0f;
    const float wanted = activate(splat((float)exact + bias), layer.activation)[0];
    const double ulp = sizeof(T) == 4 ? 0x1p-22 : 0x1p-7;  // of the activation and of storing
    const double bound =
        1.2 * 0x1p-24 * (inputs + 8) * (size + std::fabs(bias)) + ulp * std::fabs(wanted) + 1e-30;
    if (!(std::fabs(to_float(out[o]) - wanted) <= bound)) return true;
  }
  for (Int k = 0; k < inputs; k++) {
    const double term = (double)to_float(x[k]) * sums[k];
    expected += term, slack += std::fabs(term);
  }
  if (!(std::fabs(total - found) <= 0x1p-24 * (inputs + layer.outputs + 8) * all + 1e-30))
    return true;
  return !(std::fabs(total - expected) <= 0x1p-22 * slack + 1e-30);
}

// Compares rows [first, first + rows) of a layer's input with the totals of their products, which
// `parts` threads have counted, each at totals + part * step; out holds the layer's outputs.
template <class T>
static void verify(const Layer& layer, const float* sums, const T* x, Int x_row, Int first, Int rows,
                   const float* totals, Int parts, Int step, const T* out, Int out_row, Int number,
                   Problem& bad) {
  const Int inputs = layer.inputs;
  // A sum of k products has a rounding error of about 0.2 sqrt(k) ulp of |x| |w_o|; over the outputs
  // these add up as the norm of the weight does, sums[inputs]. Adding n outputs of one sign costs
  // sqrt(n) times that. Rows beyond that are looked at again.
  const float scale = 2 * 0x1p-24f * sums[inputs] *
                      (std::sqrt((float)inputs) + std::sqrt((float)layer.outputs));
  for (Int r = 0; r < rows; r++) {
    Vec dot{}, squares{}, found{};
    const T* row = x + r * x_row;
    for (Int k = 0; k < inputs; k += LANES) {
      const int n = (int)std::min<Int>(LANES, inputs - k);
      const Vec v = load_some(row + k, n);
      dot = fma(v, load_some(sums + k, n), dot);
      squares = fma(v, v, squares);
    }
    for (Int part = 0; part < parts; part++) found += load(totals + part * step + r * LANES);
    const float limit = scale * (std::sqrt(sum(squares)) + 1e-18f);  // squares may underflow
    // Where the input or the weight is not finite, neither is the limit: nothing can be said.
    if (!(std::fabs(sum(found) - sum(dot)) <= limit) && limit <= 3e38f &&
        confirmed(layer, sums, row, out + r * out_row, sum(found)))
      return bad.note(Problem::PRODUCT, number, first + r, 0);
  }
}

// As `forward` of mlp.cpp; sums[l] holds the column sums (inputs,) of layer l, and then its norm.
template <class T>
static void forward_checked(const T* x, Int x_row, Int batch, const Layer* layers,
                            const float* const* sums, Int count, Int threads, Problem& problem) {
  Int widest = 1;
  double work = 0;
  bool plain = false;
  for (Int l = 0; l < count; l++) {
    plain |= layers[l].weight_row != 0;
    widest = std::max(widest, layers[l].outputs);
    work += (double)layers[l].inputs * layers[l].outputs;
  }
  if (work * batch < CHAIN_WORK) threads = 1;
  const Int row = scratch_row<T>(widest);
  auto epilogue = [&](Int l, Int first, Int rows, T* scratch, float* totals) {
    const Layer& layer = layers[l];
    T* to = layer.out ? (T*)layer.out + first * layer.out_row : scratch + l % 2 * rows * row;
    CheckedEpilogue<T> e{};
    e.out = to, e.out_row = layer.out ? layer.out_row : row;
    e.bias = (const T*)layer.bias, e.activation = layer.activation, e.totals = totals;
#ifdef PLANT
    e.layer = l, e.first = first;
#endif
    return e;
  };
  // With too few rows to share out, or weights to be packed, the threads share each layer's panels.
  if (plain || batch < threads * 4) {
    const Int step = batch * LANES;
    Scratch<T> scratch(2 * batch * row);
    Scratch<float> totals(threads * step);
    const T* from = x;
    Int from_row = x_row;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (Int l = 0; l < count; l++) {
      const Layer& layer = layers[l];
      const Int panels = ceiling(layer.outputs, PANEL);
#pragma omp for schedule(static)
      for (Int t = 0; t < threads; t++) {
        float* own = totals.data + t * step;
        std::memset(own, 0, step * sizeof(float));
        auto e = epilogue(l, 0, batch, scratch.data, own);
        layer_part(layer, from, from_row, batch, panels * t / threads * PANEL,
                   std::min(layer.outputs, panels * (t + 1) / threads * PANEL), batch == 1, e);
      }
#pragma omp single
      {
        auto e = epilogue(l, 0, batch, scratch.data, nullptr);
        verify(layer, sums[l], from, from_row, 0, batch, totals.data, threads, step, e.out,
               e.out_row, l, problem);
        from = e.out, from_row = e.out_row;
      }
    }
    return;
  }
  const Int blocks = block_count(batch, widest * sizeof(T), threads);
  const Int most = ceiling(batch, blocks) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Problem bad;
    Scratch<T> scratch(2 * most * row);
    Scratch<float> totals(most * LANES);
#pragma omp for schedule(dynamic, 1) nowait
    for (Int i = 0; i < blocks; i++) {
      const Int first = batch * i / blocks, rows = batch * (i + 1) / blocks - first;
      const T* from = x + first * x_row;
      Int from_row = x_row;
      for (Int l = 0; l < count; l++) {
        std::memset(totals.data, 0, rows * LANES * sizeof(float));
        auto e = epilogue(l, first, rows, scratch.data, totals.data);
        layer_part(layers[l], from, from_row, rows, 0, layers[l].outputs, batch == 1, e);
        verify(layers[l], sums[l], from, from_row, first, rows, totals.data, 1, 0, e.out, e.out_row,
               l, bad);
        from = e.out, from_row = e.out_row;
      }
    }
#pragma omp critical
    problem.merge(bad);
  }
}

#define MLP(T, NAME)                                                                              \
  extern "C" __attribute__((visibility("default"))) void mlp_checked_##NAME(                      \
      const T* x, Int x_row, Int batch, const Layer* layers, const float* const* sums, Int count, \
      Int threads, Problem* problem) {                                                            \
    Problem found;                                                                                \
    forward_checked(x, x_row, batch, layers, sums, count, threads, found);                        \
    *problem = found;                                                                             \
  }
MLP(float, f32)
MLP(bf16, bf16)
