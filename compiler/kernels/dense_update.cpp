// Updates of dense parameters by the arithmetic of torch.optim on the CPU, to the last bit.
//
// PyTorch's builds for CPUs with fused multiply-add use it wherever a kernel adds a product. Its fused
// optimizers are one kernel per parameter; the others are one per operation, with MKL's roots. Built with -ffp-contract=off: a product and a sum are fused only where this file says so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using Int = int64_t;

enum Rule : Int { SGD, ADAGRAD, ADAM };

struct Parameter {
  float* weight;
  const float* gradient;
  float* first;   // SGD: momentum or null; Adagrad: sum; Adam: exp_avg
  float* second;  // Adam: exp_avg_sq
  float* step;    // Adagrad, Adam: updates so far
  Int count;
  Int rule;
  Int maximize;
  Int nesterov;
  Int decoupled;  // Adam: weight decay as in AdamW
  Int fused;      // PyTorch's fused kernel
};

struct Hyper {
  double lr, decay, eps;
  double first, second;  // Adam: the betas; SGD: momentum and dampening
  double lr_decay;       // Adagrad
};

constexpr Int GRAIN = 32768;  // numbers for which a second thread pays

constexpr Int LANES = 8;       // after whole vectors of these, PyTorch's fused kernels go one by one
constexpr Int BLOCK = 512;     // numbers whose square roots are taken in one call

// MKL's square root, which is not quite std::sqrt: PyTorch's where it is built with MKL.
using Sqrt = void (*)(int, const float*, float*, Int);
constexpr Int ACCURATE = 0x2 | 0x140000 | 0x100;  // VML_HA, FTZDAZ off, errors ignored

struct Scalars {  // in double as Python computes them, then rounded
  float lr, decay, eps, first, second, rest, root;
  bool small;
};

static Scalars scalars(const Parameter& p, const Hyper& h) {
  Scalars s{};
  s.eps = (float)h.eps;
  if (p.rule == SGD) {
    s.lr = (float)-h.lr, s.decay = (float)h.decay;
    s.first = (float)h.first, s.second = (float)(1 - h.second);
    return s;
  }
  *p.step += 1;
  const double step = *p.step;
  if (p.rule == ADAGRAD) {
    s.decay = (float)h.decay;
    s.lr = (float)-(h.lr / (1 + (step - 1) * h.lr_decay));
    return s;
  }
  s.decay = (float)(p.decoupled ? 1 - h.lr * h.decay : h.decay);
  s.lr = (float)-(h.lr / (1 - std::pow(h.first, step)));
  s.root = (float)std::pow(1 - std::pow(h.second, step), 0.5);
  s.first = (float)(1 - h.first);
  s.second = (float)h.second, s.rest = (float)(1 - h.second);
  s.small = std::fabs(s.first) < 0.5f;
  return s;
}

// a + b * c, rounded once
static inline float add(float a, float b, float c) { return __builtin_fmaf(b, c, a); }

// a * b + c * d. GCC fuses the first product in vectors of PyTorch's fused kernels, the second one in
// the numbers after the last whole vector.
template <bool LAST>
static inline float both(float a, float b, float c, float d) {
  return LAST ? add(c * d, a, b) : add(a * b, c, d);
}

template <bool LAST>
static void sgd(const Parameter& p, const Scalars s, bool decays, Int begin, Int end) {
  float* __restrict w = p.weight;
  const float* __restrict gradient = p.gradient;
  float* __restrict momentum = p.first;
  for (Int i = begin; i < end; i++) {
    float g = p.maximize ? -gradient[i] : gradient[i];
    if (decays) g = add(g, w[i], s.decay);
    if (momentum) {
      const float m = both<LAST>(momentum[i], s.first, g, s.second);
      momentum[i] = m;
      g = p.nesterov ? add(g, m, s.first) : m;
    }
    w[i] = add(w[i], g, s.lr);
  }
}

static void roots(const float* x, Int n, Sqrt root, float* out) {
  if (root) return root((int)n, x, out, ACCURATE);
  for (Int i = 0; i < n; i++) out[i] = std::sqrt(x[i]);
}

static void adagrad(const Parameter& p, const Scalars s, bool decays, Sqrt root, Int begin, Int end) {
  float* __restrict w = p.weight;
  const float* __restrict gradient = p.gradient;
  float* __restrict sum = p.first;
  float steps[BLOCK], deviation[BLOCK];
  for (Int start = begin; start < end; start += BLOCK) {
    const Int n = std::min(BLOCK, end - start);
    for (Int j = 0; j < n; j++) {
      const Int i = start + j;
      float g = p.maximize ? -gradient[i] : gradient[i];
      if (decays) g = add(g, w[i], s.decay);
      sum[i] = add(sum[i], g, g);
      steps[j] = s.lr * g;
    }
    roots(sum + start, n, root, deviation);
    for (Int j = 0; j < n; j++) w[start + j] += steps[j] / (deviation[j] + s.eps);
  }
}

template <bool LAST>
static void adam(const Parameter& p, const Scalars s, bool decays, Sqrt root, Int begin, Int end) {
  float* __restrict w = p.weight;
  const float* __restrict gradient = p.gradient;
  float* __restrict first = p.first;
  float* __restrict second = p.second;
  float deviation[BLOCK];
  for (Int start = begin; start < end; start += BLOCK) {
    const Int n = std::min(BLOCK, end - start);
    for (Int i = start; i < start + n; i++) {
      float g = p.maximize ? -gradient[i] : gradient[i];
      if (decays && p.decoupled) w[i] *= s.decay;
      if (decays && !p.decoupled) g = add(g, w[i], s.decay);
      const float difference = g - first[i];  // the mean moves as torch.lerp moves it
      first[i] = s.small ? add(first[i], s.first, difference) : add(g, s.first - 1, difference);
      second[i] = both<LAST>(second[i], s.second, s.rest * g, g);
    }
    roots(second + start, n, root, deviation);
    for (Int j = 0; j < n; j++)
      w[start + j] += s.lr * first[start + j] / (deviation[j] / s.root + s.eps);
  }
}

template <bool LAST>
static void update(
    const Parameter& p, const Hyper& h, const Scalars& s, Sqrt root, Int begin, Int end) {
  const bool decays = h.decay != 0;
  if (p.fused) root = nullptr;
  if (p.rule == SGD) sgd<LAST>(p, s, decays, begin, end);
  if (p.rule == ADAGRAD) adagrad(p, s, decays, root, begin, end);
  if (p.rule == ADAM) adam<LAST>(p, s, decays, root, begin, end);
}

struct Piece {
  Int parameter, begin, end;
};

extern "C" __attribute__((visibility("default"))) void update_dense(
    const Parameter* parameters, const Hyper* hypers, Int count, Sqrt root, Int threads) {
  std::vector<Piece> pieces;
  std::vector<Scalars> computed;
  Int total = 0;
  for (Int k = 0; k < count; k++) {
    const Int n = parameters[k].count;
    const Int parts = n < GRAIN ? 1 : std::min(threads, (n + GRAIN - 1) / GRAIN);
    const Int each = (n + parts - 1) / parts;
    for (Int start = 0; start < n; start += each)
      pieces.push_back({k, start, std::min(start + each, n)});
    computed.push_back(scalars(parameters[k], hypers[k]));
    total += n;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && total > GRAIN)
  for (size_t j = 0; j < pieces.size(); j++) {
    const auto [k, begin, end] = pieces[j];
    const Parameter& p = parameters[k];
    const Int whole = p.fused ? std::min(end, p.count - p.count % LANES) : end;
    update<false>(p, hypers[k], computed[k], root, begin, whole);
    update<true>(p, hypers[k], computed[k], root, std::max(begin, whole), end);
  }
}
