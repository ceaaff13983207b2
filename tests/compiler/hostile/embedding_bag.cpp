// Tables of one row, empty bags, ids and offsets out of range, all modes and types.
int main() {
  for (int64_t width : {1, 3, 8, 15, 16, 17, 33, 129, 130})
    for (int64_t rows : {1, 2, 50})
      for (int64_t mode : {SUM, MEAN, MAX})
        for (int64_t type : {F32, BF16, INT8})
          for (int fault = 0; fault < 6; fault++) {
            const int64_t bags = 7, count = fault == 5 ? 0 : 40, size = type == F32 ? 4 : 2 - type / 2;
            Exact<float> numbers(rows * width);
            Exact<bf16> halves(rows * width);
            Exact<uint8_t> bytes(rows * width);
            fill(numbers, false), fill(halves, false);
            for (int64_t i = 0; i < rows * width; i++) bytes[i] = draw() % 256;
            void* kept[] = {numbers.get(), halves.get(), bytes.get()};
            Exact<int64_t> ids(count), offsets(bags + 1);
            Exact<float> out(bags * width), scale(rows), offset(rows);
            fill(scale, false), fill(offset, false);
            Exact<int32_t> argmax(bags * width);
            for (int64_t i = 0; i < count; i++) ids[i] = draw() % rows;
            for (int64_t b = 1; b < bags; b++)  // the first three and the last bag are empty
              offsets[b] = b < 4 ? 0 : count * (b - 3) / (bags - 4);
            offsets[bags] = count;
            if (fault == 1) ids[17] = rows;
            if (fault == 2) ids[0] = INT64_MIN, ids[39] = INT64_MAX;
            if (fault == 3) offsets[4] = -5;
            if (fault == 4) offsets[2] = INT64_MAX;
            Table t{};
            t.bags = {ids.get(), 1, count, offsets.get(), 1, 1, 0, bags, nullptr, rows - 1, rows};
            t.rows = (char*)kept[type == F32 ? 0 : type == BF16 ? 1 : 2], t.stride = width * size, t.type = type, t.width = width;
            t.mode = mode, t.scale = (char*)scale.get(), t.offset = (char*)offset.get();
            t.scale_stride = 4, t.out = (char*)out.get(), t.out_stride = width * 4, t.out_type = F32;
            t.argmax = mode == MAX ? argmax.get() : nullptr;
            Problem problem;
            embedding_bags(&t, 1, 2, &problem);
            check((problem.kind != Problem::NONE) == (fault > 0 && fault < 5), "fault not reported");
            if (problem.kind == Problem::NONE) tell(out);
            if (type == INT8) continue;
            Exact<float> by_weight(count);
            t.scale = (char*)by_weight.get();
            bag_weight_gradients(&t, 1, 2, &problem);
            if (problem.kind == Problem::NONE) tell(by_weight);
          }
}
