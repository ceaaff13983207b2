"""What traces and the policy of CUDA graphs are told of a compiled graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from compiler.graph import FallbackOp, Graph, KernelOp
from compiler.ir import Buffer
from compiler.runtime.rowwise import works_by_rows
from compiler.runtime.trace import Facts

aten = torch.ops.aten
# operations whose results' form depends on numbers: the host waits for them
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2,
    aten.equal, aten.item,
}  # fmt: skip
_number = itertools.count()


def facts_of(half: str, gm: fx.GraphModule, graph: Graph, static: Sequence[int]) -> Facts:
    """The facts of an ATen graph and what it was lowered to.

    ``static``: which of its inputs are a model's parameters and buffers. In a backward half the
    tensors that forward saved count as such: they are that graph's results, and stay in place.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    targets = [n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    parameters = list(static)
    if half.startswith("backward"):
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        parameters = [k for k, name in enumerate(names) if not name.startswith("tangents")]
    host = [str(t) for t in targets if t.overloadpacket in WAITING]
    host += [op.target.__name__ for op in graph.ops
             if isinstance(op, FallbackOp) and op.effect]  # fmt: skip
    written = {b for op in graph.ops for b in op.writes()}
    sought = {b for op in graph.ops if isinstance(op, KernelOp) and op.by_address
              for b in op.reads()}  # fmt: skip
    return Facts(
        f"{half} {next(_number)}",
        tuple(parameters),
        tuple(k for k, b in enumerate(graph.inputs) if isinstance(b, Buffer) and b in written),
        tuple(dict.fromkeys(host)),
        tuple(dict.fromkeys(
            str(t) for t in targets if torch.Tag.nondeterministic_seeded in t.tags
        )),
        half == "inference" and works_by_rows(gm),  # what forward saves has the rows of its call
        tuple(k for k, b in enumerate(graph.inputs) if isinstance(b, Buffer) and b in sought),
    )  # fmt: skip
