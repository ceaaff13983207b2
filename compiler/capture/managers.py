"""torch's context managers: grad modes, inference mode, autocast, inside the graph.

While capturing, the mode is set for real, so that fake tensors behave; the graph gets a node that
sets it too; and where a with block is open at a break, it is left in the graph and entered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from compiler.capture import state
from compiler.capture.sources import Source
from compiler.capture.values import (
    Constant,
    MethodValue,
    NotConstant,
    Unsupported,
    Value,
    constant,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.graph import CapturedGraph
    from compiler.capture.interpreter import Frame
    from compiler.capture.rebuild import Rebuild
    from compiler.capture.tensors import Tensors

GRAD = {torch.no_grad: False, torch.enable_grad: True}
_NAMES = {  # what an instance keeps of its constructor's arguments
    torch.inference_mode: {"mode": "mode"},
    torch.autocast: {
        "device_type": "device", "dtype": "fast_dtype", "enabled": "_enabled",
        "cache_enabled": "_cache_enabled",
    },
    torch.amp.autocast: {
        "device_type": "device", "dtype": "fast_dtype", "enabled": "_enabled",
        "cache_enabled": "_cache_enabled",
    },
}  # fmt: skip
CLASSES = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)


class ManagerValue(Value):
    """A manager that can be made again: its class, and its arguments by name."""

    def __init__(self, cls: type, arguments: dict[str, Any], source: Source | None = None) -> None:
        self.cls, self.arguments, self.source = cls, arguments, source

    def code(self, rebuild: Rebuild) -> str:
        name = rebuild.trace.constants.name
        return f"{name(self.cls)}({', '.join(f'{k}={name(v)}' for k, v in self.arguments.items())})"


class LeaveValue(Value):
    """What a with block keeps on the stack: how the manager is left."""

    def __init__(self, manager: ManagerValue) -> None:
        self.manager = manager


class Modes:
    """The modes that are set at this point of the capture."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self.open: list[tuple[ManagerValue, Callable[[], None], Callable[[], None]]] = []
        self.initial = True
        self.used = False  # whether the graph sets a mode
        self.before: tuple[Any, ...] = ()
        self.running = False
        self.random: torch.Tensor | None = None

    def start(self) -> None:
        self.initial, self.running = torch.is_grad_enabled(), True
        self.random = torch.get_rng_state()
        self.before = state.modes()

    def stop(self) -> None:
        """Leave all that is entered, for real alone."""
        if not self.running:
            return
        self.running = False
        for _, real, _ in reversed(self.open):
            real()
        self.open.clear()
        state.set_grad(self.initial)
        assert self.random is not None
        torch.set_rng_state(self.random)

    def set_grad(self, mode: bool) -> None:
        self.used = True
        state.set_grad(mode)
        self.graph.call(state.set_grad, (mode,), {})

    def enter(self, manager: ManagerValue) -> None:
        cls, arguments = manager.cls, manager.arguments
        if cls in GRAD:
            before = torch.is_grad_enabled()
            self.set_grad(GRAD[cls])
            self.open.append(
                (manager, lambda: state.set_grad(before), lambda: self.set_grad(before))
            )
            return
        real = cls(**arguments)
        real.__enter__()
        self.used = True
        if cls is torch.inference_mode:
            enter, leave = state.enter_inference_mode, state.exit_inference_mode
            node = self.graph.call(enter, (real.mode,), {})
        else:
            enter, leave = state.enter_autocast, state.exit_autocast
            values = (real.device, real.fast_dtype, real._enabled, real._cache_enabled)
            node = self.graph.call(enter, values, {})

        def leave_real() -> None:
            real.__exit__(None, None, None)

        def leave_both() -> None:
            leave_real()
            self.graph.call(leave, (node,), {})

        self.open.append((manager, leave_real, leave_both))

    def leave(self, manager: ManagerValue) -> None:
        if not self.open or self.open[-1][0] is not manager:
            raise Unsupported("with blocks left out of order")
        self.open.pop()[2]()

    def last_effects(self, rebuild: Rebuild) -> None:
        """A grad mode that outlives the function."""
        if self.running and torch.is_grad_enabled() != self.initial:
            name = rebuild.trace.constants.name(state.set_grad)
            rebuild.effects.append(f"{name}({torch.is_grad_enabled()})")


def manager(tensors: Tensors, obj: Any, source: Source) -> Value | None:
    """A manager from outside, made again from what it keeps."""
    cls = type(obj)
    if cls not in CLASSES:
        return None
    source = tensors.trace.typed(obj, source)
    arguments = {}
    for name, kept in _NAMES.get(cls, {}).items():
        arguments[name] = getattr(obj, kept)
        tensors.trace.guards.equal(source.attribute(kept), arguments[name])
    return ManagerValue(cls, arguments, source)


def make(tensors: Tensors, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
    """A manager made inside the function; None if it decorates a function."""
    names = list(_NAMES.get(cls, {}))
    if len(args) > len(names) or (cls is torch.inference_mode and _callable(args)):
        raise Unsupported(f"{cls.__name__} as a decorator")
    try:
        given = {**dict(zip(names, map(constant, args), strict=False)),
                 **{k: constant(v) for k, v in kwargs.items()}}  # fmt: skip
        real = cls(**given)
    except NotConstant:
        raise Unsupported(f"{cls.__name__} with arguments that are not known") from None
    except Exception as error:
        raise Unsupported(f"{type(error).__name__}: {error}") from error
    arguments = {name: getattr(real, kept) for name, kept in _NAMES.get(cls, {}).items()}
    return ManagerValue(cls, arguments)


def _callable(args: list[Value]) -> bool:
    return bool(args) and callable(getattr(look(args[0]), "value", None))


def set_grad_enabled(tensors: Tensors, frame: Frame, mode: Value) -> Value:
    """As a call it sets the mode at once; as a manager it sets it back."""
    wanted = bool(tensors.integer(mode))
    made = ManagerValue(torch.enable_grad if wanted else torch.no_grad, {})
    made.before = torch.is_grad_enabled()  # type: ignore[attr-defined]
    tensors.modes.set_grad(wanted)
    return made


def enter(tensors: Tensors, frame: Frame, value: Value) -> bool:
    if not isinstance(value, ManagerValue):
        return False
    before = getattr(value, "before", None)
    if before is not None:
        tensors.modes.set_grad(before)
    frame.stack.append(LeaveValue(value))
    tensors.modes.enter(value)
    frame.stack.append(Constant(None))
    return True


def call(
    tensors: Tensors, frame: Frame, function: Value, args: list[Value], kwargs: dict[str, Value]
) -> Value | None:
    if isinstance(function, LeaveValue):
        tensors.modes.leave(function.manager)
        return Constant(None)
    if isinstance(function, MethodValue) and isinstance(look(function.receiver), ManagerValue):
        if function.name == "clone":
            receiver = look(function.receiver)
            assert isinstance(receiver, ManagerValue)
            return ManagerValue(receiver.cls, receiver.arguments)
        raise Unsupported(f"{function.receiver.cls.__name__}.{function.name}()")
    return None


def attribute(tensors: Tensors, owner: Value, name: str) -> Value | None:
    if isinstance(owner, ManagerValue) and name == "clone":
        return MethodValue(owner, Constant(None), "clone")
    return None
