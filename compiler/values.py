"""Tensors that are not computed yet, put together: broadcasting, casts, element-wise operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compiler.codegen.types import HALVES, computed
from compiler.ir import Cast, Const, Expr, Index, Integer, Number, Op, Value


def broadcast(value: Value, size: Sequence[Index]) -> Value:
    """The value expanded to ``size``, as NumPy broadcasts."""
    size = tuple(size)
    if value.size == size:
        return value
    lead = len(size) - len(value.size)
    own = value.size

    def place(at: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(
            Integer(0) if n == 1 and wanted != 1 else i
            for i, n, wanted in zip(at[lead:], own, size[lead:], strict=True)
        )

    return value.view(size, place)


def as_expr(expr: Expr, dtype: torch.dtype) -> Expr:
    """The expression in the type that ``dtype`` is computed in."""
    wanted = computed(dtype)
    if computed(expr.dtype) == wanted:
        return expr
    if isinstance(expr, Const):
        return constant(expr.value, wanted)
    if isinstance(expr, Number):
        return Number(expr.index, wanted) if wanted != torch.bool else Cast(expr, wanted)
    return Cast(expr, wanted)


def constant(value: Any, dtype: torch.dtype) -> Expr:
    """A Python number, or a size."""
    dtype = computed(dtype)
    if isinstance(value, Index) and not isinstance(value, Integer):
        return Number(value, dtype)
    if isinstance(value, Integer):
        value = int(value)
    if dtype == torch.bool:
        return Const(bool(value), dtype)
    if dtype.is_floating_point:
        return Const(float(value), dtype)
    return Const(int(value), dtype)


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value converted, rounded where the type is narrower."""
    if value.dtype == dtype:
        return value
    if dtype in HALVES:
        return value.map(lambda e: Cast(as_expr(e, torch.float32), dtype), dtype)
    return value.map(lambda e: as_expr(e, dtype), dtype)


def full(value: Any, size: Sequence[Index], dtype: torch.dtype) -> Value:
    """A value that is the same everywhere."""
    return Value(dtype, tuple(size), lambda at: constant(value, dtype))


def combine(name: str, args: Sequence[Any], size: Any, dtype: torch.dtype, inner: Any) -> Value:
    """``Op(name)`` of values and numbers, each first cast to ``inner``."""
    values = [arg if isinstance(arg, Value) else full(arg, (), inner) for arg in args]
    functions = [broadcast(value, size).fn for value in values]
    result = torch.bool if dtype == torch.bool else computed(dtype)

    def fn(at: tuple[Index, ...]) -> Expr:
        return Op(name, tuple(as_expr(f(at), inner) for f in functions), result)

    return Value(dtype, tuple(size), fn)


def select(condition: Value, a: Any, b: Any, size: Any, dtype: torch.dtype) -> Value:
    """``a`` where the condition holds, else ``b``."""
    parts = [x if isinstance(x, Value) else full(x, (), dtype) for x in (a, b)]
    test, yes, no = (broadcast(x, size).fn for x in (condition, *parts))
    inner = computed(dtype)

    def fn(at: tuple[Index, ...]) -> Expr:
        chosen = (as_expr(test(at), torch.bool), as_expr(yes(at), dtype), as_expr(no(at), dtype))
        return Op("where", chosen, inner)

    return Value(dtype, tuple(size), fn)
