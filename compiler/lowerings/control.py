"""Control flow on tensors, and operations with effects: called in their place, around the loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiler import compat
from compiler.graph import FallbackOp, Graph
from compiler.ir import Value
from compiler.lower import fallback, lowers


@lowers(compat.with_effects)
def with_effects(
    graph: Graph, node: fx.Node, token: Value, op: Any, *args: Any, **kwargs: Any
) -> Any:
    """``token`` orders effects in the graph; here the order of steps does, so it passes through."""
    results = node.meta["val"][1:]
    found = fallback(graph, node, args, kwargs, "it has effects", op, results)
    call = graph.ops[-1]
    assert isinstance(call, FallbackOp)
    call.effect = True
    return [token, *found]


@lowers(torch.ops.higher_order.cond)
def cond(
    graph: Graph, node: fx.Node, condition: Any, then: Any, other: Any, operands: Sequence[Any]
) -> Any:
    """Both branches are compiled; one of them runs."""
    branches = [graph.branch(then), graph.branch(other)]
    args = (condition, *branches, list(operands))
    return fallback(graph, node, args, {}, "its branches are graphs of their own")


@lowers(torch.ops.higher_order.while_loop)
def while_loop(
    graph: Graph, node: fx.Node, condition: Any, body: Any, carried: Sequence[Any],
    fixed: Sequence[Any],
) -> Any:  # fmt: skip
    """Condition and body are compiled, and called in turns."""
    parts = [graph.branch(condition), graph.branch(body)]
    args = (*parts, tuple(carried), tuple(fixed))
    return fallback(graph, node, args, {}, "its body is a graph of its own")
