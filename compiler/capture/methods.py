"""The methods of lists, dictionaries, sets, and of constants such as texts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from compiler.capture import polyfills
from compiler.capture.iterators import IteratorValue
from compiler.capture.registry import folded, inside
from compiler.capture.values import (
    Constant,
    DictValue,
    Known,
    ListValue,
    MappingValue,
    SequenceValue,
    SetValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    is_constant,
    key,
    look,
    raising,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

METHODS: dict[tuple[type, str], Callable[..., Value]] = {}
NONE = Constant(None)


def method(*kinds: type, names: str = "") -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    def register(handler: Callable[..., Value]) -> Callable[..., Value]:
        for kind in kinds:
            for name in (names or handler.__name__.strip("_")).split():
                METHODS[kind, name] = handler
        return handler

    return register


class ViewValue(TupleValue):
    """The keys, values or items of a dictionary, as it is when they are looked at."""

    def __init__(self, of: DictValue, cls: type) -> None:
        super().__init__([], cls)
        self.of = of

    @property
    def items(self) -> list[Value]:
        pairs = self.of.entries.values()
        if self.cls is type({}.keys()):
            return [k for k, _ in pairs]
        if self.cls is type({}.values()):
            return [look(v) for _, v in pairs]
        return [TupleValue([k, v]) for k, v in pairs]


def call_method(
    frame: Frame, receiver: Value, name: str, args: list[Value], kwargs: dict[str, Value],
    descriptor: Any = None,
) -> Value:  # fmt: skip
    """``receiver.name(*args, **kwargs)`` for a built-in method."""
    from compiler.capture.iterables import items_of

    receiver = look(receiver)
    if isinstance(receiver, MappingValue):
        receiver = receiver.inner
    for kind in type(receiver).__mro__:
        handler = METHODS.get((kind, name))
        if handler is not None and receiver.cls is not frozenset:
            if descriptor is not None and not issubclass(receiver.cls, descriptor.__objclass__):
                break
            try:
                return handler(frame, receiver, *args, **kwargs)
            except TypeError as error:
                if inside(error):
                    raise
                raise Unsupported(f"{name}(): {error}") from error
    values = [receiver, *args, *kwargs.values()]
    if isinstance(receiver, Constant) and name == "join" and not kwargs:
        values = [receiver, ListValue(items_of(frame, args[0]))]
        args = values[1:]
    if isinstance(receiver, Constant | TupleValue | SetValue) and all(map(is_constant, values)):
        found = descriptor or getattr(receiver.cls, name)
        return folded(frame, found, [receiver, *args], kwargs)
    raise Unsupported(f"calling {receiver.cls.__name__}.{name}")


def set_item(frame: Frame, target: DictValue, index: Value, value: Value) -> None:
    frame.trace.mutate(target)
    name = key(index)
    target.changed[name] = None
    target.entries[name] = (target.entries.get(name, (index, value))[0], value)


# ---- lists


@method(ListValue)
def append(frame: Frame, self: ListValue, item: Value) -> Value:
    frame.trace.mutate(self)
    (self.items if self.filled else self.added).append(item)
    return NONE


@method(ListValue)
def extend(frame: Frame, self: ListValue, items: Value) -> Value:
    from compiler.capture.iterables import items_of

    more = items_of(frame, items)
    frame.trace.mutate(self)
    (self.items if self.filled else self.added).extend(more)
    return NONE


@method(ListValue)
def insert(frame: Frame, self: ListValue, place: Value, item: Value) -> Value:
    frame.trace.mutate(self)
    self.items.insert(constant(place), item)
    return NONE


@method(ListValue)
def pop(frame: Frame, self: ListValue, place: Value | None = None) -> Value:
    where = -1 if place is None else constant(place)
    if not -len(self.items) <= where < len(self.items):
        raise Unsupported("IndexError: pop")
    frame.trace.mutate(self)
    return look(self.items.pop(where))


@method(ListValue)
def reverse(frame: Frame, self: ListValue) -> Value:
    frame.trace.mutate(self)
    self.items.reverse()
    return NONE


@method(ListValue, DictValue, SetValue)
def clear(frame: Frame, self: Any) -> Value:
    frame.trace.mutate(self)
    (self.items if isinstance(self, ListValue) else self.entries).clear()
    if isinstance(self, DictValue):
        self.rewritten = True
    return NONE


@method(ListValue, DictValue, SetValue)
def copy(frame: Frame, self: Any) -> Value:
    if isinstance(self, ListValue):
        return ListValue(self.items)
    if isinstance(self, DictValue):
        return DictValue(dict(self.entries), self.cls, factory=self.factory)
    return SetValue(dict(self.entries), self.cls, uncertain=True)


@method(ListValue)
def sort(frame: Frame, self: ListValue, **how: Value) -> Value:
    done = frame.call(frame.trace.known(sorted), [self], how)
    frame.trace.mutate(self)
    self.items[:] = done.items  # type: ignore[attr-defined]
    return NONE


@method(ListValue, TupleValue)
def index(frame: Frame, self: SequenceValue, item: Value) -> Value:
    return look(frame.call(frame.trace.known(polyfills.index), [self, item]))


@method(ListValue)
def remove(frame: Frame, self: ListValue, item: Value) -> Value:
    place = constant(index(frame, self, item))
    frame.trace.mutate(self)
    del self.items[place]
    return NONE


# ---- dictionaries


@method(DictValue)
def keys(frame: Frame, self: DictValue) -> Value:
    return ViewValue(self, type({}.keys()))


@method(DictValue)
def values(frame: Frame, self: DictValue) -> Value:
    return ViewValue(self, type({}.values()))


@method(DictValue)
def items(frame: Frame, self: DictValue) -> Value:
    return ViewValue(self, type({}.items()))


@method(DictValue)
def get(frame: Frame, self: DictValue, index: Value, default: Value = NONE) -> Value:
    found = self.entries.get(key(index))
    return look(found[1] if found is not None else default)


@method(DictValue)
def setdefault(frame: Frame, self: DictValue, index: Value, default: Value = NONE) -> Value:
    if key(index) not in self.entries:
        set_item(frame, self, index, default)
    return look(self.entries[key(index)][1])


@method(DictValue, names="pop")
def pop_key(frame: Frame, self: DictValue, index: Value, default: Value | None = None) -> Value:
    if key(index) not in self.entries:
        if default is None:
            raise raising(KeyError, index)
        return default
    frame.trace.mutate(self)
    self.rewritten = True
    return look(self.entries.pop(key(index))[1])


@method(DictValue)
def popitem(frame: Frame, self: DictValue) -> Value:
    if not self.entries:
        raise Unsupported("KeyError")
    frame.trace.mutate(self)
    self.rewritten = True
    return TupleValue(self.entries.popitem()[1])


@method(DictValue)
def update(frame: Frame, self: DictValue, *others: Value, **named: Value) -> Value:
    from compiler.capture.iterables import items_of

    for other in others:
        if isinstance(other, MappingValue):
            pairs = _pairs(frame, other)
        elif isinstance(other, DictValue):
            pairs = list(other.entries.values())
        elif isinstance(other, SequenceValue | IteratorValue):
            pairs = [tuple(items_of(frame, look(p))) for p in items_of(frame, other)]  # type: ignore[misc]
        else:
            raise Unsupported(f"a dictionary from a {other.cls.__name__}")
        for k, v in pairs:
            set_item(frame, self, k, v)
    for name, value in named.items():
        set_item(frame, self, Constant(name), value)
    return NONE


def _pairs(frame: Frame, other: MappingValue) -> list[tuple[Value, Value]]:
    """Of another mapping: by its own methods, unless it goes through its keys as a dict does."""
    from compiler.capture.iterables import items_of

    if getattr(other.cls, "__iter__", None) is dict.__iter__:
        return list(other.inner.entries.values())
    names = items_of(frame, frame.call(frame.call(Known(getattr), [other, Constant("keys")]), []))
    return [(k, frame.call(Known(operator.getitem), [other, k])) for k in names]


def _by(function: Any) -> Callable[..., Value]:
    return lambda frame, self, *args: look(frame.call(Known(function), [self, *args]))


for _name, _function in (
    ("__getitem__", operator.getitem), ("__setitem__", operator.setitem), ("__len__", len),
    ("__delitem__", operator.delitem), ("__contains__", operator.contains), ("__iter__", iter),
):  # fmt: skip
    METHODS[DictValue, _name] = METHODS[ListValue, _name] = _by(_function)
METHODS[DictValue, "__init__"] = update


@method(Known, names="get")
def get_context(frame: Frame, self: Known, *default: Value) -> Value:
    """Of a context variable."""
    if not isinstance(self.value, ContextVar) or not all(map(is_constant, default)):
        raise Unsupported(f"calling {self.cls.__name__}.get")
    given = [constant(d) for d in default]
    try:
        found = self.value.get(*given)
    except LookupError as error:
        raise raising(LookupError, None) from error
    name = frame.trace.constants.name
    source = frame.trace.constants.source(self.value, self.value.name)
    call = f"{{}}.get({', '.join(map(name, given))})"
    return frame.trace.wrap(found, source.then(call, "{}.get()"))


# ---- sets


@method(SetValue)
def add(frame: Frame, self: SetValue, item: Value) -> Value:
    frame.trace.mutate(self)
    self.grow(key(item), item)
    return NONE


@method(SetValue, names="discard remove")
def discard(frame: Frame, self: SetValue, item: Value) -> Value:
    if key(item) not in self.entries:
        raise Unsupported("an item that is not in the set")
    frame.trace.mutate(self)
    self.uncertain = True
    del self.entries[key(item)]
    return NONE


@method(SetValue, names="update")
def update_set(frame: Frame, self: SetValue, *others: Value) -> Value:
    from compiler.capture.iterables import items_of

    frame.trace.mutate(self)
    for other in others:
        for item in items_of(frame, look(other)):
            self.grow(key(item), item)
    return NONE
