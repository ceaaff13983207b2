"""The generated C++: goldens, and that the C++ compiler makes vector code of its loops."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from sympy import Symbol
from torch import Tensor

from compiler.codegen.expressions import index_text
from compiler.runtime import build
from tests.compiler.compiling import Stages, checked

DRAWN = torch.Generator().manual_seed(0)
X, Y, W = (torch.rand(size, generator=DRAWN) for size in ((64, 96), (64, 96), (96,)))


def generated(function: Callable[..., Any], *inputs: Tensor) -> str:
    """The loops of a function's graph, after checking its result."""
    return checked(function, *inputs).modules[0].cpp.split("\n\n")[-1].strip()


class TestCode(expecttest.TestCase):
    """Run with EXPECTTEST_ACCEPT=1 to take the present text for the expected."""

    def test_pointwise_chain(self) -> None:
        self.assertExpectedInline(
            generated(lambda x, y: (x * 2 + y).relu(), X, Y),
            """\
// buf0: relu
  {
#pragma omp parallel for num_threads(threads) if (6144 > 32768)
    for (Int o1_first = 0; o1_first < 6144; o1_first += 4096) {
      const Int o1_end = o1_first + 4096 < 6144 ? o1_first + 4096 : 6144;
#pragma omp simd
      for (Int o1 = o1_first; o1 < o1_end; o1++) {
        float t0 = get(in_arg1_1[o1]);
        float t1 = get(in_arg0_1[o1]);
        float t2 = (float)(t1 * 2.0f);
        float t3 = (float)(t2 + t0);
        float t4 = relu(t3);
        put(&buf0[o1], t4);
      }
    }
  }
}""",
        )

    def test_softmax(self) -> None:
        self.assertExpectedInline(
            generated(lambda x: torch.softmax(x, 1), X),
            """\
// buf0: _softmax
  // buf1: _softmax
  // buf2: _softmax
  // buf3: _softmax
  {
#pragma omp parallel for num_threads(threads) if (6144 > 32768)
    for (Int o0 = 0; o0 < 64; o0++) {
      float acc_buf0 = (float)-INFINITY;
      int nan_acc_buf0 = 0;
#pragma omp simd reduction(max:acc_buf0) reduction(|:nan_acc_buf0)
      for (Int r0 = 0; r0 < 96; r0++) {
        float t0 = get(in_arg0_1[96 * o0 + r0]);
        acc_buf0 = t0 > acc_buf0 ? t0 : acc_buf0;
        nan_acc_buf0 |= t0 != t0;
      }
      if (nan_acc_buf0) acc_buf0 = NAN;
      float acc_buf2 = 0;
#pragma omp simd reduction(+:acc_buf2)
      for (Int r0 = 0; r0 < 96; r0++) {
        float t0 = get(in_arg0_1[96 * o0 + r0]);
        float t1 = (float)(t0 - acc_buf0);
        float t2 = exp_(t1);
        put(&buf1[96 * o0 + r0], t2);
        acc_buf2 += t2;
      }
#pragma omp simd
      for (Int r0 = 0; r0 < 96; r0++) {
        float t0 = get(buf1[96 * o0 + r0]);
        float t1 = (t0 / acc_buf2);
        put(&buf3[96 * o0 + r0], t1);
      }
    }
  }
}""",
        )

    def test_sum_of_all(self) -> None:
        self.assertExpectedInline(
            generated(lambda x: x.square().sum(), X),
            """\
// buf0: sum_1
  {
    Int bad = 0;
    const Int rows = 6144, each = 1;
    const Int step = each < 4096 ? 4096 / (each > 1 ? each : 1) : 1;
    const Int blocks = (rows + step - 1) / step;
    float* part_buf0 = (float*)std::malloc((blocks + 1) * sizeof(float));
#pragma omp parallel for num_threads(threads) if (rows * each > 32768)
    for (Int block = 0; block < blocks; block++) {
      const Int from = block * step, to = from + step < rows ? from + step : rows;
      float acc_buf0 = 0;
#pragma omp simd reduction(+:acc_buf0)
      for (Int r1 = from; r1 < to; r1++) {
        float t0 = get(in_arg0_1[r1]);
        float t1 = (float)(t0 * t0);
        acc_buf0 += t1;
      }
      part_buf0[block] = acc_buf0;
    }
    float acc_buf0 = 0;
    for (Int block = 0; block < blocks; block++) {
      acc_buf0 += part_buf0[block];
    }
    std::free(part_buf0);
    put(&buf0[0], acc_buf0);
  }
}""",
        )

    def test_gradient_of_a_bias(self) -> None:
        self.assertExpectedInline(
            generated(lambda g, x: (g * (x > 0)).sum(0), X, Y),
            """\
// buf0: sum_1
  {
#pragma omp parallel for num_threads(threads) if (6144 > 32768)
    for (Int o0_first = 0; o0_first < 96; o0_first += 64) {
      const auto block = [&](auto o0_width) {
        float row_buf0[64];
        for (Int k = 0; k < 64; k++) row_buf0[k] = 0;
        for (Int r0 = 0; r0 < 64; r0++) {
#pragma omp simd
          for (Int o0_at = 0; o0_at < o0_width; o0_at++) {
            const Int o0 = o0_first + o0_at;
            float t0 = get(in_arg1_1[o0 + 96 * r0]);
            bool t1 = (t0 > 0.0f);
            float t2 = (t1 ? (float)1 : (float)0);
            float t3 = get(in_arg0_1[o0 + 96 * r0]);
            float t4 = (float)(t3 * t2);
            row_buf0[o0_at] += t4;
          }
        }
        for (Int o0_at = 0; o0_at < o0_width; o0_at++) {
          const Int o0 = o0_first + o0_at;
          put(&buf0[o0], row_buf0[o0_at]);
        }
        return Int(0);
      };
      o0_first + 64 <= 96 ? block(std::integral_constant<Int, 64>()) : block(96 - o0_first);
    }
  }
}""",
        )

    def test_lookup(self) -> None:
        ids = torch.randint(0, 64, (10,))
        self.assertExpectedInline(
            generated(lambda x, ids: F.embedding(ids, x) + 1, X, ids),
            """\
// buf0: add
  {
    Int bad = 0;
#pragma omp parallel for num_threads(threads) if (960 > 32768) reduction(|:bad)
    for (Int o0 = 0; o0 < 10; o0++) {
      Int c0_0 = get(in_arg1_1[o0]);
      Int c0_1 = place_unsigned(c0_0, Int(64), bad);
#pragma omp simd
      for (Int o1 = 0; o1 < 96; o1++) {
        float t2 = get(in_arg0_1[96 * c0_1 + o1]);
        float t3 = (float)(t2 + 1.0f);
        put(&buf0[96 * o0 + o1], t3);
      }
    }
    if (bad) problem->report(1);
  }
}""",
        )

    def test_transposed(self) -> None:
        self.assertExpectedInline(
            generated(lambda x: x.t().contiguous() * 2, X),
            """\
// buf0: mul
  {
#pragma omp parallel for num_threads(threads) if (6144 > 32768)
    for (Int o1_first = 0; o1_first < 64; o1_first += 16) {
      const Int o1_end = o1_first + 16 < 64 ? o1_first + 16 : 64;
      for (Int o0 = 0; o0 < 96; o0++) {
#pragma omp simd
        for (Int o1 = o1_first; o1 < o1_end; o1++) {
          float t0 = get(in_arg0_1[o0 + 96 * o1]);
          float t1 = (float)(t0 * 2.0f);
          put(&buf0[64 * o0 + o1], t1);
        }
      }
    }
  }
}""",
        )


VECTORS: dict[str, Callable[..., Any]] = {
    "exp": lambda x, y, w: torch.exp(x),
    "tanh": lambda x, y, w: torch.tanh(x),
    "log": lambda x, y, w: torch.log(y) + torch.log1p(y),
    "expm1": lambda x, y, w: torch.expm1(x),
    "sigmoid": lambda x, y, w: torch.sigmoid(x) * y,
    "gelu": lambda x, y, w: F.gelu(x),
    "max": lambda x, y, w: x.amax(1),
    "softmax": lambda x, y, w: torch.softmax(x, 1),
    "layer norm": lambda x, y, w: F.layer_norm(x, (96,), w, w),
    "loss": lambda x, y, w: F.binary_cross_entropy_with_logits(x, y),
    "bias": lambda x, y, w: (x * (y > 0.5)).sum(0),
    "mask": lambda x, y, w: torch.where((x > 0) & (y < 0.5), x, y * 2),
    "clamp": lambda x, y, w: x.clamp(-1, 1) + torch.maximum(x, y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_loops_become_vector_code(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every loop marked simd, of all functions in one file, by the word of g++ itself."""
    version = build.compiler_version(build._cxx())
    if not version.startswith("g++"):
        pytest.skip(f"asks g++ what it made; the compiler here is {version}")
    inputs = [t.to(dtype) for t in (X, Y, W)]
    stages = Stages()

    def all_of_them(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        """Each with a number of rows of its own, so that no two share a loop."""
        return [f(x[k:] - 0.5, y[k:], w) for k, f in enumerate(VECTORS.values())]

    with torch.no_grad():
        stages.compile(all_of_them)(*inputs)
    source = tmp_path / "loops.cpp"
    source.write_text(stages.modules[0].cpp)
    command = [
        build._cxx(),
        *build.FLAGS,
        *build.tune_flags(build._cxx()),
        "-fopt-info-vec-optimized",
    ]
    done = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "loops.so")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    vectorised = {int(line.split(":")[1]) for line in done.stderr.split("\n") if "loop vec" in line}
    lines = source.read_text().split("\n")
    loops = [
        k for k, line in enumerate(lines, 1) if line.startswith("#pragma omp") and "simd" in line
    ]
    scalar = []
    for start in loops:
        end = next(k for k in range(start, len(lines)) if lines[k].strip() == "}")
        if not vectorised & set(range(start, end + 1)):
            scalar.append("\n".join(lines[start - 1 : end]))
    assert len(loops) >= len(VECTORS)
    assert not scalar, "\n".join(scalar)


@pytest.mark.parametrize("name", ["exp", "log", "log1p", "expm1", "tanh", "sigmoid", "erf"])
def test_accuracy_of_functions(name: str) -> None:
    """Within 4 units in the last place of the f64 result, over all magnitudes but denormals."""
    function = getattr(torch, name)
    x = torch.cat([torch.linspace(-110, 110, 20001), torch.logspace(-40, 38, 4001), torch.zeros(1)])
    x = torch.cat([x, -x, torch.tensor([float("inf"), float("-inf"), float("nan")])])
    (found,) = Stages().compile(lambda x: [function(x)])(x)
    exact = function(x.double())
    unit = torch.finfo(torch.float32).eps * exact.abs() + 2.0**-126
    good = ((found.double() - exact).abs() <= 4 * unit) | (found.isnan() & exact.isnan())
    good |= found.double() == exact.float().double()
    assert bool(good.all()), (x[~good][:5], found[~good][:5], exact[~good][:5])


def test_index_text() -> None:
    i, n = Symbol("i", integer=True), Symbol("n", integer=True)
    assert index_text(n * i + 3) == "i * n + 3"
    assert index_text(n - i - 1) in ("n - i - 1", "-i + n - 1")
