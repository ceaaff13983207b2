"""The FX graph under construction: inputs with their guards, symbolic sizes, and the backend."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from compiler.capture.extension import GraphCall
from compiler.capture.sources import Source
from compiler.capture.state import (
    DimDynamic,
    FakeTensorMode,
    LocalSource,
    PythonPrinter,
    ShapeEnv,
    StatefulSymbolicContext,
    TensorGuards,
    TracingContext,
    guard_state,
    modes,
    restore,
    tracing,
)
from compiler.capture.values import Unsupported

if TYPE_CHECKING:
    from compiler.capture.trace import Trace
    from compiler.capture.units import Unit


class Input:
    """A tensor from outside: what it was at capture, and its place in the graph."""

    def __init__(
        self, source: Source, obj: torch.Tensor, fake: torch.Tensor, node: fx.Node, context: Any,
        name: LocalSource,
    ) -> None:  # fmt: skip
        self.source, self.obj, self.fake, self.node = source, obj, fake, node
        self.context, self.name = context, name
        self.sizes: tuple[Any, ...] = tuple(fake.shape)
        self.strides: tuple[Any, ...] = tuple(fake.stride())
        self.version = 0 if obj.is_inference() else fake._version

    def changed(self, inplace: bool) -> bool:
        """Whether an operation changed it; unsure of those that count no versions."""
        return inplace if self.obj.is_inference() else self.fake._version != self.version


class Level:
    """A graph under construction, and the modules that it names: the whole, or an operator's."""

    def __init__(self) -> None:
        self.graph, self.module = fx.Graph(), nn.Module()

    def attach(self, name: str, gm: fx.GraphModule) -> fx.Node:
        """A node for the graph of a function that is passed to an operator."""
        count = 0
        while hasattr(self.module, f"{name}_{count}"):
            count += 1
        setattr(self.module, f"{name}_{count}", gm)
        return self.graph.create_node("get_attr", f"{name}_{count}")


class CapturedGraph:
    """Nodes, inputs and the shape environment of one capture; ``level`` is where nodes go."""

    def __init__(self, trace: Trace, unit: Unit) -> None:
        self.trace, self.unit = trace, unit
        self.root = self.level = Level()
        self.graph = self.root.graph
        self.shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self.shapes)
        self.inputs: list[Input] = []
        self.inplace = False  # whether an operation changes an operand
        self.arguments: list[tuple[Source, fx.Node, Any]] = []  # of the graph, in order
        self.symbols: dict[Any, tuple[Source, fx.Node]] = {}
        self._anchor = self.graph._root  # placeholders go behind this one
        self._seen_guards = 0
        guard_state(trace)

    # ---- nodes

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: bool = False
    ) -> fx.Node:
        op = "call_method" if method else "call_function"
        return self.level.graph.create_node(op, target, args, kwargs)

    def operations(self) -> int:
        return sum(node.op.startswith("call") for node in self.graph.nodes)

    def _placeholder(self, name: str, example: Any, source: Source) -> fx.Node:
        with self.graph.inserting_after(self._anchor):
            node = self.graph.placeholder(_identifier(name))
        self._anchor = node
        node.meta["example_value"] = example
        self.arguments.append((source, node, example))
        return node

    # ---- inputs

    def tensor_input(self, obj: torch.Tensor, source: Source) -> tuple[fx.Node, torch.Tensor]:
        """A placeholder for a tensor; its sizes that have changed before are symbolic."""
        name = LocalSource(source.expression)
        sizes = [
            DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
            for dynamic in self._dynamic_sizes(obj, source)
        ]
        context: Any = StatefulSymbolicContext(
            dynamic_sizes=sizes, tensor_source=name, shape_env_to_source_to_symbol_cache={},
            constraint_sizes=[None] * len(sizes), constraint_strides=[None] * len(sizes),
        )  # fmt: skip
        try:
            fake = self.mode.from_tensor(obj, source=name, symbolic_context=context)
        except Exception as error:
            raise Unsupported(f"a tensor that has no fake: {error}") from error
        found = [(size, f"{{}}.size({k})") for k, size in enumerate(fake.shape)]
        found += [(stride, f"{{}}.stride({k})") for k, stride in enumerate(fake.stride())]
        for number, step in (*found, (fake.storage_offset(), "{}.storage_offset()")):
            symbol = number.node.expr if isinstance(number, torch.SymInt) else None
            if symbol is not None and symbol.is_symbol and symbol not in self.symbols:
                node = self._placeholder(str(symbol), number, source.then(step))
                self.symbols[symbol] = (source.then(step), node)
        node = self._placeholder(source.text, obj, source)
        node.meta["example_value"] = fake
        node.meta["tensor_dict"] = {}
        if source.known:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "guarded"}
        self.inputs.append(Input(source, obj, fake, node, context, name))
        return node, fake

    def _dynamic_sizes(self, obj: torch.Tensor, source: Source) -> list[bool]:
        dynamic, unit, shape = self.unit.session.dynamic, self.unit, tuple(obj.shape)
        if dynamic is False or source.known:
            return [False] * len(shape)
        before = unit.sizes.setdefault(source.text, shape)
        if len(before) == len(shape):
            unit.dynamic |= {
                (source.text, k)
                for k, (a, b) in enumerate(zip(before, shape, strict=True))
                if a != b
            }
        return [
            size > 1 and (dynamic is True or (source.text, k) in unit.dynamic)
            for k, size in enumerate(shape)
        ]

    def is_dynamic_number(self, obj: int, source: Source) -> bool:
        """Whether an int was another one before, and is no 0 or 1, which often are choices."""
        if self.unit.session.dynamic is False or abs(obj) > 2**60:
            return False
        before = self.unit.sizes.setdefault(source.text, (obj,))
        if before != (obj,):
            self.unit.dynamic.add((source.text, -1))
        return (source.text, -1) in self.unit.dynamic and obj not in (0, 1)

    def number_input(self, obj: int, source: Source) -> tuple[fx.Node, torch.SymInt]:
        name = LocalSource(source.expression)
        made: Any = self.shapes.create_unspecified_symint_and_symbol(obj, name, DimDynamic.DYNAMIC)
        constants = self.trace.constants
        self.trace.guards.add(
            f"type({{}}) is {constants.name(int)} and {{}} not in (0, 1)", source, source
        )
        node = self._placeholder(source.text, made, source)
        self.symbols[made.node.expr] = (source, node)
        return node, made

    def symbol_node(self, size: torch.SymInt) -> fx.Node | None:
        """The placeholder of a size that is a plain symbol."""
        found = self.symbols.get(size.node.expr)
        return found[1] if found else None

    def refuse_data(self) -> None:
        """Refuse what fake tensors took out of data, such as a size that is given as a tensor."""
        guards = self.shapes.guards
        new, self._seen_guards = guards[self._seen_guards :], len(guards)
        if any(symbol not in self.symbols for guard in new for symbol in guard.expr.free_symbols):
            raise Unsupported("a number that is read out of a tensor")

    # ---- guards

    def _guard_tensors(self) -> None:
        late = self.trace.guards.late
        first = []
        if self.inputs:
            sizes = [[_static(s) for s in i.sizes] for i in self.inputs]
            strides = [[_static(s) for s in i.strides] for i in self.inputs]
            check = TensorGuards(
                *(i.obj for i in self.inputs),
                dynamic_dims_sizes=sizes,  # type: ignore[arg-type]
                dynamic_dims_strides=strides,  # type: ignore[arg-type]
            )
            constants = self.trace.constants
            constants.keep(check)
            sources = tuple(i.source for i in self.inputs)
            places = ", ".join(["{}"] * len(sources))
            text = "tensors: " + ", ".join(
                f"{i.source.text} {_described(i)}" for i in self.inputs if not i.source.known
            )
            first.append((f"{constants.name(check.check)}({places})", sources, text))
            self.trace.guards.details[text] = (sources, check)
        late[:0] = first + self._guard_shapes()

    def _guard_shapes(self) -> list[tuple[str, tuple[Source, ...], str]]:
        """What was decided on symbolic sizes, and strides that follow from them."""
        found = []
        printer = PythonPrinter()

        def add(expression: Any, *first: Source, form: str = "{}") -> None:
            symbols = sorted(expression.free_symbols, key=str)
            sources = (*first, *(self.symbols[s][0] for s in symbols))
            code = text = printer.doprint(expression)
            for k, symbol in enumerate(symbols, len(first)):
                code = re.sub(rf"\b{symbol}\b", f"{{{k}}}", code)
                text = re.sub(rf"\b{symbol}\b", sources[k].text, text)
            found.append((form.format(code), sources, form.format(text).format(*first)))

        for source, _ in self.symbols.values():
            if ".size(" in source.template:
                found.append(("{} >= 2", (source,), f"{source.text} >= 2"))
        for i in self.inputs:
            for k, stride in enumerate(i.strides):
                if _static(stride) is None:
                    add(stride.node.expr, i.source.then(f"{{}}.stride({k})"), form="{{0}} == {}")
        for guard in self.shapes.guards:
            add(guard.expr)
        return found

    def _guard_overlap(self) -> None:
        """Inputs that are changed must share memory with no other."""
        changed = [i for i in self.inputs if i.changed(self.inplace)]
        others = [i for i in self.inputs if i not in changed]
        if not changed:
            return
        if overlap([i.obj for i in changed], [i.obj for i in others]):
            raise Unsupported("a tensor that is changed shares memory with another")
        name = self.trace.constants.name(overlap)
        groups = (f"[{', '.join(['{}'] * len(g))}]" for g in (changed, others))
        sources = tuple(i.source for i in (*changed, *others))
        text = "tensors that are changed share no memory"
        self.trace.guards.late.append((f"not {name}({', '.join(groups)})", sources, text))

    # ---- the backend

    def compile(self, backend: Callable[..., Any], outputs: list[fx.Node]) -> GraphCall | None:
        self._guard_overlap()
        self.graph.output(tuple(outputs))
        for node in reversed(list(self.graph.nodes)):  # sizes that nobody uses
            number = isinstance(
                node.meta.get("example_value"), torch.SymInt | torch.SymBool | torch.SymFloat
            )
            if number and not node.users and node.op != "placeholder":
                self.graph.erase_node(node)
        operations = self.operations()
        if not operations and not outputs:
            self._guard_tensors()
            return None
        self._drop_unused()
        tensors = any(
            isinstance(node.meta.get("example_value"), torch.Tensor) for node in self.graph.nodes
        )
        gm = fx.GraphModule(self.root.module, self.graph)
        text = gm.print_readable(print_output=False)
        # of sizes alone there is nothing to compile
        run = self._call_backend(backend, gm) if tensors else gm.forward
        self._guard_tensors()
        sources = [source for source, _, _ in self.arguments]
        return GraphCall(run, sources, text, operations if tensors else 0)

    def _drop_unused(self) -> None:
        """Tensors of which only the metadata was asked, and symbols that are no longer theirs."""
        kept = [a for a in self.arguments if a[1].users or isinstance(a[2], torch.SymInt)]
        used: set[Any] = set()
        for _, node, _ in kept:
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                sizes = (*value.shape, *value.stride())
                used |= {
                    s
                    for n in sizes
                    if isinstance(n, torch.SymInt)
                    for s in n.node.expr.free_symbols
                }
        kept = [
            a for a in kept
            if a[1].users or a[2].node.expr.free_symbols & used
        ]  # fmt: skip
        names = {id(a[1]) for a in kept}
        for _, node, _ in self.arguments:
            if id(node) not in names:
                self.graph.erase_node(node)
        self.arguments = kept

    def _call_backend(self, backend: Callable[..., Any], gm: fx.GraphModule) -> Any:
        """With fresh fake tensors, where those of the capture have seen in-place operations."""
        changed = any(i.changed(self.inplace) for i in self.inputs)
        mode = FakeTensorMode(shape_env=self.shapes) if changed else self.mode
        by_node = {id(i.node): i for i in self.inputs}
        examples = []
        context = TracingContext(mode)
        with tracing(context):
            for _, node, example in self.arguments:
                known = by_node.get(id(node))
                if known is not None:
                    mode.from_tensor(known.obj, source=known.name, symbolic_context=known.context)
                    context.tensor_to_context[known.obj] = known.context
                    examples.append(known.obj)
                else:
                    examples.append(example)
            before = modes()
            try:
                return backend(gm, examples)
            finally:
                restore(before)  # tracing a graph that ends in another mode leaves it set


def overlap(changed: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether a changed tensor shares its memory with another tensor."""
    first = [t.untyped_storage()._cdata for t in changed]
    rest = {t.untyped_storage()._cdata for t in others}
    return len(set(first)) < len(first) or any(s in rest for s in first)


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _described(i: Input) -> str:
    sizes = ", ".join("*" if s is None else str(s) for s in map(_static, i.sizes))
    grad = ", requires grad" if i.obj.requires_grad else ""
    return f"{str(i.obj.dtype).removeprefix('torch.')}[{sizes}] on {i.obj.device}{grad}"


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_")
    return f"x_{name}" if not name or name[0].isdigit() else name
