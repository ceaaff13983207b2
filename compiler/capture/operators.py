"""Operators, comparisons, identity and items on values: as Python's data model has them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from compiler.capture import methods, polyfills
from compiler.capture.attributes import held, lookup, special
from compiler.capture.iterables import items_of
from compiler.capture.iterators import IteratorValue
from compiler.capture.registry import FALSE, HANDLERS, NONE, fresh, handles
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    Foreign,
    FunctionValue,
    Known,
    ListValue,
    ObjectValue,
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

_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
_COMPARED = ("__lt__", "__gt__", "__le__", "__ge__", "__eq__", "__ne__")
_REFLECTED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _operator(name: str) -> None:
    function, inplace = getattr(operator, name), getattr(operator, "i" + name.strip("_"))
    dunder = name.strip("_")

    def handler(frame: Frame, a: Value, b: Value) -> Value | None:
        return _containers(frame, name, a, b) or _by_class(
            frame, a, b, [f"__{dunder}__"], f"__r{dunder}__"
        )

    def handler_inplace(frame: Frame, a: Value, b: Value) -> Value | None:
        if isinstance(a, ListValue) and name == "add":
            methods.call_method(frame, a, "extend", [b], {})
            return a
        if isinstance(a, SetValue | DictValue) and name == "or_" and a.cls is not frozenset:
            methods.call_method(frame, a, "update", [b], {})
            return a
        if isinstance(a, ListValue | SetValue) and name != "add" and a.cls is not frozenset:
            return None
        return _containers(frame, name, a, b) or _by_class(
            frame, a, b, [f"__i{dunder}__", f"__{dunder}__"], f"__r{dunder}__"
        )

    HANDLERS[function], HANDLERS[inplace] = handler, handler_inplace


def _containers(frame: Frame, name: str, a: Value, b: Value) -> Value | None:
    if name == "add" and isinstance(a, ListValue) and isinstance(b, ListValue):
        return ListValue([*a.items, *b.items])
    if name == "add" and isinstance(a, TupleValue) and isinstance(b, TupleValue):
        cls = a.cls if a.cls is b.cls and not hasattr(a.cls, "_fields") else tuple
        return TupleValue([*a.items, *b.items], cls)
    if name == "mul" and isinstance(b, SequenceValue):
        a, b = b, a
    if name == "mul" and isinstance(a, SequenceValue):
        count = frame.trace.tensors.integer(b)
        if type(count) not in (int, bool):
            return None
        if isinstance(a, ListValue):
            return ListValue(a.items * count)
        return TupleValue(a.items * count, tuple if hasattr(a.cls, "_fields") else a.cls)
    if name == "or_" and isinstance(a, DictValue) and isinstance(b, DictValue):
        return DictValue({**a.entries, **b.entries}, a.cls, factory=a.factory)
    if isinstance(a, SetValue) and isinstance(b, SetValue):
        x, y = a.entries, b.entries
        kept = {
            "and_": {k: v for k, v in x.items() if k in y},
            "or_": {**x, **{k: v for k, v in y.items() if k not in x}},
            "sub": {k: v for k, v in x.items() if k not in y},
            "xor": {k: v for k, v in {**x, **y}.items() if (k in x) != (k in y)},
        }.get(name)
        return None if kept is None else SetValue(kept, a.cls, uncertain=True)
    return None


def _by_class(frame: Frame, a: Value, b: Value, names: list[str], reflected: str) -> Value | None:
    """The operator methods of user classes; a subclass's own reflected one comes first."""
    if not isinstance(a, ObjectValue) and not isinstance(b, ObjectValue):
        return None
    calls = [(name, a, b) for name in names]
    if b.cls is not a.cls or reflected in _COMPARED:
        first = b.cls is not a.cls and issubclass(b.cls, a.cls) and (
            reflected in _COMPARED or lookup(b.cls, reflected) is not lookup(a.cls, reflected)
        )  # fmt: skip
        calls.insert(0 if first else len(calls), (reflected, b, a))
    for name, left, right in calls:
        method = special(frame, left, name)
        if method is not None:
            result = look(frame.call(method, [left, right]))
            if not (isinstance(result, Constant) and result.value is NotImplemented):
                return result
    return None


for _name in _BINARY:
    _operator(_name)


def _comparison(name: str) -> None:
    def handler(frame: Frame, a: Value, b: Value) -> Value | None:
        own = _by_class(frame, a, b, [f"__{name}__"], f"__{_REFLECTED[name]}__")
        if own is not None:
            return own
        if name not in ("eq", "ne"):
            return None
        equal = _equal(frame, a, b)
        return None if equal is None else Constant(equal == (name == "eq"))

    HANDLERS[getattr(operator, name)] = handler


def _equal(frame: Frame, a: Value, b: Value) -> bool | None:
    """Equality where no class has its own; None if unsure."""
    if a is b and not isinstance(a, Constant):
        return None if isinstance(a, ByIdentity) else True
    both = a, b = held(a), held(b)
    for kind, polyfill in (
        (SequenceValue, polyfills.sequences_equal),
        (DictValue, polyfills.dicts_equal),
    ):
        if isinstance(a, kind) and isinstance(b, kind):
            if (a.cls is list) != (b.cls is list):
                return False
            return frame.truth(frame.call(frame.trace.known(polyfill), [a, b]))
    if isinstance(a, SetValue) and isinstance(b, SetValue):
        return a.entries.keys() == b.entries.keys()
    never_none = ObjectValue | SequenceValue | DictValue | SetValue | FunctionValue
    for one, other in (both, both[::-1]):
        if isinstance(one, Constant) and one.value is None and isinstance(other, never_none):
            return False
    if all(isinstance(v, ObjectValue) and v.cls.__eq__ is object.__eq__ for v in both):
        return _identical(frame, a, b)
    return None


for _name in _REFLECTED:
    _comparison(_name)


@handles(operator.is_)
def _(frame: Frame, a: Value, b: Value) -> Value:
    return Constant(_identical(frame, a, b))


@handles(operator.is_not)
def _(frame: Frame, a: Value, b: Value) -> Value:
    return Constant(not _identical(frame, a, b))


def _identical(frame: Frame, a: Value, b: Value) -> bool:
    if a is b:
        return True
    if isinstance(a, Constant) and isinstance(b, Constant):
        if type(a.value) is not type(b.value) or a.value != b.value:
            return False
        if a.value is b.value and isinstance(a.value, bool | None | type(Ellipsis)):
            return True
        raise Unsupported("the identity of equal constants")
    if isinstance(a, Known) and isinstance(b, Known):
        return a.value is b.value
    if isinstance(a, Foreign) or isinstance(b, Foreign):
        if isinstance(a, Constant) or isinstance(b, Constant):
            frame.trace.guards.add("{} is not None", (a.source or b.source))  # type: ignore[arg-type]
            return False
        raise Unsupported("the identity of an object that is not known")
    both = isinstance(a, FunctionValue) and isinstance(b, FunctionValue)
    if both and a.real is not None and a.real is b.real:  # type: ignore[attr-defined]
        return True
    if a.source is not None and b.source is not None and a.cls is b.cls:
        frame.trace.guards.late.append(
            ("{} is not {}", (a.source, b.source), f"{a.source} is not {b.source}")
        )
    if a.cls is b.cls and isinstance(a, TupleValue) and a.cls is not tuple:
        raise Unsupported("the identity of tuples")
    return False


def alike(frame: Frame, a: Value, b: Value) -> Value | None:
    """For ``polyfills.alike``: constants without asking for their identity."""
    if isinstance(a, Constant) and isinstance(b, Constant) and a.value == a.value:
        return Constant(a.value == b.value)
    return None


@handles(operator.not_)
def _(frame: Frame, a: Value) -> Value:
    return Constant(not frame.truth(a))


@handles(bool, operator.truth)
def _(frame: Frame, a: Value = FALSE) -> Value:
    return Constant(frame.truth(a))


@handles(operator.neg, operator.pos, operator.invert, abs)
def _(frame: Frame, a: Value) -> Value | None:
    if isinstance(a, ObjectValue):
        raise Unsupported("a unary operator of a class")
    return None


@handles(operator.contains)
def _(frame: Frame, container: Value, item: Value) -> Value | None:
    method = special(frame, container, "__contains__")
    if method is not None:
        return Constant(frame.truth(look(frame.call(method, [container, item]))))
    container = held(container)
    if isinstance(container, DictValue | SetValue):
        return Constant(key(item) in container.entries)
    if is_constant(container) and is_constant(item):
        return None
    if isinstance(container, SequenceValue | IteratorValue):
        return look(frame.call(frame.trace.known(polyfills.contains), [container, item]))
    return None


@handles(operator.getitem)
def _(frame: Frame, a: Value, index: Value) -> Value | None:
    method = special(frame, a, "__getitem__")
    if method is not None:
        return look(frame.call(method, [a, index]))
    a = held(a)
    if isinstance(a, DictValue):
        found = a.entries.get(key(index))
        if found is not None:
            return look(found[1])
        if a.factory is not None and not isinstance(a.factory, Constant):
            made = frame.call(a.factory, [])
            methods.set_item(frame, a, index, made)
            return look(made)
        raise raising(KeyError, index)
    if isinstance(a, SequenceValue):
        place = _index(frame, index)
        try:
            found_items = a.items[place]
        except IndexError:
            text = f"{'list' if isinstance(a, ListValue) else 'tuple'} index out of range"
            raise raising(IndexError, Constant(text)) from None
        except TypeError as error:
            raise Unsupported(str(error)) from error
        if isinstance(found_items, list):
            if isinstance(a, ListValue):
                return ListValue(found_items)
            return TupleValue(found_items, tuple if hasattr(a.cls, "_fields") else a.cls)
        return look(found_items)
    if isinstance(a, Known) and isinstance(a.value, type):
        return fresh(frame, a.value[constant(index)])  # type: ignore[index]
    return None


def _index(frame: Frame, index: Value) -> Any:
    if isinstance(index, SliceValue):
        return slice(*(frame.trace.tensors.integer(look(part)) for part in index.parts))
    return frame.trace.tensors.integer(index)


@handles(operator.setitem)
def _(frame: Frame, a: Value, index: Value, value: Value) -> Value | None:
    method = special(frame, a, "__setitem__")
    if method is not None:
        return frame.call(method, [a, index, value])
    a = held(a)
    if isinstance(a, ListValue) and isinstance(index, SliceValue):
        items = items_of(frame, value)
        frame.trace.mutate(a)
        a.items[_index(frame, index)] = items
        return NONE
    if isinstance(a, ListValue):
        place = _index(frame, index)
        if not isinstance(place, int) or not -len(a.items) <= place < len(a.items):
            raise Unsupported("setting an item that is not there")
        frame.trace.mutate(a)
        a.items[place] = value
        return NONE
    if isinstance(a, DictValue):
        methods.set_item(frame, a, index, value)
        return NONE
    raise Unsupported(f"setting an item of a {a.cls.__name__}")


@handles(operator.delitem)
def _(frame: Frame, a: Value, index: Value) -> Value:
    method = special(frame, a, "__delitem__")
    if method is not None:
        return frame.call(method, [a, index])
    a = held(a)
    if isinstance(a, ListValue):
        place = _index(frame, index)
        if isinstance(place, int) and not -len(a.items) <= place < len(a.items):
            raise Unsupported("deleting an item that is not there")
        frame.trace.mutate(a)
        del a.items[place]
        return NONE
    if isinstance(a, DictValue) and key(index) in a.entries:
        frame.trace.mutate(a)
        a.rewritten = True
        del a.entries[key(index)]
        return NONE
    raise Unsupported(f"deleting an item of a {a.cls.__name__}")
