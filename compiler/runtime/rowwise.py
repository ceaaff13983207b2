"""Whether a graph computes each row of its results from the same row of its inputs alone.

Then rows may be added to fill a bucket, and cut off the results. Rows are the first dimension of
tensors whose first size is the graph's one symbolic size. The test is by a list of operations: what
is not on it does not work by rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def works_by_rows(gm: fx.GraphModule) -> bool:
    """Whether rows can be added to every input that has them, without changing the others."""
    symbols = {
        str(n) for node in gm.graph.nodes if node.op == "placeholder"
        for n in getattr(node.meta.get("val"), "shape", ()) if not isinstance(n, int)
    }  # fmt: skip
    if len(symbols) != 1:
        return False
    rows = symbols.pop()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            if not _form(value, rows):
                return False
        elif node.op == "call_function" and not _by_rows(node, rows):
            return False
        elif node.op == "get_attr":
            continue
        elif node.op == "output":
            found = [a.meta.get("val") for a in node.all_input_nodes]
            if not all(not isinstance(v, Tensor) or _has(v, rows) for v in found):
                return False
    return True


def _has(value: Any, rows: str) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and str(value.shape[0]) == rows


def _form(value: Tensor, rows: str) -> bool:
    """Whether rows are nowhere but in the first dimension."""
    rest = value.shape[1:] if _has(value, rows) else value.shape
    return all(isinstance(n, int) for n in rest)


def _by_rows(node: fx.Node, rows: str) -> bool:
    found = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    if not found:  # a size, or what is computed from sizes
        return not any(isinstance(a.meta.get("val"), Tensor) for a in node.all_input_nodes)
    if not all(_form(v, rows) for v in found):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # one of several results of an operation, which was looked at
    given = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    if not any(_has(a.meta["val"], rows) for a in given):  # computed from what has no rows
        return not any(_has(v, rows) for v in found) or node.target in _MADE
    if not all(_has(v, rows) for v in found):
        return False  # a sum over rows, or the like
    packet = node.target.overloadpacket
    if torch.Tag.pointwise in node.target.tags:
        most = max(v.dim() for v in found)
        # a row vector of as many numbers as there are rows would be spread over columns
        return all(a.meta["val"].dim() == most or not _has(a.meta["val"], rows) for a in given)
    test = _TESTS.get(packet)
    return test is not None and test(node, rows)


_MADE = {aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format}


def _always(node: fx.Node, rows: str) -> bool:
    return True


def _first_alone(node: fx.Node, rows: str) -> bool:
    """Only the first tensor has rows: the left side of a product."""
    return not any(_has(a.meta.get("val"), rows) for a in node.all_input_nodes if a != _left(node))


def _left(node: fx.Node) -> Any:
    return node.args[1] if node.target.overloadpacket is aten.addmm else node.args[0]  # type: ignore[union-attr]


def _not_rows(node: fx.Node, rows: str) -> bool:
    """The dimension that it works along is not the first."""
    return _dims(node, 1, 0)


def _slice(node: fx.Node, rows: str) -> bool:
    """A part of another dimension, or all rows."""
    given: list[Any] = [*node.args[1:], 0, None, None, 1]
    whole = given[:2] in ([0, None], [0, 0]) and len(node.args) <= 4
    return (whole and given[2] in (None, sys.maxsize)) or _not_rows(node, rows)


def _normalized(node: fx.Node, rows: str) -> bool:
    """Layer normalization over other dimensions than the first."""
    return len(node.args[1]) < node.args[0].meta["val"].dim()  # type: ignore[arg-type,union-attr]


def _all_but_rows(node: fx.Node, rows: str) -> bool:
    """The dimensions that are reduced do not include the first."""
    return len(node.args) > 1 and bool(node.args[1]) and _dims(node, 1, None)


def _dims(node: fx.Node, at: int, default: int | None) -> bool:
    given = node.args[at] if len(node.args) > at else default
    dims = given if isinstance(given, list | tuple) else [given]
    source = node.args[0]
    first = source[0] if isinstance(source, list | tuple) else source
    rank = first.meta["val"].dim()  # type: ignore[union-attr]
    return all(isinstance(d, int) and d % rank != 0 for d in dims)


def _keeps_first(node: fx.Node, rows: str) -> bool:
    """A permutation that leaves the first dimension first."""
    order: Any = node.args[1]
    return bool(order[0] == 0)


def _looked_up(node: fx.Node, rows: str) -> bool:
    """Ids have rows, the table has none."""
    return not _has(node.args[0].meta["val"], rows)  # type: ignore[union-attr]


_TESTS: dict[Any, Callable[[fx.Node, str], bool]] = {
    **dict.fromkeys((aten.mm, aten.addmm), _first_alone),
    **dict.fromkeys((aten.bmm, aten.clone, aten.view, aten._unsafe_view, aten.reshape), _always),
    **dict.fromkeys((aten.expand, aten.alias, aten.detach, aten._to_copy), _always),
    **dict.fromkeys((aten.cat, aten.select, aten.squeeze), _not_rows),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten.cumsum), _not_rows),
    aten.unsqueeze: lambda node, rows: bool(node.args[1] != 0),
    aten.permute: _keeps_first,
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin), _all_but_rows),
    aten.embedding: _looked_up,
    aten.slice: _slice,
    aten.native_layer_norm: _normalized,
}
