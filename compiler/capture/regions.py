"""Operators that take functions: ``torch.cond``, ``while_loop`` and custom autograd functions.

Each function is interpreted into a graph of its own. What it reads of outer graphs becomes a
further operand, and it must change nothing that stands outside, as it may run or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._higher_order_ops import while_loop as _while_loop
from torch._higher_order_ops.cond import cond as _cond

from compiler.capture import polyfills, state
from compiler.capture.graph import Level
from compiler.capture.iterables import items_of
from compiler.capture.values import (
    Constant,
    DictValue,
    ListValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    look,
    serials,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame
    from compiler.capture.tensors import Tensors, TensorValue

_ops = torch.ops.higher_order


class Region:
    """The graph of what ``interpret`` does, within which nothing from outside may change.

    ``leaves`` are the tensors of its result, and ``form`` is all of the result but those. ``bare``:
    the one tensor that it gives stands for itself, without a tuple around it.
    """

    bare = False

    def __init__(self, tensors: Tensors, interpret: Callable[[], Value]) -> None:
        graph, trace, modes = tensors.graph, tensors.trace, tensors.modes
        versions = {i: _version(value.fake) for i, value in tensors.values.items()}
        self.tensors, self.level = tensors, Level()
        before = graph.level, trace.sealed, len(modes.open), torch.is_grad_enabled()
        graph.level, trace.sealed = self.level, next(serials)
        try:
            result = interpret()
        finally:
            graph.level, trace.sealed = before[:2]
        if (len(modes.open), torch.is_grad_enabled()) != before[2:]:
            raise Unsupported("a grad mode or context that outlives an operator's function")
        self.leaves: list[TensorValue] = []
        self.form = self._form(result)
        self.reads: dict[fx.Node, None] = {}  # of outer graphs
        for node in self.level.graph.nodes:
            self.reads |= {n: None for n in node.all_input_nodes if n.graph is not node.graph}
        outside = {i.node: i.version for i in graph.inputs}
        for node in self.reads:
            fake = node.meta.get("example_value")
            start = versions.get(id(fake), outside.get(node, 0))
            if isinstance(fake, torch.Tensor) and _version(fake) != start:
                raise Unsupported("a tensor from outside that an operator's function changes")

    def _form(self, value: Value) -> Any:
        from compiler.capture.tensors import TensorValue

        value = look(value)
        if isinstance(value, TensorValue):
            self.leaves.append(value)
            return "a tensor"
        if type(value) is Constant:
            return Constant, type(value.value), value.value
        if isinstance(value, TupleValue | ListValue):
            return value.cls, [self._form(item) for item in value.items]
        if isinstance(value, DictValue) and value.cls is dict:
            return dict, [(k, self._form(v)) for k, (_, v) in value.entries.items()]
        raise Unsupported(f"a {value.cls.__name__} as the result of an operator's function")

    def fresh(self) -> None:
        """Refuse results that are, or share memory with, what was read from outside."""
        graph = self.level.graph
        inputs = [n.meta.get("example_value") for n in self.reads]
        inputs += [n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"]
        taken = {_storage(t) for t in inputs if isinstance(t, torch.Tensor)}
        for leaf in self.leaves:
            if leaf.node.graph is not graph or _storage(leaf.fake) in taken:
                raise Unsupported("an operator's function that hands on what it was given")

    def close(self, reads: Sequence[fx.Node]) -> fx.GraphModule:
        """The graph as a module that takes its own placeholders, and then ``reads``."""
        graph = self.level.graph
        anchor = next((n for n in graph.nodes if n.op != "placeholder"), graph._root)
        for outer in reads:
            with graph.inserting_before(anchor):
                inner = _placeholder(graph, outer.name)
            inner.meta["example_value"] = outer.meta["example_value"]
            for user in [u for u in outer.users if u.graph is graph]:
                user.replace_input_with(outer, inner)
        nodes = tuple(leaf.node for leaf in self.leaves)
        graph.output(nodes[0] if self.bare else nodes)
        return fx.GraphModule(self.level.module, graph)


def _placeholder(graph: fx.Graph, stem: str) -> fx.Node:
    """A placeholder whose name no other has."""
    taken = {node.target for node in graph.nodes if node.op == "placeholder"}
    name = next(
        n for k in range(len(taken) + 1) if (n := f"{stem}_{k}" if k else stem) not in taken
    )
    return graph.placeholder(name)


def _version(fake: Any) -> int:
    return 0 if fake.is_inference() else int(fake._version)


def _storage(fake: torch.Tensor) -> int:
    return fake.untyped_storage()._cdata


def _made(form: Any, leaves: list[Value]) -> Value:
    """A result of that form; takes its tensors from the front of ``leaves``."""
    if form == "a tensor":
        return leaves.pop(0)
    if form[0] is Constant:
        return Constant(form[2])
    if form[0] is dict:
        return DictValue({k: (Constant(k), _made(part, leaves)) for k, part in form[1]})
    items = [_made(part, leaves) for part in form[1]]
    return ListValue(items) if form[0] is list else TupleValue(items, form[0])


def _operands(reads: Sequence[fx.Node]) -> tuple[Any, ...]:
    return tuple(node.meta["example_value"] for node in reads)


def _operator(
    tensors: Tensors, target: Any, first: Sequence[TensorValue], regions: dict[str, Region],
    carried: Sequence[TensorValue] | None = None,
) -> list[Value]:  # fmt: skip
    """A node for ``target(*first, *graphs, [carried], reads)``; the tensors that it gives."""
    reads = list(dict.fromkeys(node for region in regions.values() for node in region.reads))
    graphs = {name: region.close(reads) for name, region in regions.items()}
    groups = [list(carried)] if carried is not None else []
    fakes = (*(v.fake for v in first), *graphs.values(),
             *(tuple(v.fake for v in g) for g in groups), _operands(reads))  # fmt: skip
    found = state.on_fakes(tensors.graph.mode, lambda: target(*fakes))
    attached = [tensors.graph.level.attach(name, gm) for name, gm in graphs.items()]
    nodes = (*(v.node for v in first), *attached,
             *(tuple(v.node for v in g) for g in groups), tuple(reads))  # fmt: skip
    return list(tensors.result(tensors.graph.call(target, nodes, {}), found).items)  # type: ignore[attr-defined]


def cond(
    tensors: Tensors, frame: Frame, pred: Value, then: Value, other: Value,
    operands: Value | None = None,
) -> Value:  # fmt: skip
    """``torch.cond``: both functions in the graph, of which one runs."""
    pred = _tensor(pred, "the condition of torch.cond")
    args = [] if operands is None else items_of(frame, look(operands))
    sides = [Region(tensors, lambda f=f: frame.call(look(f), args)) for f in (then, other)]  # type: ignore[misc]
    if sides[0].form != sides[1].form:
        raise Unsupported("functions of torch.cond whose results are not of one form")
    for side in sides:
        side.fresh()
    named = dict(zip(("cond_true", "cond_false"), sides, strict=True))
    return _made(sides[0].form, _operator(tensors, _ops.cond, [pred], named))


def while_loop(
    tensors: Tensors, frame: Frame, test: Value, body: Value, carried: Value
) -> Value:  # fmt: skip
    """PyTorch's ``while_loop``, which carries tensors from round to round."""
    start = [_tensor(v, "what a loop carries") for v in items_of(frame, look(carried))]
    test_region, body_region = (
        Region(tensors, lambda f=f: frame.call(look(f), stand_ins(tensors, start)))  # type: ignore[misc]
        for f in (test, body)
    )
    if test_region.form != "a tensor" or body_region.form != (tuple, ["a tensor"] * len(start)):
        raise Unsupported("a loop that carries something else from round to round")
    body_region.fresh()
    test_region.bare = True
    named = {"while_test": test_region, "while_body": body_region}
    return TupleValue(_operator(tensors, _ops.while_loop, [], named, start))


def stand_ins(tensors: Tensors, values: Sequence[Value]) -> list[Value]:
    """Placeholders in the region that is under way, for tensors like the given ones."""
    from compiler.capture.tensors import TensorValue

    found: list[Value] = []
    for value in map(look, values):
        if isinstance(value, TensorValue):
            fake = value.fake
            node = _placeholder(tensors.graph.level.graph, "carried")
            copy = state.on_fakes(tensors.graph.mode, lambda fake=fake: fake.clone())  # type: ignore[misc]
            node.meta["example_value"] = copy
            value = tensors.values[id(copy)] = TensorValue(node, copy)
        found.append(value)
    return found


def _tensor(value: Value, what: str) -> TensorValue:
    from compiler.capture.tensors import TensorValue

    value = look(value)
    if not isinstance(value, TensorValue):
        raise Unsupported(f"a {value.cls.__name__} as {what}")
    return value


def apply(
    tensors: Tensors, frame: Frame, owner: Value, *args: Value, **kwargs: Value
) -> Value:  # fmt: skip
    """``Function.apply``: one node, once it is seen that forward and backward only compute.

    Both are interpreted for that, and for the guards on what they read; their graphs are dropped.
    """
    cls = constant(owner)
    if kwargs:
        raise Unsupported(f"{cls.__name__}.apply() with arguments by name")
    trace = tensors.trace
    needed = [_requires_grad(look(a)) and torch.is_grad_enabled() for a in args]

    def interpret() -> Value:
        before = torch.is_grad_enabled()
        state.set_grad(False)
        try:
            context = frame.call(
                trace.known(polyfills.Context), [TupleValue([Constant(n) for n in needed])]
            )
            given = stand_ins(tensors, args)
            forward, setup = trace.known(cls.forward), cls.setup_context
            if setup is torch.autograd.Function.setup_context:
                result = frame.call(forward, [context, *given])
            else:
                result = frame.call(forward, given)
                frame.call(trace.known(setup), [context, TupleValue(given), result])
            if any(needed):
                outputs = result.items if isinstance(result, TupleValue) else [result]
                gradients = stand_ins(tensors, outputs)
                frame.call(trace.known(cls.backward), [context, *gradients])
            return Constant(None)
        finally:
            state.set_grad(before)

    Region(tensors, interpret)
    return tensors.operation(_applying(cls), list(args), {})


@functools.cache
def _applying(cls: Any) -> Callable[..., Any]:
    """``cls.apply`` under a name that does not lead FX to look for it in torch."""

    def applying(*args: Any) -> Any:
        return cls.apply(*args)

    applying.__name__, applying.__module__ = cls.__name__, cls.__module__
    return applying


def _requires_grad(value: Value) -> bool:
    fake = getattr(value, "fake", None)
    return isinstance(fake, torch.Tensor) and fake.requires_grad


MEANINGS: dict[Any, Callable[..., Value]] = {
    _cond: cond,
    _while_loop: while_loop,
    torch.autograd.Function.apply.__func__: apply,  # type: ignore[attr-defined]
}
