"""Operators that take functions: torch.cond, while_loop, and custom autograd functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from compiler.backend import dlrm
from compiler.capture import capture, explain
from tests.compiler.capture.capturing import Counting, alike, same


def _x(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0)).requires_grad_()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.a(v).relu(), lambda v: self.b(v) * 2, (x,))


def _closures(x: Tensor) -> Tensor:
    y = x * 2
    return torch.cond(x.sum() > 0, lambda: y.sin() + x, lambda: y.cos(), ()) + y


def _tree(x: Tensor) -> Any:
    return torch.cond(
        x.sum() > 0,
        lambda v: {"a": (v + 1,), "b": [v * 2]},
        lambda v: {"a": (v - 1,), "b": [v * 3]},
        (x,),
    )


def _nested(x: Tensor) -> Tensor:
    def inner(v: Tensor) -> Tensor:
        return torch.cond(v.max() > 2, lambda: v + x, lambda: v - x, ())

    return torch.cond(x.sum() > 0, inner, lambda v: v * 5, (x * 1,))


def _comprehension(x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0, lambda v: sum([v * k for k in range(3)]), lambda v: v.clone(), (x,)
    )


@pytest.mark.parametrize("function", [_closures, _tree, _nested, _comprehension])
@pytest.mark.parametrize("values", [(1.0, 2.0), (-1.0, -2.0), (1.0, 4.0)])
def test_cond_is_part_of_the_graph(function: Any, values: tuple[float, ...]) -> None:
    same(function, _x(*values), graphs=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_cond_reads_parameters_and_has_their_gradients(sign: int) -> None:
    torch.manual_seed(0)
    module = Gated()
    x = sign * torch.ones(3, 2)
    for backend in (Counting(), dlrm):
        captured = capture(module, backend, fullgraph=True)
        found = []
        for run in (captured, module):
            module.zero_grad()
            run(x).sum().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


def test_one_graph_serves_both_sides() -> None:
    backend = Counting()
    captured = capture(_closures, backend)
    for values in ((1.0, 2.0), (-1.0, -2.0)):
        alike(captured(_x(*values)).detach(), _closures(_x(*values)).detach())
    assert len(backend.graphs) == 1


class Counted:
    def __init__(self) -> None:
        self.calls = 0


def _changes_an_object(x: Tensor, counted: Counted) -> Tensor:
    def then(v: Tensor) -> Tensor:
        counted.calls += 1
        return v + 1

    return torch.cond(x.sum() > 0, then, lambda v: v - 1, (x,))


def _changes_a_list(x: Tensor, found: list[int]) -> Tensor:
    rows = iter([1, 2])

    def then(v: Tensor) -> Tensor:
        found.append(next(rows))
        return v + 1

    return torch.cond(x.sum() > 0, then, lambda v: v - 1, (x,))


def _changes_a_tensor(x: Tensor) -> Tensor:
    y = x * 1

    def then(v: Tensor) -> Tensor:
        y.add_(1)
        return v + y

    return torch.cond(x.sum() > 0, then, lambda v: v - 1, (x,))


def _hands_on(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: v.view(-1), lambda v: v - 1, (x,))


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (_changes_an_object, (Counted(),), "a change within an operator"),
        (_changes_a_list, ([],), "an iterator from outside"),
        (_changes_a_tensor, (), "changes"),
        (_hands_on, (), "hands on what it was given"),
    ],
)
def test_functions_with_effects_are_left_to_python(
    function: Any, arguments: tuple[Any, ...], reason: str
) -> None:
    captured = capture(function, Counting())
    with pytest.raises(Exception):  # noqa: B017  # as torch.cond itself has it
        function(_x(), *arguments)
    with pytest.raises(Exception):  # noqa: B017
        captured(_x(), *arguments)
    found = explain(captured)
    assert reason in f"{found.breaks} {found.fallbacks}"


def _doubles(x: Tensor) -> Tensor:
    scale = x.detach().abs().max() + 1

    def test(v: Tensor, n: Tensor) -> Tensor:
        return v.sum() < 100

    def body(v: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return v * scale, n + 1

    v, n = while_loop(test, body, (x * 1, torch.zeros((), dtype=torch.long)))
    return v + n


def test_while_loop_is_part_of_the_graph() -> None:
    captured = capture(_doubles, Counting(), fullgraph=True)
    for values in ((1.0, 2.0), (200.0, 1.0)):
        with torch.no_grad():
            alike(captured(_x(*values)), _doubles(_x(*values)))


SCALE = 3.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        ctx.power = power
        ctx.save_for_backward(x)
        return x**power * SCALE, x.sum()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.power * x ** (ctx.power - 1) * first * 7 + second, None  # not the true gradient


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2


class Branching(torch.autograd.Function):
    """Whose backward decides by a tensor, as no graph could."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.sum() > 0 else gradient * 2


def _scaled(x: Tensor) -> Tensor:
    a, b = Scaled.apply(x * 1, 3)
    return a + b


@pytest.mark.parametrize("function", [_scaled, lambda x: SetUp.apply(x) + 1])
def test_custom_functions_keep_their_own_gradient(function: Any) -> None:
    same(function, _x(), graphs=1)
    captured = capture(function, dlrm, fullgraph=True)
    grads = []
    for run in (captured, function):
        x = _x(0.5, 1.5)
        run(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_what_a_custom_function_reads_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(_scaled, dlrm)
    alike(captured(_x()).detach(), _scaled(_x()).detach())
    monkeypatch.setattr(f"{__name__}.SCALE", 5.0)
    alike(captured(_x()).detach(), _scaled(_x()).detach())


def test_a_backward_that_branches_is_left_to_python() -> None:
    found = same(lambda x: Branching.apply(x * 1) + 1, _x(), whole=False)
    assert "a branch on a tensor" in f"{found.breaks} {found.fallbacks}"
