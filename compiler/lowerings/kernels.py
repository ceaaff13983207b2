"""The fused operations of ``compiler.ops`` as calls of the hand-written kernels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from sympy import Min
from torch import fx

import compiler.ops  # noqa: F401  # defines torch.ops.dlrm
from compiler.codegen.expressions import index_text
from compiler.graph import Graph, KernelOp, sizes
from compiler.ir import Index, Integer, Layout, Value
from compiler.kernels import linear
from compiler.kernels import mlp as mlp_kernel
from compiler.kernels.bags import MODES
from compiler.lower import lowers
from compiler.lowerings.matmul import (
    SUFFIX,
    checksums,
    packed_weight,
    pointer,
    reporting,
    row,
    scratch,
    turned,
    weight_layout,
)

ops = torch.ops.dlrm


def _array(name: str, fields: Sequence[str]) -> str:
    return f"Int {name}[] = {{{', '.join(fields)}}};"


def _structures(name: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """An array of structures, one a line."""
    return [f"Int {name}[] = {{", *(f"{', '.join(row)}," for row in rows), "};"]


def _spread(columns: Index, dtype: torch.dtype) -> Index:
    """A row stride of an odd number of cache lines, so that columns do not share a cache set."""
    return columns if not columns.is_number else Integer(mlp_kernel.spread(int(columns), dtype))


# MLP


@lowers(ops.mlp.default)
def mlp(
    graph: Graph,
    node: fx.Node,
    x: Value,
    weights: list[Value],
    biases: list[Value],
    activations: str,
) -> Any:
    dtype = x.dtype
    if dtype not in SUFFIX or any(v.dtype != dtype for v in (*weights, *biases)):
        return NotImplemented
    data = graph.rows(x)
    layers = [weight_layout(graph, w) for w in weights]
    lines = [graph.dense(b) for b in biases]
    metas = node.meta["val"]
    wanted = _used(node, len(metas))
    outs: list[Layout | None] = [None] * len(metas)
    for k, meta in enumerate(metas):
        if k in wanted:
            outs[k] = graph.buffer(dtype, sizes(meta.shape), note=node.name).layout()
    packs = [packed_weight(graph, w, data.size[0], dtype, node.name) for w in layers]
    sums = checksums(graph, layers, "weight_sums") if graph.checksums else None
    names = activations.split(",")

    def emit(code: Any, problem: int) -> None:
        suffix = SUFFIX[dtype]
        batch = index_text(data.size[0])
        fields = []
        for w, b, out, (packed, few), name in zip(layers, lines, outs, packs, names, strict=True):
            kept = ("0", "0") if out is None else (f"(Int){pointer(out)}", row(out))
            fields.append([
                f"(Int)({few} ? {pointer(w)} : {packed.buffer.name})",
                f"{few} ? {index_text(w.stride[0])} : 0", f"(Int){pointer(b)}",
                index_text(w.size[1]), index_text(w.size[0]), str(linear.ACTIVATIONS.index(name)),
                *kept, "0", "0", "0", "0",
            ])  # fmt: skip
        code.add(*_structures("layers", fields))
        given = f"{pointer(data)}, {row(data)}, {batch}, layers"
        if sums is None:
            code.add(f"mlp_forward_{suffix}({given}, {len(layers)}, threads);")
        else:
            call = f"mlp_checked_{suffix}({given}, {sums.buffer.name}, {len(layers)}"
            code.add(*reporting(call, problem))

    made = [out for out in outs if out is not None]
    reads = [data, *layers, *lines, *(packed for packed, _ in packs)]
    reads += [] if sums is None else [sums]
    name, entry = ("mlp", "forward") if sums is None else ("checked mlp", "checked")
    entries = [f"mlp_{entry}_{SUFFIX[dtype]}"]
    graph.ops.append(KernelOp(name, reads, made, entries, emit, node.name))
    return [None if out is None else out.value() for out in outs]


def _used(node: fx.Node, count: int) -> set[int]:
    """Which of a node's results anybody reads."""
    found: set[int] = set()
    for user in node.users:
        if user.op != "call_function" or user.target is not operator.getitem:
            return set(range(count))
        found.add(int(user.args[1]))  # type: ignore[arg-type]
    return found


@lowers(ops.mlp_backward.default)
def mlp_backward(
    graph: Graph, node: fx.Node, g: Value, x: Value, outputs: list[Value], weights: list[Value],
    biases: list[Value], activations: str, want_x: bool,
) -> Any:  # fmt: skip
    dtype = x.dtype
    every = (g, *outputs, *weights)
    names = activations.split(",")
    if dtype not in SUFFIX or any(v.dtype != dtype for v in every):
        return NotImplemented
    if any(name not in linear.ACTIVATIONS[:3] for name in names):
        return NotImplemented
    data, gradient = graph.rows(x), graph.rows(g)
    kept = [graph.rows(y) for y in outputs]
    layers = [weight_layout(graph, w) for w in weights]
    metas = node.meta["val"]
    first = graph.buffer(dtype, sizes(metas[0].shape), note=node.name).layout() if want_x else None
    # of frozen layers nobody reads the gradients, which are half of the work
    count, used = len(layers), _used(node, len(metas))
    found = [
        graph.buffer(torch.float32, sizes(metas[1 + i].shape), note=node.name).layout()
        if {1 + i % count, 1 + count + i % count} & used
        else None
        for i in range(2 * count)
    ]
    batch = data.size[0]
    rows = Min(batch, mlp_kernel.CHUNK)
    between = [scratch(graph, rows * _spread(w.size[0], dtype), dtype) for w in layers]
    packs = [
        packed_weight(graph, turned(w), None, dtype, node.name)[0] if k > 0 or want_x else None
        for k, w in enumerate(layers)
    ]

    def emit(code: Any, problem: int) -> None:
        suffix = SUFFIX[dtype]
        fields = []
        for k, w in enumerate(layers):
            outs, ins = index_text(w.size[0]), index_text(w.size[1])
            pack = packs[k]
            own = [found[k], found[count + k]]
            fields.append([
                "0" if pack is None else f"(Int){pack.buffer.name}", "0", "0", ins, outs,
                str(linear.ACTIVATIONS.index(names[k])),
                f"(Int){pointer(kept[k])}", row(kept[k]),
                f"(Int){between[k].buffer.name}", index_text(_spread(w.size[0], dtype)),
                *("0" if f is None else f"(Int){f.buffer.name}" for f in own),
            ])  # fmt: skip
        code.add(*_structures("layers", fields))
        to = "nullptr, 0" if first is None else f"{first.buffer.name}, {row(first)}"
        code.add(
            f"mlp_backward_{suffix}({pointer(data)}, {row(data)}, {pointer(gradient)}, "
            f"{row(gradient)}, {to}, {index_text(batch)}, layers, {count}, threads);"
        )

    made = [f for f in (*found, first) if f is not None]
    reads = [data, gradient, *kept, *layers, *(pack for pack in packs if pack is not None)]
    entries = [f"mlp_backward_{SUFFIX[dtype]}"]
    graph.ops.append(
        KernelOp(
            "mlp backward", reads, [*made, *between], entries, emit, node.name
        )
    )  # fmt: skip
    empty = Value(dtype, (Integer(0),), data.value().fn)
    return [empty if f is None else f.value() for f in (first, *found)]


# Interaction


def _addresses(code: Any, name: str, vectors: Sequence[Layout]) -> None:
    """``struct Features`` of interaction.cpp for tensors (B, d) or (B, k, d)."""
    count = sum(1 if len(v.size) == 2 else int(v.size[1]) for v in vectors)
    bases, strides = [], []
    for v in vectors:
        for k in range(1 if len(v.size) == 2 else int(v.size[1])):
            shift = "" if k == 0 else f" + {index_text(k * v.stride[1])}"
            bases.append(f"(Int)({pointer(v)}{shift})")
            strides.append(index_text(v.stride[0]))
    width = index_text(vectors[0].size[-1])
    code.add(_array(f"{name}_bases", bases), _array(f"{name}_strides", strides))
    code.add(
        _array(
            name, [f"(Int){name}_bases", f"(Int){name}_strides", "0", "0", "0", str(count), width]
        )
    )


def _shape(pairs: Layout, dense: bool, self_pairs: bool, upper: bool) -> str:
    """``struct Shape`` of interaction.cpp; ``pairs`` is the output, or its gradient."""
    flags = [str(int(flag)) for flag in (dense, self_pairs)]
    return _array("shape", [index_text(pairs.size[0]), *flags, row(pairs), "0", str(int(upper))])


@lowers(ops.interaction.default)
def interact(
    graph: Graph, node: fx.Node, features: list[Value], dense: bool, self_pairs: bool,
    upper: bool,
) -> Any:  # fmt: skip
    dtype = features[0].dtype
    if dtype not in SUFFIX or any(f.dtype != dtype for f in features):
        return NotImplemented
    vectors = [graph.rows(f) for f in features]
    size = sizes(node.meta["val"].shape)
    out = graph.buffer(dtype, size, note=node.name).layout()

    def emit(code: Any, problem: int) -> None:
        _addresses(code, "features", vectors)
        code.add(_shape(out, dense, self_pairs, upper))
        code.add(f"interaction_{SUFFIX[dtype]}(features, shape, {out.buffer.name}, threads);")

    entries = [f"interaction_{SUFFIX[dtype]}"]
    graph.ops.append(KernelOp("interaction", vectors, [out], entries, emit, node.name))
    return out.value()


@lowers(ops.interaction_backward.default)
def interact_backward(
    graph: Graph, node: fx.Node, g: Value, features: list[Value], dense: bool, self_pairs: bool,
    upper: bool,
) -> Any:  # fmt: skip
    dtype = features[0].dtype
    if dtype not in SUFFIX or any(f.dtype != dtype for f in (g, *features)):
        return NotImplemented
    vectors = [graph.rows(f) for f in features]
    gradient = graph.rows(g)
    outs = [graph.buffer(dtype, v.size, note=node.name).layout() for v in vectors]

    def emit(code: Any, problem: int) -> None:
        _addresses(code, "features", vectors)
        _addresses(code, "gradients", outs)
        code.add(_shape(gradient, dense, self_pairs, upper))
        code.add(
            f"interaction_backward_{SUFFIX[dtype]}(features, shape, {pointer(gradient)}, "
            "gradients, threads);"
        )

    entries = [f"interaction_backward_{SUFFIX[dtype]}"]
    graph.ops.append(
        KernelOp("interaction backward", [*vectors, gradient], outs, entries, emit, node.name)
    )
    return [out.value() for out in outs]


# Embedding bags


@lowers(ops.embedding_bags.default)
def bags(
    graph: Graph, node: fx.Node, tables: list[Value], ids: list[Value], offsets: list[Value],
    weights: list[Value], modes: str, padding: list[int], include_last_offset: bool, names: str,
) -> Any:  # fmt: skip
    if any(t.dtype not in SUFFIX or t.dtype != tables[0].dtype for t in tables):
        return NotImplemented
    rows = [graph.rows(t) for t in tables]
    places = [graph.dense(i) for i in ids]
    starts = [graph.dense(o) for o in offsets]
    scales = [graph.dense(w) for w in weights]
    sums = checksums(graph, rows, "table_sums") if graph.checksums else None
    dtype, size = tables[0].dtype, sizes(node.meta["val"].shape)
    out = graph.buffer(dtype, size, note=node.name).layout()
    kinds = modes.split(",")

    def emit(code: Any, problem: int) -> None:
        wide = dtype.itemsize
        fields = []
        for f, (table, own) in enumerate(zip(rows, places, strict=True)):
            count = own.size[0] if starts else own.size[0] * own.size[1]
            length = "0" if starts else index_text(own.size[1])
            fields.append([
                f"(Int){pointer(own)}", str(int(ids[f].dtype == torch.int64)), index_text(count),
                f"(Int){pointer(starts[f])}" if starts else "0",
                str(int(bool(starts) and offsets[f].dtype == torch.int64)),
                str(int(include_last_offset)), length, index_text(size[0]),
                f"(Int){pointer(scales[f])}" if scales else "0",
                str(padding[f]) if padding else "-1",
                index_text(table.size[0]),
                f"(Int){pointer(table)}", index_text(table.stride[0] * wide),
                str(int(dtype == torch.bfloat16)), index_text(table.size[1]),
                str(MODES.index(kinds[f])), "0", "0", "0",
                f"(Int)({out.buffer.name} + {index_text(f * size[2])})",
                index_text(size[1] * size[2] * wide), str(int(dtype == torch.bfloat16)), "0",
            ])  # fmt: skip
        code.add(*_structures("tables", fields))
        call = "embedding_bags(tables, "
        if sums is not None:
            call = f"embedding_bags_checked(tables, {sums.buffer.name}, "
        code.add(*reporting(f"{call}{len(rows)}", problem))

    reads = [*rows, *places, *starts, *scales, *([] if sums is None else [sums])]
    name, entry = ("embedding bags", "embedding_bags")
    if sums is not None:
        name, entry = f"checked {name}", f"{entry}_checked"
    graph.ops.append(KernelOp(name, reads, [out], [entry], emit, names))
    return out.value()
