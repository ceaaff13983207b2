# mypy: ignore-errors
"""Functions and modules with branches on tensors: those that mend, and those that must not.

``mended(maker)``: one graph afterwards. ``declined(maker, words)``: left alone, for a reason that
contains the words. ``maker(g)`` draws inputs; over some draws every statement runs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.survey.register import Cases

CASES = Cases("where")
mended, declined = CASES.mended, CASES.declined


def vector(g: torch.Generator) -> tuple[Tensor]:
    return (torch.randn(4, generator=g),)


def pair(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, generator=g), torch.randn(4, generator=g)


def matrix(g: torch.Generator) -> tuple[Tensor]:
    return (torch.randn(3, 4, generator=g),)


def scalar(g: torch.Generator) -> tuple[Tensor]:
    return (torch.randn((), generator=g),)


def maybe_mask(g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    x, mask = pair(g)
    return x, mask if torch.rand((), generator=g) > 0.5 else None


def ids(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, generator=g), torch.randint(-1, 6, (3,), generator=g)


def ints(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(-5, 6, (3,), generator=g), torch.randint(-1, 2, (3,), generator=g)


def near(g: torch.Generator) -> tuple[Tensor]:
    """Zeros and negatives, where roots and logarithms have no finite gradient; or none of them."""
    x = torch.randn(4, generator=g) * (torch.rand(4, generator=g) > 0.3)
    return (x.abs() / 2 + 0.1 if torch.rand((), generator=g) < 0.4 else x,)


# ── if and else ──


@mended(vector)
def two_sides(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y + 1


@mended(vector)
def two_returns(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    else:
        return torch.sin(x)


@mended(vector)
def no_else(x: Tensor) -> Tensor:
    y = x + 1
    if x.mean() > 0:
        y = torch.cos(y)
    return y * x


@mended(vector)
def several_statements(x: Tensor) -> Tensor:
    if x.max() > 1:
        a = torch.exp(-x)
        b = a * x
        c = a + b
    else:
        a = x.abs()
        b = a - 1
        c = torch.tanh(b)
    return a * b + c


@mended(vector)
def several_targets(x: Tensor) -> tuple[Tensor, Tensor]:
    if x[0] > 0:
        low, high = x - 1, x + 1
    else:
        low, high = x * 2, x * 3
    return low, high


@mended(vector)
def elif_chain(x: Tensor) -> Tensor:
    s = x.sum()
    if s > 2:
        y = x * 3
    elif s > 0:
        y = x * 2
    elif s > -2:
        y = x + 5
    else:
        y = -x
    return y


@mended(vector)
def elif_without_else(x: Tensor) -> Tensor:
    y = x * 1.5
    if x.sum() > 1:
        y = y + 1
    elif x.sum() < -1:
        y = y - 1
    return y


@mended(pair)
def nested(x: Tensor, w: Tensor) -> Tensor:
    if x.sum() > 0:
        if w.sum() > 0:
            y = x * w
        else:
            y = x + w
    else:
        y = x - w
        if w.max() > 1:
            y = y * 2
    return y


@mended(pair)
def differing_targets(x: Tensor, w: Tensor) -> Tensor:
    scale = w * 2
    if x.sum() > 0:
        y = x + 1
        scale = scale * 3
    else:
        y = x - 1
    return y * scale


@mended(vector)
def temporary_on_one_side(x: Tensor) -> Tensor:
    if x.sum() > 0:
        t = torch.sin(x)
        y = t * t
    else:
        y = x
    return y * 2


@mended(vector)
def empty_side(x: Tensor) -> Tensor:
    y = x * 2
    if x.sum() > 0:
        pass
    else:
        y = y - 3
    return y


@mended(vector)
def early_return(x: Tensor) -> Tensor:
    if x.sum() > 1:
        return x * 2
    y = x + 1
    z = y * x
    return z - 1


@mended(vector)
def early_returns(x: Tensor) -> Tensor:
    if x.max() > 1.5:
        return x - x.max()
    if x.min() < -1:
        return x - x.min()
    y = x.exp()
    if y.sum() > 4:
        y = y / 2
        return y
    return y * 2


@mended(vector)
def early_return_inside(x: Tensor) -> Tensor:
    y = x + 1
    if x.sum() > 0:
        if x.max() > 1:
            return y * 2
        y = y * x
    else:
        y = y - x
    return y + 3


@mended(vector)
def return_after_python_branch(x: Tensor, flag: bool = True) -> Tensor:
    y = x * 2
    if flag:
        y = y + 1
        if x.sum() > 0:
            return y
    y = y + 1
    return y


@mended(vector)
def returns_tuples(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.sum() > 0:
        return x, x * 2
    return x + 1, x * 3


@mended(vector)
def returns_a_dict(x: Tensor) -> dict[str, Tensor]:
    if x.sum() > 0:
        return {"low": x, "high": x + 1}
    return {"low": x - 1, "high": x * 2}


@mended(matrix)
def augmented_number(x: Tensor) -> Tensor:
    scale = 1.0
    if x.mean() > 0:
        scale *= 3
    else:
        scale -= 0.5
    return x * scale


@mended(vector)
def same_condition_twice(x: Tensor) -> Tensor:
    positive = x.sum() > 0
    if positive:
        y = x * 2
    else:
        y = x
    z = y + 1
    if positive:
        z = z * z
    return z


@mended(vector)
def python_then_tensor(x: Tensor, mode: str = "sin") -> Tensor:
    y = x
    if mode == "sin":
        if x.sum() > 0:
            y = torch.sin(x)
        else:
            y = torch.cos(x)
    return y


@mended(scalar)
def condition_is_the_input(x: Tensor) -> Tensor:
    if x > 0:
        return x * 2
    return x * x


@mended(vector)
def float_condition(x: Tensor) -> Tensor:
    if torch.relu(x[0]):
        y = x * 2
    else:
        y = x + 1
    return y


@mended(ints)
def integer_arithmetic(x: Tensor, w: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * w
    else:
        y = x + 2 * w
    return y


@mended(vector)
def one_element_condition(x: Tensor) -> Tensor:
    c = x[:1] > 0
    if c:
        y = x + 1
    else:
        y = x - 1
    return y


# ── Python values that depend on the branch ──


@mended(vector)
def chosen_number(x: Tensor) -> Tensor:
    if x.sum() > 0:
        scale = 2.0
    else:
        scale = 0.5
    y = x * scale
    return y + 1


@mended(vector)
def chosen_text(x: Tensor) -> Tensor:
    if x.sum() > 0:
        kind = "sin"
    else:
        kind = "cos"
    if kind == "sin":
        y = torch.sin(x)
    else:
        y = torch.cos(x)
    return y


@mended(ints)
def number_or_tensor(x: Tensor, w: Tensor) -> Tensor:
    penalty = 0
    if x.sum() > 0:
        penalty = w.sum()
    return x + penalty


@mended(vector)
def chosen_dimension(x: Tensor) -> Tensor:
    y = x.reshape(2, 2)
    dim = 0 if x.sum() > 0 else 1
    return y.sum(dim)


@mended(pair)
def chosen_number_inside(x: Tensor, w: Tensor, flag: bool = True) -> Tensor:
    scale = 1.0
    if flag:
        if w.max() > 0:
            x = x + 1
            if x.sum() > 0:
                scale = 2.0
        else:
            x = x * 2
    y = x * scale
    return y + w


@mended(vector)
def number_in_arithmetic(x: Tensor) -> Tensor:
    return x * (2.0 if x.sum() > 0 else 0.5) + 1


@mended(vector)
def none_or_tensor(x: Tensor) -> Tensor:
    extra = None
    if x.sum() > 0:
        extra = x * 2
    y = x + 1
    if extra is not None:
        y = y + extra
    return y


# ── expressions ──


@mended(vector)
def conditional_expression(x: Tensor) -> Tensor:
    y = torch.sqrt(x.abs()) if x.sum() > 0 else x * 3
    return y + 1


@mended(vector)
def conditional_in_call(x: Tensor) -> Tensor:
    return torch.sin(x if x.sum() > 0 else -x)


@mended(vector)
def conditional_nested(x: Tensor) -> Tensor:
    s = x.sum()
    return x * 2 if s > 1 else x * 3 if s > -1 else x * 4


@mended(pair)
def and_or(x: Tensor, w: Tensor) -> Tensor:
    if (x.sum() > 0 and w.sum() > 0) or x.max() > 1:
        return x + w
    return x * w


@mended(pair)
def not_and(x: Tensor, w: Tensor) -> Tensor:
    if not (x.sum() > 0 and not (w > 0).all()):
        y = x
    else:
        y = w
    return y * 2


@mended(vector)
def chained_comparison(x: Tensor) -> Tensor:
    if -0.5 < x.mean() < 0.5:
        return x * 2
    return x - 1


@mended(pair)
def chained_three(x: Tensor, w: Tensor) -> Tensor:
    if -1 < x[0] < w[0] < 1:
        y = x
    else:
        y = w * x
    return y


@mended(vector)
def and_as_value(x: Tensor) -> Tensor:
    c = x.sum() > 0 and x.max() < 1
    if c:
        return x * 2
    return x * 3


@mended(vector)
def or_as_value(x: Tensor) -> Tensor:
    s = x[0] * (x[1] > 0) or x[2]
    return x * s


@mended(maybe_mask)
def optional_mask(x: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is not None and (mask > 0).any():
        x = x * mask
    if mask is None or x.sum() > 0:
        x = x + 1
    return x + (0 if x.sum() > 3 else 1)


@mended(pair)
def short_circuit_guards_division(x: Tensor, w: Tensor) -> Tensor:
    n = (w > 0).sum()
    k = (x > 0).sum()
    if n > 0 and k // n > 0:
        return x * 2
    return x * 3


@mended(vector)
def python_flag_first(x: Tensor, flag: bool = True) -> Tensor:
    if flag and x.sum() > 0:
        y = x * 2
    else:
        y = x
    return y + 1


@mended(vector)
def item_in_condition(x: Tensor) -> Tensor:
    if x.sum().item() > 0.1:
        return x * 2
    return x * 3


@mended(vector)
def number_casts(x: Tensor) -> Tensor:
    if float(x.sum()) > 0.5 or int(x[0]) == 0 or bool(x[1] > 1):
        return x * 2
    return x * 3


@mended(vector)
def item_by_name(x: Tensor) -> Tensor:
    top = x.max().item()
    if top > 1:
        return x / 2
    if top + 1 < 1.5:
        return x * 2
    return x


@mended(pair)
def allclose_condition(x: Tensor, w: Tensor) -> Tensor:
    if torch.allclose(x.round(), w.round(), atol=2.0):
        return x - w
    return x + w


@mended(ints)
def equal_condition(x: Tensor, w: Tensor) -> Tensor:
    if torch.equal(x[:1].sign(), w[:1]):
        return x * w
    return x + w


# ── gradients: what is not taken must not leak ──


@mended(near)
def square_root(x: Tensor) -> Tensor:
    if x.min() > 0:
        y = torch.sqrt(x)
    else:
        y = x * 2
    return y


@mended(near)
def logarithm_else(x: Tensor) -> Tensor:
    return x if x.min() <= 0 else torch.log(x)


@mended(near)
def arc_cosine_and_power(x: Tensor) -> Tensor:
    big = x.abs().max() > 1
    if big:
        y = x / x.abs().max()
    else:
        y = torch.acos(x) * x.abs() ** 0.5
    return y


@mended(near)
def division(x: Tensor) -> Tensor:
    d = x.abs().min()
    if d > 0:
        y = x / d
        z = torch.rsqrt(d)
    else:
        y = x
        z = d
    return y * z


@mended(near)
def root_before_the_branch(x: Tensor) -> Tensor:
    """Where it is zero, the root's slope is infinite: no gradient may go through it, not even 0."""
    total = x.clamp(min=0).sum() - 0.7
    t = torch.relu(total)
    s = torch.sqrt(t)
    if s > 0:
        y = x / s
    else:
        y = x
    return y + 1


@mended(near)
def deviation_before_the_branch(x: Tensor) -> Tensor:
    y = x * (x.min() > 0)
    deviation = y.std()
    return y / deviation if deviation > 0 else y + x


@mended(near)
def overflow(x: Tensor) -> Tensor:
    big = x * 200
    if big.max() < 85:
        y = torch.exp(big)
    else:
        y = big
    return y.sum() * x


@mended(near)
def norm_of_zero(x: Tensor) -> Tensor:
    y = torch.relu(x - 2)
    if y.sum() > 0:
        y = y / y.norm()
    return y + x


@mended(vector)
class GatedParameter(nn.Module):
    """The parameter's gradient is infinite on the side that is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0, 1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * torch.sqrt(self.w)
        return x * self.w


# ── sides that must run only when taken ──


@mended(vector)
class CostlySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = self.second(h)
            h = self.act(h)
        return h * 2


@mended(pair)
def matrix_product(x: Tensor, w: Tensor) -> Tensor:
    if x.sum() > 0:
        return x.outer(w) @ x
    return w


@mended(ids)
def guarded_index(x: Tensor, i: Tensor) -> Tensor:
    if i.min() >= 0 and i.max() < 4:
        y = x[i]
    else:
        y = x[:3] * 0
    return y


@mended(ids)
def guarded_gather(x: Tensor, i: Tensor) -> Tensor:
    valid = (i >= 0).all() and (i < 4).all()
    return x.gather(0, i) if valid else x[:3]


@mended(ints)
def integer_division(x: Tensor, w: Tensor) -> Tensor:
    if (w != 0).all():
        return x // w + x % w
    return x * w


@declined(matrix, "torch.cond cannot hold")
def inverse(x: Tensor) -> Tensor:
    a = x[:, :3]
    if torch.linalg.det(a).abs() > 0.5:
        return torch.linalg.inv(a)
    return a.t()


@mended(vector)
def result_is_the_operand(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        y = y @ torch.ones(4, 4)
    return y


# ── calls ──


def helper(x: Tensor, k: float = 2.0) -> Tensor:
    return torch.sin(x) * k


def helper_that_calls(x: Tensor) -> Tensor:
    y = helper(x, 3.0)
    return helper(y)


@mended(vector)
def pure_helpers(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = helper(x)
    else:
        y = helper_that_calls(x) + math.pi
    return y


@mended(vector)
class OwnMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.act = nn.ReLU()

    def shrink(self, x: Tensor) -> Tensor:
        return x * self.w / 2

    def forward(self, x: Tensor) -> Tensor:
        if x.norm() > 1.5:
            x = self.shrink(x)
        else:
            x = self.act(x)
        return x + 1


@mended(vector)
def python_loop_in_side(x: Tensor) -> Tensor:
    y = x
    if x.sum() > 0:
        for k in range(3):
            if k == 1:
                continue
            y = y * (k + 1)
    else:
        y = sum(v * 2 for v in (x, x + 1))
    return y


@mended(vector)
def own_scratch(x: Tensor) -> Tensor:
    """What a side itself has made, it may change in place."""
    if x.sum() > 0:
        y = torch.zeros(4)
        y[0] = 1.0
        y += x
        parts = [y * 2]
        parts.append(y + 1)
        y = torch.stack(parts).sum(0)
    else:
        y = torch.ones_like(x)
        y.mul_(3)
        y = y * x
    return y


@mended(vector)
def own_tensor_in_place(x: Tensor) -> Tensor:
    """A tensor that nothing else can see: the branch works on a copy."""
    y = x * 2
    if x.sum() > 0:
        y += 1
        y.clamp_(max=3)
    else:
        y[0] = 0
    return y * 2


@mended(pair)
def made_in_the_side(x: Tensor, w: Tensor) -> Tensor:
    z = x
    if x.sum() > 0:
        z = z * 2
        z += w
        z.clamp_(max=3)
    return z


# ── in loops over Python values ──


@mended(vector)
def in_a_loop(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(4):
        if x[i] > 0:
            total = total + x[i]
        else:
            total = total - 2 * x[i]
    return total * x


@mended(vector)
def continue_in_a_loop(x: Tensor) -> Tensor:
    y = x
    for i in range(3):
        y = y + 0.1
        if y[i] > 0.5:
            continue
        z = y * y
        y = z + i
    return y


@mended(matrix)
def over_rows(x: Tensor) -> Tensor:
    found = []
    for row in x:
        if row.sum() > 0:
            r = row * 2
        else:
            r = row - 1
        found.append(r)
    return torch.stack(found)


@mended(vector)
def in_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        if x.sum() > 0:
            s = x.max()
        else:
            s = x.min()
    return x * s


@mended(vector)
def no_grad_in_side(x: Tensor) -> Tensor:
    if x.sum() > 0:
        with torch.no_grad():
            s = x.max()
    else:
        s = x.min()
    return x * s


@mended(vector)
class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(0.5))
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.abs().max() > self.limit:
            h = h * self.limit / h.abs().max()
        if self.training and self.limit > 0.25:
            h = h + 1
        return h


@mended(vector)
def unknown_condition(x: Tensor) -> Tensor:
    """Nothing is known of what the lambda returns: decided when it runs."""
    check = lambda t: t.sum() > 0  # noqa: E731
    if check(x) and True:
        y = x * 2
    else:
        y = x + 1
    return y


@mended(vector)
def clamped_by_f(x: Tensor) -> Tensor:
    h = F.softmax(x, 0)
    if h.max() > 0.5:
        h = F.normalize(h, dim=0)
    return h


# ── must be left alone ──


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)


@declined(vector, "assigns to self.calls")
class AssignsAttribute(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.calls += 1
            x = x * 2
        return x


@declined(vector, "assigns to self.count")
class RebindsBuffer(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.count = self.count + 1
        return x * self.count


@declined(vector, "changes self.seen in place")
class ChangesBuffer(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.seen.add_(x.detach())
        return x * 2


@declined(vector, "draws random numbers", gradients=False)
class Drops(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.drop(x) * 0
        return x


@declined(matrix, "changes its statistics")
class Normalizes(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.norm(x)
        return x


@declined(vector, "assigns to x[0]", gradients=False)
def changes_input_item(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x[0] = 1
    return x * 2


@declined(vector, "changes x in place", gradients=False)
def changes_input(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x += 1
    return x * 2


@declined(vector, "changes z in place")
def made_in_the_side_then_shared(x: Tensor) -> Tensor:
    z = x
    if x.sum() > 0:
        z = z * 2
        y = z
        z += 1
    else:
        y = x
    return z + y


@declined(vector, "changes z in place", gradients=False)
def shared_in_the_next_round(x: Tensor) -> Tensor:
    z = x
    if x.sum() > 0:
        z = z * 2
        for _ in range(2):
            z += 1
            z = x
    return z


@declined(vector, ".mul_() changes x in place", gradients=False)
def changes_input_by_method(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x.mul_(2)
    return x


@declined(vector, "changed in place in line", gradients=False)
def result_changes_later(x: Tensor) -> Tensor:
    """``y`` may be ``x`` itself, which then changes with it."""
    if x.sum() > 0:
        y = x
    else:
        y = x * 2
    y.add_(1)
    return x + y


@declined(vector, ".append() may change found")
def appends(x: Tensor) -> Tensor:
    found = [x]
    if x.sum() > 0:
        found.append(x * 2)
    return torch.stack(found).sum(0)


@declined(vector, "prints")
def prints(x: Tensor) -> Tensor:
    if x.sum() > 0:
        print(end="")
        x = x * 2
    return x


@declined(vector, "whose effects are not known")
def unknown_call(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = UNKNOWN[0](x)
    return x


UNKNOWN = [torch.sin]


def impure_helper(x: Tensor) -> Tensor:
    UNKNOWN[0] = torch.sin
    return x * 2


@declined(vector, "calls impure_helper, which assigns to UNKNOWN[0]")
def calls_impure(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = impure_helper(x)
    return x


@declined(vector, "draws random numbers", gradients=False)
def random_side(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + torch.rand(4) * 0
    return x


@declined(vector, "shape of its result depends on data")
def shape_from_data(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + torch.nonzero(x).sum()
    return x


@declined(vector, "selects by a mask")
def mask_selects(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + x[x > 0].sum()
    return x


@declined(vector, "y may have no value afterwards")
def maybe_unbound(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    if x.sum() > 0:
        return y
    return x


@declined(vector, "returns a Python value")
def returns_numbers(x: Tensor) -> int:
    if x.sum() > 0:
        return 1
    return 0


@declined(vector, "returns a Python value")
def returns_none_or_tensor(x: Tensor) -> Tensor | None:
    if x.sum() > 0:
        return x * 2
    return None


@declined(vector, "is a Python value that depends on a tensor")
def counts(x: Tensor) -> tuple[Tensor, int]:
    n = 0
    for i in range(4):
        if x[i] > 0:
            n = n + 1
    return x * n, n


@declined(vector, "raises")
def raises_inside(x: Tensor) -> Tensor:
    if x.sum() > 1:
        raise ValueError("too large")
    return x


@declined(vector, "holds a try statement")
def tries(x: Tensor) -> Tensor:
    if x.sum() > 0:
        try:
            x = x * 2
        finally:
            x = x + 1
    return x


@declined(vector, "holds a with statement")
def with_inside(x: Tensor) -> Tensor:
    if x.sum() > 0:
        with torch.profiler.record_function("double"):
            x = x * 2
    return x


@declined(vector, "deletes")
def deletes(x: Tensor) -> Tensor:
    y = x * 2
    z = x
    if x.sum() > 0:
        z = y + 1
        del y
    return z


@declined(vector, "imports")
def imports(x: Tensor) -> Tensor:
    if x.sum() > 0:
        import math as m

        x = x * m.pi
    return x


@declined(vector, "defines a function")
def defines(x: Tensor) -> Tensor:
    if x.sum() > 0:

        def double(t: Tensor) -> Tensor:
            return t * 2

        x = double(x)
    return x


@declined(vector, "declares a global name")
def declares_global(x: Tensor) -> Tensor:
    if x.sum() > 0:
        global LAST
        LAST = 1
    return x


@declined(vector, "assigns to a global or nonlocal name")
def assigns_global(x: Tensor) -> Tensor:
    global TOTAL
    TOTAL = x * 0
    if x.sum() > 0:
        TOTAL = x
    return TOTAL


@declined(vector, "binds t within an expression")
def walrus(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = (t := x * 2) + t
    return x


@declined(vector, "leaves or goes on with a loop")
def breaks_a_while(x: Tensor) -> Tensor:
    k = 0
    while k < 3:
        x = x + 1
        k += 1
        if x.sum() > 4:
            break
    return x


@declined(vector, "reads a tensor's value through int()")
def number_inside(x: Tensor) -> Tensor:
    if x.sum() > 0:
        k = int(x.abs().max())
        x = x * k
    return x


@declined(vector, "the branch or loop in line")
def inner_stays(x: Tensor) -> Tensor:
    y = x
    if x.sum() > 0:
        k = 0
        if x.max() > 1:
            k = 1
        y = y * 2
        print(end="" * k)
    return y


class Parent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@declined(vector, "calls super()")
class CallsSuper(Parent):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = super().forward(x)
        return x


@mended(matrix)
def fills_before_it_is_shared(x: Tensor) -> Tensor:
    rows = x.exp() + 1
    bad = (rows > 2).any(dim=1)
    if bad.any():
        rows[bad] = 0.5
    rows = rows.unsqueeze(-1)
    return torch.cat([rows[:, k] for k in range(2)], dim=1)


@declined(matrix, "assigns to rows[bad]")
def fills_after_it_is_shared(x: Tensor) -> Tensor:
    rows = x.exp() + 1
    first = rows[:, 0]
    bad = (rows > 2).any(dim=1)
    if bad.any():
        rows[bad] = 0.5
    return first + rows.sum()


@declined(vector, "writes into out=", gradients=False)
def writes_out(x: Tensor) -> Tensor:
    y = torch.zeros(4)
    if x.sum() > 0:
        torch.sin(x, out=y)
    return y
