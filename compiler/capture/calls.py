"""What a call means: functions are interpreted, built-in ones looked up in the library."""

from __future__ import annotations

import sysconfig
import types
import weakref
from typing import TYPE_CHECKING, Any

from compiler.capture.attributes import special
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    Foreign,
    FunctionValue,
    Known,
    ListValue,
    MappingValue,
    MethodValue,
    NamedMethod,
    Null,
    ObjectValue,
    PartialValue,
    SetValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    is_constant,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

_STDLIB = sysconfig.get_paths()["stdlib"]
_INLINED = (
    "collections", "functools", "dataclasses", "operator", "abc", "enum", "typing", "contextlib",
)  # fmt: skip
_OWN = ("compiler.capture.polyfills",)
_TORCH = (  # of torch's own Python
    "torch.nn.modules", "torch.distributions", "torch.utils._contextlib", "torch.nn.parameter",
    "torch.nn.utils.rnn", "torch.nn.functional", "torch.functional", "torch.backends.mha",
    "torch.jit._trace", "torch.fx._symbolic_trace", "torch.nn.utils.parametrize",
    "torch.nn.utils.parametrizations",
)  # fmt: skip


def call(frame: Frame, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The result of ``function(*args, **kwargs)``."""
    from compiler.capture import library

    special_meaning = frame.trace.tensors.call(frame, function, args, kwargs)
    if special_meaning is not None:
        return special_meaning
    if isinstance(function, FunctionValue):
        if function.real in library.SHORTCUTS:
            shortcut = library.SHORTCUTS[function.real](frame, *args, **kwargs)
            if shortcut is not None:
                return shortcut
        return call_function(frame, function, args, kwargs)
    if isinstance(function, MethodValue):
        return frame.call(function.function, [function.receiver, *args], kwargs)
    if isinstance(function, NamedMethod):
        return library.call_method(frame, function.receiver, function.name, args, kwargs)
    if isinstance(function, PartialValue):
        merged = {**function.kwargs, **kwargs}
        return frame.call(function.function, [*function.args, *args], merged)
    if isinstance(function, Known):
        return library.call_known(frame, function.value, args, kwargs)
    if isinstance(function, ObjectValue):
        method = special(frame, function, "__call__")
        if method is not None:
            return frame.call(method, [function, *args], kwargs)
    if isinstance(function, Foreign) and function.cls is weakref.ref and function.source:
        return frame.trace.wrap(function.obj(), function.source.then("{}()"))
    raise Unsupported(f"calling a {function.cls.__name__}")


def skipped(code: types.CodeType, module: Any) -> bool:
    """Whether a function is left to Python: the standard library's, and most of torch's."""
    name = str(module or "")
    top = name.split(".")[0]
    if name.startswith("compiler.capture.") and name not in _OWN:
        return True
    if top == "torch":
        return not name.startswith(_TORCH)
    if code.co_filename.startswith(_STDLIB) and "site-packages" not in code.co_filename:
        return top not in _INLINED
    return False


def call_function(
    frame: Frame, function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    code = function.code
    if hasattr(function.real, "_capture"):  # captured itself: here it is what it was made of
        return frame.call(frame.trace.known(function.real.__wrapped__), args, kwargs)  # type: ignore[union-attr]
    if skipped(code, function.scope.get("__name__")):
        raise Unsupported(f"calling {function.name} of {function.scope.get('__name__')}")
    return frame.inline(function, bind_arguments(function, args, kwargs))


def bind_arguments(
    function: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """Parameters to values; what Python would refuse is left to Python to refuse."""
    code = function.code
    names = code.co_varnames
    count, more = code.co_argcount, code.co_kwonlyargcount
    positional, keyword_only = names[:count], names[count : count + more]
    slots = dict(zip(positional, args, strict=False))
    place = count + more
    if code.co_flags & 4:
        slots[names[place]] = TupleValue(args[count:])
        place += 1
    elif len(args) > count:
        raise Unsupported(f"{function.name}() with too many arguments")
    extra: dict[Any, tuple[Value, Value]] = {}
    allowed = (*positional[code.co_posonlyargcount :], *keyword_only)
    for name, value in kwargs.items():
        if name in allowed:
            if name in slots:
                raise Unsupported(f"{function.name}() with {name} given twice")
            slots[name] = value
        else:
            extra[name] = (Constant(name), value)
    if code.co_flags & 8:
        slots[names[place]] = DictValue(extra)
    elif extra:
        raise Unsupported(f"{function.name}() with an unknown argument {next(iter(extra))}")
    defaults = dict(zip(reversed(positional), reversed(function.defaults), strict=False))
    for name, value in {**defaults, **function.kwdefaults}.items():
        slots.setdefault(name, value)
    missing = [name for name in (*positional, *keyword_only) if name not in slots]
    if missing:
        raise Unsupported(f"{function.name}() without {missing[0]}")
    return slots


def truth(frame: Frame, value: Value) -> bool:
    """What ``if value:`` finds."""
    if isinstance(value, Constant):
        return bool(value.value)
    known = frame.trace.tensors.truth(value)
    if known is not None:
        return bool(known)
    if isinstance(value, TupleValue | ListValue):
        return bool(value.items)
    if isinstance(value, DictValue | SetValue):
        return bool(value.entries)
    if isinstance(value, ObjectValue):
        for name in ("__bool__", "__len__"):
            method = special(frame, value, name)
            if method is not None:
                return truth(frame, frame.call(method, [value]))
        return bool(value.inner.entries) if isinstance(value, MappingValue) else True
    if isinstance(value, Known):
        if isinstance(value.value, type | types.ModuleType | types.BuiltinFunctionType):
            return True
        return bool(constant(value))
    if isinstance(value, FunctionValue | MethodValue | NamedMethod | PartialValue | ByIdentity):
        return True
    if isinstance(value, Null) or not is_constant(value):
        raise Unsupported(f"the truth of a {value.cls.__name__}")
    return bool(constant(value))
