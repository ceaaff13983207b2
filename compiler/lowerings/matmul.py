"""Matrix products as calls of the linear kernel, which packs the second matrix on the way.

``mm(a, b)`` is a linear layer with weight b^T. Few rows go without packing, and a^T b with both
row-major, which is what the gradient of a weight is, goes to the kernel made for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiler.codegen.expressions import index_text
from compiler.graph import Graph, KernelOp, size
from compiler.ir import Buffer, Index, Integer, Layout, Value
from compiler.kernels import linear
from compiler.lower import aten, lowers
from compiler.lowerings.pointwise import shape_of
from compiler.values import cast

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


def pointer(layout: Layout) -> str:
    """A layout's first element, in C++."""
    if layout.offset == 0:
        return layout.buffer.name
    return f"({layout.buffer.name} + {index_text(layout.offset)})"


def row(layout: Layout) -> str:
    """How far the rows of a matrix lie apart, in C++."""
    return index_text(layout.stride[0] if len(layout.stride) > 1 else layout.size[-1])


def packed_numbers(outputs: Index, inputs: Index, dtype: torch.dtype) -> Index:
    """How many numbers a packed weight takes; an upper bound where the sizes are symbolic."""
    if outputs.is_number and inputs.is_number:
        native = linear.library()
        return Integer(getattr(native, f"packed_size_{SUFFIX[dtype]}")(int(outputs), int(inputs)))
    return (outputs + 64) * (inputs + 2)


def scratch(graph: Graph, numbers: Index, dtype: torch.dtype) -> Layout:
    """Memory for one call."""
    return graph.buffer(dtype, (numbers,), note="scratch").layout()


def weight_layout(graph: Graph, value: Value) -> Layout:
    """A matrix with a unit stride in one of its dimensions, as ``pack`` wants it."""
    layout = graph.realize(value)
    if 1 in layout.stride or any(n == 1 for n in layout.size):
        return layout
    return graph.dense(value)


def product_lines(
    code: Any, a: Layout, b: Layout, out: Layout, bias: str, packed: str, dtype: torch.dtype,
    threads: str = "threads", shift: tuple[str, str, str] = ("", "", ""),
) -> None:  # fmt: skip
    """C++ for out (M, N) = a (M, K) b (K, N) + bias; ``shift`` is added to the pointers."""
    name = SUFFIX[dtype]
    m, k = (index_text(n) for n in a.size)
    n = index_text(b.size[1])
    steps = (
        index_text(b.stride[1]),
        index_text(b.stride[0]),
    )  # from output to output, input to input
    at_a, at_b, at_out = (
        pointer(layout) + (f" + {s}" if s else "")
        for layout, s in zip((a, b, out), shift, strict=True)
    )
    ends = f"{k}, {n}, {at_out}, {row(out)}, {bias}, nullptr, 0, 0, {threads}"
    plain = b.stride[0] == 1 or b.size[0] == 1
    if plain:
        few = f"{m} <= {linear.PLAIN_ROWS}"
        code.add(
            f"if ({few}) {{", f"linear_{name}({at_a}, {row(a)}, {m}, {at_b}, {steps[0]}, {ends});"
        )
        code.add("}", "else {")
    code.add(f"pack_{name}({at_b}, {steps[0]}, {steps[1]}, {n}, {k}, {packed}, {threads});")
    code.add(f"linear_{name}({at_a}, {row(a)}, {m}, {packed}, 0, {ends});")
    if plain:
        code.add("}")


def _small_step(layout: Layout) -> Layout:
    """A layout whose dimensions of size 1 have stride 1 where that gives the unit stride."""
    stride = tuple(
        Integer(1) if n == 1 and 1 not in layout.stride else s
        for n, s in zip(layout.size, layout.stride, strict=True)
    )
    return Layout(layout.buffer, layout.size, stride, layout.offset)


@lowers(aten.mm.default)
def mm(graph: Graph, node: fx.Node, a: Value, b: Value) -> Any:
    return _product(graph, node, a, b, None)


@lowers(aten.addmm.default)
def addmm(
    graph: Graph, node: fx.Node, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if beta != 1 or alpha != 1 or len(bias.size) != 1 or bias.size != (b.size[1],):
        return NotImplemented
    return _product(graph, node, a, b, bias)


def _product(graph: Graph, node: fx.Node, a: Value, b: Value, bias: Value | None) -> Any:
    dtype = node.meta["val"].dtype
    if dtype not in SUFFIX or any(n == 0 for n in (*a.size, *b.size)):
        return NotImplemented
    out = graph.buffer(dtype, shape_of(node), note=node.name).layout()
    left = graph.realize(a)
    if bias is None and left.stride[0] == 1 and left.stride[1] != 1:
        return _weight_gradient(graph, node, left, b)
    left, right = graph.rows(a), _small_step(weight_layout(graph, b))
    packed = scratch(graph, packed_numbers(b.size[1], a.size[1], dtype), dtype)
    line = None if bias is None else graph.dense(bias)

    def emit(code: Any, problem: int) -> None:
        start = "nullptr" if line is None else pointer(line)
        product_lines(code, left, right, out, start, packed.buffer.name, dtype)

    reads = [left, right, *([] if line is None else [line])]
    names = [f"{n}_{SUFFIX[dtype]}" for n in ("pack", "linear")]
    graph.ops.append(KernelOp("linear", reads, [out, packed], names, emit, node.name))
    return out.value()


def _weight_gradient(graph: Graph, node: fx.Node, left: Layout, b: Value) -> Value:
    """a^T b for a (B, N) and b (B, K), summed in f32."""
    dtype = node.meta["val"].dtype
    right = graph.rows(b)
    out = graph.buffer(torch.float32, shape_of(node), note=node.name).layout()
    g = Layout(left.buffer, left.size[::-1], left.stride[::-1], left.offset)

    def emit(code: Any, problem: int) -> None:
        batch, outputs = (index_text(n) for n in g.size)
        inputs = index_text(right.size[1])
        code.add(
            f"weight_gradient_{SUFFIX[dtype]}({pointer(g)}, {row(g)}, {pointer(right)}, "
            f"{row(right)}, {batch}, {outputs}, {inputs}, {out.buffer.name}, {inputs}, nullptr, "
            "threads);"
        )

    names = [f"weight_gradient_{SUFFIX[dtype]}"]
    graph.ops.append(KernelOp("weight gradient", [left, right], [out], names, emit, node.name))
    return cast(out.value(), dtype)


@lowers(aten.bmm.default)
def bmm(graph: Graph, node: fx.Node, a: Value, b: Value) -> Any:
    dtype = node.meta["val"].dtype
    if dtype not in SUFFIX or any(n == 0 for n in (*a.size, *b.size)):
        return NotImplemented
    left = graph.realize(a)
    if left.stride[2] != 1 and left.size[2] != 1:
        left = graph.dense(a)
    right = graph.realize(b)
    if 1 not in right.stride[1:]:
        right = graph.dense(b)
    out = graph.buffer(dtype, shape_of(node), note=node.name).layout()
    numbers = packed_numbers(b.size[2], a.size[2], dtype)

    def matrix(layout: Layout) -> Layout:
        return Layout(layout.buffer, layout.size[1:], layout.stride[1:], layout.offset)

    def emit(code: Any, problem: int) -> None:
        count, m, k = (index_text(n) for n in left.size)
        n = index_text(right.size[2])
        ctype = "float" if dtype == torch.float32 else "bf16"
        code.add(
            f"#pragma omp parallel for num_threads(threads) if ({count} * {m} * {k} * {n} > 200000)",
            f"for (Int one = 0; one < {count}; one++) {{",
            f"{ctype}* const packed = ({ctype}*)std::aligned_alloc(64, "
            f"aligned(({index_text(numbers)}) * sizeof({ctype})));",
        )
        shift = tuple(f"one * ({index_text(x.stride[0])})" for x in (left, right, out))
        product_lines(
            code, matrix(left), matrix(right), matrix(out), "nullptr", "packed", dtype, "1", shift
        )  # fmt: skip
        code.add("std::free(packed);", "}")

    names = [f"{x}_{SUFFIX[dtype]}" for x in ("pack", "linear")]
    graph.ops.append(KernelOp("batched product", [left, right], [out], names, emit, node.name))
    return out.value()


__all__ = ["Buffer", "packed_numbers", "pointer", "row", "scratch", "size"]
