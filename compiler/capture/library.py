"""Built-in functions, operators and classes on values: one small function each, in a table."""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import itertools
import math
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiler.capture import methods, polyfills
from compiler.capture.attributes import (
    class_attribute,
    exception_arguments,
    get_attribute,
    known_name,
    lookup,
    set_attribute,
    set_own,
    special,
    usual_attribute,
)
from compiler.capture.calls import bind_arguments
from compiler.capture.trace import IDENTITIES, LITERALS, plain
from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    EnumerateIterator,
    Foreign,
    FunctionValue,
    ItemIterator,
    IteratorValue,
    Known,
    ListValue,
    MapIterator,
    NeedsFrame,
    ObjectValue,
    PartialValue,
    SequenceValue,
    SetValue,
    SliceValue,
    SuperValue,
    TupleValue,
    Unsupported,
    Value,
    ZipIterator,
    constant,
    is_constant,
    key,
    look,
    raising,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

NONE, TRUE, FALSE = Constant(None), Constant(True), Constant(False)
HANDLERS: dict[Any, Callable[..., Value | None]] = {}
PURE = {
    abs, ascii, bin, bool, bytes, callable, chr, complex, divmod, float, format, hash, hex, int,
    issubclass, len, max, min, oct, ord, pow, repr, round, slice, sorted, str, sum, any, all,
}  # fmt: skip
PURE |= {f for f in vars(math).values() if callable(f)}
PURE |= {f for n, f in vars(operator).items() if callable(f) and not n.startswith("_")}
_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
_COMPARED = ("__lt__", "__gt__", "__le__", "__ge__", "__eq__", "__ne__")
_REFLECTED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def handles(
    *functions: Any,
) -> Callable[[Callable[..., Value | None]], Callable[..., Value | None]]:
    def register(handler: Callable[..., Value | None]) -> Callable[..., Value | None]:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


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
            if _inside(error):
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


def _inside(error: TypeError) -> bool:
    """Whether it comes from within a handler: a bug, and no wrong call."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is not None


def _pure(obj: Any) -> bool:
    try:
        return obj in PURE
    except TypeError:
        return False


def folded(
    frame: Frame, function: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Computed now, from constants; what it raises, Python shall raise."""
    try:
        result = function(*map(constant, args), **{k: constant(v) for k, v in kwargs.items()})
    except Exception as error:
        known = all(type(a) in LITERALS for a in error.args)
        raise raising(type(error), *(Constant(a) if known else None for a in error.args)) from error
    return fresh(frame, result)


def fresh(frame: Frame, obj: Any) -> Value:
    """The value of an object that was made just now."""
    if type(obj) in LITERALS:
        return Constant(obj)
    if type(obj) is list:
        return ListValue([fresh(frame, item) for item in obj])
    if type(obj) is tuple:
        return TupleValue([fresh(frame, item) for item in obj])
    if type(obj) is dict:
        return DictValue({k: (fresh(frame, k), fresh(frame, v)) for k, v in obj.items()})
    if type(obj) in (set, frozenset):
        return SetValue({k: fresh(frame, k) for k in obj}, type(obj))
    if type(obj) is slice:
        return SliceValue([fresh(frame, part) for part in (obj.start, obj.stop, obj.step)])
    if isinstance(obj, IDENTITIES):
        return frame.trace.known(obj)
    raise Unsupported(f"making a {type(obj).__name__}")


# ---- operators


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
    both = (a, b)
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
    if a.source is not None and b.source is not None and a.cls is b.cls:
        frame.trace.guards.late.append(
            ("{} is not {}", (a.source, b.source), f"{a.source} is not {b.source}")
        )
    if a.cls is b.cls and isinstance(a, FunctionValue | TupleValue) and a.cls is not tuple:
        raise Unsupported("the identity of functions")
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
    if isinstance(container, DictValue | SetValue):
        return Constant(key(item) in container.entries)
    method = special(frame, container, "__contains__")
    if method is not None:
        return Constant(frame.truth(look(frame.call(method, [container, item]))))
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


@handles(object.__init__)
def _(frame: Frame, owner: Value, *args: Value) -> Value:
    if args or not isinstance(owner, ObjectValue):
        raise Unsupported("object.__init__")
    return NONE


@handles(isinstance)
def _(frame: Frame, value: Value, classes: Value) -> Value:
    wanted = constant(classes)
    obj = getattr(value, "obj", None)
    return Constant(isinstance(obj, wanted) if obj is not None else issubclass(value.cls, wanted))


@handles(callable)
def _(frame: Frame, value: Value) -> Value:
    return Constant(hasattr(value.cls, "__call__"))  # noqa: B004  # the class is asked


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
    if not plain(cls) or type(cls).__call__ is not type.__call__:
        raise Unsupported(f"making a {cls.__name__}")
    value = ObjectValue(cls)
    value.born = frame.trace.clock
    init = class_attribute(frame, cls, "__init__")
    if isinstance(init, types.FunctionType):
        frame.call(frame.trace.known(init), [value, *args], kwargs)
    elif args or kwargs:
        raise Unsupported(f"{cls.__name__}() with arguments")
    return value


# ---- iterables


def iterator(frame: Frame, value: Value) -> IteratorValue:
    if isinstance(value, IteratorValue):
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
    found = it.advance(frame)
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


# ---- text


def formatted(frame: Frame, value: Value, conversion: Value, spec: Value) -> Value | None:
    """For ``polyfills.formatted``: constants at once."""
    value = frame.trace.tensors.specialised(value)
    if is_constant(value) and is_constant(spec):
        return folded(frame, polyfills.formatted, [value, conversion, spec], {})
    return None


SHORTCUTS: dict[Any, Callable[..., Value | None]] = {
    polyfills.alike: alike, polyfills.formatted: formatted,
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
