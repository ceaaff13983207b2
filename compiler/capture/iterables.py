"""Iterators, and the functions that make containers of them or go through them."""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiler.capture import methods
from compiler.capture.attributes import (
    special,
)
from compiler.capture.iterators import (
    EnumerateIterator,
    ItemIterator,
    IteratorValue,
    MapIterator,
    ZipIterator,
)
from compiler.capture.registry import FALSE, HANDLERS, NONE, handles
from compiler.capture.values import (
    Constant,
    DictValue,
    Known,
    ListValue,
    MappingValue,
    SequenceValue,
    SetValue,
    SliceValue,
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


def iterator(frame: Frame, value: Value) -> IteratorValue:
    if isinstance(value, IteratorValue):
        if value.serial < frame.trace.sealed:
            raise Unsupported("going on within an operator with an iterator from outside of it")
        return value
    if isinstance(value, methods.ViewValue):
        return ItemIterator(value.items, value.of)
    if isinstance(value, SequenceValue):
        return ItemIterator(value.items)
    if isinstance(value, DictValue):
        return ItemIterator([k for k, _ in value.entries.values()], value)
    if isinstance(value, SetValue):
        return ItemIterator(value.in_order(), value)
    if isinstance(value, Constant) and isinstance(value.value, str | bytes | range):
        if len(value.value) > 100_000:
            raise Unsupported("a loop of more than 100000 rounds")
        return ItemIterator([Constant(item) for item in value.value])
    items = frame.trace.tensors.unpacked(value)
    if items is not None:
        return ItemIterator(items)
    if isinstance(value, Known) and isinstance(value.value, enum.EnumMeta):
        members: list[Any] = list(value.value)
        return ItemIterator([frame.trace.known(member) for member in members])
    method = special(frame, value, "__iter__")
    if method is not None:
        made = look(frame.call(method, [value]))
        if isinstance(made, IteratorValue):
            return made
    elif isinstance(value, MappingValue):
        return iterator(frame, value.inner)
    raise Unsupported(f"iterating over a {value.cls.__name__}")


def items_of(frame: Frame, value: Value) -> list[Value]:
    """All items of an iterable."""
    if isinstance(value, SequenceValue):
        return list(value.items)
    steps, found = iterator(frame, value), []
    while (item := steps.advance(frame)) is not None:
        found.append(item)
    return found


HANDLERS[iter] = iterator


@handles(next)
def _(frame: Frame, it: Value, default: Value | None = None) -> Value:
    if not isinstance(it, IteratorValue):
        raise Unsupported(f"next() of a {it.cls.__name__}")
    found = iterator(frame, it).advance(frame)
    if found is None and default is None:
        raise raising(StopIteration)
    return found or default  # type: ignore[return-value]


@handles(list)
def _(frame: Frame, items: Value | None = None) -> Value:
    return ListValue([] if items is None else items_of(frame, items))


@handles(tuple)
def _(frame: Frame, items: Value | None = None) -> Value:
    if isinstance(items, TupleValue) and items.cls is tuple:
        return items
    return TupleValue([] if items is None else items_of(frame, items))


for _cls in (set, frozenset):
    HANDLERS[_cls] = lambda frame, items=None, cls=_cls: SetValue(
        {key(i): i for i in items_of(frame, items)} if items is not None else {}, cls
    )


def _dict(frame: Frame, cls: type, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    factory = args[0] if cls is defaultdict and args else None
    made = DictValue({}, cls, factory=factory)
    if rest := args[1 if cls is defaultdict else 0 :]:
        methods.call_method(frame, made, "update", list(rest), {})
    for name, value in kwargs.items():
        made.entries[name] = (Constant(name), value)
    return made


for _kind in (dict, OrderedDict, defaultdict):
    HANDLERS[_kind] = lambda frame, *args, cls_=_kind, **kwargs: _dict(frame, cls_, args, kwargs)


@handles(range)
def _(frame: Frame, *args: Value) -> Value:
    try:
        return Constant(range(*(frame.trace.tensors.integer(a) for a in args)))
    except (TypeError, ValueError) as error:
        raise Unsupported(str(error)) from error


@handles(slice)
def _(frame: Frame, *args: Value) -> Value:
    parts = [NONE, *args, NONE] if len(args) == 1 else [*args, NONE][:3]
    return SliceValue(parts)


@handles(zip)
def _(frame: Frame, *parts: Value, strict: Value = FALSE) -> Value:
    return ZipIterator([iterator(frame, part) for part in parts], frame.truth(strict))


@handles(enumerate)
def _(frame: Frame, iterable: Value, start: Value | None = None) -> Value:
    return EnumerateIterator(iterator(frame, iterable), constant(start) if start else 0)


@handles(map)
def _(frame: Frame, function: Value, *parts: Value) -> Value:
    return MapIterator(map, function, [iterator(frame, part) for part in parts])


@handles(filter)
def _(frame: Frame, function: Value, part: Value) -> Value:
    return MapIterator(filter, function, [iterator(frame, part)])


@handles(reversed)
def _(frame: Frame, items: Value) -> Value:
    if isinstance(items, SequenceValue | DictValue | Constant):
        return ItemIterator(list(reversed(items_of(frame, items))))
    method = special(frame, items, "__reversed__")
    if method is None:
        raise Unsupported(f"reversed() of a {items.cls.__name__}")
    return look(frame.call(method, [items]))


def _itertools(function: Callable[..., Any]) -> Callable[..., Value]:
    """Of those that move items about and never look at them, the real ones serve."""

    def handler(frame: Frame, *args: Value, **kwargs: Value) -> Value:
        given = [
            constant(a) if isinstance(a, Constant) and not isinstance(a.value, str | range)
            else items_of(frame, a) for a in args
        ]  # fmt: skip
        named = {k: constant(v) if is_constant(v) else v for k, v in kwargs.items()}
        if function is itertools.zip_longest:
            named["fillvalue"] = kwargs.get("fillvalue", NONE)
        found = [
            TupleValue(item) if isinstance(item, tuple) else item
            for item in itertools.islice(function(*given, **named), 100_001)
        ]
        if len(found) > 100_000:
            raise Unsupported("more than 100000 items")
        return ItemIterator(found)

    return handler


for _function in (
    itertools.chain, itertools.product, itertools.combinations, itertools.permutations,
    itertools.zip_longest, itertools.islice, itertools.pairwise, itertools.chain.from_iterable,
):  # fmt: skip
    HANDLERS[_function] = _itertools(_function)
HANDLERS[itertools.chain.from_iterable] = lambda frame, items: ItemIterator(
    [i for part in items_of(frame, items) for i in items_of(frame, part)]
)
