"""Tensors: operations, views, in-place changes, aliases, random numbers, modes, errors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.capture.anywhere import variants
from tests.compiler.capture.capturing import same

X, Y = torch.randn(4, 3), torch.randn(4, 3)
GRAD = torch.randn(4, 3, requires_grad=True)
CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
SCALE = torch.tensor(2.0)
TABLE = {"scale": SCALE, "shift": 1}


def case(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((function, args))
        return function

    return add


class Out(NamedTuple):
    logit: Tensor
    width: int


@dataclasses.dataclass
class Batch:
    dense: Tensor
    ids: list[Tensor]
    name: str = "b"

    @property
    def size(self) -> int:
        return self.dense.shape[0]

    def moved(self, by: float) -> Batch:
        return Batch(self.dense + by, self.ids, name=self.name + "!")


@case(X, Y)
def arithmetic(x: Any, y: Any) -> Any:
    return x + y * 2 - 1 / (x.abs() + 1), x @ y.T, -x, x**2, 3 - x, 2.0 * y, x // 2, x % 3, abs(x)


@case(X, Y)
def comparisons(x: Any, y: Any) -> Any:
    return x < y, x >= 0, x == y, x != 1, (x > 0) & (y > 0), ~(x > 0), (x > 0) | (y > 0)


@case(X)
def methods(x: Any) -> Any:
    return x.sum(), x.mean(dim=1, keepdim=True), x.view(3, 4), x.t(), x.reshape(-1), x.max(dim=0)


@case(X)
def return_types(x: Any) -> Any:
    best = x.max(dim=1)
    values, indices = torch.sort(x, dim=0)
    return best.values, best.indices, values[0], indices, torch.topk(x, 2)[0]


@case(X)
def attributes(x: Any) -> Any:
    return x.shape, x.shape[0] * x.shape[1], x.dtype, x.device, x.ndim, x.T, x.mT, x.requires_grad


@case(X)
def sizes(x: Any) -> Any:
    rows, columns = x.size()
    return (
        x.size(0),
        x.numel(),
        len(x),
        x.dim(),
        x.new_zeros(rows, columns),
        x.shape[:-1],
        x.stride(),
    )


@case(X, torch.tensor([2, 0]))
def indexing(x: Any, i: Any) -> Any:
    return x[0], x[:, 1], x[1:3, ::2], x[None], x[..., 0], x[i], x[:, i], x[-1, -1], x[[0, 2]]


@case(X)
def set_items(x: Any) -> Any:
    y = x.clone()
    y[0] = 1.0
    y[1:, 0] += 5
    y[y > 1] = 0
    return y


@case(X)
def input_changed(x: Any) -> Any:
    x.add_(1)
    x[0] = 3
    x *= 2
    return x.sum()


@case(X, Y)
def inputs_swapped(x: Any, y: Any) -> Any:
    z = x.clone()
    x.copy_(y)
    y.copy_(z)


@case(X)
def inplace_returns_itself(x: Any) -> Any:
    y = x.add_(1)
    return y is x, y


@case(X)
def views_see_changes(x: Any) -> Any:
    y = x * 1
    v = y[0]
    v.mul_(2)
    y.t_()
    return y, v


@case(GRAD, Y)
def gradients(x: Any, y: Any) -> Any:
    return (x * y).relu().sum(), x.detach() * 2, x.sigmoid()


@case(torch.randn(3, requires_grad=True) * 2)
def no_leaf(x: Any) -> Any:
    return (x * 3).sum()


@case(X)
def same_output_twice(x: Any) -> Any:
    y = x + 1
    return y, y, [y], x, {"x": x}


@case(X)
def factories(x: Any) -> Any:
    n = x.shape[0]
    return (
        torch.zeros(n, 2),
        torch.ones_like(x),
        torch.arange(n),
        torch.full((2, n), 1.5),
        torch.eye(n),
        torch.tensor([1.0, 2.0]),
        torch.tensor(3),
        torch.empty(0),
        torch.tril_indices(n, n),
        torch.linspace(0, 1, 3),
        x.new_ones(2),
        torch.zeros(n, dtype=torch.float64),
    )


@case(X)
def random(x: Any) -> Any:
    a = F.dropout(x, 0.5)
    b = torch.rand(3)
    torch.randn(2)
    return a, b, F.dropout(x, 0.3, training=False) is x, torch.rand_like(x)


@case(X)
def functional(x: Any) -> Any:
    w = torch.ones(5, 3)
    h = F.relu(F.linear(x, w, torch.zeros(5)))
    return (
        F.softmax(h, dim=-1),
        F.gelu(h),
        F.layer_norm(x, (3,)),
        F.mse_loss(x, x + 1),
        F.pad(x, (1, 1)),
        F.cross_entropy(h, torch.tensor([0, 1, 2, 3])),
        F.normalize(x),
        F.one_hot(torch.arange(3), 4),
        F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
        F.embedding_bag(torch.tensor([0, 1, 2]), w, torch.tensor([0, 2])),
        F.silu(x, inplace=False),
    )


@case(X, Y)
def torch_functions(x: Any, y: Any) -> Any:
    return (
        torch.cat([x, y]),
        torch.stack((x, y), 1),
        torch.where(x > 0, x, y),
        torch.einsum("ij,kj->ik", x, y),
        torch.split(x, 2),
        torch.chunk(x, 2, dim=1)[0],
        torch.maximum(x, y),
        torch.matmul(x, y.mT),
        torch.allclose is None,
        torch.is_tensor(x),
        torch.sum(x, dim=(0, 1)),
        torch.bmm(x[None], y.T[None]),
        torch.linalg.norm(x),
        torch.special.expit(x),
        torch.fft.fft(x).real,
        torch.clamp(x, min=0),
        torch.addmm(torch.zeros(4), x, y.T),
        torch.unbind(x)[1],
        torch.numel(x),
    )


@case(X)
def operators_as_functions(x: Any) -> Any:
    return (
        sum([x, x, x]),
        functools.reduce(torch.add, [x, x]),
        list(map(torch.relu, [x, -x])),
        max(2, 3) * x,
    )


@case([X, Y], {"k": X})
def containers(items: Any, named: Any) -> Any:
    out = {k: v + 1 for k, v in named.items()}
    out["all"] = [i * 2 for i in items]
    first, *rest = items
    items.append(first + rest[0])
    named["new"] = items[-1]
    return out, isinstance(first, torch.Tensor), len(items), first is items[0], (*rest, first)


@case(X)
def unpacking(x: Any) -> Any:
    a, _, _, d = x
    rows = [row.sum() for row in x]
    return a + d, rows, list(x.unbind(1)), list(zip(x, rows, strict=True))


@case(Batch(X, [Y, Y + 1]))
def dataclass_batch(b: Any) -> Any:
    c = b.moved(1.0)
    return c.dense.sum() / b.size, c.name, c, sum(c.ids), Out(c.dense[:, 0], width=b.size)


@case(X)
def globals_and_closures(x: Any) -> Any:
    def scaled(t: Any, by: Any = SCALE) -> Any:
        return t * by + TABLE["shift"] + n

    n = x.shape[1]
    return scaled(x), scaled(x, by=TABLE["scale"]), functools.partial(scaled, by=3)(x)


@case(X)
def global_tensor(x: Any) -> Any:
    return x * SCALE


@case(X)
def grad_modes(x: Any) -> Any:
    w = torch.ones(3, 3).requires_grad_(False) if False else torch.ones(3, 3)
    with torch.no_grad():
        a = x @ w
    with torch.enable_grad():
        b = x * 2
    with torch.inference_mode(False):
        c = x * 3
    return a, b, c, torch.is_grad_enabled()


@case(GRAD)
def no_grad_inside(x: Any) -> Any:
    with torch.no_grad():
        scale = x.abs().max()
        inside = torch.is_grad_enabled()
    return (x / scale).sum(), scale.requires_grad, inside


@torch.no_grad()
def _frozen(x: Any) -> Any:
    return x * 2


@case(GRAD)
def no_grad_decorator(x: Any) -> Any:
    return _frozen(x) + x


@case(GRAD)
def set_grad(x: Any) -> Any:
    with torch.set_grad_enabled(False):
        y = x * 2
    with torch.set_grad_enabled(x.shape[0] > 2):
        z = x * 3
    return y, z


@case(X)
def autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        with torch.autocast("cpu", enabled=False):
            z = x @ x.T
    return y, z, x @ x.T


@case(X)
def types(x: Any) -> Any:
    return (
        x.to(torch.float64),
        x.double(),
        x.half().dtype,
        x.to("cpu"),
        x.long(),
        x.type_as(x.int()),
        x.bool().any(),
    )


@case(X)
def shape_logic(x: Any) -> Any:
    if x.dim() == 2 and x.shape[-1] > 2:
        x = x.reshape(x.size(0), -1, 1)
    assert x.shape == (4, 3, 1), f"bad shape {tuple(x.shape)}"
    return x.squeeze(-1) * math.sqrt(x.shape[1]), f"{x.shape[0]} rows", x.shape[0] in (4, 5)


@case(torch.float16, X)
def dtype_argument(dtype: Any, x: Any) -> Any:
    return x.to(dtype), dtype == torch.float16, dtype is torch.float32, torch.finfo(dtype).max


@case(X, None)
def optional(x: Any, bias: Any = None) -> Any:
    return x if bias is None else x + bias


@case(torch.randn(3, 4).t())
def strides(x: Any) -> Any:
    return x.is_contiguous(), x.contiguous(), x + 1, x.view(torch.int32) if False else x.stride()


@pytest.mark.parametrize(("function", "args"), [pytest.param(*c, id=c[0].__name__) for c in CASES])
def test_whole(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Captured into at most one graph, and nothing is different."""
    found = same(function, *args, graphs=None)
    assert len(found.graphs) <= 1


@pytest.mark.parametrize(("function", "args"), [pytest.param(*c, id=c[0].__name__) for c in CASES])
def test_broken_anywhere(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The same with a break behind any statement."""
    for variant in variants(function, globals()):
        same(variant, *args, whole=False, calls=1)


def test_same_tensor_twice() -> None:
    """One input of the graph; two different tensors are another case."""
    found = same(lambda x, y: (x + y, x is y), X, X)
    assert found.graphs[0].count("x: ") == 1


def test_changed_inputs_that_share_memory() -> None:
    def add(x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2

    found = same(add, X, X, whole=False)
    x = torch.zeros(4)
    found = same(lambda t: add(t[0], t[1]), (x[:2], x[1:3]), whole=False)
    assert any("shares memory" in why for why in found.fallbacks)


def test_errors_are_the_users_own() -> None:
    """What a wrong operation raises is what it raises in Python."""
    same(lambda x: x @ x, X, whole=False)
    same(lambda x: x.view(5, 5), X, whole=False)
    same(lambda x: x.nothing, X, whole=False)
    same(lambda x: torch.relu(x, x, x), X, whole=False)
    same(lambda x: x.add_(1), torch.ones(2, requires_grad=True), whole=False)
    same(lambda x: x[7], X, whole=False)


def test_inference_mode() -> None:
    @torch.inference_mode()
    def run(x: Tensor) -> Tensor:
        return x * 2

    def block(x: Tensor) -> Any:
        with torch.inference_mode():
            y = x * 2
        return y.is_inference(), y

    assert run(X).is_inference()
    same(block, X, whole=False)
    same(run, X, whole=False)


def test_module_global_changes() -> None:
    """A tensor of the module's globals is an input: its new value shows."""
    from compiler.capture import capture

    captured = capture(global_tensor, backend=lambda gm, inputs: gm)
    assert torch.equal(captured(X), X * 2)
    SCALE.fill_(5)
    try:
        assert torch.equal(captured(X), X * 5)
    finally:
        SCALE.fill_(2)


def test_captured_in_captured() -> None:
    from compiler.capture import capture, explain

    inner = capture(lambda x: x * 2, backend=lambda gm, inputs: gm)
    outer = capture(lambda x: inner(x) + 1, backend=lambda gm, inputs: gm)
    again = capture(inner, backend=lambda gm, inputs: gm)
    net = capture(capture(Net(), lambda gm, inputs: gm), lambda gm, inputs: gm)
    assert torch.equal(outer(X), X * 2 + 1) and torch.equal(again(X), X * 2)
    assert explain(outer).whole and explain(outer).operations == 2
    torch.testing.assert_close(net(X), net._orig_mod(X))
    assert explain(net).whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_wants_a_function() -> None:
    from compiler.capture import capture

    with pytest.raises(TypeError, match="want something to call"):
        capture(3)  # type: ignore[arg-type]


def test_other_callables() -> None:
    """Built-in functions, partials and objects with ``__call__``."""
    from compiler.capture import capture

    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.n

    for function in (
        torch.relu,
        functools.partial(torch.mul, other=2),
        Adder(3),
        Adder(3).__call__,
    ):
        captured = capture(function, backend=lambda gm, inputs: gm)
        assert torch.equal(captured(X), function(X))
