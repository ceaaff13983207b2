// Numbers of features and widths around every vector's length, tight rows, both orders.
template <class T>
static void run(void (*forward)(const Features<const T>*, const Shape*, T*, Int),
                void (*backward)(const Features<const T>*, const Shape*, const T*,
                                 const Features<T>*, Int)) {
  for (Int K : {1, 2, 3, 5, 16, 17, 27, 34})
    for (Int d : {1, 3, 4, 15, 16, 17, 31, 33, 64})
      for (Int batch : {0, 1, 3, 4, 5, 9})
        for (int flags = 0; flags < 8; flags++) {
          Int dense = flags & 1, self = flags >> 1 & 1, upper = flags >> 2;
          Int n = row_start(K, self) + dense * d;
          Exact<T> x(batch * K * d), out(batch * n), g(batch * n), gx(batch * K * d);
          fill(x, batch == 9), fill(g, batch == 9);
          Shape shape{batch, dense, self, n, 0, upper};
          Features<const T> features{nullptr, nullptr, x.get(), d, K * d, K, d};
          Features<T> gradients{nullptr, nullptr, gx.get(), d, K * d, K, d};
          forward(&features, &shape, out.get(), 2);
          backward(&features, &shape, g.get(), &gradients, 2);
          if (batch != 9) tell(out), tell(gx);
        }
}

int main() {
  run<float>(interaction_f32, interaction_backward_f32);
  run<bf16>(interaction_bf16, interaction_backward_bf16);
}
