# mypy: ignore-errors
"""Several breaks in one function or module, and effects around and inside branches."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn, randn, tensor

from compiler.survey.case import Case, of

logger = logging.getLogger(__name__)


def three_of_them(x: Tensor) -> Tensor:
    print("mean", x.mean())
    if torch.isnan(x).any():
        raise ValueError("NaN")
    if x.sum() > 0:
        x = x * 2
    return x


def print_in_both_sides(x: Tensor) -> Tensor:
    if x.sum() > 0:
        print("positive", x.sum().item())
        y = x * 2
    else:
        print("negative", x.sum().item())
        y = x - 1
    return y


def raise_on_one_side(x: Tensor) -> Tensor:
    if x.sum() > 0:
        if x.max() > 5:
            raise OverflowError(f"{x.max().item():.1f} is more than 5")
        x = x * 2
    else:
        x = -x
    return x


def log_before_a_raise(x: Tensor) -> Tensor:
    logger.warning("checking %d values", x.numel())
    if x.min() < 0:
        logger.error("minimum %.2f", x.min())
        raise ValueError("a negative value")
    logger.warning("checked")
    return x.sqrt()


def warn_and_fall_back(x: Tensor) -> Tensor:
    if x.det() == 0:
        warnings.warn("singular: the identity is returned", RuntimeWarning, stacklevel=1)
        return torch.eye(2)
    return x / x.det()


def item_in_a_message(x: Tensor) -> Tensor:
    top = x.max().item()
    print(f"top is {top:.3f}")
    return x - x.max()


def item_for_a_branch(x: Tensor) -> Tensor:
    top = x.max().item()
    if top > 1:
        x = x / 2
    return x


def tolist_in_a_message(x: Tensor) -> Tensor:
    logger.warning("values %s", x.detach().tolist())
    return x * 3


def number_that_feeds_the_graph(x: Tensor) -> Tensor:
    scale = x.detach().max().item()
    return x * scale


def number_that_picks_a_slice(x: Tensor, n: Tensor) -> Tensor:
    return x[: n.item()].sum()


def branch_between_types(x: Tensor) -> object:
    if x.sum() > 0:
        return x * 2
    return None


def branch_between_shapes(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x[:1]
    return x * 2


def assert_then_branch(x: Tensor, low: float = 0.0) -> Tensor:
    assert x.min() >= low, f"minimum {x.min()} is under {low}"
    if x.max() > 1:
        x = x / x.max()
    return x


def python_and_tensor(x: Tensor, flag: bool) -> Tensor:
    if flag and x.sum() > 0:
        x = x + 1
    return x


def counts_in_a_list(x: Tensor, seen: list[int]) -> Tensor:
    if x.sum() > 0:
        seen.append(1)
    return x * 2


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        if x.sum() > 0:
            x = x * 2
    return x + 1


def try_around_a_check(x: Tensor) -> Tensor:
    try:
        if x.min() < 0:
            raise ValueError("negative")
    except ValueError:
        x = x.abs()
    return x.sqrt()


class Noisy(nn.Module):
    """A module that prints, logs, warns, checks and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger(f"{__name__}.Noisy")
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("limit", tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.logger.warning("input %s", tuple(x.shape))
        hidden = torch.relu(self.first(x))
        if hidden.max() > self.limit:
            warnings.warn(f"activation over {self.limit}", stacklevel=1)
            hidden = hidden.clamp(max=self.limit)
        print("hidden", hidden.shape)
        assert torch.isfinite(hidden).all(), "not finite"
        out = self.second(hidden)
        if out.mean() > 0:
            out = out * 2
        else:
            out = out / 2
        self.logger.info("this level is not printed: %f", out.mean())
        return out


class Halting(nn.Module):
    """Adaptive depth: each layer runs only while the state still moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            moved = torch.tanh(layer(x))
            if (moved - x).abs().max() < 0.5:
                print("halted at layer", k)
                break
            x = moved
        return x


def _small() -> tuple[Tensor]:
    return (tensor([0.5, 0.75, 0.25], requires_grad=True),)


def _large() -> tuple[Tensor]:
    return (tensor([4.0, 5.0, 8.0], requires_grad=True),)


def _negative() -> tuple[Tensor]:
    return (tensor([-0.5, -2.0, 0.25], requires_grad=True),)


def _nan() -> tuple[Tensor]:
    return (tensor([float("nan"), 0, 1], requires_grad=True),)


def _rows() -> tuple[Tensor]:
    return (randn(2, 3, requires_grad=True),)


def _singular() -> tuple[Tensor]:
    return (torch.ones(2, 2, requires_grad=True),)


CASES: tuple[Case, ...] = tuple(
    of(target, *inputs, family=family, expect=expect)
    for target, family, expect, inputs in (
        (three_of_them, "mixed", "mended", (_small, _negative, _nan)),
        (print_in_both_sides, "mixed", "mended", (_small, _negative)),
        (raise_on_one_side, "mixed", "mended", (_small, _negative, _large)),
        (log_before_a_raise, "mixed", "mended", (_small, _negative)),
        (warn_and_fall_back, "mixed", "mended", (
            lambda: (torch.eye(2, requires_grad=True),), _singular)),
        (item_in_a_message, "item", "mended", (_small, _large)),
        (item_for_a_branch, "item", "mended", (_small, _large)),
        (tolist_in_a_message, "item", "mended", (_small, _large)),
        (number_that_feeds_the_graph, "item", "declined", (_small, _large)),
        (number_that_picks_a_slice, "decline", "declined", (
            lambda: (*_small(), tensor(2)), lambda: (*_small(), tensor(1)))),
        (branch_between_types, "decline", "declined", (_small, _negative)),
        (branch_between_shapes, "decline", "declined", (_small, _negative)),
        (assert_then_branch, "mixed", "mended", (_small, _large, _negative)),
        (python_and_tensor, "where", "mended", (
            lambda: (*_small(), True), lambda: (*_negative(), True),
            lambda: (*_small(), False))),
        (counts_in_a_list, "decline", "declined", (
            lambda: (*_small(), []), lambda: (*_negative(), []))),
        (under_no_grad, "decline", "declined", (_small, _negative)),
        (try_around_a_check, "decline", "declined", (_small, _negative)),
        (Noisy, "mixed", "mended", (_rows, lambda: (torch.full((2, 3), 50.0),),
                                    lambda: (torch.full((2, 3), float("inf")),))),
        (Halting, "mixed", "declined", (_rows, lambda: (torch.zeros(2, 3),))),
    )
)  # fmt: skip
