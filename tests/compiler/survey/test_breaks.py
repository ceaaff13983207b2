"""Breaks are found where they are, also those that torch._dynamo.explain does not report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from compiler.survey.breaks import Made, breaks_of
from compiler.survey.kinds import graphmend_fixes, kind_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def unbroken(x: Tensor) -> Tensor:
    return x.relu() + 1


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y


def branches_by_elif(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    elif x.sum() < -5:
        y = x - 1
    else:
        y = x
    return y


def prints_first(x: Tensor) -> Tensor:
    print("before any operation")
    return x * 2


def warns(x: Tensor) -> Tensor:
    y = x * 2
    warnings.warn("look", stacklevel=1)
    return y + 1


def raises(x: Tensor) -> Tensor:
    if x.min() < 0:
        raise ValueError("negative")
    return x.sqrt()


def asserts(x: Tensor) -> Tensor:
    assert x.min() >= 0, f"minimum {x.min()}"
    return x.sqrt()


def item(x: Tensor) -> Tensor:
    return x * x.max().item()


def loops(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


@pytest.mark.parametrize(
    ("function", "kinds", "graphmend"),
    [
        (unbroken, [], []),
        (branches, ["branch"], [True]),
        (branches_by_elif, ["branch"], [False]),
        (prints_first, ["print"], [True]),
        (warns, ["warning"], [False]),
        (raises, ["raise"], [False]),
        (asserts, ["assert"], [False]),
        (item, ["item"], [False]),
        (loops, ["loop"], [False]),
    ],
)
def test_a_break_has_its_place_and_kind(
    function: Callable[..., Any], kinds: list[str], graphmend: list[bool]
) -> None:
    found = breaks_of(lambda: Made(function, [(tensor([2.0, 1.0]),)], function))
    assert [kind_of(b) for b in found.places] == kinds
    assert [graphmend_fixes(b) for b in found.places] == graphmend
    assert found.whole == (not kinds)
    first = function.__code__.co_firstlineno
    for place in found.places:
        assert place.file == __file__
        assert first < place.line < first + 6


def test_all_calls_count() -> None:
    calls = [(tensor([1.0]),), (tensor([-1.0]),)]
    found = breaks_of(lambda: Made(prints_below, calls, prints_below))
    assert [kind_of(b) for b in found.places] == ["branch", "print"]


def prints_below(x: Tensor) -> Tensor:
    if x.sum() < 0:
        print("below")
    return x


def test_a_first_call_that_raises_is_refused() -> None:
    with pytest.raises(RuntimeError, match="first call must not raise"):
        breaks_of(lambda: Made(raises, [(tensor([-1.0]),)], raises))
