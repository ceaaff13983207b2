"""One capture under way: what is known of objects from outside, and what was done to them."""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from compiler.capture.guards import Guards
from compiler.capture.sources import Constants, Source
from compiler.capture.values import (
    CellValue,
    Constant,
    DictValue,
    Foreign,
    FunctionValue,
    Known,
    Lazy,
    ListValue,
    MappingValue,
    MethodValue,
    NamedMethod,
    ObjectValue,
    PartialValue,
    Scope,
    SetValue,
    SliceValue,
    TupleValue,
    Unsupported,
    Value,
    key,
)

LITERALS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range)
)
IDENTITIES = (
    type, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, enum.Enum,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType,
    types.CodeType, property, classmethod, staticmethod, functools.cached_property, ContextVar,
)  # fmt: skip


class Trace:
    """``clock`` counts the instructions of the outermost function; ``breaking``: at this one."""

    def __init__(self, extension: Callable[[Trace], Any]) -> None:
        self.constants = Constants()
        self.guards = Guards(self.constants)
        self.clock = 0
        self.depth = self.deepest = 0  # of calls; the deepest of the current instruction
        self.frames: list[Any] = []  # under interpretation, outermost first
        self.dirty: dict[int, Value] = {}  # changed values from outside, in order
        self.seen: dict[int, Value] = {}
        self._kept: list[Any] = []
        self.compiling = self.asked_compiling = False  # what is_compiling() says; if it was asked
        self.trials = 0  # how many branches were asked about: see mended
        self.refused: set[int] = set()  # those, by number, that cannot be captured
        self.sealed = 0  # values made before this serial must not change: see regions
        self.tensors = extension(self)

    # ---- values from outside

    def lazy(self, obj: Any, source: Source) -> Lazy:
        return Lazy(obj, source, self.wrap)

    def known(self, obj: Any, text: str = "") -> Value:
        """A value for an object that is the same at every call."""
        if type(obj) in LITERALS:
            return Constant(obj)
        return self.wrap(obj, self.constants.source(obj, text or _text(obj)))

    def wrap(self, obj: Any, source: Source) -> Value:
        """The value of an object from outside, and the guards on which it stands."""
        found = self.seen.get(id(obj))
        if found is not None:
            self._same(source, obj, found.source)
            return found
        value = self._wrap(obj, source)
        value.born = self.clock
        if not isinstance(value, Constant):
            self.seen[id(obj)] = value
            self._kept.append(obj)
        return value

    def _same(self, source: Source, obj: Any, first: Source | None) -> None:
        if first is None or first == source or source.expression == self.constants.name(obj):
            return
        if first.known and first.base is None:
            self.guards.same(source, obj)
        else:
            self.guards.add("{} is {}", source, first)

    def held(self, table: dict[str, Any], name: str, text: str = "") -> Source:
        """The source of what a known dictionary has under a name."""
        return self.constants.source(table, text).then(
            f"{{}}[{name!r}]", f"{text}.{name}" if text else name
        )

    def pin(self, obj: Any, source: Source) -> Source:
        """Guard that the source leads to this very object; the source of what is known now."""
        if source.expression != self.constants.name(obj):
            self.guards.same(source, obj)
        return self.constants.source(obj, source.text)

    def typed(self, obj: Any, source: Source) -> Source:
        """Guard the type; the identity where the way to the object is known by identity."""
        if source.known:
            return self.pin(obj, source)
        self.guards.add(f"type({{}}) is {self.constants.name(type(obj))}", source)
        return source

    def _wrap(self, obj: Any, source: Source) -> Value:
        cls = type(obj)
        if cls in LITERALS:
            number = self.tensors.number(obj, source)
            if number is not None:
                return number
            self.guards.equal(source, obj)
            return Constant(obj, source)
        special = self.tensors.wrap(obj, source)
        if special is not None:
            return special
        if cls in (tuple, list):
            source = self.typed(obj, source)
            return self._sequence(obj, source)
        if issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__bases__ == (tuple,):
            return self._sequence(obj, self.typed(obj, source))
        if cls in (dict, OrderedDict, defaultdict, types.MappingProxyType):
            return self._dictionary(obj, source)
        if cls in (set, frozenset):
            return self._set(obj, source)
        if cls is slice:
            source = self.typed(obj, source)
            parts = [(getattr(obj, n), source.attribute(n)) for n in ("start", "stop", "step")]
            return SliceValue([self.lazy(*part) for part in parts])
        if cls is types.FunctionType:
            return self.function(obj, source)
        if cls is types.MethodType:
            source = self.typed(obj, source)
            function = self.wrap(obj.__func__, source.attribute("__func__"))
            receiver = self.wrap(obj.__self__, source.attribute("__self__"))
            return MethodValue(receiver, function, obj.__name__)
        if cls is types.BuiltinMethodType and _is_method(obj):
            source = self.typed(obj, source)
            self.guards.equal(source.attribute("__name__"), obj.__name__)
            return NamedMethod(self.wrap(obj.__self__, source.attribute("__self__")), obj.__name__)
        if cls is types.CellType:
            return self.cell(obj, self.pin(obj, source))
        if cls is functools.partial:
            return self._partial(obj, source)
        if isinstance(obj, IDENTITIES):
            return Known(obj, self.pin(obj, source))
        if plain(cls):
            return ObjectValue(cls, obj, self.typed(obj, source))
        base = mapping_base(cls)
        if base is not None:
            source = self.typed(obj, source)
            return MappingValue(cls, base, obj, source, lambda: self._held(obj, base, source))
        return Foreign(obj, source)

    def _sequence(self, obj: Any, source: Source) -> Value:
        def fill() -> list[Value]:
            self.guards.add(f"len({{}}) == {len(obj)}", source)
            return [self.lazy(item, source.item(k)) for k, item in enumerate(obj)]

        if type(obj) is list:
            return ListValue(None, source, fill)
        return TupleValue(None, type(obj), source, fill)

    def key_source(self, source: Source, key: Any) -> Source:
        if type(key) in (int, str, bool, type(None)):
            return source.item(key)
        return source.then(f"{{}}[{self.constants.name(key)}]")

    def _dictionary(self, obj: Any, source: Source) -> Value:
        if not all(map(_plain_key, obj)):
            return Foreign(obj, source)
        source = self.typed(obj, source)
        name = self.constants.name(list(obj))
        self.guards.add(
            f"list({{}}) == {name}", source, text=f"{source.text} has keys {list(obj)!r:.80}"
        )
        names = {k: self.known(k) for k in obj}
        entries = {
            key(names[k]): (names[k], self.lazy(v, self.key_source(source, k)))
            for k, v in obj.items()
        }
        factory = None
        if type(obj) is defaultdict:
            factory = self.wrap(obj.default_factory, source.attribute("default_factory"))
        cls = type(obj)
        return DictValue(entries, cls, source, factory)  # type: ignore[arg-type]

    def _held(self, obj: Any, base: Any, source: Source) -> DictValue:
        """What an instance of a subclass of dict holds, past the methods of its class."""
        names = list(base.keys(obj))
        if not all(map(_plain_key, names)):
            raise Unsupported(f"the keys of a {type(obj).__name__}")
        keys, get = self.constants.name(base.keys), self.constants.name(base.__getitem__)
        self.guards.add(
            f"list({keys}({{}})) == {self.constants.name(names)}", source,
            text=f"{source.text} has keys {names!r:.80}",
        )  # fmt: skip
        entries: dict[Any, tuple[Value, Value]] = {}
        for k in names:
            step = source.then(f"{get}({{}}, {self.constants.name(k)})", f"{{}}[{k!r}]")
            name = self.known(k)
            entries[key(name)] = (name, self.lazy(base.__getitem__(obj, k), step))
        found = DictValue(entries, base, source)
        found.within = True
        return found

    def _set(self, obj: Any, source: Source) -> Value:
        if not all(map(_plain_key, obj)):
            return Foreign(obj, source)
        source = self.typed(obj, source)
        order = list(obj)  # sets of equal items may differ in it
        self.guards.add(f"list({{}}) == {self.constants.name(order)}", source)
        values = [self.known(k) for k in order]
        return SetValue({key(v): v for v in values}, type(obj), source)

    def function(self, obj: types.FunctionType, source: Source) -> FunctionValue:
        """By identity where the way to it is known, else by its code: closures are made anew."""
        if source.known:
            source = self.pin(obj, source)
        else:
            self.guards.add(f"type({{}}) is {self.constants.name(type(obj))}", source)
            self.guards.same(source.attribute("__code__"), obj.__code__)
            self.guards.same(source.attribute("__globals__"), obj.__globals__)
        value = FunctionValue(obj.__code__, obj.__globals__, obj.__qualname__, obj, source)
        defaults = source.attribute("__defaults__")
        value.defaults = [
            self.lazy(d, defaults.item(k)) for k, d in enumerate(obj.__defaults__ or ())
        ]
        named = source.attribute("__kwdefaults__")
        value.kwdefaults = {
            k: self.lazy(d, named.item(k)) for k, d in (obj.__kwdefaults__ or {}).items()
        }
        cells = source.attribute("__closure__")
        value.cells = [
            self._inner_cell(c, cells.item(k)) for k, c in enumerate(obj.__closure__ or ())
        ]
        return value

    def _inner_cell(self, cell: types.CellType, source: Source) -> CellValue:
        if source.known:
            source = self.constants.source(cell, source.text)
        found = self.seen.get(id(cell))
        if isinstance(found, CellValue):
            self._same(source, cell, found.source)
            return found
        value = self.cell(cell, source)
        self.seen[id(cell)] = value
        self._kept.append(cell)
        return value

    def cell(self, cell: types.CellType, source: Source) -> CellValue:
        if is_empty(cell):  # its variable has no value yet
            self.guards.add(f"{self.constants.name(is_empty)}({{}})", source)
            return CellValue(None, source, cell)
        content = self.lazy(cell.cell_contents, source.attribute("cell_contents"))
        return CellValue(content, source, cell)

    def _partial(self, obj: functools.partial[Any], source: Source) -> Value:
        source = self.typed(obj, source)
        args = source.attribute("args")
        self.guards.add(f"len({{}}) == {len(obj.args)}", args)
        names = source.attribute("keywords")
        self.guards.add(f"list({{}}) == {self.constants.name(list(obj.keywords))}", names)
        return PartialValue(
            functools.partial,
            self.wrap(obj.func, source.attribute("func")),
            [self.lazy(a, args.item(k)) for k, a in enumerate(obj.args)],
            {k: self.lazy(v, names.item(k)) for k, v in obj.keywords.items()},
            source,
        )

    # ---- changes

    def scope(self, real: dict[str, Any]) -> Scope:
        found = self.seen.get(id(real))
        if not isinstance(found, Scope):
            found = Scope(real)
            found.source = self.constants.source(real, "globals()")
            self.seen[id(real)] = found
        return found

    def mutate(self, value: Value) -> None:
        """Note that a value changes; one from outside is written back at the end."""
        if self.sealed and (value.source is not None or value.serial < self.sealed):
            raise Unsupported("a change within an operator of what stands outside of it")
        if value.frozen:
            raise Unsupported("a change of an object whose __dict__ was read")
        if value.source is not None:
            self.dirty.setdefault(id(value), value)

    def guard_distinct(self) -> None:
        """A changed object must not turn up under another name at a later call."""
        others = [v for v in self.seen.values() if isinstance(v, _MUTABLE)]
        for changed in self.dirty.values():
            for other in others:
                if other is changed or other.cls is not changed.cls:
                    continue
                a, b = changed.source, other.source
                if a is not None and b is not None and not (a.known and b.known):
                    self.guards.late.append(("{} is not {}", (a, b), f"{a.text} is not {b.text}"))


_MUTABLE = (ListValue, DictValue, SetValue, ObjectValue)


def _plain_key(k: Any) -> bool:
    """Whether a key is a literal, or is compared by identity."""
    cls: Any = type(k)
    by_identity = cls.__hash__ is object.__hash__ and cls.__eq__ is object.__eq__
    return cls in LITERALS or isinstance(k, IDENTITIES) or (by_identity and plain(cls))


def _is_method(obj: Any) -> bool:
    """Whether a built-in function is the method of a value, such as ``items.append``."""
    owner = obj.__self__
    if owner is None or isinstance(owner, types.ModuleType | type):
        return False
    return bool(getattr(owner, obj.__name__, None) == obj)


def is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


_PLAIN_CLASS: Any = type.__getattribute__


def mapping_base(cls: Any) -> Any:
    """dict or OrderedDict, where a class is a plain subclass of it in Python; else None."""
    base = OrderedDict if issubclass(cls, OrderedDict) else dict
    if not issubclass(cls, base) or issubclass(cls, defaultdict):
        return None
    python = all(b in (object, dict, OrderedDict) or b.__flags__ & (1 << 9) for b in cls.__mro__)
    usual = type(cls).__getattribute__ is _PLAIN_CLASS and cls.__new__ is base.__new__
    return base if python and usual else None


def plain(cls: Any) -> bool:
    """Whether instances keep what they have in ``__dict__`` or slots, and look it up as usual."""
    return (
        (
            cls.__getattribute__ is object.__getattribute__
            or isinstance(cls.__getattribute__, types.FunctionType)
        )
        and type(cls).__getattribute__ is _PLAIN_CLASS
        and all(base is object or base.__flags__ & (1 << 9) for base in cls.__mro__)  # heap type
        and cls.__new__ is object.__new__
    )


def _text(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return name if isinstance(name, str) else type(obj).__name__
