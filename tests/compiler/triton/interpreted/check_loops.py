"""Generated Triton kernels against eager PyTorch: operations, reductions, lookups, forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.options import listening

EDGES = [0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 2.5, -2.5, 60.0, -60.0, 1e-7, 3e38]
SPECIAL = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def check(
    function: Callable[..., Any], *inputs: Any, fallbacks: bool = False, **tolerance: float
) -> str:
    """Compare with eager, and return the generated Triton; ATen must not have computed it."""
    text, left = [], set()

    def listen(half: str, *stages: Any) -> None:
        if half not in ("patterns", "graphed"):
            text.append(stages[3].triton)
            left.update(stages[1].fallbacks)

    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    with listening(listen):
        found = torch.compile(function, backend="dlrm", options={"target": "triton"})(*inputs)
    want = function(*copies)
    torch.testing.assert_close(found, want, equal_nan=True, **tolerance)
    assert fallbacks or not left, left
    return "\n".join(text)


UNARY = (
    *("abs", "neg", "exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh"),
    *("erf", "sigmoid", "relu", "floor", "ceil", "trunc", "sign", "isnan", "isinf", "logical_not"),
    *("square", "sgn", "log", "log2", "log10", "log1p"),
)


def test_unary_operations() -> None:
    x = torch.cat([torch.tensor(EDGES), torch.linspace(-4, 4, 53)])
    special = torch.tensor(SPECIAL)

    def all_of(x: Tensor, special: Tensor) -> list[Tensor]:
        found = []
        for name in UNARY:
            call = getattr(torch, name)
            ok = x.abs() if name in ("sqrt", "rsqrt", "log", "log2", "log10", "log1p") else x
            ok = ok.clamp(-80, 80) if "exp" in name else ok
            found += [call(ok.clamp(-100, 100)), call(special)]
        x = x.clamp(-100, 100)
        return [*found, F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.elu(x)]

    for k in range(0, len(UNARY), 8):  # in parts: a graph each
        end = 2 * min(k + 8, len(UNARY))
        check(lambda x, s, k=k, end=end: all_of(x, s)[2 * k : end], x, special,
              rtol=1e-5, atol=1e-6)  # fmt: skip
    check(lambda x, s: all_of(x, s)[2 * len(UNARY) :], x, special, rtol=1e-5, atol=1e-6)


def test_f64_keeps_its_digits_and_leaves_the_rest_to_aten() -> None:
    x = torch.linspace(-3, 3, 40, dtype=torch.float64)
    check(lambda x: (x * 1.1 + 1 / 3, x.exp(), x.sigmoid(), (x > 0.1).double() * 0.1), x)
    check(lambda x: x.tanh() + x.expm1(), x, fallbacks=True)
    check(lambda x: (x.atan(), torch.atan2(x, x + 1), x.abs().pow(0.3)), x.float(), fallbacks=True)


def test_binary_operations() -> None:
    a, b = torch.randn(7, 9), torch.randn(9)
    nan = torch.tensor([1.0, float("nan"), 3.0] * 3)
    check(lambda a, b, n: (
        a + b, a - 2 * b, a * b, a / b, torch.maximum(a, n), torch.minimum(n, a), torch.fmax(a, n),
        torch.fmin(n, a), a > b, a <= b, a == b, torch.where(a > b, a, b),
        torch.where(a > 0, 1.0, 2.0), torch.clamp(a, -0.5, 0.5), torch.addcmul(a, a, b, value=0.5),
        torch.lerp(a, b, 0.3), torch.div(a, b, rounding_mode="trunc"),
    ), a, b, nan)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    a = torch.arange(-20, 20).to(dtype)
    b = torch.tensor([-3, 2, 5, -1, 7] * 8).to(dtype)
    check(lambda a, b: (
        a + b, a * b, a - b, -a, a // b, a % b, torch.fmod(a, b), a & b, a | b, a ^ b, ~a, a > b,
        a == 3, a.float() / 3, torch.div(a, b, rounding_mode="trunc"), a.clamp(-3, 9), a.bool(),
        a.sign(), torch.maximum(a, b), a.abs(), torch.where(a > 2, 5, b), a.relu(),
    ), a, b)  # fmt: skip


def test_bools() -> None:
    a, b = torch.rand(40) < 0.5, torch.rand(40) < 0.5
    check(lambda a, b: (
        a & b, a | b, a ^ b, ~a, a.float() + 1, a.sum(), (a * 2).sum(), a.any(), a.all(),
        torch.where(a, b, ~b), a == b, a.int() + b,
    ), a, b)  # fmt: skip


@pytest.mark.parametrize(
    "shape", [(5, 70), (9, 5000), (3, 5000), (70, 17), (2500, 3), (12000, 1), (1, 1), (4, 1)]
)
def test_reductions(shape: tuple[int, int]) -> None:
    """Persistent, looped, down columns, and cut in two."""
    x = torch.randn(shape)
    x[0, 0] = 0.0
    check(lambda x: (
        x.sum(), x.sum(0), x.sum(1), x.mean(), x.mean(0), x.amax(), x.amax(0), x.amin(1),
        x.argmax(1), x.argmin(0), (x > 2).any(1), (x > -9).all(0), x.var(1, correction=0),
        x.prod(1),        torch.logsumexp(x, 1), x.norm(dim=1),
    ), x, rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("length", [40, 5000])
def test_reductions_of_ties_and_nans(length: int) -> None:
    x = torch.randint(0, 3, (3, length)).float()
    x[1, 7] = x[1, 20] = float("nan")
    x[2] = float("-inf")
    check(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), x.sum(1), x.argmax(0)), x)
    check(
        lambda x: (x.amax(1), x.argmax(1), x.argmin(1), x.sum(1), x.amin()), x.nan_to_num(-9).long()
    )


def test_reductions_over_several_dimensions() -> None:
    x = torch.randn(3, 40, 5, 60)
    check(lambda x: (x.sum((1, 3)), x.mean((0, 2)), x.amax((2, 3)), x.sum((0, 1, 2))), x,
          rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("columns", [7, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_row_by_row_is_one_kernel(columns: int, dtype: torch.dtype) -> None:
    x, w, b = torch.randn(8, columns), torch.randn(columns), torch.randn(columns)
    x, w, b = (t.to(dtype) for t in (x, w, b))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    one = check(lambda x: F.softmax(x * 2, 1), x, **tolerance)
    assert one.count("@triton.jit") == 1
    assert columns > 4096 or one.count("tl.store") == 1  # nothing between is stored
    assert check(F.layer_norm, x, (columns,), w, b, **tolerance).count("@triton.jit") == 1
    check(lambda x: F.log_softmax(x, 1), x, **tolerance)


def test_views_pads_and_concatenations() -> None:
    x, y = torch.randn(6, 10), torch.randn(6, 4)
    check(lambda x, y: (
        x.t() + 1, torch.cat([x * 2, y], 1), F.pad(x, (2, 1), value=3.0) * 2, x[:, 2:7] * x[:, 3:8],
        x.flip(1), x.repeat(2, 3), x.view(3, 20).sum(1), x[:, ::3] + 1, torch.stack([x, x + 1], 2),
        x.diagonal() * 2, x.expand(2, 6, 10) + 1, torch.tril(x),
        x.roll(1, 0),
    ), x, y)  # fmt: skip
    check(lambda x: x.slice_scatter(x[:, :3] * 2, 1, 2, 5), x)
    check(
        lambda x: (torch.arange(x.shape[0]) * 2, torch.full((3,), 2.5), torch.eye(4) + x[:4, :4]), x
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_lookups(dtype: torch.dtype) -> None:
    table, ids = torch.randn(11, 6), torch.randint(0, 11, (4, 5)).to(dtype)
    check(lambda t, i: (F.embedding(i, t), t.index_select(0, i[0])), table, ids)
    check(
        lambda t, i: (t[i] * 2, t[:, i[0] % 6], t[i - 11], t.gather(0, i[:, :4].long() % 4)),
        table,
        ids,
    )
    check(lambda t, i: F.embedding(i, t).sum(1) + 1, table, ids)


@pytest.mark.parametrize("bad", [11, -1])
def test_a_bad_index_is_an_error(bad: int) -> None:
    run = torch.compile(
        lambda t, i: t.index_select(0, i) + 1, backend="dlrm", options={"target": "triton"}
    )
    table = torch.randn(11, 6)
    good = torch.tensor([0, 10])
    torch.testing.assert_close(run(table, good), table[good] + 1)
    with pytest.raises(IndexError, match="an index is outside its dimension"):
        run(table, torch.tensor([0, bad]))
    torch.testing.assert_close(run(table, good), table[good] + 1)


def test_an_input_changed_in_place() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        y.mul_(x)
        return x.sum(1)

    x, y = torch.randn(6, 4), torch.randn(6, 4)
    own = [x.clone(), y.clone()]
    found = torch.compile(function, backend="dlrm", options={"target": "triton"})(x, y)
    torch.testing.assert_close(found, function(*own))
    torch.testing.assert_close([x, y], own)


def test_nothing_at_all() -> None:
    x = torch.randn(0, 5)
    check(lambda x: (x + 1, x.sum(), x.sum(0), x.sum(1), F.softmax(x, 1)), x, fallbacks=True)


def test_products_are_pytorchs_in_planned_memory() -> None:
    a, b, c = torch.randn(9, 5), torch.randn(5, 7), torch.randn(7)
    check(
        lambda a, b, c: ((a @ b).relu().sum(1), torch.addmm(c, a, b), (a.t() @ a)[:2] + 1), a, b, c
    )
    check(lambda x: (x @ x.transpose(1, 2)).softmax(2), torch.randn(3, 4, 6))


def test_sizes_that_change() -> None:
    def function(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return F.softmax(x, 1)[i].sum(0), x.sum(), x.t() + 1, x.mean(0), x.shape[0] * x

    run = torch.compile(function, backend="dlrm", dynamic=True, options={"target": "triton"})
    for rows in (5, 60, 300):
        x, i = torch.randn(rows, 9), torch.randint(0, rows, (rows + 1,))
        torch.testing.assert_close(run(x, i), function(x, i), rtol=1e-4, atol=1e-4)
