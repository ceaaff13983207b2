"""Reading by computed places: gather, index, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import Dummy
from torch import fx

from compiler.graph import Graph
from compiler.ir import Expr, Index, Load, Op, Value
from compiler.lower import aten, lowers
from compiler.lowerings.pointwise import shape_of
from compiler.values import as_expr, broadcast, constant


def looked_up(
    graph: Graph, x: Value, places: Sequence[Any], size: Any, note: str, wrap: bool = True
) -> Value:
    """``x`` at computed places: each of ``places`` maps an index to an Index or an int Expr.

    A place outside its dimension is reported when the graph has run; negative ones count from the
    end if ``wrap``.
    """
    layout = graph.realize(x, note)
    dims = layout.size

    def fn(at: tuple[Index, ...]) -> Expr:
        index: list[Index] = []
        bound = []
        for d, place in enumerate(places):
            found = place(at)
            if isinstance(found, Expr):
                symbol = Dummy("t", integer=True)
                limit = constant(dims[d], torch.int64)
                name = "place" if wrap else "place_unsigned"
                checked = Op(name, (as_expr(found, torch.int64), limit), torch.int64)
                bound.append((symbol, checked))
                index.append(symbol)
            else:
                index.append(found)
        return Load(layout.buffer, layout.index(index), tuple(bound), note)

    return Value(x.dtype, tuple(size), fn)


@lowers(aten.embedding.default)
def embedding(
    graph: Graph, node: fx.Node, weight: Value, ids: Value, *rest: Any, **options: Any
) -> Value:
    ids = _stored(graph, ids, node)
    rank = len(ids.size)
    return looked_up(
        graph, weight, [lambda at: ids.fn(at[:rank]), lambda at: at[rank]], shape_of(node),
        node.name, wrap=False,
    )  # fmt: skip


@lowers(aten.gather.default)
def gather(
    graph: Graph, node: fx.Node, x: Value, dim: int, index: Value, sparse_grad: bool = False
) -> Any:
    if not x.size or not index.size:
        return NotImplemented
    dim %= len(x.size)
    index = _stored(graph, index, node)
    places = [
        (lambda at: index.fn(at)) if d == dim else (lambda at, d=d: at[d])
        for d in range(len(x.size))
    ]
    return looked_up(graph, x, places, shape_of(node), node.name, wrap=False)


@lowers(aten.index_select.default)
def index_select(graph: Graph, node: fx.Node, x: Value, dim: int, index: Value) -> Any:
    if not x.size:
        return NotImplemented
    dim %= len(x.size)
    index = _stored(graph, index, node)
    flat = (lambda at: index.fn(())) if not index.size else (lambda at: index.fn((at[dim],)))
    places = [flat if d == dim else (lambda at, d=d: at[d]) for d in range(len(x.size))]
    return looked_up(graph, x, places, shape_of(node), node.name, wrap=False)


@lowers(aten.index.Tensor)
def index(graph: Graph, node: fx.Node, x: Value, indices: Sequence[Any]) -> Any:
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in given):
        return NotImplemented  # a mask: how many it picks is not known before
    size = shape_of(node)
    shared = max((len(indices[d].size) for d in given), default=0)
    # neighbouring index tensors keep their place, others go to the front (as in NumPy)
    together = given == list(range(given[0], given[-1] + 1))
    lead = given[0] if together else 0
    common = size[lead : lead + shared]
    wide = {d: broadcast(_stored(graph, indices[d], node), common) for d in given}
    rest = [d for d in range(len(x.size)) if d not in given]
    outer = [*range(lead), *range(lead + shared, len(size))]
    at_dim = dict(zip(rest, outer, strict=True))
    places = [
        (lambda at, d=d: wide[d].fn(at[lead : lead + shared]))
        if d in wide
        else (lambda at, d=d: at[at_dim[d]])
        for d in range(len(x.size))
    ]
    return looked_up(graph, x, places, size, node.name)


def _stored(graph: Graph, ids: Value, node: fx.Node) -> Value:
    """Ids in memory, since each serves a whole row."""
    return graph.realize(ids, node.name).value()
