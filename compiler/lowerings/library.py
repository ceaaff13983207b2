"""Matrix products on a GPU: PyTorch's (cuBLAS, hipBLAS), into memory that the graph has planned.

PyTorch's settings of precision hold (``torch.backends.cuda.matmul``), as in eager mode.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from compiler.codegen.wrapper import view_text
from compiler.graph import Graph, KernelOp
from compiler.ir import Layout, Value
from compiler.lower import aten, lowers
from compiler.lowerings.pointwise import shape_of


@lowers(aten.mm.default, aten.bmm.default, triton=True)
def product(graph: Graph, node: fx.Node, a: Value, b: Value) -> Any:
    return _call(graph, node, "mm" if len(a.size) == 2 else "bmm", [a, b])


@lowers(aten.addmm.default, triton=True)
def addmm(
    graph: Graph, node: fx.Node, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if beta != 1 or alpha != 1:
        return NotImplemented
    return _call(graph, node, "addmm", [bias, a, b])


def _call(graph: Graph, node: fx.Node, name: str, given: list[Value]) -> Value:
    layouts: list[Layout] = [graph.realize(value) for value in given]
    out = graph.buffer(node.meta["val"].dtype, shape_of(node), note=node.name).layout()

    def emit(code: Any, problem: int) -> None:
        arguments = ", ".join(map(view_text, layouts))
        code.add(f"torch.{name}({arguments}, out={view_text(out)})")

    graph.ops.append(KernelOp(f"PyTorch's {name}", layouts, [out], [], emit, node.name))
    return out.value()
