"""Shared by the tests of capture: a function captured and in Python, compared in all they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from compiler.capture import Explanation, capture, explain


class Counting:
    """A backend that runs the graph as it is, and counts graphs and runs."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.runs = 0

    def __call__(self, gm: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)

        def run(*args: Any) -> Any:
            self.runs += 1
            return gm(*args)

        return run


def clone(value: Any) -> Any:
    """A deep copy, also of tensors that are not leaves; aliases and views stay such."""
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_() * 1.0
    return copy.deepcopy(value, memo)


def alike(got: Any, want: Any, where: str = "result") -> None:
    """Equal in value, type, and order; tensors in dtype, shape, stride and requires_grad too."""
    assert type(got) is type(want), f"{where}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        for name in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
            a, b = getattr(got, name), getattr(want, name)
            assert a == b, f"{where}.{name}: {a} is not {b}"
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert got.stride() == want.stride(), f"{where}: strides"
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: keys"
        for key in want:
            alike(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{where}: length"
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            alike(a, b, f"{where}[{k}]")
    elif isinstance(want, torch.nn.Module):
        alike(dict(got.state_dict()), dict(want.state_dict()), f"{where}.state_dict()")
    elif hasattr(want, "__dict__") and not isinstance(want, type) and not callable(want):
        alike(vars(got), vars(want), where)
    else:
        assert got == want or got is want or (got != got and want != want), (
            f"{where}: {got!r} is not {want!r}"
        )


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a call gives or raises, and the gradients of its arguments."""
    torch.manual_seed(3)
    try:
        result = function(*args)
    except Exception as error:
        return (type(error).__name__, str(error).split("\n")[0])
    random = torch.rand(2)  # as many random numbers were drawn
    total = [
        t.double().sum() for t in tree_leaves(result)
        if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None
    ]  # fmt: skip
    grads = []
    if total:
        torch.stack(total).sum().backward()
        grads = [t.grad for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_leaf]
    return result, random, grads


def same(
    function: Callable[..., Any], *args: Any, whole: bool = True, graphs: int | None = None,
    calls: int = 2, **options: Any,
) -> Explanation:  # fmt: skip
    """Captured and in Python: the same results, exceptions, changed arguments and gradients."""
    backend = Counting()
    captured = capture(function, backend, **options)
    for _ in range(calls):
        ours, theirs = clone(args), clone(args)
        want, got = outcome(function, theirs), outcome(captured, ours)
        alike(got, want)
        alike(ours, theirs, "arguments")
    found = explain(captured)
    assert not [w for w in found.fallbacks if w.startswith("internal")], found.fallbacks
    if whole:
        assert found.whole, f"{found.breaks} {found.fallbacks}"
        assert graphs is not None or len(found.graphs) <= 1
    if graphs is not None:
        assert len(found.graphs) == graphs, str(found)
    return found
