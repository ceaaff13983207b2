"""What mended code calls where a branch or loop depends on a tensor.

``attempt`` is the heart: it asks the front end that is capturing whether a way to compute both
sides can be captured. If so it is; if not (no capture going on, sides of different shapes, code
that breaks graphs) the plain Python branch runs, just as in the source. So these functions never
give another result than the source: at worst the graph breaks there, as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._higher_order_ops import while_loop
from torch.utils._pytree import tree_leaves

from compiler.mend.trial import try_capture

Side = Callable[..., Any]


WHOLE = {  # types without gradients, and the keys under which torch.cond returns them
    t: f"mend::{t}"
    for t in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


class Mismatch(Exception):
    """The two sides of a branch give values that no one tensor could stand for."""


def truth(c: Any) -> Any:
    """``bool(c)`` as a 0-dim bool tensor; a condition that is no tensor is passed on.

    Raises what ``bool(c)`` raises for a tensor that has not exactly one element.
    """
    if not isinstance(c, Tensor):
        return c
    if c.numel() != 1:
        return bool(c)  # raises
    if c.dtype != torch.bool:
        c = c.detach() != 0
    return c.reshape(()) if c.dim() else c


def select(c: Any, a: Any, b: Any) -> Any:
    """``a if c else b``; for tensors of one kind, ``torch.where``."""
    if isinstance(c, Tensor) and torch.compiler.is_compiling() and c.numel() == 1 and alike(a, b):
        return a if a is b else _chosen(truth(c), a, b)
    return a if c else b


def gate(c: Tensor, x: Any) -> Any:
    """``x``, whose gradient is zero where ``c`` is false, whatever NaN or infinity comes back.

    ``c`` is a 0-dim bool tensor. What is no tensor, or needs no gradient, is passed on.
    """
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return torch.where(c, x, x.detach())
    return x


def both(c: Any, then: Side, other: Side, *operands: Any) -> Any:
    """``then(*operands) if c else other(*operands)``, for sides that may both run.

    In a capture both run on gated operands, and their results are selected from.
    """
    if isinstance(c, Tensor) and c.numel() == 1:

        def way() -> Any:
            taken = truth(c)
            not_taken = ~taken
            a = then(*[gate(taken, x) for x in operands])
            b = other(*[gate(not_taken, x) for x in operands])
            return merged(taken, a, b)

        if capturable(way):
            return way()
    return then(*operands) if c else other(*operands)


def cond(c: Any, then: Side, other: Side, *operands: Any) -> Any:
    """``then(*operands) if c else other(*operands)``, where the other side must not run.

    In a capture it is ``torch.cond``; results are copied, as they may not alias operands.
    """
    if isinstance(c, Tensor) and c.numel() == 1:

        def way() -> Any:
            found = torch.cond(
                truth(c),
                lambda: as_floats(copied(then(*operands))),
                lambda: as_floats(copied(other(*operands))),
                (),
            )
            return from_floats(found)

        def trial() -> Any:  # torch.cond takes sides of different shapes, and fails in backward
            result = merged(truth(c), then(*operands), other(*operands))
            if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                raise Mismatch("a result of torch.cond is no tensor")
            return result, way()

        if capturable(trial):
            return way()
    return then(*operands) if c else other(*operands)


def loop(test: Side, body: Side, *carried: Any) -> tuple[Any, ...]:
    """``while test(*carried): carried = body(*carried)``; what is carried, at the end.

    In a capture it is PyTorch's ``while_loop``, where all that is carried keeps shape and type.
    """

    def way() -> Any:
        start = copied(carried)  # a tensor that is carried may not be read otherwise too
        entered = truth(test(*carried))
        start = tuple([gate(entered, x) for x in start])
        end = while_loop(lambda *v: truth(test(*v)), lambda *v: copied(body(*v)), start)
        if not any(isinstance(t, Tensor) and t.requires_grad for t in end):
            return end
        # PyTorch differentiates a loop that makes no round as if it made one
        return merged(entered, end, carried)

    if capturable(way):
        return tuple(way())
    while test(*carried):
        carried = body(*carried)
    return carried


def counter(n: Any) -> Any:
    """A Python integer as a 0-dim i64 tensor, which behaves alike in arithmetic with tensors."""
    return torch.tensor(n) if type(n) is int else n


def merged(c: Tensor, a: Any, b: Any) -> Any:
    """Results of two sides, selected from: tensors, and tuples, lists and dicts of them.

    Raises Mismatch where they differ in more than the values of tensors.
    """
    if isinstance(a, Tensor):
        if not alike(a, b):
            raise Mismatch(f"{a!r} or {b!r}")
        return a if a is b else _chosen(c, a, b)
    if type(a) is not type(b):
        raise Mismatch(f"{a!r} or {b!r}")
    if isinstance(a, tuple | list) and len(a) == len(b):
        parts = [merged(c, p, q) for p, q in zip(a, b, strict=True)]
        return (
            parts
            if isinstance(a, list)
            else type(a)(*parts)
            if hasattr(a, "_fields")
            else tuple(parts)
        )
    if isinstance(a, dict) and list(a) == list(b):
        return {key: merged(c, a[key], b[key]) for key in a}
    if a is b or (isinstance(a, int | float | str) and a == b):
        return a
    raise Mismatch(f"{a!r} or {b!r}")


def _chosen(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where``; a side that needs a gradient keeps it where gradients are off, too."""
    if torch.is_grad_enabled() or not (a.requires_grad or b.requires_grad):
        return torch.where(c, a, b)
    with torch.enable_grad():
        return torch.where(c, a, b)


def alike(a: Any, b: Any) -> bool:
    """Whether both are tensors of one shape, type, device and layout."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout
    )


def copied(result: Any) -> Any:
    """The result of a side, with its tensors copied."""
    if isinstance(result, Tensor):
        return result.clone(memory_format=torch.contiguous_format)
    if isinstance(result, tuple | list):
        return type(result)([copied(r) for r in result])
    if isinstance(result, dict):
        return {key: copied(r) for key, r in result.items()}
    return result


def as_floats(result: Any) -> Any:
    """Results with whole numbers and bools as f64, under a key that names their type.

    The backward pass of ``torch.cond`` asks for a gradient of every result.
    """
    if isinstance(result, Tensor) and torch.is_grad_enabled():
        key = WHOLE.get(result.dtype)
        if key is None:
            return result
        if result.dtype == torch.int64:
            return {key: result.view(torch.float64)}  # bit by bit, as not all are f64 numbers
        return {key: result.to(torch.float64)}
    if isinstance(result, tuple | list):
        return type(result)([as_floats(r) for r in result])
    if isinstance(result, dict):
        return {key: as_floats(r) for key, r in result.items()}
    return result


def from_floats(result: Any) -> Any:
    """What ``as_floats`` was given."""
    if isinstance(result, tuple | list):
        return type(result)([from_floats(r) for r in result])
    if isinstance(result, dict):
        for dtype, key in WHOLE.items():
            if key in result:
                kept = result[key].detach()
                return kept.view(dtype) if dtype == torch.int64 else kept.to(dtype)
        return {key: from_floats(r) for key, r in result.items()}
    return result


def capturable(way: Callable[[], Any]) -> bool:
    """Whether a capture is going on that can take in ``way()``."""
    answer = False
    comptime(try_capture)  # at capture: sets ``answer`` in this frame
    return answer


# ── conditions ──


def every(*terms: Any, guarded: bool = False) -> Any:
    """``a and b and c`` as a condition, given as ``every(a, lambda: b, lambda: c)``.

    ``guarded``: later terms may raise, and must run only where Python would run them.
    """
    return _terms(terms, guarded, stop=False)


def some(*terms: Any, guarded: bool = False) -> Any:
    """``a or b or c`` as a condition, given as ``some(a, lambda: b, lambda: c)``."""
    return _terms(terms, guarded, stop=True)


def _terms(terms: Sequence[Any], guarded: bool, stop: bool) -> Any:
    """Evaluate terms until one is ``stop``; where they are tensors, all of them."""
    value = terms[0]
    for term in terms[1:]:
        if not isinstance(value, Tensor):
            if (not value) is not stop:  # its truth, as an ``if`` asks for it
                return value
            value = term()
            continue
        if guarded:
            value = _guarded(truth(value), term, stop)
            continue
        following = term()
        if isinstance(following, Tensor):
            a, b = truth(value), truth(following)
            value = a | b if stop else a & b
        elif (not following) is not stop:
            value = torch.full_like(truth(value), stop)
    return value


def _guarded(value: Tensor, term: Side, stop: bool) -> Any:
    def following() -> Any:
        c = truth(term())
        if isinstance(c, Tensor):
            return c
        return torch.ones_like(value) if c else torch.zeros_like(value)

    if stop:
        return cond(value, lambda: value, following)
    return cond(value, following, lambda: value)


def negate(c: Any) -> Any:
    """``not c`` as a condition."""
    return ~truth(c) if isinstance(c, Tensor) and c.numel() == 1 else not c


# ── numbers read out of tensors, kept as 0-dim tensors of the same value ──


def item(t: Any) -> Any:
    """``t.item()``, where it feeds a condition: f64 for floats and i64 for ints, as in Python."""
    if not isinstance(t, Tensor) or t.numel() != 1:
        return t.item()  # which raises, for a tensor
    t = t.detach().reshape(())
    if t.dtype == torch.bool:
        return t
    return t.to(torch.float64 if t.is_floating_point() else torch.int64)


def as_float(t: Any) -> Any:
    """``float(t)``, where it feeds a condition."""
    return item(t).to(torch.float64) if isinstance(t, Tensor) and t.numel() == 1 else float(t)


def as_int(t: Any) -> Any:
    """``int(t)``, where it feeds a condition or bounds a loop."""
    return item(t).to(torch.int64) if isinstance(t, Tensor) and t.numel() == 1 else int(t)


def as_index(t: Any) -> Any:
    """``operator.index(t)``, as ``range`` takes its bounds: integers only."""
    whole = isinstance(t, Tensor) and t.numel() == 1 and not t.is_floating_point()
    return as_int(t) if whole and t.dtype != torch.bool else operator.index(t)


def equal(a: Any, b: Any) -> Any:
    """``torch.equal``, where it feeds a condition."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype:
        return torch.equal(a, b)
    return False if a.shape != b.shape else (a == b).all()


def allclose(a: Any, b: Any, **options: Any) -> Any:
    """``torch.allclose``, where it feeds a condition."""
    return torch.isclose(a, b, **options).all()
