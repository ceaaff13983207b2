"""Breaks that lie deeper: in called functions, in submodules, in methods, under both."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn, randn, tensor

from compiler.survey.case import Case, of

logger = logging.getLogger(__name__)


def _clamped(x: Tensor) -> Tensor:
    if x.abs().max() > 2:
        x = x / x.abs().max()
    return x


def _checked(x: Tensor) -> None:
    if torch.isinf(x).any():
        raise FloatingPointError(f"{int(torch.isinf(x).sum())} values are infinite")


def _report(name: str, x: Tensor) -> None:
    print(name, "has", x.numel(), "values")


def calls_one(x: Tensor) -> Tensor:
    return _clamped(x) + 1


def calls_twice(x: Tensor) -> Tensor:
    return _clamped(_clamped(x) * 3)


def calls_a_check(x: Tensor) -> Tensor:
    _checked(x)
    y = x * 2
    _checked(y)
    return y


def calls_a_report(x: Tensor) -> Tensor:
    _report("before", x)
    y = torch.cat([x, x])
    _report("after", y)
    return y.cumsum(0)


def calls_in_a_branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return _clamped(x)
    return _clamped(-x)


def inner_function(x: Tensor) -> Tensor:
    def halve(y: Tensor) -> Tensor:
        if y.mean() > 1:
            y = y / 2
        return y

    return halve(halve(x))


def passes_a_function(x: Tensor, act: object = torch.relu) -> Tensor:
    if x.min() < -1:
        x = act(x)  # type: ignore[operator]
    return x * 2


def in_a_comprehension(xs: list[Tensor]) -> list[Tensor]:
    return [_clamped(x) for x in xs]


def in_a_python_loop(xs: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(3)
    for name, x in xs.items():
        if x.sum() < 0:
            logger.warning("%s is negative", name)
        total = total + x
    return total


class Block(nn.Module):
    """A layer whose output is clamped where it holds an infinity, as in half precision."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if torch.isinf(x).any() or torch.isnan(x).any():
            x = torch.clamp(x, -1e4, 1e4)
        return x


class Stack(nn.Module):
    """The same break in each layer of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Chain(nn.Module):
    """The same in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), nn.ReLU(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Shared(nn.Module):
    """One submodule called at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x) * 2)


class Methods(nn.Module):
    """Methods, a property and a static method, each with a break."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    @property
    def safe_scale(self) -> Tensor:
        if self.scale.max() > 10:
            return self.scale.clamp(max=10)
        return self.scale

    @staticmethod
    def check(x: Tensor) -> None:
        assert not torch.isnan(x).any(), "NaN at the door"

    def shrink(self, x: Tensor) -> Tensor:
        if x.norm() > 3:
            return x / 3
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.shrink(x) * self.safe_scale


class Parent(nn.Module):
    """A method that a subclass overrides, and calls through super()."""

    def act(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) + 1


class Child(Parent):
    """Adds a branch of its own before its parent's."""

    def act(self, x: Tensor) -> Tensor:
        if x.max() > 1:
            x = x - 1
        return super().act(x)


class Hooked(nn.Module):
    """A forward hook that looks at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_hook(_hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def _hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    if out.max() > 5:
        out = out.clamp(max=5)
    return out


def _small() -> tuple[Tensor]:
    return (tensor([0.5, -0.5, 0.25], requires_grad=True),)


def _large() -> tuple[Tensor]:
    return (tensor([4.0, -5.0, 8.0], requires_grad=True),)


def _infinite() -> tuple[Tensor]:
    return (tensor([4.0, float("inf"), 8.0], requires_grad=True),)


def _rows() -> tuple[Tensor]:
    return (randn(2, 3, requires_grad=True),)


CASES: tuple[Case, ...] = tuple(
    of(target, *inputs, family=family, expect=expect)
    for target, family, expect, inputs in (
        (calls_one, "where", "mended", (_small, _large)),
        (calls_twice, "where", "mended", (_small, _large)),
        (calls_a_check, "trap", "mended", (_small, _infinite)),
        (calls_a_report, "defer", "mended", (_small, _large)),
        (calls_in_a_branch, "where", "mended", (_small, _large, lambda: (-_large()[0].detach(),))),
        (inner_function, "where", "declined", (_small, _large)),
        (passes_a_function, "where", "declined", (_small, _large)),
        (in_a_comprehension, "where", "mended", (
            lambda: ([_small()[0], _large()[0]],), lambda: ([_large()[0], _small()[0]],))),
        (in_a_python_loop, "mixed", "mended", (
            lambda: ({"a": _small()[0], "b": -_large()[0].detach()},),)),
        (Block, "where", "mended", (_rows, lambda: (torch.full((2, 3), float("inf")),))),
        (Stack, "where", "mended", (_rows, lambda: (torch.full((2, 3), float("inf")),))),
        (Chain, "where", "mended", (_rows, lambda: (torch.full((2, 3), float("inf")),))),
        (Shared, "where", "mended", (_rows, lambda: (torch.full((2, 3), float("inf")),))),
        (Methods, "mixed", "mended", (
            _small, _large, lambda: (tensor([float("nan"), 0, 0]),))),
        (Child, "where", "mended", (_small, _large)),
        (Hooked, "where", "declined", (_rows, lambda: (torch.full((2, 3), 50.0),))),
    )
)  # fmt: skip
