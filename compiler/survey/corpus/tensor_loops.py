# mypy: ignore-errors
"""Functions with loops whose number of rounds depends on a tensor: to mend, and to leave alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiler.survey.register import Cases

CASES = Cases("loops")
mended, declined = CASES.mended, CASES.declined


def vector(g: torch.Generator) -> tuple[Tensor]:
    """Of a norm below one in some draws: no round at all."""
    return (torch.randn(4, generator=g) * torch.randint(0, 4, (), generator=g),)


def counted(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The number is computed, as PyTorch itself can read one that is an input."""
    return torch.randn(4, generator=g), torch.randint(-1, 2, (4,), generator=g)


# ── bounded ──


@mended(counted)
def least_of_two(x: Tensor, n: Tensor) -> Tensor:
    for i in range(min(int(n.sum()), 3)):
        x = x * 2 + i
    return x


@mended(counted)
def bounded_by_a_shape(x: Tensor, n: Tensor) -> Tensor:
    total = x.sum()
    for i in range(min(x.shape[0], n.sum().item())):
        total = total + x[i]
    return total


@mended(counted)
def clamped(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(n.sum().clamp(0, 3))):
        x = torch.sin(x)
    return x


@mended(counted)
def clamped_by_keyword(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(n.sum().clamp(max=2).item()):
        if x.sum() > 0:
            x = x - 1
    return x


@mended(vector)
def left_by_break(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x + 0.5
        if x.sum() > 6:
            break
        x = x * 1.1
    return x


@mended(vector)
def break_after_statements(x: Tensor) -> Tensor:
    y = x * 0
    for i in range(4):
        if x.sum() > i:
            y = y + x
            break
        elif x.min() < -2:
            x = x + 1
        else:
            x = x + 0.25
    return x - y


@mended(vector)
def two_breaks(x: Tensor) -> Tensor:
    for i in range(4):
        if x.max() > 2:
            break
        x = x + i
        if x.min() < -2:
            x = -x
            break
        x = x * 1.5
    return x


@mended(vector)
def for_else(x: Tensor) -> Tensor:
    for i in range(3):
        if x[i] > 1:
            break
        x = x + 0.1
    else:
        x = x * 0
    return x + 1


@mended(vector)
def returns_from_inside(x: Tensor) -> Tensor:
    for k in range(3):
        if x.sum() > k:
            return x * 2
        x = x + 0.5
    return x - 1


@mended(vector, gradients=False)
class LeavesLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.norm() < 0.9:
                break
            x = layer(x) * 0.7
        return x


@mended(vector)
def over_rows_until(x: Tensor) -> Tensor:
    total = torch.zeros(2)
    for row in x.reshape(2, 2):
        if row.sum() > 1:
            break
        total = total + torch.sqrt(row.abs() + 1)
    return total


# ── without a bound ──


@mended(vector)
def halves(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
    return x * 3


@mended(vector)
def two_carried(x: Tensor) -> Tensor:
    y = x.abs()
    while y.sum() > 1 and y.max() > 0.2:
        y = y * y / (y.sum() + 1)
        x = x + y
    return x * y


@mended(vector)
def condition_by_item(x: Tensor) -> Tensor:
    while x.norm().item() > 1:
        t = x * 0.5
        x = t
    return x


@mended(vector, gradients=False)
def counts_rounds(x: Tensor) -> tuple[Tensor, int]:
    n = 0
    while x.norm() > 1:
        x = x * 0.5
        n += 1
    return x, n


@mended(vector)
def counts_for_arithmetic(x: Tensor) -> Tensor:
    n = 0
    while x.norm() > 1:
        x = x * 0.5
        n = n + 1
    return x * n


@mended(vector)
def branch_inside(x: Tensor) -> Tensor:
    while x.norm() > 1:
        if x.sum() > 0:
            x = x * 0.5
        else:
            x = x * 0.25 + 0.1
    return x


@mended(vector)
def owns_what_it_changes(x: Tensor) -> Tensor:
    y = x * 2
    while y.norm() > 1:
        y *= 0.5
    return y + x


@mended(counted)
def range_of_a_tensor(x: Tensor, n: Tensor) -> Tensor:
    for i in range(n.sum()):
        x = x * 0.5 + i
    return x


@mended(counted, gradients=False)
def range_that_indexes(x: Tensor, n: Tensor) -> Tensor:
    total = x.sum()
    for i in range(int(n.sum())):
        total = total + x[i]
    return total


@mended(counted)
def range_from_one(x: Tensor, n: Tensor) -> Tensor:
    for i in range(1, n.sum().item()):
        x = x / i
    return x


@mended(counted)
class RefinesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for _ in range(int(n.sum())):
            x = torch.tanh(x * self.w)
        return x


@mended(vector, gradients=False)
def loop_in_a_branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        while x.norm() > 1:
            x = x * 0.5
    else:
        x = x + 1
    return x


# ── must be left alone ──


@declined(vector, "leaves or goes on with a loop around it")
def while_with_break(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
        if x.sum() > 0:
            break
    return x


@declined(counted, "i is read after the loop")
def target_read_later(x: Tensor, n: Tensor) -> Tensor:
    i = 0
    for i in range(int(n.sum())):  # noqa: B007
        x = x * 2
    return x * i


@declined(counted, "it assigns to its own i")
def target_assigned(x: Tensor, n: Tensor) -> Tensor:
    for i in range(min(int(n.sum()), 3)):
        i = i + 1
        x = x * i
    return x


@declined(vector, ".append() may change found")
def appends(x: Tensor) -> Tensor:
    found = [x]
    while x.norm() > 1:
        x = x * 0.5
        found.append(x)
    return torch.stack(found).sum(0)


@declined(vector, "prints")
def prints(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
        print(end="")
    return x


@declined(vector, "an object, changes from round to round")
def carries_a_list(x: Tensor) -> Tensor:
    pair = [x, x]
    while x.norm() > 1:
        x = x * 0.5
        pair = [x, pair[0]]
    return pair[0] + pair[1]


@declined(vector, "y may have no value afterwards")
def may_be_unbound(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
        y = x
    return y if x.sum() > 100 else x


@declined(counted, "it counts in steps")
def in_steps(x: Tensor, n: Tensor) -> Tensor:
    for i in range(0, int(n.sum()), 2):
        x = x * i
    return x


@declined(vector, "may not be read further")
def generator_left_early(x: Tensor) -> Tensor:
    rows = iter(x)
    for row in rows:
        if row.sum() > 0.5:
            break
    return x + sum(rows)


@declined(vector, "returns from inside what may not be computed in vain")
def returns_a_root(x: Tensor) -> Tensor:
    for k in range(3):
        if x.sum() > k:
            return torch.sqrt(x.abs())
        x = x + 0.5
    return x - 1


@declined(vector, "changed in place in line", gradients=False)
def carries_an_alias(x: Tensor) -> Tensor:
    y = x
    while y.norm() > 1:
        y = y * 0.5
    x.add_(1)
    return y
