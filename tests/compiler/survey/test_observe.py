"""What the survey compares: anything a caller could notice must count as a difference."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor

from compiler.survey.observe import Raised, differences, observe

logger = logging.getLogger(__name__)


def model(x: Tensor) -> Tensor:
    print("one", "two")
    logger.warning("three %d", 3)
    warnings.warn("four", RuntimeWarning, stacklevel=1)
    return x * 2


def another_value(x: Tensor) -> Tensor:
    return model(x) + 1e-3


def another_gradient(x: Tensor) -> Tensor:
    return model(x.detach()) + 0 * x


def another_order(x: Tensor) -> Tensor:
    logger.warning("three %d", 3)
    print("one", "two")
    warnings.warn("four", RuntimeWarning, stacklevel=1)
    return x * 2


def another_text(x: Tensor) -> Tensor:
    print("one", "too")
    logger.warning("three %d", 3)
    warnings.warn("four", RuntimeWarning, stacklevel=1)
    return x * 2


def another_level(x: Tensor) -> Tensor:
    print("one", "two")
    logger.error("three %d", 3)
    warnings.warn("four", RuntimeWarning, stacklevel=1)
    return x * 2


def another_category(x: Tensor) -> Tensor:
    print("one", "two")
    logger.warning("three %d", 3)
    warnings.warn("four", UserWarning, stacklevel=1)
    return x * 2


def another_container(x: Tensor) -> list[Tensor]:
    return [model(x)]


def another_input(x: Tensor) -> Tensor:
    result = model(x)
    with torch.no_grad():
        x.add_(1)
    return result


def raising(x: Tensor) -> Tensor:
    model(x)
    raise ValueError("no")


def _seen(function: Callable[..., Any]) -> Any:
    return observe(function, [(tensor([1.0, 2.0], requires_grad=True),)])


def test_effects_in_order() -> None:
    (found,) = _seen(model)
    assert found.effects == [
        ("print", "stdout", "one two\n"),
        ("log", f"{__name__}:WARNING", "three 3"),
        ("warning", "RuntimeWarning", "four"),
    ]
    assert found.gradients["input 0"].tolist() == [1.0, 3.0]  # 2 * linspace(0.5, 1.5)


def test_nothing_differs_from_itself() -> None:
    assert differences(_seen(model), _seen(model), 0, 0) == []
    assert differences(_seen(raising), _seen(raising), 0, 0) == []


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (another_value, "outcome"),
        (another_gradient, "gradients"),
        (another_order, "effects"),
        (another_text, "effects"),
        (another_level, "effects"),
        (another_category, "effects"),
        (another_container, "outcome"),
        (another_input, "inputs"),
        (raising, "outcome"),
    ],
)
def test_a_difference_is_seen(other: Callable[..., Any], what: str) -> None:
    said = differences(_seen(other), _seen(model), 1.3e-6, 1e-5)
    assert said[0].startswith(f"call 1: {what}: "), said


def test_an_exception_is_an_outcome() -> None:
    (found,) = _seen(raising)
    assert found.outcome == Raised("ValueError", "no", "NoneType")
    assert len(found.effects) == 3


class Counter(nn.Module):
    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by
        self.register_buffer("count", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.by
        return x * self.scale


def test_buffers_and_parameters_are_looked_at() -> None:
    seen = [observe(Counter(by), [(torch.ones(2),)] * 2) for by in (1, 2)]
    assert seen[0][1].gradients["scale"].item() == 2.0
    assert differences(seen[1], seen[0], 0, 0)[0].startswith("call 1: state: ")
