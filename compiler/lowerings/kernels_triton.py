"""The fused operations of ``compiler.ops`` as calls of the hand-written Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import compiler.ops  # noqa: F401  # defines torch.ops.dlrm
from compiler.codegen.wrapper import view_text
from compiler.graph import Graph, KernelOp, sizes
from compiler.ir import Integer, Layout, Value
from compiler.lower import lowers
from compiler.lowerings.pointwise import shape_of
from compiler.values import full

ops = torch.ops.dlrm
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_ADDRESS = ("interaction", "interaction_backward", "embedding_bags")  # see kernels.triton.arrays


def _list(layouts: Sequence[Layout]) -> str:
    return f"[{', '.join(map(view_text, layouts))}]"


def _append(
    graph: Graph, node: fx.Node, face: str, reads: Sequence[Layout], writes: Sequence[Layout],
    arguments: Sequence[str],
) -> None:  # fmt: skip
    def emit(code: Any, problem: int) -> None:
        code.add(f"{face}({', '.join(arguments)})".replace("PROBLEM", str(problem)))

    note = node.name if face != "embedding_bags" else str(node.args[-1])
    by_address = face in BY_ADDRESS
    graph.ops.append(KernelOp(face, list(reads), list(writes), [face], emit, note, by_address))


def _alike(values: Sequence[Value]) -> bool:
    dtype = values[0].dtype
    return dtype in TYPES and all(v.dtype == dtype for v in values)


@lowers(ops.mlp.default, triton=True)
def mlp(
    graph: Graph, node: fx.Node, x: Value, weights: list[Value], biases: list[Value],
    activations: str,
) -> Any:  # fmt: skip
    if not _alike([x, *weights, *biases]):
        return NotImplemented
    data, layers = graph.realize(x), [graph.realize(w) for w in weights]
    lines = [graph.dense(b) for b in biases]
    outs = [
        graph.buffer(x.dtype, sizes(m.shape), note=node.name).layout() for m in node.meta["val"]
    ]
    arguments = [view_text(data), _list(layers), _list(lines), repr(activations), _list(outs)]
    _append(graph, node, "mlp_forward", [data, *layers, *lines], outs, arguments)
    return [out.value() for out in outs]


@lowers(ops.mlp_backward.default, triton=True)
def mlp_backward(
    graph: Graph, node: fx.Node, g: Value, x: Value, outputs: list[Value], weights: list[Value],
    biases: list[Value], activations: str, want_x: bool,
) -> Any:  # fmt: skip
    if not _alike([g, x, *outputs, *weights]):
        return NotImplemented
    gradient, data = graph.rows(g), graph.rows(x)
    kept, layers = [graph.rows(y) for y in outputs], [graph.realize(w) for w in weights]
    metas = node.meta["val"]
    made = [graph.buffer(torch.float32, sizes(m.shape), note=node.name).layout() for m in metas[1:]]
    first = graph.buffer(x.dtype, x.size, note=node.name).layout() if want_x else None
    arguments = [
        view_text(gradient), view_text(data), _list(kept), _list(layers), repr(activations),
        _list(made), "None" if first is None else view_text(first),
    ]  # fmt: skip
    writes = [*made, *([] if first is None else [first])]
    _append(graph, node, "mlp_backward", [gradient, data, *kept, *layers], writes, arguments)
    empty = full(0, (Integer(0),), x.dtype)
    return [empty if first is None else first.value(), *(m.value() for m in made)]


@lowers(ops.interaction.default, triton=True)
def interact(
    graph: Graph, node: fx.Node, features: list[Value], dense: bool, self_pairs: bool, upper: bool
) -> Any:
    if not _alike(features):
        return NotImplemented
    vectors = [graph.rows(f) for f in features]
    out = graph.buffer(features[0].dtype, shape_of(node), note=node.name).layout()
    arguments = [_list(vectors), *map(repr, (dense, self_pairs, upper)), view_text(out)]
    _append(graph, node, "interaction", vectors, [out], arguments)
    return out.value()


@lowers(ops.interaction_backward.default, triton=True)
def interact_backward(
    graph: Graph, node: fx.Node, g: Value, features: list[Value], dense: bool, self_pairs: bool,
    upper: bool,
) -> Any:  # fmt: skip
    if not _alike([g, *features]):
        return NotImplemented
    gradient, vectors = graph.rows(g), [graph.rows(f) for f in features]
    outs = [graph.buffer(g.dtype, f.size, note=node.name).layout() for f in features]
    arguments = [
        view_text(gradient), _list(vectors), *map(repr, (dense, self_pairs, upper)), _list(outs),
    ]  # fmt: skip
    _append(graph, node, "interaction_backward", [gradient, *vectors], outs, arguments)
    return [out.value() for out in outs]


@lowers(ops.embedding_bags.default, triton=True)
def bags(
    graph: Graph, node: fx.Node, tables: list[Value], ids: list[Value], offsets: list[Value],
    weights: list[Value], modes: str, padding: list[int], include_last_offset: bool, names: str,
) -> Any:  # fmt: skip
    if not _alike(tables):
        return NotImplemented
    groups = [
        [graph.rows(t) for t in tables],
        *([graph.dense(v) for v in values] for values in (ids, offsets, weights)),
    ]
    out = graph.buffer(tables[0].dtype, shape_of(node), note=node.name).layout()
    arguments = [
        view_text(out), *map(_list, groups),
        *map(repr, (modes, list(padding), include_last_offset, names)), "noted", "PROBLEM",
    ]  # fmt: skip
    reads = [layout for group in groups for layout in group]
    _append(graph, node, "embedding_bags", reads, [out], arguments)
    return out.value()
