"""Loops whose length depends on data, with and without a bound, and loops that Python unrolls."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, randn, tensor

from compiler.survey.case import Case, of

logger = logging.getLogger(__name__)


def halve_until_small(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def halve_and_count(x: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.zeros((), dtype=torch.long)
    while x.norm() > 1:
        x = x / 2
        steps = steps + 1
    return x, steps


def halve_at_most_eight_times(x: Tensor) -> Tensor:
    for _ in range(8):
        if x.norm() <= 1:
            break
        x = x / 2
    return x


def newton(a: Tensor) -> Tensor:
    x = torch.ones_like(a)
    for _ in range(20):
        following = (x + a / x) / 2
        if (following - x).abs().max() < 1e-5:
            break
        x = following
    return x


def power_iteration(m: Tensor) -> Tensor:
    v = torch.ones(3) / 3**0.5
    for _ in range(10):
        w = m @ v
        norm = w.norm()
        if norm == 0:
            break
        v = w / norm
    return v


def skips_rows(xs: list[Tensor]) -> Tensor:
    total = torch.zeros(2)
    for x in xs:
        if x.sum() < 0:
            continue
        total = total + x
    return total


def first_positive(xs: list[Tensor]) -> Tensor:
    for x in xs:
        if x.sum() > 0:
            return x * 2
    return torch.zeros(2)


def counted_by_a_tensor(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(n.item()):  # type: ignore[arg-type]
        x = x * 2
    return x


def counted_in_python(x: Tensor, n: int) -> Tensor:
    for k in range(n):
        x = x * 2 + k
    return x


def over_the_rows(x: Tensor) -> Tensor:
    total = torch.zeros(3)
    for row in x:
        if row.max() > 0:
            total = total + row
    return total


def logs_in_a_loop(x: Tensor) -> Tensor:
    for k in range(3):
        x = x * 2
        logger.warning("round %d: %.2f", k, x.mean())
    return x


def grows_a_list(x: Tensor) -> Tensor:
    parts = []
    while x.sum() > 1:  # the number of parts is the result's shape: nothing static can hold it
        parts.append(x)
        x = x / 2
    return torch.stack([*parts, x])


def nested_loops(x: Tensor) -> Tensor:
    for _ in range(3):
        for _ in range(2):
            if x.max() < 1:
                break
            x = x / 2
        x = x + 0.5
    return x


def collatz(n: Tensor) -> Tensor:
    steps = torch.zeros((), dtype=torch.long)
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps = steps + 1
    return steps


def _vector(*values: float) -> tuple[Tensor]:
    return (tensor(values),)


CASES: tuple[Case, ...] = tuple(
    of(target, *inputs, family="loops", expect=expect)
    for target, expect, inputs in (
        (halve_until_small, "mended", (lambda: _vector(0.1, 0.2), lambda: _vector(30.0, 40.0))),
        (halve_and_count, "mended", (lambda: _vector(0.1, 0.2), lambda: _vector(30.0, 40.0))),
        (halve_at_most_eight_times, "mended", (
            lambda: (tensor([0.1, 0.2], requires_grad=True),),
            lambda: (tensor([3.0, 4.0], requires_grad=True),),
            lambda: (tensor([3e5, 4e5], requires_grad=True),))),
        (newton, "mended", (
            lambda: (tensor([1.0, 2.0], requires_grad=True),),
            lambda: (tensor([1e4, 2.0], requires_grad=True),))),
        (power_iteration, "mended", (
            lambda: (torch.eye(3).requires_grad_(),),
            lambda: (torch.zeros(3, 3, requires_grad=True),),
            lambda: (randn(3, 3, requires_grad=True),))),
        (skips_rows, "mended", (
            lambda: ([randn(2, requires_grad=True) for _ in range(4)],),
            lambda: ([tensor([1.0, 1], requires_grad=True), tensor([-1.0, -1])],))),
        (first_positive, "declined", (
            lambda: ([tensor([-1.0, 0]), tensor([1.0, 1], requires_grad=True)],),
            lambda: ([tensor([1.0, 2]), tensor([1.0, 1], requires_grad=True)],),
            lambda: ([tensor([-1.0, 0]), tensor([-1.0, 1e-3], requires_grad=True)],))),
        (counted_by_a_tensor, "mended", (
            lambda: (tensor([1.0, 2.0]), tensor(3)), lambda: (tensor([1.0, 2.0]), tensor(0)))),
        (counted_in_python, "whole", (
            lambda: (tensor([1.0, 2.0], requires_grad=True), 3),
            lambda: (tensor([1.0, 2.0], requires_grad=True), 4))),
        (over_the_rows, "mended", (
            lambda: (randn(4, 3, requires_grad=True),),
            lambda: ((-torch.ones(4, 3)).requires_grad_(),))),
        (logs_in_a_loop, "mended", (lambda: (tensor([1.0, 2.0], requires_grad=True),),)),
        (grows_a_list, "declined", (lambda: _vector(0.1, 0.2), lambda: _vector(3.0, 4.0))),
        (nested_loops, "mended", (
            lambda: (tensor([0.1, 0.2], requires_grad=True),),
            lambda: (tensor([3.0, 40.0], requires_grad=True),))),
        (collatz, "mended", (lambda: (tensor(1),), lambda: (tensor(6),))),
    )
)  # fmt: skip
