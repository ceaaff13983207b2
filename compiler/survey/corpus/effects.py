# ruff: noqa: B028, RUF021, SIM102, UP031, UP032
# mypy: ignore-errors
"""Small functions and modules that print, log, warn, raise and assert on tensors.

``@case`` says what becomes of each: ``mends`` whether nothing is left that breaks, ``reason`` why
not, ``breaks`` whether TorchDynamo broke before.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from compiler.survey.register import Effects

logger = logging.getLogger("corpus")
X = torch.arange(6.0).reshape(2, 3)
NAN = torch.tensor([[1.0, math.nan, 2.0]])
BOTH = ((X,), (-X,))
CHECK = ((X,), (NAN,))


CASES = Effects(BOTH)
case = CASES.case


class OwnError(Exception):
    def __init__(self, value: Any, code: int = 3) -> None:
        super().__init__(value, code)
        self.code = code


class OwnWarning(UserWarning):
    pass


# ── print ──


@case()
def prints_text(x):
    print("start")
    return x + 1


@case()
def prints_tensor(x):
    y = x * 2
    print(y)
    return y


@case()
def prints_several(x):
    print("x", x, x.shape, x.dtype, x.device, len(x), None, True, 1.5)
    return x.sum()


@case()
def prints_with_sep_and_end(x):
    print("a", x.sum(), sep=" = ", end="!\n", flush=True)
    return x * 3


@case()
def prints_to_stderr(x):
    print("to stderr", x.mean(), file=sys.stderr)
    return x


@case()
def prints_f_string(x):
    print(f"mean {x.mean().item():.3f}, shape {x.shape}, first {x[0, 0].item()!r:>8}")
    return x - 1


@case()
def prints_debugging_f_string(x):
    total = x.sum()
    print(f"{total=} {total.item()=:.2f}")
    return x


@case()
def prints_percent(x):
    print("norm %.2f of %s" % (x.norm().item(), x.shape))
    return x / 2


@case()
def prints_format(x):
    print("norm {:.2f} of {size}".format(x.norm().item(), size=x.numel()))
    return x / 2


@case()
def prints_nested_width(x):
    width = 10
    print(f"{x.max().item():{width}.{2}f}|")
    return x


@case()
def prints_str_and_repr(x):
    print(
        str(x.sum()),
        repr(x[0]),
        float(x.sum()),
        int(x.sum()),
        bool(x.sum()),
        round(x.sum().item(), 2),
    )
    return x


@case()
def prints_lists(x):
    print(x.tolist(), [x.sum(), 1], {"k": x.mean(), 2: (3, x.max())}, x[0].tolist()[0])
    return x


@case()
def prints_a_comprehension(x):
    print([f"{v.item():.1f}" for v in x[0]])
    return x


@case()
def prints_a_choice(x):
    print("positive" if x.sum() > 0 else "negative", x.sum() > 0 and "yes")
    return x


@case()
def prints_starred(x):
    parts = [x.sum(), x.mean()]
    print("parts", *parts)
    return x


@case()
def prints_in_a_loop(x):
    for k in range(3):
        x = x + k
        print(k, x.sum())
    return x


@case()
def prints_before_changing_in_place(x):
    y = x * 1
    print("before", y)
    y.add_(10)
    print("after", y)
    y[0] = 0
    print("then", y)
    return y


@case()
def prints_input_before_changing_it(x):
    print("before", x)
    x.mul_(2)
    print("after", x)
    return x + 0


@case()
def prints_a_view(x):
    y = x.clone()
    row = y[0]
    print(row)
    y.zero_()
    print(row)
    return y


@case()
def prints_a_number_of_before(x):
    y = x.clone()
    total = y.sum().item()
    message = f"total {total:.2f}"
    y.add_(1)
    print(message, total)
    return y


@case()
def prints_unused_results(x):
    z = x.exp().log1p()
    print(z.shape, z.max())
    return x


@case(((X, 3, 0.5), (X, 4, 1 / 3), (torch.ones(4, 3), 4, 0.1)))
def prints_numbers(x, n, f):
    print(n, f, n * 2, f"{f:.4f} {n:03d}", x.shape[0] * n)
    return x * n


@case(((X, "one"), (X, "two")))
def prints_given_texts(x, name):
    print(name, f"{name!r}: {x.sum()}", name.upper())
    return x


@case()
def prints_types(x):
    print(type(x).__name__, torch.float32, torch.device("cpu"), x.size(0), x.dim(), x.stride())
    return x


@case(((X, True), (X, False)))
def prints_where_a_flag_says(x, verbose):
    if verbose:
        print("verbose", x.sum())
    return x * 2


@case()
def prints_on_a_tensor(x):
    if x.sum() > 0:
        print("positive", x.sum().item())
    return x * 2


@case()
def prints_on_either_side(x):
    if x.sum() > 0:
        print("positive")
        print(f"{x.max().item()}")
    else:
        print("negative")
    return x * 2


@case(((X,), (-X,), (X * 0,)))
def prints_in_a_chain(x):
    total = x.sum()
    if total > 0:
        print("positive")
    elif total < 0:
        print("negative", total)
    else:
        print("zero")
    return total


@case()
def prints_nested(x):
    if x.sum() > 0:
        if x.max() > 4:
            print("large", x.max())
        print("positive")
    return x


@case()
def prints_on_and_or_not(x):
    if x.sum() > 0 and not x.max() > 100 or x.min() < -4:
        print("so it is")
    return x


@case()
def prints_on_a_number(x):
    if x.sum().item() > 3.5:
        print("above")
    if bool((x < 0).any()):
        print("below")
    return x


@case(((X, None), (X, X)))
def prints_on_an_optional(x, bias):
    if bias is not None:
        print("bias", bias.sum())
        x = x + bias
    return x


@case()
def prints_under_no_grad(x):
    with torch.no_grad():
        y = x * 2
        print("inside", y)
    return y


@case()
def prints_function_of_its_own(x):
    print("scaled", _scaled(x))
    return x


def _scaled(x):
    return x * 10


# ── logging ──


@case()
def logs(x):
    logger.info("mean %.3f", x.mean().item())
    logger.debug("not shown %s", x)
    logger.warning("shape %s of %s", x.shape, x)
    return x


@case()
def logs_each_level(x):
    logger.error("error %d", len(x))
    logger.critical("critical")
    logger.log(logging.INFO, "log %s", x.sum())
    logger.exception("no exception")
    logging.info("root %s", x.sum())
    return x


@case()
def logs_f_string(x):
    logger.info(f"norm {x.norm():.2f}")
    return x


@case()
def logs_extra(x):
    logger.info("extra", extra={"loss": x.sum()})
    return x


@case()
def logs_on_a_tensor(x):
    if (x < 0).any():
        logger.warning("%d negative", (x < 0).sum().item())
    return x.abs()


@case()
def logs_by_name(x):
    logging.getLogger("corpus.other").info("other %s", x.sum())
    return x


@case()
class LogsOfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.logger = logging.getLogger("corpus.module")
        self.linear = nn.Linear(3, 2)
        self.steps = 7

    def forward(self, x):
        with torch.no_grad():
            y = self.linear(x * 0)
            self.logger.info("step %d, mean %.2f", self.steps, x.mean())
            if y.sum() > 1e9:
                self.logger.error("too large")
        return y


@case()
class PrintsGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * self.weight
        print("weight", self.weight)
        print("product", y, y[0], y.sum(), y.detach())
        return y


@case()
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(LogsOfItsOwn(), nn.ReLU())
        self.calls = 0

    def _report(self, x, what):
        print(what, x.sum())
        return x

    @staticmethod
    def _check(x):
        if torch.isnan(x).any():
            raise FloatingPointError("NaN")

    @property
    def scale(self):
        print("scale")
        return 2.0

    def forward(self, x):
        self._check(x)
        y = self._report(x, "in") * self.scale
        return self.inner(y) + self._report(x, "out").sum()


class _Base(nn.Module):
    def forward(self, x):
        print("base", x.sum())
        return x + 1


@case()
class Inherits(_Base):
    def forward(self, x):
        print("before")
        x = super().forward(x)
        print("after", x.sum())
        return x


# ── warnings ──


@case()
def warns(x):
    warnings.warn("plain")
    warnings.warn(f"of {x.sum().item():.1f}", RuntimeWarning)
    return x


@case()
def warns_of_its_own(x):
    warnings.warn(OwnWarning(f"max {x.max()}"))
    warnings.warn("own", category=OwnWarning, stacklevel=1)
    return x


@case()
def warns_on_a_tensor(x):
    if x.min() < 0:
        warnings.warn(f"negative: {x.min().item()}", UserWarning)
    return x


@case()
def warns_at_the_caller(x):
    _warn(x, "one")
    y = x + 1
    _warn(y, "two")
    return y


def _warn(x, name):
    if x.max() > 3:
        warnings.warn(f"{name} is large", OwnWarning, stacklevel=2)


# ── exceptions ──


@case(CHECK)
def raises(x):
    if torch.isnan(x).any():
        raise ValueError("NaN in x")
    return x * 2


@case(CHECK)
def raises_with_tensors(x):
    bad = torch.isnan(x)
    if bad.any():
        raise ValueError(f"{bad.sum().item()} NaN in {x.shape}: {x}")
    return x * 2


@case(CHECK)
def raises_unless(x):
    if not torch.isfinite(x).all():
        raise FloatingPointError("not finite")
    return x * 2


@case(BOTH)
def raises_a_class(x):
    if x.sum() < 0:
        raise OverflowError
    return x


@case(BOTH)
def raises_its_own(x):
    if x.sum() < 0:
        raise OwnError(x.sum(), code=len(x))
    return x


@case(BOTH)
def raises_from_none(x):
    if x.sum() < 0:
        raise KeyError("a", 2) from None
    return x


@case(BOTH)
def raises_from_another(x):
    if x.sum() < 0:
        raise RuntimeError("outer") from ValueError(f"inner {x.min()}")
    return x


@case(((X,), (-X,), (X * 100,)))
def raises_in_a_chain(x):
    if x.sum() < 0:
        raise ValueError("negative")
    elif x.max() > 100:
        raise OverflowError(f"{x.max().item()}")
    return x.sqrt()


@case(BOTH)
def raises_otherwise(x):
    if x.sum() >= 0:
        y = x + 1
        print("fine", y.sum())
    else:
        raise ValueError("negative")
    return y


@case(BOTH)
def raises_after_printing(x):
    print("first", x.sum())
    if x.sum() < 0:
        print("about to raise")
        logger.error("negative: %s", x.sum())
        raise ValueError("negative")
    print("not after an exception")
    return x


@case(BOTH)
def raises_a_message_made_before(x):
    if x.min() < 0:
        lowest = x.min().item()
        message = f"lowest is {lowest:.1f}"
        raise ValueError(message)
    return x


@case(((X,), (-X,), (X * 100,)))
def raises_nested(x):
    if x.sum() > 0:
        if x.max() > 100:
            raise OverflowError("large")
    return x


@case(((X,), (torch.zeros(0, 3),), (-X - 1,)))
def raises_on_what_may_be_empty(x):
    if x.numel() > 0 and x.max() < 0:
        raise ValueError("all negative")
    return x


@case(((X,), (X * 100,)))
def raises_on_a_range(x):
    if not 0 <= x.max() < 100:
        raise ValueError(f"{x.max()} out of range")
    return x


@case(((X, 90.0), (X, 2.0)))
def raises_on_a_number(x, most):
    if x.sum().item() > most:
        raise ValueError(f"{x.sum().item()} > {most}")
    return x


@case(((X, X), (X, X + 1)))
def raises_unless_equal(x, y):
    if not torch.allclose(x, y):
        raise ValueError("differ")
    return x


@case(((X, 3), (X + 1, 3)), breaks=False)
def raises_on_a_shape(x, n):
    if x.shape[1] != n:
        raise ValueError(f"{x.shape[1]} columns, want {n}")
    return x


@case(BOTH)
def raises_in_a_helper(x):
    y = _positive(x)
    print("checked")
    return y


def _positive(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x


@case(((X,), (-X,), (X + 100,)))
def raises_twice(x):
    if x.sum() < 0:
        raise ValueError("first")
    y = x * 2
    if y.max() > 100:
        raise ValueError("second")
    return y


@case(BOTH)
def raises_in_a_loop(x):
    for k in range(3):
        if (x * k).min() < -5:
            raise ValueError(f"at {k}")
        print("passed", k)
    return x


# ── asserts ──


@case(CHECK, breaks=False)
def asserts(x):
    assert torch.isfinite(x).all(), "not finite"
    return x


@case(BOTH, breaks=False)
def asserts_without_message(x):
    assert x.sum() >= 0
    return x


@case(((X,), (-X,), (X * 100,)))
def asserts_with_tensors(x):
    assert (x >= 0).all() and x.max() < 100, f"out of range: {x.min().item()} to {x.max()}"
    return x


@case(((X,), (-X - 1,), (X * 100,)))
def asserts_a_chain(x):
    assert 0 <= x.sum() <= 100, (x.sum(), "sum")
    return x


@case(BOTH)
def asserts_not(x):
    assert not (x < 0).any(), "negative"
    return x


# ── all together ──


@case(((X,), (-X,), (X * 100,)))
def does_it_all(x):
    print("start", x.shape)
    logger.info("mean %.2f", x.mean())
    if x.max() > 100:
        warnings.warn(f"large: {x.max().item()}")
    y = x.clone()
    y.add_(1)
    assert y.sum() > 0, f"sum {y.sum()}"
    if y.max() > 400:
        logger.error("too large")
        raise OwnError(y.max())
    print("end", y)
    return y


@case(BOTH)
def does_more_in_a_branch(x):
    if x.sum() > 0:
        print("positive")
        y = x * 2
        print("doubled")
    else:
        y = x
        logger.info("negative")
    return y + 1


@case(BOTH)
def returns_early(x):
    if x.sum() < 0:
        print("early", x.sum())
        return x * 0
    print("late")
    return x


# ── what must stay ──


@case(reason="calls _scaled")
def formats_an_unknown_call(x):
    print(f"{x.sum().item()} {_scaled(x).item() if x.numel() == 1 else 0}", _scaled(x.sum().item()))
    return x


@case(CHECK, reason="inside of a try")
def catches(x):
    try:
        if torch.isnan(x).any():
            raise ValueError("NaN")
    except ValueError as error:
        return x.nan_to_num() if str(error) == "NaN" else x
    return x


@case(BOTH, reason="inside of a try")
def catches_from_a_helper(x):
    try:
        return _positive(x)
    except ValueError:
        return x.abs()


@case(reason="context of its own")
def warns_in_a_context(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("ignored")
    return x


@case(reason="no statement of its own")
def prints_within_an_expression(x):
    y = print("within") or x
    return y


@case(reason="in a function inside")
def prints_in_a_function_inside(x):
    def report(y):
        print("inside", y.sum())
        return y

    return report(x)


@case(reason="asks for the stack")
def logs_the_stack(x):
    logger.info("stack", stacklevel=1)
    return x


@case(reason="prints to")
def prints_to_a_file(x):
    print("here", file=sys.__stdout__ if x is None else sys.stdout)
    return x


@case(BOTH, reason="is no class of exceptions")
def raises_what_a_function_makes(x):
    if x.sum() < 0:
        raise _make(x)
    return x


def _make(x):
    return ValueError(f"made {x.sum()}")


@case(BOTH, reason="its condition evaluates")
def raises_on_a_walrus(x):
    if (total := x.sum()) < 0:
        raise ValueError(f"{total}")
    return x


SEEN = []


def _noted(x):
    SEEN.append(1)
    return (x > 4).any()


@case(BOTH, reason="may only be computed in its branch")
def asks_in_a_branch_only(x):
    if x.sum() > 0:
        if _noted(x):
            print("noted", len(SEEN) > 0)
        print("asked")
    return x


@case(reason="imported inside of the function")
def warns_by_an_import_inside(x):
    import warnings as w

    w.warn("inside")
    return x


@case(reason="takes arguments by **")
def prints_keywords(x):
    options = {"sep": "-"}
    print("a", "b", **options)
    return x


# ── changes that a graph that raises would lose ──


@case(CHECK, reason="is changed before it")
class CountsThenRaises(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        if torch.isnan(x).any():
            raise ValueError("NaN")
        return x * 2


@case(CHECK, reason="is changed before it")
def changes_its_argument_then_asserts(x):
    x.mul_(2)
    assert not torch.isnan(x).any(), "NaN"
    return x + 1


@case(CHECK)
def changes_its_own_then_raises(x):
    rows = []
    x = x * 2
    x += 1
    rows.append(x)
    y = torch.zeros(3)
    y[0] = x.sum()
    if torch.isnan(x).any():
        raise ValueError("NaN")
    return rows[0] + y
