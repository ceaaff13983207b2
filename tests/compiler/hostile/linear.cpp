// Widths around every panel's, rows around every tile's, plain and packed weights.
template <class T>
static void run(void (*packing)(const T*, Int, Int, Int, Int, T*, Int),
                void (*product)(const T*, Int, Int, const T*, Int, Int, Int, T*, Int, const T*,
                                const T*, Int, Int, Int),
                void (*gradient)(const T*, Int, const T*, Int, Int, Int, Int, float*, Int, float*,
                                 Int)) {
  for (Int inputs : {1, 2, 13, 16, 17, 33, 64, 67})
    for (Int outputs : {1, 2, 15, 16, 17, 32, 33, 65})
      for (Int batch : {0, 1, 2, 6, 7, 11, 15, 21, 30}) {
        Exact<T> x(batch * inputs), w(outputs * inputs), bias(outputs), y(batch * outputs);
        Exact<T> packed(packed_size<T>(outputs, inputs)), g(batch * outputs);
        Exact<float> gw(outputs * inputs), gb(outputs);
        fill(x, batch == 7), fill(w, false), fill(bias, false), fill(g, batch == 7);
        Int activation = draw() % 4;
        packing(w.get(), inputs, 1, outputs, inputs, packed.get(), 2);
        for (Int row : {(Int)0, inputs}) {
          product(x.get(), inputs, batch, row ? w.get() : packed.get(), row, inputs, outputs,
                  y.get(), outputs, bias.get(), nullptr, 0, activation, 2);
          if (batch != 7) tell(y);
        }
        product(x.get(), inputs, batch, packed.get(), 0, inputs, outputs, y.get(), outputs, nullptr,
                g.get(), outputs, RELU, 3);
        gradient(g.get(), outputs, x.get(), inputs, batch, outputs, inputs, gw.get(), inputs,
                 gb.get(), 2);
        if (batch != 7) tell(y), tell(gw), tell(gb);
      }
}

int main() {
  run<float>(pack_f32, linear_f32, weight_gradient_f32);
  run<bf16>(pack_bf16, linear_bf16, weight_gradient_bf16);
}
