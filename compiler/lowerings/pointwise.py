"""Pointwise operations: each element of the result from the same element of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiler.graph import Graph, sizes
from compiler.ir import Index, Number, Sizes, Value
from compiler.lower import aten, lowers
from compiler.values import broadcast, cast, combine, full, select

prims = torch.ops.prims


def shape_of(node: fx.Node) -> Sizes:
    """The shape that tracing found for a node's result."""
    return sizes(node.meta["val"].shape)


def promoted(node: fx.Node) -> torch.dtype:
    """The type in which the arguments of a comparison meet."""
    metas = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            metas.append(arg.meta["val"])
        elif isinstance(arg, bool | int | float):
            metas.append(arg)
    if len(metas) == 1:
        return metas[0].dtype
    if any(isinstance(m, torch.Tensor) for m in metas):
        return torch.result_type(metas[0], metas[1])
    return torch.float32


def _pointwise(graph: Graph, node: fx.Node, name: str, args: Sequence[Any]) -> Value:
    dtype = node.meta["val"].dtype
    return combine(
        name, args, shape_of(node), dtype, dtype if dtype != torch.bool else promoted(node)
    )


# ATen operations that are one operation of codegen's table, by its name
UNARY = (
    *("abs", "neg", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt"),
    *("reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh"),
    *("acosh", "atanh", "erf", "erfc", "sigmoid", "relu", "floor", "ceil", "trunc", "sign"),
    *("isnan", "isinf", "bitwise_not", "logical_not", "signbit"),
)
BINARY = {
    "mul.Tensor": "mul", "mul.Scalar": "mul", "maximum.default": "maximum",
    "minimum.default": "minimum", "fmax.default": "fmax", "fmin.default": "fmin",
    "atan2.default": "atan2", "fmod.Tensor": "fmod", "fmod.Scalar": "fmod",
    "remainder.Tensor": "mod_floor", "remainder.Scalar": "mod_floor",
    "eq.Tensor": "eq", "eq.Scalar": "eq", "ne.Tensor": "ne", "ne.Scalar": "ne",
    "lt.Tensor": "lt", "lt.Scalar": "lt", "le.Tensor": "le", "le.Scalar": "le",
    "gt.Tensor": "gt", "gt.Scalar": "gt", "ge.Tensor": "ge", "ge.Scalar": "ge",
    "logical_and.default": "logical_and", "logical_or.default": "logical_or",
    "logical_xor.default": "logical_xor", "bitwise_and.Tensor": "bitwise_and",
    "bitwise_and.Scalar": "bitwise_and", "bitwise_or.Tensor": "bitwise_or",
    "bitwise_or.Scalar": "bitwise_or", "bitwise_xor.Tensor": "bitwise_xor",
    "bitwise_xor.Scalar": "bitwise_xor", "hypot.default": "hypot", "copysign.Tensor": "copysign",
    "copysign.Scalar": "copysign",
}  # fmt: skip


def _register() -> None:
    for name in UNARY:
        lowers(getattr(aten, name).default)(
            lambda graph, node, x, name=name: _pointwise(graph, node, name, [x])
        )
    for target, name in BINARY.items():
        packet, overload = target.split(".")
        lowers(getattr(getattr(aten, packet), overload))(
            lambda graph, node, a, b, name=name: _pointwise(graph, node, name, [a, b])
        )


_register()


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(graph: Graph, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _scaled(graph, node, "add", a, b, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(graph: Graph, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _scaled(graph, node, "sub", a, b, alpha)


def _scaled(graph: Graph, node: fx.Node, name: str, a: Any, b: Any, alpha: Any) -> Value:
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        name = {"add": "logical_or", "sub": "logical_xor"}[name]
    if alpha != 1:
        if not isinstance(b, Value):
            b = full(b, (), dtype)
        b = combine("mul", [b, alpha], b.size, dtype, dtype)
    return combine(name, [a, b], shape_of(node), dtype, dtype)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(graph: Graph, node: fx.Node, a: Any, b: Any) -> Value:
    return _pointwise(graph, node, "div", [a, b])


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(graph: Graph, node: fx.Node, a: Any, b: Any, rounding_mode: Any = None) -> Value:
    name = {None: "div", "floor": "div_floor", "trunc": "div_trunc"}[rounding_mode]
    return _pointwise(graph, node, name, [a, b])


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(graph: Graph, node: fx.Node, a: Any, b: Any) -> Any:
    dtype = node.meta["val"].dtype
    size = shape_of(node)
    if not isinstance(b, Value) and b in (1, 2, 3, 0.5, -0.5, -1) and dtype.is_floating_point:
        if b in (0.5, -0.5, -1):
            name = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[b]
            return combine(name, [a], size, dtype, dtype)
        result = a
        for _ in range(int(b) - 1):
            result = combine("mul", [result, a], size, dtype, dtype)
        return cast(result, dtype)
    if not dtype.is_floating_point:
        return NotImplemented
    return combine("pow", [a, b], size, dtype, dtype)


@lowers(aten.where.self)
def where(graph: Graph, node: fx.Node, condition: Any, a: Any, b: Any) -> Value:
    return select(condition, a, b, shape_of(node), node.meta["val"].dtype)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(graph: Graph, node: fx.Node, x: Value, low: Any = None, high: Any = None) -> Value:
    dtype, size = node.meta["val"].dtype, shape_of(node)
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            x = combine(name, [x, bound], size, dtype, dtype)
    return cast(broadcast(x, size), dtype)


@lowers(aten.gelu.default)
def gelu(graph: Graph, node: fx.Node, x: Value, approximate: str = "none") -> Value:
    return _pointwise(graph, node, "gelu" if approximate == "none" else "gelu_tanh", [x])


@lowers(aten.hardtanh.default)
def hardtanh(graph: Graph, node: fx.Node, x: Value, low: Any = -1.0, high: Any = 1.0) -> Value:
    return clamp(graph, node, x, low, high)


@lowers(aten.leaky_relu.default)
def leaky_relu(graph: Graph, node: fx.Node, x: Value, slope: Any = 0.01) -> Value:
    dtype, size = node.meta["val"].dtype, shape_of(node)
    negative = combine("mul", [x, slope], size, dtype, dtype)
    return select(combine("gt", [x, 0], size, torch.bool, dtype), x, negative, size, dtype)


@lowers(aten.elu.default)
def elu(
    graph: Graph, node: fx.Node, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1
) -> Value:
    dtype, size = node.meta["val"].dtype, shape_of(node)
    low = combine(
        "expm1", [combine("mul", [x, input_scale], size, dtype, dtype)], size, dtype, dtype
    )
    low = combine("mul", [low, float(alpha) * float(scale)], size, dtype, dtype)
    high = combine("mul", [x, scale], size, dtype, dtype)
    return select(combine("gt", [x, 0], size, torch.bool, dtype), high, low, size, dtype)


@lowers(aten._to_copy.default, prims.convert_element_type.default, aten.clone.default)
def to_copy(graph: Graph, node: fx.Node, x: Value, *rest: Any, **options: Any) -> Any:
    if options.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return copied(x, node.meta["val"].dtype)


@lowers(aten.copy.default)
def copy(graph: Graph, node: fx.Node, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return copied(broadcast(source, shape_of(node)), node.meta["val"].dtype)


def copied(x: Value, dtype: torch.dtype) -> Value:
    """A copy, which gets its own memory, so that no later change of ``x`` shows in it."""
    return Value(dtype, x.size, x.fn) if x.dtype == dtype else cast(x, dtype)


@lowers(aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def alias(graph: Graph, node: fx.Node, x: Value) -> Value:
    return x


@lowers(
    aten.full.default, aten.full_like.default, aten.scalar_tensor.default,
    aten.empty.memory_format,
)  # fmt: skip
def filled(graph: Graph, node: fx.Node, *args: Any, **options: Any) -> Value:
    first = node.target is aten.scalar_tensor.default
    value = 0 if node.target is aten.empty.memory_format else args[0 if first else 1]
    return full(value, shape_of(node), node.meta["val"].dtype)


@lowers(prims.iota.default)
def iota(graph: Graph, node: fx.Node, length: Any, *, start: Any, step: Any, **rest: Any) -> Value:
    dtype = node.meta["val"].dtype
    return Value(dtype, shape_of(node), lambda at: Number(start + at[0] * step, dtype))


@lowers(aten.arange.start_step)
def arange(graph: Graph, node: fx.Node, start: Any, end: Any, step: Any = 1, **rest: Any) -> Any:
    dtype = node.meta["val"].dtype
    if not all(isinstance(x, int | Index) for x in (start, step)):
        return NotImplemented
    return Value(dtype, shape_of(node), lambda at: Number(start + at[0] * step, dtype))
