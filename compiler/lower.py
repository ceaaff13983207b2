"""Lowering: an FX graph of ATen operations to the loop IR.

Each node becomes a ``Value``, or an operation that fills a buffer. A value is realized when the
graph returns it, when a kernel or an ATen call reads it, or when computing it at each of its uses
would cost more than storing it once (``_worth_storing``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from compiler import compat
from compiler.codegen.triton_expressions import TYPES as TRITON_TYPES
from compiler.codegen.triton_expressions import computes
from compiler.codegen.types import CTYPES
from compiler.graph import FallbackOp, Graph, size, sizes
from compiler.ir import Buffer, Layout, Load, Op, Sizes, Value, loops, same, walk
from compiler.values import broadcast, cast

aten = torch.ops.aten
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # sizes, and what is computed from them
Lower = Callable[..., Any]
LOWERINGS: dict[Any, Lower] = {}
FOR_TRITON: dict[Any, Lower] = {}  # come before those

MOST_LOADS, MOST_NODES = 24, 96  # of one expression
COSTLY = {
    *("exp", "log", "log1p", "expm1", "tanh", "sigmoid", "erf", "gelu", "gelu_tanh", "sin", "cos"),
    *("pow", "div", "sqrt", "rsqrt", "silu", "softplus", "div_floor", "mod_floor", "atan2"),
}


def lowers(*targets: Any, triton: bool = False) -> Callable[[Lower], Lower]:
    """Register a function ``(graph, node, *args, **kwargs)`` as the lowering of operations.

    ``triton``: for that target alone, where it comes before the one for all.
    """

    def register(function: Lower) -> Lower:
        for target in targets:
            (FOR_TRITON if triton else LOWERINGS)[target] = function
        return function

    return register


def lower(
    gm: fx.GraphModule,
    inlining: bool = True,
    frozen: Sequence[int] = (),
    autotune: bool = False,
    branch: Callable[[fx.GraphModule], Callable[..., Any]] = lambda gm: gm,
    target: str = "",
    checksums: bool = False,
) -> Graph:
    """The graph's operations in the loop IR.

    ``inlining=False`` stores every intermediate. ``frozen`` are inputs, by number, whose values may
    be taken once for all: what depends on them alone is computed at the first call only.
    ``autotune`` lets matrix products be measured, ours against PyTorch's. ``branch`` compiles the
    graphs inside control flow. ``target`` is cpp or triton, or that of the tensors' device.
    ``checksums`` has the C++ kernels verify their results.
    """
    import compiler.lowerings  # noqa: F401  # fills LOWERINGS, and itself imports this module

    device = device_of(gm)
    target = target or ("triton" if device.type == "cuda" else "cpp")
    if target == "cpp" and device.type != "cpu":
        raise ValueError(f"target='cpp' is for tensors on the CPU, and there are some on {device}")
    graph = Graph(target=target, device=device, inlining=inlining, autotune=autotune, branch=branch)
    graph.checksums = checksums and target == "cpp"
    graph.effects = any(node.target is compat.with_effects for node in gm.graph.nodes)
    env: dict[fx.Node, Any] = {}
    copies: list[tuple[Layout, Value]] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = _input(graph, node)
            if len(graph.inputs) - 1 in frozen and isinstance(graph.inputs[-1], Buffer):
                graph.frozen.add(graph.inputs[-1])
        elif node.op == "get_attr":
            env[node] = _constant(graph, gm, node)
        elif node.op == "output":
            _finish(graph, node, env, copies)
        elif node.target is aten.copy_.default:  # AOTAutograd puts these last
            changed, source = env[node.args[0]], env[node.args[1]]
            copies.append((changed.layout, _alike(source, changed)))
            env[node] = changed
        else:
            env[node] = _call(graph, node, env)
    return graph


def device_of(gm: fx.GraphModule) -> torch.device:
    """Where a graph's tensors are: on a GPU if there is one among them, else on the CPU."""
    for node in gm.graph.nodes:
        for found in tree_leaves(node.meta.get("val")):
            if isinstance(found, torch.Tensor) and found.device.type == "cuda":
                return found.device
    return torch.device("cpu")


def _input(graph: Graph, node: fx.Node) -> Any:
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        name = node.name
        buffer = Buffer(
            f"in_{name}", found.dtype, sizes(found.shape), sizes(found.stride()), "input", name
        )
        graph.inputs.append(buffer)
        return buffer.value()
    if isinstance(found, NUMBERS) and not isinstance(found, bool):
        graph.inputs.append(size(found))
        return size(found)
    graph.inputs.append(None)
    return found


def _constant(graph: Graph, gm: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = operator.attrgetter(str(node.target))(gm)
    if not isinstance(found, torch.Tensor):
        return found
    name = f"constant{len(graph.constants)}"
    graph.constants[name] = found
    return Buffer(name, found.dtype, sizes(found.shape), sizes(found.stride()), "constant").value()


def _call(graph: Graph, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args: Any = fx.node.map_arg(node.args, lambda n: env[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n])
    found = node.meta.get("val")
    if isinstance(found, NUMBERS) and not isinstance(found, bool):
        return size(found)
    if node.target is operator.getitem:
        return args[0][args[1]]
    lowering = LOWERINGS.get(node.target)
    result: Any = NotImplemented
    if graph.target == "triton":
        lowering = FOR_TRITON.get(node.target, lowering)
    if lowering is not None and supported(node, graph):
        result = lowering(graph, node, *args, **kwargs)
        if graph.target == "triton" and not all(map(computes, _uncomputed(result))):
            result = NotImplemented
    if result is NotImplemented:
        why = "no lowering" if lowering is None else "not for these types or arguments"
        return fallback(graph, node, args, kwargs, why)
    if isinstance(result, Value):
        return _settle(graph, node, result)
    return result


def _uncomputed(result: Any) -> list[Value]:
    results = result if isinstance(result, list | tuple) else [result]
    return [v for v in results if isinstance(v, Value) and v.layout is None]


def supported(node: fx.Node, graph: Graph) -> bool:
    """Dense tensors on the graph's device, of types that the generated code knows."""
    types: Any = CTYPES if graph.target == "cpp" else TRITON_TYPES

    def good(found: Any) -> bool:
        if isinstance(found, list | tuple):
            return all(map(good, found))
        if not isinstance(found, torch.Tensor):
            return True
        return (
            found.layout == torch.strided
            and found.device == graph.device
            and found.dtype in types
            and not found.is_quantized
            and not found.is_conj()
            and not found.is_neg()
        )

    return all(good(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def _settle(graph: Graph, node: fx.Node, value: Value) -> Value:
    """The value as it is, or realized where that is worth it."""
    if value.layout is not None:
        return value
    if not graph.inlining or _worth_storing(value, len(node.users), graph.effects):
        stride = _strides(node.meta.get("val"))
        return graph.realize(value, note=node.name, stride=stride).value()
    return value


def _worth_storing(value: Value, users: int, effects: bool) -> bool:
    """``effects``: whether a lookup, which may raise, must not wait until its result is used."""
    index, _ = loops("i", value.size)
    loads = nodes = 0
    costly = False
    for expr in walk(value.fn(index)):
        nodes += 1
        loads += isinstance(expr, Load)
        costly = costly or (isinstance(expr, Op) and expr.name in COSTLY)
        checked = isinstance(expr, Load) and bool(expr.note)
        if nodes > MOST_NODES or loads > MOST_LOADS or (effects and checked):
            return True
    return users > 1 and (costly or nodes > 6 or loads > 2)


def fallback(
    graph: Graph, node: fx.Node, args: Any, kwargs: Any, why: str, target: Any = None,
    found: Any = None,
) -> Any:  # fmt: skip
    """Call the operation itself, or ``target`` with results like ``found``."""
    target = node.target if target is None else target
    graph.fallbacks.setdefault(str(target), why)
    inputs: list[Layout] = []

    def in_memory(value: Any) -> Any:
        if isinstance(value, Value):
            layout = graph.realize(value)
            inputs.append(layout)
            return layout
        if isinstance(value, list | tuple):
            return type(value)(in_memory(v) for v in value)
        return value

    args, kwargs = in_memory(tuple(args)), {k: in_memory(v) for k, v in kwargs.items()}
    found = node.meta.get("val") if found is None else found
    many = isinstance(found, list | tuple)
    outputs: list[Buffer | None] = []
    for one in found if many else [found]:
        if isinstance(one, torch.Tensor):
            buffer = graph.buffer(one.dtype, sizes(one.shape), sizes(one.stride()), note=node.name)
            outputs.append(buffer)
        else:
            outputs.append(None)
    graph.ops.append(FallbackOp(target, args, kwargs, inputs, outputs, many, note=node.name))
    values = [None if b is None else b.value() for b in outputs]
    return values if many else values[0]


def _alike(source: Value, target: Value) -> Value:
    """A copy's source with the type and shape of its target."""
    return cast(broadcast(source, target.size), target.dtype)


def _finish(
    graph: Graph, node: fx.Node, env: dict[fx.Node, Any], copies: list[tuple[Layout, Value]]
) -> None:
    """Put the outputs into memory, then the graph's changes of its own inputs, all at the end."""
    sources = [graph.realize(s) if _read_elsewhere(s, t) else s for t, s in copies]
    returned: Any = node.args[0]
    for one in [returned] if isinstance(returned, fx.Node) else returned:
        if isinstance(one, fx.Node):
            graph.outputs.append(_output(graph, env[one], one.name, one.meta.get("val")))
        else:
            graph.outputs.append(one)
    for (target, _), source in zip(copies, sources, strict=True):
        value = source.value() if isinstance(source, Layout) else source
        graph.store(value, target, note=f"{target.buffer.name} changed in place")


def _output(graph: Graph, value: Any, name: str, meta: Any) -> Any:
    if not isinstance(value, Value):
        return value
    stride = _strides(meta)
    layout = value.layout
    if layout is not None and stride is not None and layout.buffer.kind == "temporary":
        dims = zip(layout.size, layout.stride, stride, strict=True)
        if any(n != 1 and not same(own, wanted) for n, own, wanted in dims):
            layout = None  # what comes after the graph was traced for PyTorch's strides
    if layout is None:
        layout = graph.realize(Value(value.dtype, value.size, value.fn), name, stride)
    return layout


def _strides(meta: Any) -> Sizes | None:
    """PyTorch's strides of a result that fills its memory without gap or overlap; else None."""
    dense = isinstance(meta, torch.Tensor) and compat.is_dense(meta)
    return sizes(meta.stride()) if dense else None


def _read_elsewhere(source: Value, target: Layout) -> bool:
    """Whether storing the source into the target would change what is still to be read."""
    if source.layout is not None:
        return source.layout.buffer.kind == "input"
    index, _ = loops("i", source.size)
    loads = [e for e in walk(source.fn(index)) if isinstance(e, Load)]
    mutable = [load for load in loads if load.buffer.kind == "input"]
    return any(
        load.buffer is not target.buffer or load.index != target.index(index) for load in mutable
    )
