// Hot rows across blocks, one row, empty bags, ids and offsets out of range, all rules.
int main() {
  for (int64_t width : {1, 16, 17, 40})
    for (int64_t rows : {1, 3, 5000})
      for (int64_t mode : {SUM, MEAN, MAX})
        for (int64_t rule : {WRITE, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM})
          for (int fault = 0; fault < 5; fault++)
            for (int64_t each : {0, 1, 700}) {
              const int64_t bags = 9, count = bags * each;
              if (count == 0 && (fault == 1 || fault == 2)) continue;
              Exact<float> table(rows * width), squares(rows * width), moment(rows * width);
              Exact<float> gradient(bags * width);
              Exact<int64_t> ids(count), offsets(bags);
              Exact<uint64_t> sorted(count), spare(count), sides(count);
              Exact<int32_t> argmax(bags * width);
              fill(table, false), fill(gradient, fault == 0 && each == 1);
              for (int64_t i = 0; i < count; i++) ids[i] = draw() % 3 ? 0 : draw() % rows;
              for (int64_t b = 0; b < bags; b++) offsets[b] = b * each;
              if (fault == 1) ids[count - 1] = rows;
              if (fault == 2) ids[0] = -1;
              if (fault == 3) offsets[8] = count + 1;
              if (fault == 4) offsets[3] = -1;
              Table t{};
              t.bags = {ids.get(), 1, count, offsets.get(), 1, 0, 0, bags, nullptr, -1, rows};
              t.mode = mode, t.width = width;
              t.gradient = (char*)gradient.get(), t.gradient_stride = width * 4;
              t.argmax = mode == MAX ? argmax.get() : nullptr;
              t.rule = rule, t.rows = (char*)table.get(), t.stride = width * 4;
              t.squares = squares.get(), t.moment = moment.get();
              t.sorted = sorted.get(), t.spare = spare.get();
              t.sides = mode == SUM ? nullptr : sides.get();
              Hyper hyper{0.1, 1e-8, 0.01, 0.9, 0.99, 0.1, 0.01};
              Exact<float> before(rows * width);
              std::copy(table.get(), table.get() + rows * width, before.get());
              Problem problem;
              update_rows(&t, &hyper, 1, 2, &problem);
              check((problem.kind != Problem::NONE) == (fault > 0), "fault not reported");
              if (fault)
                check(std::equal(before.get(), before.get() + rows * width, table.get()),
                      "a row was changed in spite of a fault");
              else if (each != 1)
                tell(table), tell(squares), tell(moment);
            }
}
