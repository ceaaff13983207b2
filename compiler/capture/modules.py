"""nn.Module in the interpreter, and functions of torch that mean something while capturing."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from compiler.capture import managers
from compiler.capture.attributes import lookup, object_attribute
from compiler.capture.iterables import items_of
from compiler.capture.sources import Source
from compiler.capture.unseen import unseen
from compiler.capture.values import (
    ByIdentity,
    Constant,
    ObjectValue,
    TupleValue,
    Unsupported,
    Value,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame
    from compiler.capture.tensors import Tensors

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [
    getattr(_module, name) for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
]  # fmt: skip


class ModuleValue(ObjectValue, ByIdentity):
    """A module, known by identity."""


def module(tensors: Tensors, obj: nn.Module, source: Source) -> Value:
    return ModuleValue(type(obj), obj, tensors.trace.pin(obj, source))


def attribute(tensors: Tensors, frame: Frame, owner: ModuleValue, name: str) -> Value | None:
    held_here = owner.attributes.get(name)
    if held_here is not None:
        return look(held_here)
    instance, trace = owner.obj.__dict__, tensors.trace
    cls: Any = owner.cls
    if cls.__getattribute__ is not object.__getattribute__:
        raise Unsupported(f"{owner.cls.__name__}.__getattribute__")
    if name not in instance and not on_class(owner.cls, name):
        assert owner.source is not None
        for table in _TABLES:
            held = instance[table]
            if name in held:
                trace.pin(held, trace.held(instance, table, owner.source.text))
                step = trace.held(held, name, owner.source.text)
                owner.attributes[name] = value = trace.wrap(held[name], step)
                return value
        if lookup(owner.cls, "__getattr__") is not nn.Module.__getattr__:
            raise Unsupported(f"{owner.cls.__name__}.__getattr__")
        for held in (*(instance[table] for table in _TABLES), instance):
            trace.guards.absent(trace.constants.source(held, owner.source.text), name)
        return None
    return object_attribute(frame, owner, name)


def on_class(cls: type, name: str) -> bool:
    return any(name in base.__dict__ for base in cls.__mro__)


def set_attribute(tensors: Tensors, owner: ModuleValue, name: str, value: Value) -> bool:
    value = look(value)
    cls: Any = owner.cls
    if cls.__setattr__ is not nn.Module.__setattr__:
        return False
    instance = owner.obj.__dict__
    if isinstance(value, ModuleValue) or (
        isinstance(value.cls, type) and issubclass(value.cls, nn.Parameter)
    ):
        raise Unsupported("setting a parameter or a submodule")
    if any(name in base.__dict__ for base in owner.cls.__mro__):
        return False
    if name in instance["_parameters"] or name in instance["_modules"]:
        raise Unsupported("setting a parameter or a submodule")
    owner.attributes[name] = value
    owner.changed[name] = None
    tensors.trace.mutate(owner)
    return True


def call(
    tensors: Tensors, frame: Frame, function: ModuleValue, args: list[Value],
    kwargs: dict[str, Value],
) -> Value:  # fmt: skip
    """Interpret ``forward``, unless hooks or a compiled version are in the way."""
    obj = function.obj
    if function.cls.__call__ is not nn.Module.__call__:
        raise Unsupported(f"{function.cls.__name__}.__call__")
    if isinstance(obj, torch.jit.ScriptModule) or obj._compiled_call_impl is not None:
        raise Unsupported(f"a compiled {function.cls.__name__}")
    guard_hooks(tensors, obj)
    forward = attribute(tensors, frame, function, "forward")
    if forward is None:
        raise Unsupported(f"{function.cls.__name__} without forward")
    return frame.call(forward, args, kwargs)


def guard_hooks(tensors: Tensors, obj: nn.Module) -> None:
    if has_hooks(obj):
        raise Unsupported(f"a {type(obj).__name__} with hooks")
    if not tensors.hooks:
        tensors.hooks += _GLOBAL_HOOKS
    held = [getattr(obj, name) for name in _HOOKS]
    if not any(h is held[0] for h in tensors.hooks):
        tensors.hooks += held


def has_hooks(obj: nn.Module) -> bool:
    return any(getattr(obj, name) for name in _HOOKS) or any(_GLOBAL_HOOKS)


def forward_of(obj: Any) -> tuple[nn.Module, types.FunctionType] | None:
    """A module and the function that its call comes down to."""
    if not isinstance(obj, nn.Module) or isinstance(obj, torch.jit.ScriptModule):
        return None
    forward: Any = obj.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, types.FunctionType) or forward.__self__ is not obj:
        return None
    if type(obj).__call__ is not nn.Module.__call__ or obj._compiled_call_impl is not None:
        return None
    return obj, function


class CapturedModule(nn.Module):
    """A module whose calls are captured; all else is the module's own."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], session: Any) -> None:
        super().__init__()
        self._orig_mod = module
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_capture", session)
        self.training = module.training

    @unseen
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._orig_mod, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    def train(self, mode: bool = True) -> CapturedModule:
        super().train(mode)
        return self


# ---- functions with a meaning of their own

MEANINGS: dict[Any, Callable[..., Value | None]] = {}


def _answers(answer: Any, *functions: Any) -> None:
    for function in functions:
        MEANINGS[function] = lambda tensors, frame, *args, **kwargs: Constant(answer)


def _is_compiling(tensors: Tensors, frame: Frame) -> Value:
    """Yes where the whole function may become one graph: see ``frames.capture_entry``."""
    name = str(frame.scope.get("__name__"))
    if name.startswith(("torch.", "compiler.mend.")):
        return Constant(True)
    tensors.trace.asked_compiling = True
    return Constant(tensors.trace.compiling)


MEANINGS[torch.compiler.is_compiling] = _is_compiling
MEANINGS[torch.compiler.is_dynamo_compiling] = _is_compiling
_answers(
    False, torch.jit.is_scripting, torch.jit.is_tracing, torch.compiler.is_exporting,
    torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic, torch.fx._symbolic_trace.is_fx_tracing,
)  # fmt: skip
_answers(None, torch._C._log_api_usage_once, torch._C._get_tracing_state)


def _asked(function: Callable[[], Any], possible: bool) -> Callable[..., Value]:
    """A question whose answer is guarded, if it can be yes at all."""

    def meant(tensors: Tensors, frame: Frame) -> Value:
        if not possible:
            return Constant(False)
        source = tensors.trace.constants.source(function, function.__name__)
        return tensors.trace.wrap(function(), source.then("{}()"))

    return meant


for _device in (torch.cuda, torch.xpu):
    for _name in ("is_available", "is_current_stream_capturing"):
        _question = getattr(_device, _name, None)
        if _question is not None:
            MEANINGS[_question] = _asked(_question, _device.is_available())
for _query in (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
    torch.is_autocast_enabled, torch.get_autocast_dtype, torch.are_deterministic_algorithms_enabled,
):  # fmt: skip
    MEANINGS[_query] = lambda tensors, frame, *args, query=_query: tensors.trace.known(
        query(*(tensors.integer(a) for a in args))
    )
for _cls in managers.CLASSES:
    MEANINGS[_cls] = lambda tensors, frame, *args, cls=_cls, **kwargs: managers.make(
        tensors, cls, list(args), kwargs
    )
MEANINGS[torch.set_grad_enabled] = managers.set_grad_enabled
MEANINGS[torch._C._set_grad_enabled] = lambda tensors, frame, mode: (
    managers.set_grad_enabled(tensors, frame, mode) and Constant(None)
)


def _is_tensor(tensors: Tensors, frame: Frame, value: Value) -> Value:
    return Constant(issubclass(value.cls, torch.Tensor))


MEANINGS[torch.is_tensor] = _is_tensor


def _dtype_info(cls: Any) -> Callable[..., Value]:
    def meant(tensors: Tensors, frame: Frame, dtype: Value) -> Value:
        return tensors.trace.known(cls(tensors.integer(dtype)))

    return meant


MEANINGS[torch.finfo], MEANINGS[torch.iinfo] = _dtype_info(torch.finfo), _dtype_info(torch.iinfo)
MEANINGS[torch.device] = lambda tensors, frame, *args: Constant(
    torch.device(*(tensors.integer(a) for a in args))
)
MEANINGS[torch.Size] = lambda tensors, frame, items: TupleValue(items_of(frame, items), torch.Size)
