"""Groups of embedding bags to one call.

Bags of one width, whatever their sizes and modes, become one tensor (B, F, d). Where no gradient
is wanted that is ``dlrm::embedding_bags`` inside the graph. In training the bags run before the
graph, as an autograd function (``compiler.bags``): their backward needs the optimizer, not a graph.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compiler import compat
from compiler.bags import Lookup, Prologue
from compiler.patterns.match import Rewrite, argument, dimension, kind, rank, value

ROWS = (torch.float32, torch.bfloat16)
ROWS_ON_GPU = (*ROWS, torch.float16)


@dataclass(eq=False)
class Bag:
    """One table's lookup: the node it stands for, and its parts."""

    node: fx.Node
    table: Any
    ids: Any
    offsets: Any = None
    weights: Any = None
    mode: str = "sum"
    padding: int = -1
    include_last_offset: bool = False
    sparse: bool = False

    def key(self) -> tuple[Any, ...]:
        """Bags with equal keys go together."""
        table, result = value(self.table), value(self.node)
        return (
            *(table.shape[1], table.dtype, str(result.shape[0]), self.offsets is None),
            *(self.weights is None, self.include_last_offset),
        )


def replace(rewrite: Rewrite) -> None:
    """Replace every group of bags."""
    found = [bag for node in rewrite.graph.nodes if (bag := _bag(node)) is not None]
    # an embedding that makes another bag's weights or ids stays with that bag
    inner = {bag.node for bag in found if kind(bag.node) == "embedding"}
    feeding = {node for bag in found for node in inner & _needs(bag)}
    found = [bag for bag in found if bag.node not in feeding]
    nodes = {bag.node for bag in found}
    found = [bag for bag in found if not nodes & _needs(bag)]
    if found and rewrite.changed_between(None, found[-1].node):
        return  # bags move to the first of them, or before the graph
    if found and not _may_pass_effects(rewrite, found):
        return
    groups: dict[tuple[Any, ...], list[Bag]] = {}
    for bag in found:
        groups.setdefault(bag.key(), []).append(bag)
    for group in groups.values():
        _fuse(rewrite, group)
    if found:
        _join(rewrite)


def _may_pass_effects(rewrite: Rewrite, bags: list[Bag]) -> bool:
    """Whether bags and effects keep their order, as both may raise an exception.

    Effects before all bags may run before the graph, if the bags do.
    """
    order = {node: k for k, node in enumerate(rewrite.graph.nodes)}
    last = max(order[bag.node] for bag in bags)
    effects = [n for n in rewrite.graph.nodes if compat.has_effect(n.target) and order[n] < last]
    if any(order[n] > min(order[bag.node] for bag in bags) for n in effects):
        return False
    if _wants_gradient(bags):
        rewrite.early = effects
    return True


def _bag(node: fx.Node) -> Bag | None:
    bag = None
    if kind(node) == "embedding_bag":
        bag = _of_embedding_bag(node)
    elif kind(node) in ("sum", "mean"):
        bag = _of_reduction(node)
    elif kind(node) == "embedding" and rank(node) == 2:
        bag = _of_embedding(node, node)
    if bag is None:
        return None
    table, ids = value(bag.table), value(bag.ids)
    tensors = [t for t in (table, ids, value(bag.offsets), value(bag.weights)) if t is not None]
    if not all(isinstance(t, Tensor) for t in tensors):
        return None
    if table.dtype not in (ROWS if table.is_cpu else ROWS_ON_GPU) or ids.dtype not in (
        torch.int32,
        torch.int64,
    ):
        return None
    if bag.weights is not None and value(bag.weights).dtype != torch.float32:
        return None
    if bag.offsets is not None and value(bag.offsets).dtype != ids.dtype:
        return None
    if not isinstance(table.shape[0], int) or not isinstance(table.shape[1], int):
        return None
    return bag


def _of_embedding_bag(node: fx.Node) -> Bag | None:
    names = (
        *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode"),
        *("sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
    )
    defaults = {"mode": "mean", "sparse": False, "include_last_offset": False}
    given = {n: argument(node, k, n, defaults.get(n)) for k, n in enumerate(names)}
    if given["max_norm"] is not None or given["scale_grad_by_freq"]:
        return None
    ids, weights = given["input"], given["per_sample_weights"]
    if (rank(ids) == 2 and given["offsets"] is not None) or rank(ids) not in (1, 2):
        return None
    if given["mode"] not in ("sum", "mean", "max") or rank(given["weight"]) != 2:
        return None
    padding = given["padding_idx"]
    rows = value(given["weight"]).shape[0]
    return Bag(
        node, given["weight"], ids, given["offsets"], weights, given["mode"],
        -1 if padding is None else int(padding) % int(rows),
        bool(given["include_last_offset"]) and given["offsets"] is not None, bool(given["sparse"]),
    )  # fmt: skip


def _of_reduction(node: fx.Node) -> Bag | None:
    """``F.embedding(ids (B, L), table)`` summed or averaged over L."""
    looked = node.args[0]
    if kind(looked) != "embedding" or rank(looked) != 3 or len(looked.users) != 1:  # type: ignore
        return None
    dims = argument(node, 1, "dim")
    dims = dims if isinstance(dims, list | tuple) else [dims]
    if len(dims) != 1 or dims[0] is None or dimension(dims[0], looked) != 1:
        return None
    if argument(node, 2, "keepdim", False) or node.kwargs.get("dtype") is not None:
        return None
    if kind(node) == "mean" and value(looked).shape[1] == 0:
        return None  # the mean of nothing is NaN, an empty bag is 0
    bag = _of_embedding(looked, node)
    if bag is not None:
        bag.mode = kind(node)
    return bag


def _of_embedding(looked: Any, node: fx.Node) -> Bag | None:
    names = (
        "input",
        "weight",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )
    given = {n: argument(looked, k, n) for k, n in enumerate(names)}
    if given["max_norm"] is not None or given["scale_grad_by_freq"]:
        return None
    if given["padding_idx"] is not None and torch.is_grad_enabled():
        return None  # here padding keeps its row in the forward pass, and gets no gradient
    return Bag(node, given["weight"], given["input"], sparse=bool(given["sparse"]))


def _needs(bag: Bag) -> set[fx.Node]:
    """All nodes that a bag's arguments depend on."""
    stack = [a for a in (bag.table, bag.ids, bag.offsets, bag.weights) if isinstance(a, fx.Node)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def table_name(node: Any) -> str:
    """How the model calls a table: ``tables.0.bag.weight``; else the name of its node."""
    source = getattr(node, "_dynamo_source", None)
    parts = re.findall(r"\['?(\w+)'?\]|\.(?!_)(\w+)", source.name) if source is not None else []
    words = [a or b for a, b in parts]
    return ".".join(words[1:]) if len(words) > 1 else str(node)


def _wants_gradient(bags: list[Bag]) -> bool:
    if not torch.is_grad_enabled():
        return False
    parts = [p for bag in bags for p in (bag.table, bag.weights) if p is not None]
    return any(value(p).requires_grad for p in parts)


def _fuse(rewrite: Rewrite, bags: list[Bag]) -> None:
    first = bags[0].node
    if _wants_gradient(bags):
        if rewrite.before is None:
            rewrite.before = Prologue(rewrite.graph, rewrite.early)
        pooled = _before(rewrite, bags)
    else:
        ids = [bag.ids for bag in bags]
        if bags[0].offsets is None:
            ids = [i if rank(i) == 2 else rewrite.call(torch.unsqueeze, (i, 1), first) for i in ids]
        given = (
            [bag.table for bag in bags], ids,
            [bag.offsets for bag in bags] if bags[0].offsets is not None else [],
            [bag.weights for bag in bags] if bags[0].weights is not None else [],
            ",".join(bag.mode for bag in bags), [bag.padding for bag in bags],
            bags[0].include_last_offset, ",".join(table_name(bag.table) for bag in bags),
        )  # fmt: skip
        pooled = rewrite.call(torch.ops.dlrm.embedding_bags.default, given, first)
    pieces = rewrite.call(torch.unbind, (pooled, 1), first)
    for f, bag in enumerate(bags):
        piece = rewrite.call(operator.getitem, (pieces, f), bag.node)
        piece.meta["pooled"] = (pooled, f, len(bags))
        bag.node.replace_all_uses_with(piece)
        rewrite.graph.erase_node(bag.node)
    width = value(bags[0].table).shape[1]
    where = "before the graph" if _wants_gradient(bags) else "in the graph"
    rewrite.found.append(f"{len(bags)} embedding bags of width {width}, one call {where}")


def _before(rewrite: Rewrite, bags: list[Bag]) -> fx.Node:
    """The pooled vectors as an input of the graph."""
    lookup = Lookup(
        tuple(bag.mode for bag in bags), tuple(bag.padding for bag in bags),
        bags[0].include_last_offset, tuple(table_name(bag.table) for bag in bags),
        tuple(bag.sparse for bag in bags), rewrite.target,
    )  # fmt: skip
    parts = [[bag.table for bag in bags], [bag.ids for bag in bags],
             [bag.offsets for bag in bags], [bag.weights for bag in bags]]  # fmt: skip
    last = rewrite.placeholders[-1]
    with rewrite.graph.inserting_after(last):
        pooled = rewrite.graph.placeholder(f"pooled_{len(rewrite.before.lookups)}")
    pooled._dynamo_source = None  # it comes from no user variable
    rewrite.placeholders.append(pooled)
    table, result = value(bags[0].table), value(bags[0].node)
    shape = (result.shape[0], len(bags), table.shape[1])
    with rewrite.faking():
        example = table.new_empty(shape)
    pooled.meta["example_value"] = example.requires_grad_()
    rewrite.inputs.append(example)
    rewrite.before.add(lookup, parts)
    return pooled


def _join(rewrite: Rewrite) -> None:
    """Where all vectors of a group are stacked again side by side, take the group as it is."""
    for node in list(rewrite.graph.nodes):
        if kind(node) not in ("stack", "cat"):
            continue
        dim = dimension(argument(node, 1, "dim", 0), node)
        stacked = kind(node) == "stack"
        if dim != 1 or (not stacked and rank(node) != 2):
            continue
        parts = list(node.args[0])
        joined: list[Any] = []
        k = 0
        while k < len(parts):
            pooled, f, count = parts[k].meta.get("pooled", (None, -1, 0))
            run = [p.meta.get("pooled") for p in parts[k : k + count]]
            if f == 0 and run == [(pooled, j, count) for j in range(count)]:
                joined.append(pooled if stacked else rewrite.call(torch.flatten, (pooled, 1), node))
                k += count
            else:
                joined.append(
                    rewrite.call(torch.unsqueeze, (parts[k], 1), node) if stacked else parts[k]
                )
                k += 1
        if len(joined) < len(parts):
            new = rewrite.call(torch.cat, (joined, 1), node)
            node.replace_all_uses_with(new)
            rewrite.graph.erase_node(node)
