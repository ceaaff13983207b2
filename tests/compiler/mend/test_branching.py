"""The helpers that mended code calls, in eager mode and in a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.mend import runtime as _mend
from tests.compiler.mend.branch_cases import assert_same, breaks, outcome


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


POSITIVE, NEGATIVE = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])


def agrees(function: Callable[..., Any], whole: bool, backend: str = "eager") -> None:
    """The function, captured (in one graph if ``whole``), does what it does in eager mode."""
    compiled = torch.compile(function, backend=backend, fullgraph=whole)
    for x in (POSITIVE, NEGATIVE, POSITIVE * 0):
        assert_same(outcome(compiled, (x,), True), outcome(function, (x,), True))
    if not whole:
        assert breaks(function, (POSITIVE,))


@pytest.mark.parametrize("helper", [_mend.both, _mend.cond])
@pytest.mark.parametrize(
    ("then", "other", "whole"),
    [
        (lambda x: x * 2, lambda x: x + 1, True),
        (lambda x: (x, {"a": x * 2}), lambda x: (x * 3, {"a": x}), True),
        (lambda x: (x, x.argmax(), x > 0), lambda x: (x + 1, x.argmin(), x < 0), True),
        (lambda x: (x, 2), lambda x: (x + 1, 2), True),
        (lambda x: x[:1], lambda x: x * 2, False),  # of different shapes
        (lambda x: x.double(), lambda x: x, False),  # of different types
        (lambda x: (x, 2), lambda x: (x + 1, 3), False),  # of different numbers
        (lambda x: None, lambda x: x, False),
        (lambda x: x.tolist(), lambda x: [0.0, 0.0], False),  # breaks the graph itself
    ],
)
def test_what_cannot_be_captured_runs_as_in_python(
    helper: Any, then: Any, other: Any, whole: bool
) -> None:
    if helper is _mend.cond and not isinstance(then(POSITIVE), Tensor | dict):
        whole = whole and all(isinstance(t, Tensor | dict) for t in then(POSITIVE))
    agrees(lambda x: helper(x.sum() > 0, then, other, x), whole)


@pytest.mark.parametrize("helper", [_mend.both, _mend.cond])
def test_a_side_that_cannot_be_traced_runs_if_taken_only(helper: Any) -> None:
    agrees(lambda x: helper(x.sum() > 9, lambda x: x.view(5), lambda x: x * 2, x), False)


@pytest.mark.parametrize("helper", [_mend.both, _mend.cond, _mend.loop])
def test_a_trial_leaves_nothing_behind(helper: Any) -> None:
    def function(x: Tensor) -> Any:
        if helper is _mend.loop:
            return helper(lambda y: y.sum() > 1, lambda y: (y[:1] * 0.1,), x)
        return helper(x.sum() > 0, lambda x: x.sin()[:1], lambda x: x.cos(), x)

    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(function, backend=backend)(NEGATIVE)
    first = str(graphs[0].graph)
    assert "sin" not in first and "while_loop" not in first


def test_a_gate_lets_no_nan_through() -> None:
    x = torch.zeros(2, requires_grad=True)
    taken = torch.tensor(False)
    (g,) = torch.autograd.grad(torch.where(taken, _mend.gate(taken, x).sqrt(), x).sum(), x)
    assert g.tolist() == [1.0, 1.0]
    assert torch.where(taken, x.sqrt(), x).sum().backward() is None
    assert x.grad is not None and x.grad.isnan().all()  # as it is without the gate


@pytest.mark.parametrize("values", [[], [1.0, 0.0]])
def test_truth_raises_what_bool_raises(values: list[float]) -> None:
    c = torch.tensor(values)
    with pytest.raises(RuntimeError) as expected:
        bool(c)
    with pytest.raises(RuntimeError, match=str(expected.value)[:40]):
        _mend.truth(c)
    with pytest.raises(RuntimeError, match=str(expected.value)[:40]):
        torch.compile(lambda c: _mend.both(c, lambda: c, lambda: c), backend="eager")(c)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0, float("nan"), float("inf")])
def test_truth_is_that_of_python(value: float) -> None:
    assert bool(_mend.truth(torch.tensor([[value]]))) is bool(torch.tensor(value))
    assert _mend.truth(value) is value or value != value


@pytest.mark.parametrize("a", [True, False])
@pytest.mark.parametrize("b", [True, False])
@pytest.mark.parametrize("kinds", ["tt", "tp", "pt"])
@pytest.mark.parametrize("guarded", [False, True])
def test_every_and_some(a: bool, b: bool, kinds: str, guarded: bool) -> None:
    def value(v: bool, kind: str) -> Any:
        return torch.tensor(v) if kind == "t" else v

    def function(x: Tensor) -> Tensor:
        first = (x.sum() > 0) == a if kinds[0] == "t" else a
        later = lambda: (x.sum() > 0) == b if kinds[1] == "t" else b  # noqa: E731
        both = _mend.every(first, later, guarded=guarded)
        either = _mend.some(first, later, guarded=guarded)
        return x + _mend.both(both, lambda: x, lambda: x * 2) * _mend.both(
            either, lambda: x * 3, lambda: x * 4
        )

    assert bool(_mend.every(value(a, kinds[0]), lambda: value(b, kinds[1]))) is (a and b)
    assert bool(_mend.some(value(a, kinds[0]), lambda: value(b, kinds[1]))) is (a or b)
    agrees(function, True)


def test_later_terms_do_not_run_where_python_would_not() -> None:
    def function(x: Tensor) -> Tensor:
        index = (x > 0).sum() * 9  # far beyond the end, where x is positive
        inside = _mend.every(index < 2, lambda: x[index.reshape(1)].sum() < 0, guarded=True)
        return _mend.both(inside, lambda x: x, lambda x: x * 2, x)

    agrees(function, True)


@pytest.mark.parametrize("t", [torch.tensor(0.1), torch.tensor([7]), torch.tensor(True)])
def test_numbers_keep_their_value(t: Tensor) -> None:
    for helper, python in (
        (_mend.item, Tensor.item),
        (_mend.as_float, float),
        (_mend.as_int, int),
    ):
        assert helper(t).item() == python(t)
    assert _mend.as_float("1.5") == 1.5 and _mend.as_int("3") == 3


@pytest.mark.parametrize("helper", [_mend.item, _mend.as_int, _mend.as_float, _mend.as_index])
def test_numbers_raise_what_python_raises(helper: Any) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        helper(torch.zeros(2))


def test_range_takes_whole_numbers_only() -> None:
    with pytest.raises(TypeError):
        _mend.as_index(torch.tensor(2.5))
    assert _mend.as_index(3) == 3 and int(_mend.as_index(torch.tensor(3))) == 3


@pytest.mark.parametrize("start", [0.5, 8.0])
def test_a_loop_without_a_round_hands_gradients_on(start: float) -> None:
    """PyTorch's own while_loop differentiates as if there had been one."""

    def function(x: Tensor) -> Any:
        return _mend.loop(lambda y: y.norm() > 1, lambda y: (y * 0.5 * y.cos(),), x)

    x = torch.full((2,), start)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(outcome(compiled, (x,), True), outcome(function, (x,), True))


def test_whole_numbers_survive_torch_cond() -> None:
    big = torch.tensor([2**62 + 1, -1, -(2**63)])

    def function(x: Tensor) -> Any:
        then = lambda x: (x * 2, big + x.long()[0], big.to(torch.int32), x > 0)  # noqa: E731
        other = lambda x: (x * 3, big - x.long()[0], big.to(torch.int32) * 2, x < 0)  # noqa: E731
        return _mend.cond(x.sum() > 0, then, other, x)

    agrees(function, True)


@pytest.mark.parametrize("taken", [True, False])
def test_a_side_keeps_its_gradient_where_gradients_are_off(taken: bool) -> None:
    def selects(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = _mend.select(x.sum() > 0, x * 2, x)
            z = _mend.both(x.sum() > 0, lambda x: x * 3, lambda x: x, x)
        return y + z

    x = torch.ones(2, requires_grad=True) if taken else torch.full((2,), -1.0, requires_grad=True)
    y = torch.compile(selects, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(y, 5 * x.detach() if taken else 2 * x.detach(), check_stride=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == ([0.0, 0.0] if taken else [2.0, 2.0])
