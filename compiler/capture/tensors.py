"""Tensors in the interpreter: values with a node in the graph and a fake tensor without data."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from compiler.capture import managers, mended, modules, regions, state
from compiler.capture.extension import Extension, GraphCall
from compiler.capture.graph import CapturedGraph
from compiler.capture.sources import Source
from compiler.capture.state import no_modes, overridable
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    FunctionValue,
    Known,
    ListValue,
    MethodValue,
    NamedMethod,
    SequenceValue,
    SliceValue,
    TupleValue,
    Unsupported,
    Value,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame
    from compiler.capture.rebuild import Rebuild
    from compiler.capture.trace import Trace
    from compiler.capture.units import Unit

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
FACTORIES = frozenset(
    getattr(torch, name) for name in (
        "arange empty eye full linspace logspace ones rand randint randn randperm scalar_tensor "
        "tensor tril_indices triu_indices zeros rand_like randn_like randint_like empty_like "
        "full_like ones_like zeros_like normal _assert_async"
    ).split()
)  # fmt: skip
_LEFT_TO_PYTHON = frozenset(  # they need data, change autograd's own records, or leave torch
    "item tolist numpy backward requires_grad_ retain_grad register_hook detach_ set_ resize_ "
    "resize_as_ data_ptr storage untyped_storage __array__ is_shared share_memory_ pin_memory "
    "record_stream __reduce_ex__ __deepcopy__ __dlpack__ __repr__ __format__ __bool__ __int__ "
    "__float__ __index__ __contains__ __setstate__ register_post_accumulate_grad_hook "
    "apply_ map_ map2_ as_subclass __torch_function__ unflatten_".split()
)
_CONSTANTS = frozenset(  # properties that are guarded with the tensor
    "dtype device layout ndim is_cuda is_cpu is_sparse is_quantized is_meta is_mps itemsize nbytes "
    "requires_grad is_complex is_nested is_mkldnn is_sparse_csr is_xpu is_xla names".split()
)
_VIEWS = frozenset("T mT H mH real imag".split())
_ON_NUMBERS = {
    getattr(operator, n) for n in (
        "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift iadd isub imul itruediv "
        "ifloordiv imod ipow neg pos abs lt le eq ne gt ge"
    ).split()
} | {abs}  # fmt: skip
_PLAIN: dict[Any, Any] = {  # a += b, as a = a + b
    getattr(operator, "i" + n.strip("_")): getattr(operator, n) for n in (
        "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
    ).split()
}  # fmt: skip
_ON_TENSORS = _ON_NUMBERS | {
    operator.matmul, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.invert,
    operator.ilshift, operator.irshift, operator.getitem, operator.setitem, pow, round,
}  # fmt: skip


_MEANINGS: dict[Any, Any] = {**modules.MEANINGS, **mended.MEANINGS, **regions.MEANINGS}


class TensorValue(ByIdentity):
    """``node`` in the graph, ``fake`` with its metadata, ``obj`` if it is from outside."""

    def __init__(
        self, node: fx.Node, fake: torch.Tensor, source: Source | None = None,
        obj: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.node, self.fake, self.source, self.obj = node, fake, source, obj
        self.cls = torch.Tensor if obj is None else type(obj)


class NumberValue(Value):
    """A symbolic number: a size, or what was computed of sizes."""

    def __init__(self, node: fx.Node, number: Any, source: Source | None = None) -> None:
        self.node, self.number, self.source = node, number, source
        kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
        self.cls = kinds[type(number)]


class Tensors(Extension):
    """What torch adds; ``graph`` collects the operations."""

    def __init__(self, trace: Trace, unit: Unit) -> None:
        super().__init__(trace)
        self.unit = unit
        trace.guards.dict_version = state.count_changes()
        self.graph = CapturedGraph(trace, unit)
        self.values: dict[int, TensorValue] = {}  # by the fake tensor
        self.outputs: list[fx.Node] = []
        self.hooks: list[Any] = []
        self.modes = managers.Modes(self.graph)

    # ---- from outside

    def wrap(self, obj: Any, source: Source) -> Value | None:
        if isinstance(obj, torch.Tensor):
            return self._input(obj, source)
        if isinstance(obj, nn.Module):
            return modules.module(self, obj, source)
        if isinstance(obj, torch.dtype | torch.device | torch.layout | torch.memory_format):
            self.trace.guards.equal(source, obj)
            return Constant(obj, source)
        if type(obj) is torch.Size:
            return self.trace._sequence(obj, self.trace.typed(obj, source))
        if isinstance(
            obj, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.finfo | torch.iinfo
        ):
            return Known(obj, self.trace.pin(obj, source))
        if isinstance(obj, torch.library.CustomOpDef):
            return Known(obj._opoverload, self.trace.pin(obj, source))
        return managers.manager(self, obj, source)

    def _input(self, obj: torch.Tensor, source: Source) -> Value:
        if type(obj) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise Unsupported(f"a {type(obj).__name__}")
        if obj.layout is not torch.strided or obj.is_quantized:
            raise Unsupported(f"a tensor of layout {obj.layout}")
        node, fake = self.graph.tensor_input(obj, source)
        value = TensorValue(node, fake, source, obj)
        self.values[id(fake)] = value
        return value

    def number(self, obj: Any, source: Source) -> Value | None:
        if type(obj) is not int or not self.graph.is_dynamic_number(obj, source):
            return None
        node, number = self.graph.number_input(obj, source)
        return NumberValue(node, number, source)

    # ---- results

    def result(self, node: fx.Node | None, found: Any, keep: bool = False) -> Value:
        """The value of what an operation gave; ``node`` is dropped if nothing symbolic came."""
        if isinstance(found, torch.Tensor):
            known = self.values.get(id(found))
            if known is not None:
                return known
            assert node is not None
            value = TensorValue(node, found)
            value.born = self.trace.clock
            node.meta["example_value"] = found
            self.values[id(found)] = value
            return value
        if isinstance(found, SYMBOLIC):
            fixed = found.node.maybe_as_int() if isinstance(found, torch.SymInt) else None
            if fixed is not None:
                return Constant(fixed)
            assert node is not None
            node.meta["example_value"] = found
            return NumberValue(node, found)
        if isinstance(found, tuple | list):
            items = []
            for k, item in enumerate(found):
                part = None
                if isinstance(item, (torch.Tensor, tuple, list, *SYMBOLIC)):
                    assert node is not None
                    part = self.graph.call(operator.getitem, (node, k), {})
                items.append(self.result(part, item))
            if isinstance(found, list):
                return ListValue(items)
            return TupleValue(items, type(found))
        if found is None or isinstance(found, bool | int | float | complex | str):
            return Constant(found)
        if isinstance(found, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return Constant(found)
        raise Unsupported(f"an operation that gives a {type(found).__name__}")

    def operation(
        self, target: Any, args: list[Value], kwargs: dict[str, Value], method: str = ""
    ) -> Value:
        """Put an operation into the graph, and compute what it gives on fake tensors."""
        if target in _PLAIN and not isinstance(look(args[0]), TensorValue):
            target = _PLAIN[target]  # what it would change in place is no tensor
        fakes = [self._convert(a, _fake) for a in args]
        named = {k: self._convert(v, _fake) for k, v in kwargs.items()}
        nodes = tuple(self._convert(a, _node) for a in args)
        node_kwargs = {k: self._convert(v, _node) for k, v in kwargs.items()}
        run: Callable[..., Any] = getattr(fakes[0], method) if method else target
        try:
            rest = fakes[1 if method else 0 :]
            found = state.on_fakes(self.graph.mode, lambda: run(*rest, **named))
        except Exception as error:  # of the user's making, or for want of data
            text = str(error).strip().split("\n")[0]
            name = method or getattr(target, "__name__", str(target))
            raise Unsupported(f"{name}: {type(error).__name__}: {text}") from error
        self.graph.refuse_data()
        changes = _changes(method or getattr(target, "__name__", ""), kwargs)
        if not changes and found is not None and not _symbolic(found):
            return self.result(None, found)
        if isinstance(found, torch.Tensor) and id(found) in self.values and not changes:
            return self.values[id(found)]
        self.graph.inplace = self.graph.inplace or changes
        node = self.graph.call(method or target, nodes, node_kwargs, method=bool(method))
        return self.result(node, found)

    def _convert(self, value: Value, leaf: Callable[[Any], Any]) -> Any:
        value = look(value)
        if isinstance(value, TensorValue | NumberValue):
            return leaf(value)
        if isinstance(value, Constant):
            return value.value
        if isinstance(value, Known) and isinstance(value.value, torch._ops.OpOverload):
            return value.value
        if isinstance(value, Known) and value.value in (int, float, bool):
            return value.value
        if isinstance(value, TupleValue) and not hasattr(value.cls, "_fields"):
            return tuple(self._convert(item, leaf) for item in value.items)
        if isinstance(value, ListValue):
            return [self._convert(item, leaf) for item in value.items]
        if isinstance(value, SliceValue):
            return slice(*(self._convert(part, leaf) for part in value.parts))
        if isinstance(value, DictValue) and all(isinstance(k, str) for k in value.entries):
            return {k: self._convert(v, leaf) for k, (_, v) in value.entries.items()}
        raise Unsupported(f"a {value.cls.__name__} as an operand of the graph")

    # ---- what the interpreter asks

    def call(
        self, frame: Frame, function: Value, args: list[Value], kwargs: dict[str, Value]
    ) -> Value | None:
        args = [look(a) for a in args]
        if isinstance(function, NamedMethod) and isinstance(function.receiver, TensorValue):
            return self._method(function.name, [function.receiver, *args], kwargs)
        if isinstance(function, modules.ModuleValue):
            return modules.call(self, frame, function, args, kwargs)
        if isinstance(function, FunctionValue):
            if function.real is not None and function.real in overridable():
                return self.operation(function.real, args, kwargs)
            meant = _MEANINGS.get(function.real)
            return None if meant is None else meant(self, frame, *args, **kwargs)
        if isinstance(function, Known):
            return self._known(frame, function.value, args, kwargs)
        return managers.call(self, frame, function, args, kwargs)

    def _known(
        self, frame: Frame, obj: Any, args: list[Value], kwargs: dict[str, Value]
    ) -> Value | None:
        try:
            meant = _MEANINGS.get(obj)
        except TypeError:
            return None
        if meant is not None:
            return meant(self, frame, *args, **kwargs)
        if isinstance(obj, torch._ops.OpOverload | torch._ops.OpOverloadPacket) or obj in FACTORIES:
            return self.operation(obj, args, kwargs)
        if obj in overridable() or _of_torch(obj):
            name = getattr(obj, "__name__", "")
            if isinstance(obj, types.MethodDescriptorType | types.WrapperDescriptorType):
                tensor = bool(args) and isinstance(args[0], TensorValue)
                return self._method(name, args, kwargs) if tensor else None
            if name in _LEFT_TO_PYTHON:
                raise Unsupported(f"torch's {name}")
            return self.operation(obj, args, kwargs)
        if obj in (operator.getitem, operator.setitem) and not isinstance(args[0], TensorValue):
            if any(isinstance(a, TensorValue) for a in args[1:2]):
                raise Unsupported("a tensor as an index")
        elif any(isinstance(a, TensorValue) for a in args):
            if obj in _ON_TENSORS:
                return self._operator(obj, args)
            if obj is len:
                return self._size(args[0], 0)  # type: ignore[arg-type]
            if obj in (operator.is_, operator.is_not, isinstance, type, getattr, hasattr, iter):
                return None
            if obj in (operator.eq, operator.ne):
                raise Unsupported("comparing a tensor")
            return None
        if _any_number(args):
            return self._on_numbers(frame, obj, args, kwargs)
        return None

    def _operator(self, obj: Any, args: list[Value]) -> Value | None:
        if obj in (operator.add, operator.iadd, operator.mul, operator.imul) and any(
            isinstance(a, SequenceValue) for a in args
        ):
            raise Unsupported("an operator between a tensor and a sequence")
        if obj in (operator.eq, operator.ne) and not all(map(_numeric, args)):
            raise Unsupported("comparing a tensor with something else")
        return self.operation(obj, args, {})

    def _on_numbers(
        self, frame: Frame, obj: Any, args: list[Value], kwargs: dict[str, Value]
    ) -> Value | None:
        plain = all(map(_numeric, args))
        if obj in _ON_NUMBERS and plain:
            return self.operation(obj, args, {})
        if obj is int and args[0].cls is int:
            return args[0]
        if obj is float and args[0].cls is int:
            return self.operation(torch.sym_float, args, {})
        if obj in (isinstance, type, operator.is_, operator.is_not, operator.contains, iter):
            return None
        if obj in (operator.getitem, operator.setitem) and isinstance(args[0], DictValue):
            raise Unsupported("a size as a key")
        if obj in (bool, operator.not_, operator.truth, getattr):
            return None
        if obj in vars(math).values() or obj in (
            str,
            repr,
            round,
            divmod,
            hash,
            format,
            pow,
            complex,
        ):
            fixed = [self.specialised(a) for a in args]
            return frame.call(Known(obj), fixed, kwargs)
        return None

    def _method(self, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        owner = look(args[0])
        assert isinstance(owner, TensorValue)
        if name in _LEFT_TO_PYTHON:
            raise Unsupported(f"Tensor.{name}()")
        if name == "size" and not kwargs:
            if len(args) == 1:
                return self._shape(owner)
            return self._size(owner, self.integer(args[1]))
        if name in ("__len__",):
            return self._size(owner, 0)
        if name == "__iter__":
            raise Unsupported("Tensor.__iter__()")
        return self.operation(None, [owner, *args[1:]], kwargs, method=name)

    def _shape(self, owner: TensorValue) -> Value:
        return TupleValue([self._size(owner, k) for k in range(owner.fake.dim())], torch.Size)

    def _size(self, owner: TensorValue, dim: int) -> Value:
        if not -owner.fake.dim() <= dim < owner.fake.dim():
            raise Unsupported("a size of a dimension that is not there")
        size: Any = owner.fake.shape[dim]
        if isinstance(size, int):
            return Constant(size)
        node = self.graph.symbol_node(size)
        if node is None:
            node = self.graph.call("size", (owner.node, dim), {}, method=True)
        return self.result(node, size)

    def attribute(self, frame: Frame, owner: Value, name: str) -> Value | None:
        if isinstance(owner, TensorValue):
            return self._tensor_attribute(owner, name)
        if isinstance(owner, NumberValue):
            return frame.call(Known(getattr), [self.specialised(owner), Constant(name)])
        if isinstance(owner, modules.ModuleValue):
            return modules.attribute(self, frame, owner, name)
        if isinstance(owner, TupleValue) and owner.cls.__module__ == "torch.return_types":
            names: tuple[str, ...] = owner.cls.__match_args__  # type: ignore[attr-defined]
            return look(owner.items[names.index(name)]) if name in names else None
        if isinstance(owner, TupleValue) and owner.cls is torch.Size and name == "numel":
            return MethodValue(owner, self.trace.known(math.prod), "numel")
        if isinstance(owner, Known) and isinstance(owner.value, torch.finfo | torch.iinfo):
            return self.trace.known(getattr(owner.value, name))
        return managers.attribute(self, owner, name)

    def _tensor_attribute(self, owner: TensorValue, name: str) -> Value | None:
        if name == "shape":
            return self._shape(owner)
        if name in _CONSTANTS:
            return self.result(None, getattr(owner.fake, name))
        if name in _VIEWS:
            return self.operation(getattr, [owner, Constant(name)], {})
        if name == "__class__":
            return self.trace.known(owner.cls)
        found = getattr(owner.cls, name, None)
        if callable(found) and not isinstance(found, type):
            return NamedMethod(owner, name)
        if not hasattr(owner.fake if owner.obj is None else owner.obj, name):
            if owner.source is not None:
                self.trace.guards.add(f"not hasattr({{}}, {name!r})", owner.source)
            return None
        raise Unsupported(f"Tensor.{name}")

    def set_attribute(self, frame: Frame, owner: Value, name: str, value: Value) -> bool:
        if isinstance(owner, TensorValue):
            raise Unsupported(f"setting Tensor.{name}")
        if isinstance(owner, modules.ModuleValue):
            return modules.set_attribute(self, owner, name, value)
        return False

    def truth(self, value: Value) -> bool | None:
        if isinstance(value, NumberValue):
            return bool(value.number)  # which guards it
        if isinstance(value, TensorValue):
            raise Unsupported("a branch on a tensor")
        return None

    def unpacked(self, value: Value) -> list[Value] | None:
        if not isinstance(value, TensorValue):
            return None
        if value.fake.dim() == 0:
            raise Unsupported("iterating over a tensor without dimensions")
        int(value.fake.shape[0])  # the number of rows is guarded
        return self.operation(None, [value], {}, method="unbind").items  # type: ignore[attr-defined]

    def specialised(self, value: Value) -> Value:
        value = look(value)
        if isinstance(value, NumberValue):
            return Constant(value.cls(value.number))
        return value

    def integer(self, value: Value) -> Any:
        if isinstance(look(value), TensorValue):
            raise Unsupported("a tensor where a number must be known")
        return super().integer(value)

    def enter(self, frame: Frame, manager: Value) -> bool:
        return managers.enter(self, frame, manager)

    # ---- at the end

    def rebuild(self, value: Value, rebuild: Rebuild) -> str | None:
        if isinstance(value, TensorValue | NumberValue) and value.source is None:
            if value.node not in self.outputs:
                self.outputs.append(value.node)
            return f"out[{self.outputs.index(value.node)}]"
        if isinstance(value, managers.ManagerValue) and value.source is None:
            return rebuild.new(value, value.code(rebuild))
        return None

    def manager(self, value: Value, rebuild: Rebuild) -> str | None:
        if isinstance(value, managers.LeaveValue):
            return value.manager.code(rebuild)
        return None

    def close(self, stack: list[Value]) -> None:
        for value in reversed(stack):
            if isinstance(value, managers.LeaveValue):
                self.modes.leave(value.manager)

    def write_back(self, value: Value, rebuild: Rebuild) -> bool:
        if not isinstance(value, modules.ModuleValue):
            return False
        assert value.source is not None
        for name in value.changed:
            made = rebuild.expression(value.attributes[name] or Constant(None))
            rebuild.effects.append(f"setattr({rebuild.fetch(value.source)}, {name!r}, {made})")
        return True

    def last_effects(self, rebuild: Rebuild) -> None:
        self.modes.last_effects(rebuild)

    def operations(self) -> int:
        return self.graph.operations()

    def calling(self, call: str, rebuild: Rebuild) -> list[str]:
        if not self.modes.used:
            return [call]
        name = rebuild.trace.constants.name(self.modes.before)
        restore = f"{rebuild.trace.constants.name(state.restore)}({name})"
        return ["try:", f"    {call}", "except BaseException:", f"    {restore}", "    raise"]

    def called(self, module: Any) -> None:
        modules.guard_hooks(self, module)

    def start(self) -> None:
        assert no_modes()
        self.modes.start()

    def stop(self) -> None:
        self.modes.stop()

    def compile(self, backend: Callable[..., Any]) -> GraphCall | None:
        self.modes.stop()
        if self.hooks:
            name = self.trace.constants.name(self.hooks)
            self.trace.guards.late.append((f"not any({name})", (), "no module has hooks"))
        return self.graph.compile(backend, self.outputs)


def _numeric(value: Value) -> bool:
    """A tensor or number, known or not."""
    if isinstance(value, Constant):
        return isinstance(value.value, int | float | complex)
    return isinstance(value, TensorValue | NumberValue)


def _fake(value: Any) -> Any:
    return value.fake if isinstance(value, TensorValue) else value.number


def _node(value: Any) -> Any:
    return value.node


def _any_number(values: list[Value]) -> bool:
    """Whether a symbolic number is among the operands, or in a slice of them."""
    return any(
        isinstance(look(v), NumberValue)
        or (isinstance(v, SliceValue) and _any_number(v.parts))
        for v in values
    )  # fmt: skip


def _symbolic(found: Any) -> bool:
    if isinstance(found, tuple | list):
        return any(map(_symbolic, found))
    return isinstance(found, (torch.Tensor, *SYMBOLIC))


def _changes(name: str, kwargs: dict[str, Value]) -> bool:
    """Whether an operation changes an operand in place, going by its name as torch's go."""
    inplace = kwargs.get("inplace")
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in ("setitem", "__setitem__")
        or (name.startswith("i") and hasattr(operator, f"__{name}__"))
        or name.startswith("__i")
        or (isinstance(inplace, Constant) and inplace.value is True)
        or "out" in kwargs
    )


def _of_torch(obj: Any) -> bool:
    """Built-in functions of torch that its list of overridable ones leaves out."""
    module = getattr(obj, "__module__", None) or ""
    return isinstance(obj, types.BuiltinFunctionType) and module.startswith(
        ("torch._C._nn", "torch._C._linalg", "torch._C._special", "torch._C._fft")
    )
