"""Matrix products as calls of the linear kernel, which packs the second matrix on the way.

``mm(a, b)`` is a linear layer with weight b^T. Few rows go without packing, and a^T b with both
row-major, which is what the gradient of a weight is, goes to the kernel made for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiler import compat
from compiler.codegen.expressions import index_text
from compiler.graph import FallbackOp, Graph, KernelOp, sizes
from compiler.ir import Index, Integer, Layout, Value
from compiler.kernels import linear
from compiler.kernels.checked import Sums
from compiler.lower import aten, lowers
from compiler.lowerings.pointwise import shape_of
from compiler.runtime import autotune
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


def packed_weight(
    graph: Graph, weight: Layout, rows: Index | None, dtype: torch.dtype, note: str
) -> tuple[Layout, str]:
    """A weight (outputs, inputs) in the kernel's order, and the C++ condition of going without.

    With few rows packing costs more than it brings, if the weight can be read as it is (``rows``
    None: the kernel wants it packed). A frozen weight is packed once for all.
    """
    outputs, inputs = weight.size
    packed = scratch(graph, packed_numbers(outputs, inputs, dtype), dtype)
    few = "false"
    plain = (weight.stride[1] == 1 or inputs == 1) and weight.stride[0] != 0  # 0 means packed
    if rows is not None and plain and not graph.is_frozen(weight.buffer):
        few = f"{index_text(rows)} <= {linear.PLAIN_ROWS}"
    steps = f"{index_text(weight.stride[0])}, {index_text(weight.stride[1])}"

    def emit(code: Any, problem: int) -> None:
        code.add(
            f"if (!({few})) pack_{SUFFIX[dtype]}({pointer(weight)}, {steps}, "
            f"{index_text(outputs)}, {index_text(inputs)}, {packed.buffer.name}, threads);"
        )

    graph.ops.append(KernelOp("pack", [weight], [packed], [f"pack_{SUFFIX[dtype]}"], emit, note))
    return packed, few


def checksums(graph: Graph, weights: Sequence[Layout], what: str) -> Layout:
    """The addresses of the weights' checksums, (..,) i64: see ``kernels.checked.Sums``.

    They are taken when a weight was changed; of a weight that the graph itself makes, at each call.
    """
    lasting = all(w.buffer in graph.inputs or w.buffer.kind == "constant" for w in weights)
    tables = what == "table_sums"
    sums = Sums(f"{what}{len(graph.ops)}", tables, fresh=not lasting)
    count = len(weights) * (2 if tables else 1)
    out = graph.buffer(torch.int64, (Integer(count),), note=what)
    graph.ops.append(FallbackOp(sums, (list(weights),), {}, list(weights), [out], False, what))
    return out.layout()


def reporting(call: str, problem: int) -> list[str]:
    """C++ of a call, cut before ``threads``, of a kernel that says what is wrong."""
    return [
        "Int found[4] = {0, 0, 0, 0};",
        f"{call}, threads, found);",
        f"if (found[0]) report({problem}, found[0], found[1], found[2], found[3]);",
    ]


def turned(layout: Layout) -> Layout:
    """The transpose of a matrix."""
    return Layout(layout.buffer, layout.size[::-1], layout.stride[::-1], layout.offset)


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
    if graph.autotune and not graph.checksums and (way := _fastest(node, dtype)) != "ours":
        return NotImplemented if way == "PyTorch" else _by_onednn(graph, node, a, b, bias)
    out = graph.buffer(dtype, shape_of(node), note=node.name).layout()
    left = graph.realize(a)
    if bias is None and left.stride[0] == 1 and left.stride[1] != 1:
        return _weight_gradient(graph, node, left, b)
    left = graph.rows(a)
    weight = turned(_small_step(weight_layout(graph, b)))  # (N, K)
    packed, few = packed_weight(graph, weight, a.size[0], dtype, node.name)
    line = None if bias is None else graph.dense(bias)
    if graph.checksums:
        return _checked(graph, node.name, left, weight, packed, few, line, out)

    def emit(code: Any, problem: int) -> None:
        m, k = (index_text(n) for n in left.size)
        start = "nullptr" if line is None else pointer(line)
        code.add(
            f"const bool few = {few};",
            f"linear_{SUFFIX[dtype]}({pointer(left)}, {row(left)}, {m}, "
            f"few ? {pointer(weight)} : {packed.buffer.name}, "
            f"few ? {index_text(weight.stride[0])} : 0, {k}, {index_text(weight.size[0])}, "
            f"{pointer(out)}, {row(out)}, {start}, nullptr, 0, 0, threads);",
        )

    reads = [left, weight, packed, *([] if line is None else [line])]
    names = [f"linear_{SUFFIX[dtype]}"]
    graph.ops.append(KernelOp("linear", reads, [out], names, emit, node.name))
    return out.value()


def _checked(
    graph: Graph, note: str, left: Layout, weight: Layout, packed: Layout, few: str,
    line: Layout | None, out: Layout,
) -> Value:  # fmt: skip
    """The product as a chain of one layer, verified."""
    suffix = SUFFIX[out.buffer.dtype]
    sums = checksums(graph, [weight], "weight_sums")

    def emit(code: Any, problem: int) -> None:
        m, k = (index_text(n) for n in left.size)
        start = "0" if line is None else f"(Int){pointer(line)}"
        code.add(
            f"Int layer[] = {{(Int)({few} ? {pointer(weight)} : {packed.buffer.name}), "
            f"{few} ? {index_text(weight.stride[0])} : 0, {start}, {k}, "
            f"{index_text(weight.size[0])}, 0, (Int){pointer(out)}, {row(out)}, 0, 0, 0, 0}};"
        )
        given = f"{pointer(left)}, {row(left)}, {m}, layer, {sums.buffer.name}, 1"
        code.add(*reporting(f"mlp_checked_{suffix}({given}", problem))

    reads = [left, weight, packed, sums, *([] if line is None else [line])]
    names = [f"mlp_checked_{suffix}"]
    graph.ops.append(KernelOp("checked linear", reads, [out], names, emit, note))
    return out.value()


def _fastest(node: fx.Node, dtype: torch.dtype) -> str:
    """Which product is the fastest for a node's example sizes: ours, PyTorch's or oneDNN's."""
    a, b = (n.meta["val"] for n in node.all_input_nodes[-2:])
    m, k, n = (compat.example_size(x) for x in (*a.shape, b.shape[1]))
    with compat.real_tensors():
        left, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        ways = {
            "ours": _native(left, weight),
            "PyTorch": lambda: torch.mm(left, weight.t()),
        }
        if compat.has_onednn() and b.stride()[0] == 1 and b.stride()[1] == b.shape[0]:
            ways["oneDNN"] = lambda: torch.ops.dlrm.onednn_linear(left, weight, None)
        return autotune.choose(f"mm {m} x {k} x {n} {dtype}, {len(ways)} ways", ways)


def _native(x: Tensor, weight: Tensor) -> Callable[[], object]:
    """Our product as generated code calls it, without the checks of its Python face."""
    library, suffix = linear.library(), SUFFIX[x.dtype]
    rows, outputs, inputs = x.shape[0], *weight.shape
    pack, product = (getattr(library, f"{name}_{suffix}") for name in ("pack", "linear"))
    size = getattr(library, f"packed_size_{suffix}")(outputs, inputs)
    packed, out = x.new_empty(size), x.new_empty(rows, outputs)
    threads = torch.get_num_threads()
    few = rows <= linear.PLAIN_ROWS

    def run() -> Tensor:
        if not few:
            pack(weight.data_ptr(), inputs, 1, outputs, inputs, packed.data_ptr(), threads)
        data, row = (weight, inputs) if few else (packed, 0)
        product(
            *(x.data_ptr(), inputs, rows, data.data_ptr(), row, inputs, outputs),
            *(out.data_ptr(), outputs, None, None, 0, 0, threads),
        )
        return out

    return run


def _by_onednn(graph: Graph, node: fx.Node, a: Value, b: Value, bias: Value | None) -> Value:
    meta = node.meta["val"]
    weight = turned(graph.realize(b))
    inputs = [graph.rows(a), weight, *([] if bias is None else [graph.dense(bias)])]
    out = graph.buffer(meta.dtype, sizes(meta.shape), note=node.name)
    arguments = (*inputs, *([None] if bias is None else []))
    graph.ops.append(
        FallbackOp(
            torch.ops.dlrm.onednn_linear.default, arguments, {}, inputs, [out], False, node.name
        )
    )
    return out.value()


def _weight_gradient(graph: Graph, node: fx.Node, left: Layout, b: Value) -> Value:
    """a^T b for a (B, N) and b (B, K), summed in f32."""
    dtype = node.meta["val"].dtype
    right = graph.rows(b)
    out = graph.buffer(torch.float32, shape_of(node), note=node.name).layout()
    g = turned(left)

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
    left = graph.rows(a)
    right = graph.realize(b)
    if 1 not in right.stride[1:]:
        right = graph.dense(b)
    out = graph.buffer(dtype, shape_of(node), note=node.name).layout()
    numbers = packed_numbers(b.size[2], a.size[2], dtype)

    def emit(code: Any, problem: int) -> None:
        count, m, k = (index_text(n) for n in left.size)
        n, name = index_text(right.size[2]), SUFFIX[dtype]
        ctype = "float" if dtype == torch.float32 else "bf16"
        of_a, of_b, of_out = (
            f"{pointer(x)} + one * ({index_text(x.stride[0])})" for x in (left, right, out)
        )
        code.add(
            f"#pragma omp parallel for num_threads(threads) "
            f"if ({count} * {m} * {k} * {n} > 200000)",
            f"for (Int one = 0; one < {count}; one++) {{",
            f"{ctype}* const packed = ({ctype}*)std::aligned_alloc(64, "
            f"aligned(({index_text(numbers)}) * sizeof({ctype})));",
            f"pack_{name}({of_b}, {index_text(right.stride[2])}, {index_text(right.stride[1])}, "
            f"{n}, {k}, packed, 1);",
            f"linear_{name}({of_a}, {index_text(left.stride[1])}, {m}, packed, 0, {k}, {n}, "
            f"{of_out}, {n}, nullptr, nullptr, 0, 0, 1);",
            "std::free(packed);",
            "}",
        )

    names = [f"{x}_{SUFFIX[dtype]}" for x in ("pack", "linear")]
    graph.ops.append(KernelOp("batched product", [left, right], [out], names, emit, node.name))
    return out.value()
