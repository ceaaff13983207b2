"""What the interpreter computes with: stand-ins for the Python values of a run to come.

A value knows its Python type (``cls``), where it came from if it existed before the call
(``source``), and whatever can be said of it: a constant all, a list its items, a tensor (see
``tensors``) its node in the graph. Containers from outside are filled in only when looked at, so
that no more is guarded than was used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Self

from compiler.capture.sources import Source

serials = itertools.count(1)


class Unsupported(Exception):
    """Not understood here, and left to Python: a graph break. The message says what it was."""


class NeedsFrame(Unsupported):
    """A call that looks at the frame it is made from, such as ``locals()``."""


class Raised(Unsupported):
    """An exception of the user's, on its way to a handler; without one, Python shall raise it."""

    def __init__(self, exception: ObjectValue) -> None:
        super().__init__(f"raising {exception.cls.__name__}")
        self.exception = exception


def raising(cls: type, *arguments: Value | None) -> Raised:
    """An exception that an operation raises; a None stands for a message that is not known."""
    exception = ObjectValue(cls)
    exception.arguments = list(arguments)
    return Raised(exception)


class Value:
    """``born`` is the instruction of the outermost function that made it."""

    cls: type = object
    source: Source | None = None
    born: int = 0
    serial: int  # greater for values made later
    frozen = False  # not to be changed here

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.serial = next(serials)
        return made


class Null(Value):
    """The NULL that calls keep on the stack."""


NULL = Null()


class Constant(Value):
    """A number, text, None, or another immutable value that is known."""

    def __init__(self, value: Any, source: Source | None = None) -> None:
        self.value, self.cls, self.source = value, type(value), source

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


class Known(Value):
    """An object known by identity: a class, a built-in function, a module, a singleton."""

    def __init__(self, value: Any, source: Source | None = None) -> None:
        self.value, self.cls, self.source = value, type(value), source

    def __repr__(self) -> str:
        return f"Known({self.value!r})"


class Foreign(Value):
    """An object from outside of which nothing is known but where it is."""

    def __init__(self, obj: Any, source: Source) -> None:
        self.cls, self.source, self.obj = type(obj), source, obj


class Lazy(Value):
    """A value from outside that nobody has looked at yet."""

    def __init__(self, obj: Any, source: Source, wrap: Callable[[Any, Source], Value]) -> None:
        self.obj, self.source, self.cls = obj, source, type(obj)
        self._wrap: Callable[[Any, Source], Value] | None = wrap
        self._value: Value | None = None

    def look(self) -> Value:
        if self._value is None:
            assert self._wrap is not None and self.source is not None
            self._value = self._wrap(self.obj, self.source)
        return self._value

    @property
    def seen(self) -> Value | None:
        return self._value


def look(value: Value) -> Value:
    """The value itself; whoever calls depends on what it is."""
    return value.look() if isinstance(value, Lazy) else value


class SequenceValue(Value):
    """What lists and tuples share. ``fill`` gives the items of one from outside when needed."""

    def __init__(
        self, items: Sequence[Value] | None, cls: type, source: Source | None = None,
        fill: Callable[[], list[Value]] | None = None,
    ) -> None:  # fmt: skip
        self.cls, self.source, self._fill = cls, source, fill
        self._items = None if items is None else list(items)

    @property
    def items(self) -> list[Value]:
        if self._items is None:
            assert self._fill is not None
            self._items = self._fill()
        return self._items


class TupleValue(SequenceValue):
    """A tuple, a named tuple, or a tensor's shape."""

    def __init__(
        self, items: Sequence[Value] | None, cls: type = tuple, source: Source | None = None,
        fill: Callable[[], list[Value]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(items, cls, source, fill)


class ListValue(SequenceValue):
    """``added`` are appended to a list from outside whose items nobody has looked at."""

    def __init__(
        self, items: Sequence[Value] | None, source: Source | None = None,
        fill: Callable[[], list[Value]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(items, list, source, fill)
        self.added: list[Value] = []

    @property
    def filled(self) -> bool:
        return self._items is not None

    @property
    def items(self) -> list[Value]:
        if self._items is None:
            assert self._fill is not None
            self._items, self.added = self._fill() + self.added, []
        return self._items


class Key:
    """A dictionary key that is compared by identity."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key(value: Value) -> Any:
    """What stands for a value in our own dictionaries: equal where Python's keys are equal."""
    value = look(value)
    if isinstance(value, Constant | Known):
        hash(value.value)
        return value.value
    if isinstance(value, TupleValue):
        return tuple(key(item) for item in value.items)
    if type(value).__hash__ is object.__hash__ and not isinstance(
        value, ListValue | DictValue | SetValue | SliceValue
    ):
        cls: Any = value.cls
        own = cls.__hash__ is not object.__hash__ or cls.__eq__ is not object.__eq__
        if isinstance(value, ObjectValue) and own:
            raise Unsupported(f"a {value.cls.__name__} as a key")
        if isinstance(value, ByIdentity | ObjectValue | FunctionValue):
            return Key(value)
    raise Unsupported(f"a {value.cls.__name__} as a key")


class ByIdentity(Value):
    """Values that are hashed by identity, such as tensors and modules."""


class DictValue(Value):
    """``entries``: key to (the key's value, the value), in order. ``changed`` keys, or all."""

    def __init__(
        self, entries: dict[Any, tuple[Value, Value]], cls: type = dict,
        source: Source | None = None, factory: Value | None = None,
    ) -> None:  # fmt: skip
        self.entries, self.cls, self.source, self.factory = entries, cls, source, factory
        self.changed: dict[Any, None] = {}
        self.rewritten = False
        self.within = False  # an object of a subclass, whose own methods it must not call


class SetValue(Value):
    """``entries`` in the order of insertion; ``uncertain``: Python's own order is not known."""

    def __init__(
        self, entries: dict[Any, Value], cls: type = set, source: Source | None = None,
        uncertain: bool = False,
    ) -> None:  # fmt: skip
        self.entries, self.cls, self.source = entries, cls, source
        self.uncertain = uncertain

    def grow(self, name: Any, item: Value) -> None:
        if name not in self.entries:
            self.entries[name] = item
            self.uncertain = self.uncertain or self.source is not None

    def in_order(self) -> list[Value]:
        """In the order in which Python goes through the set: by hashes, for constants."""
        if self.source is not None and not self.uncertain:
            return list(self.entries.values())
        if len(self.entries) > 1:
            if self.uncertain or not all(is_constant(v) for v in self.entries.values()):
                raise Unsupported("the order of a set")
            real: set[Any] = set()
            for name in self.entries:
                real.add(name)
            return [self.entries[name] for name in real]
        return list(self.entries.values())


class SliceValue(Value):
    cls = slice

    def __init__(self, parts: Sequence[Value]) -> None:
        self.parts = list(parts)


class CellValue(Value):
    """A variable shared with inner functions. From outside, ``real`` is the cell."""

    cls = type((lambda x: lambda: x)(0).__closure__[0])  # type: ignore[index]

    def __init__(
        self, content: Value | None, source: Source | None = None, real: Any = None
    ) -> None:
        self.content, self.source, self.real = content, source, real


class FunctionValue(Value):
    """A Python function, from outside (``real``) or made inside."""

    cls = FunctionType

    def __init__(
        self, code: CodeType, scope: dict[str, Any], name: str, real: FunctionType | None = None,
        source: Source | None = None,
    ) -> None:  # fmt: skip
        self.code, self.scope, self.name, self.real, self.source = code, scope, name, real, source
        self.defaults: list[Value] = []
        self.kwdefaults: dict[str, Value] = {}
        self.cells: list[CellValue] = []
        self.attributes: dict[str, Value] = {}


class MethodValue(Value):
    """``function`` with its first argument given."""

    cls = MethodType

    def __init__(self, receiver: Value, function: Value, name: str = "") -> None:
        self.receiver, self.function, self.name = receiver, function, name


class NamedMethod(Value):
    """A built-in method of a value, such as ``append`` of a list."""

    cls: type = type([].append)

    def __init__(self, receiver: Value, name: str) -> None:
        self.receiver, self.name = receiver, name


class Recaptured(Value):
    """A function that Python is left to call, captured in turn."""

    def __init__(self, function: Value) -> None:
        self.function, self.cls = function, function.cls


class PartialValue(Value):
    """A ``functools.partial``."""

    def __init__(
        self, cls: type, function: Value, args: list[Value], kwargs: dict[str, Value],
        source: Source | None = None,
    ) -> None:  # fmt: skip
        self.cls, self.function, self.args, self.kwargs = cls, function, args, kwargs
        self.source = source


class ObjectValue(Value):
    """An instance of a Python class; ``obj`` if it is from outside.

    ``attributes`` are those that were set or looked up here; a None was deleted.
    """

    def __init__(self, cls: type, obj: Any = None, source: Source | None = None) -> None:
        self.cls, self.obj, self.source = cls, obj, source
        self.attributes: dict[str, Value | None] = {}
        self.changed: dict[str, None] = {}
        self.arguments: list[Value | None] = []  # of an exception: what it was made with


class MappingValue(ObjectValue):
    """An instance of a subclass of dict: an object, and the dictionary that it is."""

    def __init__(
        self, cls: type, base: type, obj: Any = None, source: Source | None = None,
        fill: Callable[[], DictValue] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cls, obj, source)
        self._inner = None if fill else DictValue({}, base)
        self._fill = fill

    @property
    def inner(self) -> DictValue:
        if self._inner is None:
            assert self._fill is not None
            self._inner = self._fill()
        return self._inner


class NamespaceValue(DictValue):
    """The ``__dict__`` of an object as it is now, which is not changed by this name.

    ``before``: what an object from outside had in it.
    """

    frozen = True

    def __init__(self, owner: ObjectValue, before: dict[str, Value]) -> None:
        super().__init__({})
        self.owner, self.before = owner, before

    @property
    def entries(self) -> dict[Any, tuple[Value, Value]]:
        slots = {n for base in self.owner.cls.__mro__ for n in base.__dict__.get("__slots__", ())}
        changed = {k: v for k, v in self.owner.attributes.items() if k in self.owner.changed}
        own = {**self.before, **changed}.items()
        return {k: (Constant(k), v) for k, v in own if v is not None and k not in slots}

    @entries.setter
    def entries(self, given: Any) -> None:
        pass


class Handling(Value):
    """What lies on the stack while an exception is handled: the one handled before, or a place."""


class Scope(Value):
    """A module's globals, when a function changes them."""

    def __init__(self, real: dict[str, Any]) -> None:
        self.real = real
        self.changed: dict[str, Value] = {}


class SuperValue(Value):
    cls = super

    def __init__(self, after: type, receiver: Value, of: type) -> None:
        self.after, self.receiver, self.of = after, receiver, of


def constant(value: Value) -> Any:
    """The Python object that a value is known to be; raises NotConstant otherwise."""
    value = look(value)
    if isinstance(value, Constant | Known):
        return value.value
    if isinstance(value, TupleValue) and value.cls in (tuple,):
        return tuple(constant(item) for item in value.items)
    if isinstance(value, ListValue):
        return [constant(item) for item in value.items]
    if isinstance(value, DictValue) and value.cls is dict:
        return {constant(k): constant(v) for k, v in value.entries.values()}
    if isinstance(value, SetValue):
        return value.cls(constant(v) for v in value.entries.values())
    if isinstance(value, SliceValue):
        return slice(*(constant(part) for part in value.parts))
    raise NotConstant


class NotConstant(Exception):
    pass


def is_constant(value: Value) -> bool:
    try:
        constant(value)
    except NotConstant:
        return False
    return True
