"""``copy.copy`` and ``copy.deepcopy`` of containers and of instances of plain classes."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from compiler.capture.attributes import namespace, special
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    FunctionValue,
    Known,
    ListValue,
    ObjectValue,
    SetValue,
    TupleValue,
    Unsupported,
    Value,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

_OWN_WAYS = (
    "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__",
    "__getnewargs_ex__",
)  # fmt: skip


def deepcopy(frame: Frame, value: Value, memo: Value | None = None) -> Value:
    """Of all that is reached, each once."""
    if memo is not None:
        raise Unsupported("copy.deepcopy() with a memo")
    return _copy(frame, value, {})


def shallow(frame: Frame, value: Value) -> Value:
    """Of the outermost container or object alone."""
    return _copy(frame, value, None)


def _copy(frame: Frame, value: Value, memo: dict[int, Value] | None) -> Value:
    """With ``memo``, the copies made so far, also of what is inside."""
    value = look(value)
    if _atomic(value):
        return value
    if memo is not None and id(value) in memo:
        return memo[id(value)]

    def part(inner: Value) -> Value:
        return look(inner) if memo is None else _copy(frame, inner, memo)

    def kept(made: Any) -> Any:
        if memo is not None:
            memo[id(value)] = made
        return made

    if isinstance(value, ListValue):
        made = kept(ListValue([]))
        made.items.extend([part(item) for item in value.items])
        return made
    if isinstance(value, TupleValue) and value.cls is tuple:
        items = [part(item) for item in value.items]
        same = all(a is look(b) for a, b in zip(items, value.items, strict=True))
        return value if same else kept(TupleValue(items))
    if isinstance(value, DictValue) and value.cls in (dict, OrderedDict, defaultdict):
        made = kept(DictValue({}, value.cls, factory=value.factory))
        made.entries |= {k: (part(name), part(v)) for k, (name, v) in value.entries.items()}
        return made
    if isinstance(value, SetValue):
        return kept(SetValue({k: part(v) for k, v in value.entries.items()}, value.cls))
    if type(value) is ObjectValue:
        return _object(frame, value, kept, part, "__copy__" if memo is None else "__deepcopy__")
    raise Unsupported(f"copying a {value.cls.__name__}")


def _atomic(value: Value) -> bool:
    if isinstance(value, Known):
        return isinstance(value.value, type | types.BuiltinFunctionType)
    return isinstance(value, Constant | FunctionValue)


def _object(frame: Frame, value: ObjectValue, kept: Any, part: Any, way: str) -> Value:
    own = special(frame, value, way)
    if own is not None:
        return look(frame.call(own, [value, DictValue({})] if way == "__deepcopy__" else [value]))
    cls: Any = value.cls
    ways = [
        name for name in _OWN_WAYS if getattr(cls, name, None) is not getattr(object, name, None)
    ]
    slots = any("__slots__" in base.__dict__ for base in cls.__mro__)
    if ways or slots or issubclass(cls, BaseException) or isinstance(value, ByIdentity):
        raise Unsupported(f"copying a {cls.__name__}")
    made = kept(ObjectValue(cls))
    for name, (_, content) in namespace(frame, value).entries.items():
        made.attributes[name] = part(content)
        made.changed[name] = None
    return made
