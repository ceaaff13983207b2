// A chain of odd widths, forward with plain and with packed weights, and backward.
template <class T>
static void run(void (*forth)(const T*, Int, Int, const Layer*, Int, Int),
                void (*back)(const T*, Int, const T*, Int, T*, Int, Int, const Layer*, Int, Int)) {
  const Int widths[] = {13, 70, 33, 1};
  for (Int batch : {0, 1, 3, 7, 11, 40, 130})
    for (Int threads : {1, 3})
      for (bool plain : {false, true}) {
        std::vector<Exact<T>> weights, turned, outs, gradients, packs, biases;
        std::vector<Exact<float>> by_weight, by_bias;
        Layer forward_layers[3], backward_layers[3];
        Exact<T> x(batch * 13), g(batch), gx(batch * 13);
        fill(x, batch == 7), fill(g, false);
        for (Int l = 0; l < 3; l++) {
          Int in = widths[l], out = widths[l + 1];
          weights.emplace_back(in * out), biases.emplace_back(out);
          fill(weights[l], false), fill(biases[l], false);
          packs.emplace_back(packed_size<T>(out, in)), turned.emplace_back(packed_size<T>(in, out));
          for (Int f = 0; f < out; f += PANEL)
            pack_panel<T>(weights[l].get(), in, 1, out, in, f,
                          packs[l].get() + panel_offset<T>(f, in));
          for (Int f = 0; f < in; f += PANEL)
            pack_panel<T>(weights[l].get(), 1, in, in, out, f,
                          turned[l].get() + panel_offset<T>(f, out));
          outs.emplace_back(batch * out), gradients.emplace_back(batch * out);
          by_weight.emplace_back(in * out), by_bias.emplace_back(out);
          Layer layer{plain ? weights[l].get() : packs[l].get(), plain ? in : 0, biases[l].get(),
                      in, out, l < 2 ? RELU : SIGMOID, outs[l].get(), out, nullptr, 0, nullptr,
                      nullptr};
          forward_layers[l] = layer;
          layer.weight = turned[l].get(), layer.weight_row = 0;
          layer.gradient = gradients[l].get(), layer.gradient_row = out;
          layer.weight_gradient = by_weight[l].get(), layer.bias_gradient = by_bias[l].get();
          backward_layers[l] = layer;
        }
        forth(x.get(), 13, batch, forward_layers, 3, threads);
        back(x.get(), 13, g.get(), 1, gx.get(), 13, batch, backward_layers, 3, threads);
        if (batch == 7) continue;
        tell(outs[2]), tell(gx);
        for (Int l = 0; l < 3; l++) tell(by_weight[l]), tell(by_bias[l]);
      }
}

int main() {
  run<float>(mlp_forward_f32, mlp_backward_f32);
  run<bf16>(mlp_forward_bf16, mlp_backward_bf16);
}
