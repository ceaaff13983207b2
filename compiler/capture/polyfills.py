"""Built-in functions written in Python, which the interpreter reads when a value is not known.

Each does what the built-in one does, with the same calls on its arguments in the same order. Left
to Python, the real function is called.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

_NOTHING: Any = object()


def sum_(items: Any, /, start: Any = 0) -> Any:
    total = start
    for item in items:
        total = total + item
    return total


def any_(items: Any, /) -> bool:
    for item in items:  # noqa: SIM110  # this is what any() means
        if item:
            return True
    return False


def all_(items: Any, /) -> bool:
    for item in items:  # noqa: SIM110
        if not item:
            return False
    return True


def min_(*items: Any, key: Any = None, **default: Any) -> Any:
    return _extreme(items, key, default, False)


def max_(*items: Any, key: Any = None, **default: Any) -> Any:
    return _extreme(items, key, default, True)


def _extreme(items: Any, key: Any, default: Any, largest: bool) -> Any:
    many = items[0] if len(items) == 1 else items
    best = rank = None
    empty = True
    for item in many:
        value = item if key is None else key(item)
        if empty or (value > rank if largest else value < rank):
            best, rank, empty = item, value, False
    if empty:
        if "default" not in default:
            raise ValueError("iterable argument is empty")
        return default["default"]
    return best


def sorted_(items: Any, /, *, key: Any = None, reverse: bool = False) -> Any:
    """Stable, and by ``<`` alone."""
    ranked = [(item if key is None else key(item), item) for item in items]
    done: list[Any] = []
    for pair in ranked:
        place = len(done)
        while place > 0 and (
            done[place - 1][0] < pair[0] if reverse else pair[0] < done[place - 1][0]
        ):
            place -= 1
        done.insert(place, pair)
    return [item for _, item in done]


def reduce_(function: Any, items: Any, *initial: Any) -> Any:
    rest = iter(items)
    total = initial[0] if initial else next(rest)
    for item in rest:
        total = function(total, item)
    return total


def alike(a: Any, b: Any) -> bool:
    """How containers compare what they hold."""
    return a is b or bool(a == b)


def sequences_equal(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):  # noqa: B905, SIM110
        if not alike(x, y):
            return False
    return True


def dicts_equal(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    for name in a:  # noqa: SIM110
        if name not in b or not alike(a[name], b[name]):
            return False
    return True


def contains(container: Any, item: Any) -> bool:
    for other in container:  # noqa: SIM110
        if alike(other, item):
            return True
    return False


def not_contains(container: Any, item: Any) -> bool:
    found = item in container  # in one line, this would be the instruction that it is for
    return not found


def index(items: Any, wanted: Any) -> int:
    for k, item in enumerate(items):
        if alike(item, wanted):
            return k
    raise ValueError(f"{wanted!r} is not in list")


def formatted(value: Any, conversion: int, spec: str) -> str:
    """What ``{value!r:spec}`` gives in an f-string; conversions: 1 str, 2 repr, 3 ascii."""
    if conversion == 1:
        value = str(value)
    elif conversion == 2:
        value = repr(value)
    elif conversion == 3:
        value = ascii(value)
    return format(value, spec)


class Context:
    """What the forward of a custom autograd function leaves for its backward (``ctx``)."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def less(a: Any, b: Any) -> bool:
    return bool(a < b)


def less_equal(a: Any, b: Any) -> bool:
    return bool(a <= b)


def equal(a: Any, b: Any) -> bool:
    return bool(a == b)


def unequal(a: Any, b: Any) -> bool:
    return bool(a != b)


def greater(a: Any, b: Any) -> bool:
    return bool(a > b)


def greater_equal(a: Any, b: Any) -> bool:
    return bool(a >= b)


BOOLED = {
    "<": less, "<=": less_equal, "==": equal, "!=": unequal, ">": greater, ">=": greater_equal,
}  # fmt: skip
POLYFILLS: dict[Any, Any] = {
    sum: sum_, any: any_, all: all_, min: min_, max: max_, sorted: sorted_,
    functools.reduce: reduce_, operator.indexOf: index,
}  # fmt: skip
