"""Reductions, and what is made of them: means, softmax, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiler.codegen.types import computed
from compiler.graph import Graph
from compiler.ir import Index, Integer, Layout, LoopOp, Sizes, Value, loops, product
from compiler.lower import aten, lowers
from compiler.values import as_expr, cast, combine, constant


def reduce(
    graph: Graph, node: fx.Node, x: Value, kind: str, dims: Sequence[int], keep: bool,
    dtype: torch.dtype, inner: torch.dtype | None = None,
) -> Value:  # fmt: skip
    """``x`` reduced over ``dims``, computed in ``inner`` and stored as ``dtype``."""
    rank, over = len(x.size), dims
    kept = [d for d in range(rank) if d not in over]
    size: Sizes = tuple(x.size[d] for d in kept)
    at, outer = loops("i", size)
    along, within = loops("r", [x.size[d] for d in over])
    place: list[Index] = [Integer(0)] * rank
    for d, i in zip([*kept, *over], [*at, *along], strict=True):
        place[d] = i
    body = as_expr(x.fn(tuple(place)), inner or dtype)
    buffer = graph.buffer(dtype, size, note=node.name)
    if within or any(x.size[d] == 0 for d in over):
        graph.ops.append(
            LoopOp(buffer, buffer.layout().index(at), outer, body, kind, within, node.name)
        )
    else:  # of one element each
        only = constant(0, dtype) if kind.startswith("arg") else as_expr(body, dtype)
        graph.ops.append(LoopOp(buffer, buffer.layout().index(at), outer, only, note=node.name))
    result = buffer.value()
    if keep and over:
        wide = tuple(Integer(1) if d in over else x.size[d] for d in range(rank))
        result = _kept(result, wide, kept)
    return result


def _kept(value: Value, size: Sizes, kept: Sequence[int]) -> Value:
    assert value.layout is not None
    stride: list[Index] = [Integer(1)] * len(size)
    for d, step in zip(kept, value.layout.stride, strict=True):
        stride[d] = step
    return Layout(value.layout.buffer, size, tuple(stride), value.layout.offset).value()


def _dims(x: Value, dims: Any) -> list[int]:
    """Which dimensions an argument names, counted from 0; all of them if it names none."""
    rank = len(x.size)
    if rank == 0:
        return []
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    return sorted({d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])})


@lowers(aten.sum.dim_IntList)
def sum_(
    graph: Graph, node: fx.Node, x: Value, dims: Any = None, keepdim: bool = False, *,
    dtype: Any = None,
) -> Value:  # fmt: skip
    meta = node.meta["val"]
    return reduce(graph, node, x, "sum", _dims(x, dims), keepdim, meta.dtype)


@lowers(aten.mean.dim, aten.mean.default)
def mean(
    graph: Graph, node: fx.Node, x: Value, dims: Any = None, keepdim: bool = False, *,
    dtype: Any = None,
) -> Value:  # fmt: skip
    out = node.meta["val"].dtype
    over = _dims(x, dims)
    total = reduce(graph, node, x, "sum", over, keepdim, computed(out))
    count = product([x.size[d] for d in over])
    return cast(combine("div", [total, count], total.size, computed(out), computed(out)), out)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(
    graph: Graph, node: fx.Node, x: Value, dim: Any = None, keepdim: bool = False, *,
    dtype: Any = None,
) -> Value:  # fmt: skip
    return reduce(graph, node, x, "prod", _dims(x, dim), keepdim, node.meta["val"].dtype)


@lowers(aten.amax.default, aten.max.default)
def amax(graph: Graph, node: fx.Node, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    return reduce(graph, node, x, "max", _dims(x, dims), keepdim, x.dtype)


@lowers(aten.amin.default, aten.min.default)
def amin(graph: Graph, node: fx.Node, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    return reduce(graph, node, x, "min", _dims(x, dims), keepdim, x.dtype)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(graph: Graph, node: fx.Node, x: Value, dims: Any = None, keepdim: bool = False) -> Any:
    if node.meta["val"].dtype != torch.bool:
        return NotImplemented  # any of bytes gives bytes
    return reduce(graph, node, x, "any", _dims(x, dims), keepdim, torch.bool)


@lowers(aten.argmax.default, aten.argmin.default)
def argmax(graph: Graph, node: fx.Node, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    if sum(x.size[d] != 1 for d in dims) > 1:  # the place in a flattened tensor: by PyTorch
        return NotImplemented
    kind = "argmax" if node.target is aten.argmax.default else "argmin"
    return reduce(graph, node, x, kind, dims, keepdim, torch.int64, inner=x.dtype)


@lowers(aten._softmax.default, aten._log_softmax.default)
def softmax(graph: Graph, node: fx.Node, x: Value, dim: int, half_to_float: bool) -> Value:
    out = node.meta["val"].dtype
    inner = computed(out)
    x, over = cast(x, inner), _dims(x, dim)
    top = reduce(graph, node, x, "max", over, True, inner)
    shifted = combine("sub", [x, top], x.size, inner, inner)
    powers = combine("exp", [shifted], x.size, inner, inner)
    if node.target is aten._softmax.default:
        powers = graph.realize(powers, node.name).value()
        total = reduce(graph, node, powers, "sum", over, True, inner)
        result = combine("div", [powers, total], x.size, inner, inner)
    else:
        total = reduce(graph, node, powers, "sum", over, True, inner)
        logs = combine("log", [total], total.size, inner, inner)
        result = combine("sub", [shifted, logs], x.size, inner, inner)
    return cast(result, out)


def moments(
    graph: Graph, node: fx.Node, x: Value, dims: Sequence[int], correction: Any
) -> tuple[Value, Value]:
    """Mean and variance over ``dims``, kept as size 1: two passes, as the definition."""
    inner = computed(x.dtype)
    x = cast(x, inner)
    count = product([x.size[d] for d in dims])
    total = reduce(graph, node, x, "sum", dims, True, inner)
    average = combine("div", [total, count], total.size, inner, inner)
    apart = combine("sub", [x, average], x.size, inner, inner)
    squares = combine("mul", [apart, apart], x.size, inner, inner)
    total = reduce(graph, node, squares, "sum", dims, True, inner)
    freedom: Any = count
    if correction != 0:  # never below 0
        least = combine("maximum", [count, correction], (), inner, inner)
        freedom = combine("sub", [least, correction], (), inner, inner)
    return average, combine("div", [total, freedom], total.size, inner, inner)


@lowers(aten.var.correction, aten.var_mean.correction)
def var(
    graph: Graph, node: fx.Node, x: Value, dim: Any = None, *, correction: Any = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    if not x.dtype.is_floating_point:
        return NotImplemented
    over = _dims(x, dim)
    average, variance = moments(graph, node, x, over, 1 if correction is None else correction)
    results = []
    for value in (variance, average):
        if not keepdim:
            kept = [d for d in range(len(x.size)) if d not in over]
            size, fn, rank = tuple(x.size[d] for d in kept), value.fn, len(x.size)

            def place(at: Any, kept: Any = kept, fn: Any = fn, rank: int = rank) -> Any:
                index = [Integer(0)] * rank
                for d, i in zip(kept, at, strict=True):
                    index[d] = i
                return fn(tuple(index))

            value = Value(value.dtype, size, place)
        results.append(cast(value, x.dtype))
    return results if node.target is aten.var_mean.correction else results[0]


@lowers(aten.native_layer_norm.default)
def layer_norm(
    graph: Graph, node: fx.Node, x: Value, shape: Any, weight: Any, bias: Any, eps: float
) -> Any:
    dims = list(range(len(x.size) - len(shape), len(x.size)))
    inner = computed(x.dtype)
    average, variance = moments(graph, node, x, dims, 0)
    average = graph.realize(average, node.name).value()
    spread = combine("add", [variance, eps], variance.size, inner, inner)
    scale = graph.realize(combine("rsqrt", [spread], spread.size, inner, inner), node.name).value()
    result = combine("sub", [x, average], x.size, inner, inner)
    result = combine("mul", [result, scale], x.size, inner, inner)
    if weight is not None:
        result = combine("mul", [result, weight], x.size, inner, inner)
    if bias is not None:
        result = combine("add", [result, bias], x.size, inner, inner)
    metas = node.meta["val"]
    return [cast(v, m.dtype) for v, m in zip((result, average, scale), metas, strict=True)]
