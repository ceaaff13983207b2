"""Views: the same elements under another index. A view of memory stays one, for kernels to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import simplify
from torch import fx

from compiler.graph import Graph
from compiler.ir import Const, Index, Integer, Layout, Number, Op, Sizes, Value, contiguous, same
from compiler.lower import aten, lowers
from compiler.lowerings.pointwise import shape_of
from compiler.values import as_expr, broadcast, cast, constant

ONE = Integer(1)


def groups(old: Sizes, new: Sizes) -> list[tuple[list[int], list[int]]] | None:
    """Which dimensions of ``old`` hold the same elements as which of ``new``; size 1 is left out.

    >>> groups((Integer(6), Integer(4)), (Integer(2), Integer(3), Integer(4)))
    [([0], [0, 1]), ([1], [2])]
    """
    left = [k for k, n in enumerate(old) if n != 1]
    right = [k for k, n in enumerate(new) if n != 1]
    found = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        more, size = old[a[0]], new[b[0]]
        while not same(more, size):
            ratio = simplify(size / more)
            if left and ratio.as_numer_denom()[1] == 1:
                a.append(left.pop(0))
                more = more * old[a[-1]]
            elif right:
                b.append(right.pop(0))
                size = size * new[b[-1]]
            elif left:
                a.append(left.pop(0))
                more = more * old[a[-1]]
            else:
                return None
        found.append((a, b))
    return None if left or right else found


def reshape(graph: Graph, x: Value, size: Sizes) -> Value:
    """The elements in row-major order under another shape."""
    if tuple(x.size) == tuple(size):
        return x
    if any(n == 0 for n in size):
        return Value(x.dtype, size, lambda at: constant(0, x.dtype))
    matched = groups(x.size, size)
    if x.layout is not None and matched is not None:
        strides = _strides(x.layout, size, matched)
        if strides is not None:
            return Layout(x.layout.buffer, size, strides, x.layout.offset).value()
    if x.layout is None and matched is not None and all(len(a) == 1 for a, _ in matched):
        rank = len(x.size)

        def place(at: tuple[Index, ...]) -> tuple[Index, ...]:
            index: list[Index] = [Integer(0)] * rank
            for (old,), new in matched:
                steps = contiguous([size[k] for k in new])
                index[old] = sum((at[k] * s for k, s in zip(new, steps, strict=True)), Integer(0))
            return tuple(index)

        return x.view(size, place)
    dense = graph.dense(x)
    return Layout(dense.buffer, size, contiguous(size), dense.offset).value()


def _strides(layout: Layout, size: Sizes, matched: Any) -> Sizes | None:
    strides: list[Index] = list(contiguous(size))
    for old, new in matched:
        for outer, inner in zip(old, old[1:], strict=False):
            if not same(layout.stride[outer], layout.stride[inner] * layout.size[inner]):
                return None
        steps = contiguous([size[k] for k in new])
        for k, step in zip(new, steps, strict=True):
            strides[k] = step * layout.stride[old[-1]]
    return tuple(strides)


@lowers(aten.view.default)
def view(graph: Graph, node: fx.Node, x: Value, size: Any) -> Value:
    return reshape(graph, x, shape_of(node))


@lowers(aten.squeeze.dims, aten.unsqueeze.default)
def squeeze(graph: Graph, node: fx.Node, x: Value, *dims: Any) -> Value:
    return reshape(graph, x, shape_of(node))


def permuted(x: Value, order: Sequence[int]) -> Value:
    """``x.permute(order)``."""
    order = [d % len(x.size) for d in order]
    size = tuple(x.size[d] for d in order)
    if x.layout is not None:
        stride = tuple(x.layout.stride[d] for d in order)
        return Layout(x.layout.buffer, size, stride, x.layout.offset).value()
    back = [order.index(d) for d in range(len(order))]
    return x.view(size, lambda at: tuple(at[k] for k in back))


@lowers(aten.permute.default)
def permute(graph: Graph, node: fx.Node, x: Value, order: Any) -> Value:
    return permuted(x, order)


@lowers(aten.expand.default)
def expand_to(graph: Graph, node: fx.Node, x: Value, size: Any, implicit: bool = False) -> Value:
    size = shape_of(node)
    if x.layout is None:
        return broadcast(x, size)
    lead = len(size) - len(x.size)
    stride = [Integer(0)] * lead
    for own, step, wanted in zip(x.layout.size, x.layout.stride, size[lead:], strict=True):
        stride.append(Integer(0) if own == 1 and wanted != 1 else step)
    return Layout(x.layout.buffer, size, tuple(stride), x.layout.offset).value()


def sliced(x: Value, dim: int, start: Index, length: Index, step: Index = ONE) -> Value:
    """``length`` places of dimension ``dim`` from ``start`` on."""
    size = (*x.size[:dim], length, *x.size[dim + 1 :])
    if x.layout is not None:
        stride = list(x.layout.stride)
        offset = x.layout.offset + start * stride[dim]
        stride[dim] = stride[dim] * step
        return Layout(x.layout.buffer, size, tuple(stride), offset).value()
    return x.view(size, lambda at: (*at[:dim], start + at[dim] * step, *at[dim + 1 :]))


def _start(start: Any, size: Index) -> Index | None:
    """A slice's start counted from 0 and held to the size; None where that is not known."""
    start = Integer(0) if start is None else start
    if not isinstance(start, Index):
        start = Integer(start)
    if start.is_number:
        if start < 0:
            return start + size if not size.is_number else max(Integer(0), start + size)
        if size.is_number:
            return min(start, size)
        return start  # the traced output size has been guarded on it
    return start if start.is_nonnegative else None


@lowers(aten.slice.Tensor)
def slice_(
    graph: Graph, node: fx.Node, x: Value, dim: int = 0, start: Any = None, end: Any = None,
    step: Any = 1,
) -> Any:  # fmt: skip
    dim %= len(x.size)
    begin = _start(start, x.size[dim])
    if begin is None:
        return NotImplemented
    return sliced(x, dim, begin, shape_of(node)[dim], Integer(step))


@lowers(aten.select.int)
def select_(graph: Graph, node: fx.Node, x: Value, dim: int, index: Any) -> Any:
    dim %= len(x.size)
    if not isinstance(index, Index):
        index = Integer(index)
    if not index.is_number and not index.is_nonnegative:
        return NotImplemented
    if index.is_number and index < 0:
        index = index + x.size[dim]
    one = sliced(x, dim, index, Integer(1))
    if one.layout is not None:
        layout = one.layout
        size = (*layout.size[:dim], *layout.size[dim + 1 :])
        stride = (*layout.stride[:dim], *layout.stride[dim + 1 :])
        return Layout(layout.buffer, size, stride, layout.offset).value()
    size = (*one.size[:dim], *one.size[dim + 1 :])
    return one.view(size, lambda at: (*at[:dim], Integer(0), *at[dim:]))


@lowers(aten.diagonal.default)
def diagonal(
    graph: Graph, node: fx.Node, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    a, b = dim1 % len(x.size), dim2 % len(x.size)
    rest = [d for d in range(len(x.size)) if d not in (a, b)]

    def place(at: tuple[Index, ...]) -> tuple[Index, ...]:
        index: list[Index] = [Integer(0)] * len(rest) + [Integer(0)] * 2
        for d, i in zip(rest, at[:-1], strict=True):
            index[d] = i
        index[a] = at[-1] + max(0, -offset)
        index[b] = at[-1] + max(0, offset)
        return tuple(index)

    return x.view(shape_of(node), place)


@lowers(aten.flip.default)
def flip(graph: Graph, node: fx.Node, x: Value, dims: Any) -> Value:
    turned = {d % len(x.size) for d in dims}
    size = x.size

    def place(at: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(size[d] - 1 - i if d in turned else i for d, i in enumerate(at))

    return x.view(size, place)


@lowers(aten.cat.default)
def cat(graph: Graph, node: fx.Node, tensors: Sequence[Value], dim: int = 0) -> Value:
    meta = node.meta["val"]
    size = shape_of(node)
    dim = dim % len(size)
    buffer = graph.buffer(meta.dtype, size, note=node.name)
    whole, start = buffer.value(), Integer(0)
    for part in tensors:
        if len(part.size) != len(size):  # torch.cat lets an empty vector pass
            continue
        place = sliced(whole, dim, start, part.size[dim]).layout
        assert place is not None
        graph.store(cast(part, meta.dtype), place, note=node.name)
        start = start + part.size[dim]
    return whole


@lowers(aten.constant_pad_nd.default)
def pad(graph: Graph, node: fx.Node, x: Value, amounts: Any, value: Any = 0) -> Any:
    size, rank = shape_of(node), len(x.size)
    before = [Integer(0)] * rank
    for k in range(len(amounts) // 2):
        before[rank - 1 - k] = Integer(0) + amounts[2 * k]
    if any(n.is_number and n < 0 for n in before):
        return NotImplemented
    own, dtype, fn = x.size, x.dtype, x.fn

    def padded(at: tuple[Index, ...]) -> Any:
        place = tuple(i - b for i, b in zip(at, before, strict=True))
        inside = within(place, own, range(rank))
        if inside is None:
            return fn(place)
        other = as_expr(constant(value, dtype), dtype)
        return Op("masked", (inside, as_expr(fn(place), dtype), other), other.dtype)

    return Value(dtype, size, padded)


def within(place: Sequence[Index], size: Sizes, dims: Any) -> Any:
    """The condition that an index lies in a tensor's dimensions ``dims``."""
    inside: Any = None
    for d in dims:
        number = Number(place[d], torch.int64)
        low = Op("ge", (number, Const(0, torch.int64)), torch.bool)
        high = Op("lt", (number, constant(size[d], torch.int64)), torch.bool)
        both = Op("logical_and", (low, high), torch.bool)
        inside = both if inside is None else Op("logical_and", (inside, both), torch.bool)
    return inside


@lowers(aten.slice_scatter.default)
def slice_scatter(
    graph: Graph, node: fx.Node, x: Value, src: Value, dim: int = 0, start: Any = None,
    end: Any = None, step: Any = 1,
) -> Any:  # fmt: skip
    dim %= len(x.size)
    begin = _start(start, x.size[dim])
    if begin is None or step != 1:
        return NotImplemented
    return _patched(x, src, dim, begin)


def _patched(x: Value, src: Value, dim: int, begin: Index) -> Value:
    """``x`` with ``src`` put over it from ``begin`` of dimension ``dim`` on."""
    base, top, dtype = x.fn, src.fn, x.dtype

    def fn(at: tuple[Index, ...]) -> Any:
        place = (*at[:dim], at[dim] - begin, *at[dim + 1 :])
        inside = within(place, src.size, [dim])
        parts = (inside, as_expr(top(place), dtype), as_expr(base(at), dtype))
        return Op("masked", parts, parts[1].dtype)

    return Value(dtype, x.size, fn)


@lowers(aten.as_strided.default)
def as_strided(
    graph: Graph, node: fx.Node, x: Value, size: Any, stride: Any, offset: Any = None
) -> Any:
    layout = graph.realize(x)
    if not layout.is_contiguous() and layout.buffer.kind != "input":
        return NotImplemented
    steps = tuple(Integer(0) + s for s in stride)
    start = layout.offset if offset is None else Integer(0) + offset
    if layout.buffer.kind == "input" and offset not in (None, 0):
        return NotImplemented  # an offset counts from the storage, which a graph does not see
    return Layout(layout.buffer, shape_of(node), steps, start).value()


@lowers(aten.repeat.default)
def repeat(graph: Graph, node: fx.Node, x: Value, times: Any) -> Any:
    size = shape_of(node)
    lead = len(size) - len(x.size)
    own = x.size
    if any(n == 0 for n in own):
        return NotImplemented

    def place(at: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(
            i if n == wanted else (Integer(0) if n == 1 else i % n)
            for i, n, wanted in zip(at[lead:], own, size[lead:], strict=True)
        )

    return x.view(size, place)
