"""Built-in functions and classes on values: one small function each, in a table."""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiler.capture import copies, iterables, methods, operators, polyfills  # noqa: F401  # they fill the table
from compiler.capture.attributes import (
    class_attribute,
    delete_own,
    exception_arguments,
    get_attribute,
    known_name,
    set_attribute,
    set_own,
    special,
    usual_attribute,
)
from compiler.capture.calls import bind_arguments
from compiler.capture.operators import alike
from compiler.capture.registry import HANDLERS, NONE, folded, handles, inside
from compiler.capture.trace import mapping_base, plain
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    FunctionValue,
    Known,
    MappingValue,
    MethodValue,
    NeedsFrame,
    ObjectValue,
    PartialValue,
    SequenceValue,
    SetValue,
    SuperValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    is_constant,
    look,
    raising,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

PURE = {
    abs, ascii, bin, bool, bytes, callable, chr, complex, divmod, float, format, hash, hex, int,
    issubclass, len, max, min, oct, ord, pow, repr, round, slice, sorted, str, sum, any, all,
}  # fmt: skip
PURE |= {f for f in vars(math).values() if callable(f)}
PURE |= {f for n, f in vars(operator).items() if callable(f) and not n.startswith("_")}


def call_known(frame: Frame, obj: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Call a built-in function or a class, known by identity."""
    args = [look(a) for a in args]
    kwargs = {k: look(v) for k, v in kwargs.items()}
    try:
        handler = HANDLERS.get(obj)
    except TypeError:
        handler = None
    if handler is not None:
        try:
            result = handler(frame, *args, **kwargs)
        except TypeError as error:
            if inside(error):
                raise
            raise Unsupported(f"{getattr(obj, '__name__', obj)}(): {error}") from error
        if result is not None:
            return result
    if _pure(obj) and all(map(is_constant, args)) and all(map(is_constant, kwargs.values())):
        return folded(frame, obj, args, kwargs)
    if obj in polyfills.POLYFILLS:
        return frame.call(frame.trace.known(polyfills.POLYFILLS[obj]), args, kwargs)
    if isinstance(obj, type):
        return construct(frame, obj, args, kwargs)
    if isinstance(obj, types.MethodDescriptorType | types.WrapperDescriptorType) and args:
        return methods.call_method(frame, args[0], obj.__name__, args[1:], kwargs, obj)
    raise Unsupported(f"calling {getattr(obj, '__qualname__', obj)}")


def call_method(
    frame: Frame, receiver: Value, name: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    args = [look(a) for a in args]
    if isinstance(receiver, Known) and getattr(receiver.value, "__self__", None) is None:
        bound = getattr(receiver.value, name)
        if bound in HANDLERS or _pure(bound):
            return call_known(frame, bound, args, kwargs)
    return methods.call_method(frame, receiver, name, args, kwargs)


def _pure(obj: Any) -> bool:
    try:
        return obj in PURE
    except TypeError:
        return False


# ---- attributes and classes


@handles(getattr)
def _(frame: Frame, owner: Value, name: Value, default: Value | None = None) -> Value:
    text = known_name(name)
    found = get_attribute(frame, owner, text) or default
    if found is None:
        raise raising(AttributeError, None)
    return found


@handles(hasattr)
def _(frame: Frame, owner: Value, name: Value) -> Value:
    return Constant(get_attribute(frame, owner, known_name(name)) is not None)


@handles(setattr)
def _(frame: Frame, owner: Value, name: Value, value: Value) -> Value:
    set_attribute(frame, owner, known_name(name), value)
    return NONE


@handles(delattr)
def _(frame: Frame, owner: Value, name: Value) -> Value:
    setter: Any = owner.cls.__delattr__
    if not isinstance(owner, ObjectValue) or isinstance(owner, ByIdentity):
        raise Unsupported(f"deleting an attribute of a {owner.cls.__name__}")
    if isinstance(setter, types.FunctionType):
        return frame.call(frame.trace.known(setter), [owner, name])
    delete_own(frame, owner, known_name(name))
    return NONE


@handles(object.__setattr__)
def _(frame: Frame, owner: Value, name: Value, value: Value) -> Value:
    if not isinstance(owner, ObjectValue) or isinstance(owner, ByIdentity):
        raise Unsupported("object.__setattr__")
    set_own(frame, owner, known_name(name), value)
    return NONE


@handles(object.__getattribute__)
def _(frame: Frame, owner: Value, name: Value) -> Value | None:
    if not isinstance(owner, ObjectValue) or isinstance(owner, ByIdentity):
        return None
    found = usual_attribute(frame, owner, known_name(name))
    if found is None:
        raise raising(AttributeError, None)
    return found


@handles(object.__new__)
def _(frame: Frame, cls: Value, *args: Value) -> Value:
    kind = constant(cls)
    if args or not plain(kind):
        raise Unsupported(f"making a {kind.__name__}")
    return ObjectValue(kind)


@handles(object.__init__)
def _(frame: Frame, owner: Value, *args: Value) -> Value:
    if args or not isinstance(owner, ObjectValue):
        raise Unsupported("object.__init__")
    return NONE


@handles(isinstance)
def _(frame: Frame, value: Value, classes: Value) -> Value:
    wanted = constant(classes)
    obj = getattr(value, "obj", None)
    try:
        found = isinstance(obj, wanted) if obj is not None else issubclass(value.cls, wanted)
    except TypeError as error:  # no class, or one that refuses such questions
        raise raising(TypeError, Constant(str(error))) from error
    return Constant(found)


@handles(callable)
def _(frame: Frame, value: Value) -> Value:
    if isinstance(value, Known):
        return Constant(callable(value.value))
    return Constant(any("__call__" in vars(base) for base in value.cls.__mro__))


@handles(type)
def _(frame: Frame, *args: Value) -> Value:
    if len(args) != 1:
        raise Unsupported("making a class")
    return frame.trace.known(args[0].cls)


@handles(super)
def _(frame: Frame, *args: Value) -> Value:
    if not args:
        if "__class__" not in frame.slots:
            raise NeedsFrame("super()")
        cell = frame.slots["__class__"]
        first = frame.slots[frame.code.co_varnames[0]]
        args = tuple(getattr(v, "content", v) for v in (cell, first))
    after, receiver = look(args[0]), look(args[1])
    if isinstance(receiver, Known) and isinstance(receiver.value, type):
        return SuperValue(constant(after), receiver, receiver.value)
    return SuperValue(constant(after), receiver, receiver.cls)


@handles(len)
def _(frame: Frame, value: Value) -> Value | None:
    if isinstance(value, SequenceValue):
        return Constant(len(value.items))
    if isinstance(value, DictValue | SetValue):
        return Constant(len(value.entries))
    method = special(frame, value, "__len__")
    if isinstance(value, MappingValue) and method is None:
        return Constant(len(value.inner.entries))
    return None if method is None else look(frame.call(method, [value]))


@handles(functools.partial)
def _(frame: Frame, function: Value, *args: Value, **kwargs: Value) -> Value:
    return PartialValue(functools.partial, function, list(args), kwargs)


def construct(frame: Frame, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """An instance of a class."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__bases__ == (tuple,):
        new: Any = cls.__new__
        made = frame.trace.function(new, frame.trace.constants.source(new, cls.__name__))
        slots = bind_arguments(made, [frame.trace.known(cls), *args], kwargs)
        return TupleValue([slots[name] for name in cls._fields], cls)
    own_init = isinstance(cls.__init__, types.FunctionType)  # type: ignore[misc]
    if issubclass(cls, BaseException) and not kwargs and not own_init:
        exception = ObjectValue(cls)
        exception.arguments = list(args)
        return exception
    base = mapping_base(cls)
    of_metaclass: Any = type(cls).__call__
    if isinstance(of_metaclass, types.FunctionType):
        return look(
            frame.call(frame.trace.known(of_metaclass), [frame.trace.known(cls), *args], kwargs)
        )
    if not (plain(cls) or base) or of_metaclass is not type.__call__:
        raise Unsupported(f"making a {cls.__name__}")
    value = ObjectValue(cls) if base is None else MappingValue(cls, base)
    value.born = frame.trace.clock
    init = class_attribute(frame, cls, "__init__")
    if isinstance(init, types.FunctionType):
        frame.call(frame.trace.known(init), [value, *args], kwargs)
    elif isinstance(value, MappingValue):
        methods.call_method(frame, value, "update", args, kwargs)
    elif args or kwargs:
        raise Unsupported(f"{cls.__name__}() with arguments")
    return value


def signature(frame: Frame, function: Value) -> Value:
    """Of a function from outside: a constant."""
    function = look(function)
    inner = look(function.function) if isinstance(function, MethodValue) else function
    real = getattr(inner, "real", None)
    if not isinstance(inner, FunctionValue) or real is None:
        raise Unsupported("the signature of what is made here")
    if (inner.defaults or inner.kwdefaults) and not (inner.source and inner.source.known):
        raise Unsupported("the signature of a function that is made anew each time")
    found = inspect.signature(real if inner is function else types.MethodType(real, object()))
    return Known(found, frame.trace.constants.source(found, f"the signature of {inner.name}"))


# ---- text


def formatted(frame: Frame, value: Value, conversion: Value, spec: Value) -> Value | None:
    """For ``polyfills.formatted``: constants at once."""
    value = frame.trace.tensors.specialised(value)
    if is_constant(value) and is_constant(spec):
        return folded(frame, polyfills.formatted, [value, conversion, spec], {})
    return None


SHORTCUTS: dict[Any, Callable[..., Value | None]] = {
    polyfills.alike: alike, polyfills.formatted: formatted, inspect.signature: signature,
    copy.deepcopy: copies.deepcopy, copy.copy: copies.shallow,
}  # fmt: skip


def _shown(name: str) -> Callable[..., Value | None]:
    def handler(frame: Frame, value: Value | None = None, *more: Value) -> Value | None:
        for candidate in dict.fromkeys((name, "__repr__")):
            method = None if value is None else special(frame, value, candidate)
            if method is not None and value is not None:
                return look(frame.call(method, [value]))
        if isinstance(value, ObjectValue) and issubclass(value.cls, BaseException):
            how = str if name == "__str__" else repr
            arguments = exception_arguments(value)
            return folded(frame, lambda *args: how(value.cls(*args)), arguments, {})
        return None

    return handler


HANDLERS[str], HANDLERS[repr] = _shown("__str__"), _shown("__repr__")


def _looks_at_frame(frame: Frame, *args: Value, **kwargs: Value) -> Value:
    raise NeedsFrame("a call such as locals(), which looks at the frame it is made from")


for _frame_call in (
    locals, vars, dir, globals, builtins.exec, builtins.eval, sys._getframe, inspect.currentframe,
    inspect.stack,
):  # fmt: skip
    HANDLERS[_frame_call] = _looks_at_frame
