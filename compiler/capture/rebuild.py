"""From values back to Python: code that makes real objects of what the interpreter ended with.

The generated function has four parts: fetch what comes from outside, call the graph, build new
objects (each once, so that identity holds), and write back what was changed, in order. Everything
is fetched and built before anything is written, so that no write is seen too early.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from compiler.capture.iterators import EnumerateIterator, ItemIterator, MapIterator, ZipIterator
from compiler.capture.sources import Source
from compiler.capture.trace import Trace
from compiler.capture.values import (
    CellValue,
    Constant,
    DictValue,
    FunctionValue,
    Known,
    Lazy,
    ListValue,
    MappingValue,
    MethodValue,
    NamedMethod,
    NamespaceValue,
    ObjectValue,
    PartialValue,
    Recaptured,
    Scope,
    SetValue,
    SliceValue,
    TupleValue,
    Value,
)


class CannotRebuild(Exception):
    """There is no way to make the object of a value; the graph must break before it is made."""

    def __init__(self, value: Value) -> None:
        super().__init__(f"a {value.cls.__name__} ({type(value).__name__}) that must be made anew")
        self.value = value


class Rebuild:
    """Lines of the generated function, by part."""

    def __init__(self, trace: Trace, recapture: Callable[[Any], Any]) -> None:
        self.trace, self.recapture = trace, recapture
        self.fetches: list[str] = []
        self.builds: list[str] = []
        self.effects: list[str] = []
        self._fetched: dict[str, str] = {}
        self._built: dict[int, str] = {}
        self._open: set[int] = set()
        self.kept: list[Value] = []  # so that no other value gets the id of one that was built

    def helper(self, function: Any) -> str:
        return self.trace.constants.name(function)

    def fetch(self, source: Source) -> str:
        """A name for what a source leads to, as it was before the call changed anything."""
        if source.base is None:
            return source.expression
        if source.expression not in self._fetched:
            self._fetched[source.expression] = f"v{len(self._fetched)}"
            self.fetches.append(f"{self._fetched[source.expression]} = {source.expression}")
        return self._fetched[source.expression]

    def new(self, value: Value, code: str) -> str:
        """Build an object under a name of its own."""
        name = f"t{len(self._built)}"
        self._built[id(value)] = name
        self.kept.append(value)
        self.builds.append(f"{name} = {code}")
        return name

    def expression(self, value: Value) -> str:
        """Code for a value, building first what it consists of."""
        if isinstance(value, Lazy):
            if value.seen is None:
                assert value.source is not None
                return self.fetch(value.source)
            value = value.seen
        if isinstance(value, Constant | Known):
            return self.trace.constants.name(value.value)
        if id(value) in self._built:
            return self._built[id(value)]
        special = self.trace.tensors.rebuild(value, self)
        if special is not None:
            return special
        if value.source is not None:
            return self.fetch(value.source)
        maker = _MAKERS.get(type(value))
        if maker is None or id(value) in self._open:
            raise CannotRebuild(value)
        self._open.add(id(value))
        try:
            return maker(self, value)
        finally:
            self._open.discard(id(value))

    def many(self, values: Any) -> str:
        return ", ".join([self.expression(value) for value in values])

    def write_back(self) -> None:
        """What was done to objects from outside, in the order in which it began."""
        for value in list(self.trace.dirty.values()):
            if self.trace.tensors.write_back(value, self):
                continue
            assert value.source is not None
            target = self.fetch(value.source)
            if isinstance(value, ListValue):
                if value.filled:
                    self.effects.append(f"{target}[:] = [{self.many(value.items)}]")
                else:
                    self.effects.append(f"{target}.extend([{self.many(value.added)}])")
            elif isinstance(value, DictValue):
                self._dictionary_effects(value, target)
            elif isinstance(value, SetValue):
                made = self.new(SetValue({}), f"[{self.many(value.entries.values())}]")
                self.effects += [f"{target}.clear()", f"{target}.update({made})"]
            elif isinstance(value, CellValue):
                assert value.content is not None
                self.effects.append(f"{target}.cell_contents = {self.expression(value.content)}")
            elif isinstance(value, Scope):
                for name, content in value.changed.items():
                    self.effects.append(f"{target}[{name!r}] = {self.expression(content)}")
            elif isinstance(value, ObjectValue):
                put = self.helper(object.__setattr__)
                gone = self.helper(object.__delattr__)
                for name in value.changed:
                    kept = value.attributes[name]
                    self.effects.append(
                        f"{gone}({target}, {name!r})" if kept is None
                        else f"{put}({target}, {name!r}, {self.expression(kept)})"
                    )  # fmt: skip
            else:
                raise CannotRebuild(value)

    def _dictionary_effects(self, value: DictValue, target: str) -> None:
        if value.within:
            base: Any = value.cls
            names = value.entries if value.rewritten else value.changed
            if value.rewritten:
                self.effects.append(f"{self.helper(base.clear)}({target})")
            put = self.helper(base.__setitem__)
            for name in names:
                self.effects.append(f"{put}({target}, {self.many(value.entries[name])})")
            return
        if value.rewritten:
            pairs = self.pairs(value)
            made = self.new(DictValue({}), f"[{pairs}]")
            self.effects += [f"{target}.clear()", f"{target}.update({made})"]
            return
        for name in value.changed:
            k, v = value.entries[name]
            self.effects.append(f"{target}[{self.expression(k)}] = {self.expression(v)}")

    def pairs(self, value: DictValue) -> str:
        return ", ".join([f"({self.many(pair)})" for pair in value.entries.values()])


def make_function(
    code: types.CodeType, scope: dict[str, Any], name: str, defaults: tuple[Any, ...],
    kwdefaults: dict[str, Any], cells: tuple[types.CellType, ...],
) -> types.FunctionType:  # fmt: skip
    """What MAKE_FUNCTION does."""
    made = types.FunctionType(code, scope, code.co_name, defaults or None, cells)
    made.__kwdefaults__ = kwdefaults or None
    made.__qualname__ = name
    return made


def _tuple(r: Rebuild, value: TupleValue) -> str:
    inner = "(" + "".join(r.expression(item) + ", " for item in value.items).rstrip() + ")"
    if value.cls is tuple:
        return r.new(value, inner)
    if hasattr(value.cls, "_make"):
        return r.new(value, f"{r.helper(value.cls)}._make({inner})")
    return r.new(value, f"{r.helper(value.cls)}({inner})")


def _dict(r: Rebuild, value: DictValue) -> str:
    if value.cls is dict:
        inner = [f"{r.expression(k)}: {r.expression(v)}" for k, v in value.entries.values()]
        return r.new(value, "{" + ", ".join(inner) + "}")
    if value.cls is defaultdict:
        factory = "None" if value.factory is None else r.expression(value.factory)
        return r.new(value, f"{r.helper(defaultdict)}({factory}, [{r.pairs(value)}])")
    if value.cls is OrderedDict:
        return r.new(value, f"{r.helper(OrderedDict)}([{r.pairs(value)}])")
    raise CannotRebuild(value)


def _set(r: Rebuild, value: SetValue) -> str:
    return r.new(value, f"{r.helper(value.cls)}([{r.many(value.entries.values())}])")


def _function(r: Rebuild, value: FunctionValue) -> str:
    if value.attributes:
        raise CannotRebuild(value)
    cells = "".join(r.expression(cell) + ", " for cell in value.cells)
    if id(value) in r._built:  # a recursive function, built with its own cell
        return r._built[id(value)]
    defaults = "".join(r.expression(d) + ", " for d in value.defaults)
    named = ", ".join([f"{k!r}: {r.expression(d)}" for k, d in value.kwdefaults.items()])
    arguments = [
        r.helper(value.code), r.helper(value.scope), repr(value.name), f"({defaults})",
        "{" + named + "}", f"({cells})",
    ]  # fmt: skip
    return r.new(value, f"{r.helper(make_function)}({', '.join(arguments)})")


def _cell(r: Rebuild, value: CellValue) -> str:
    name = r.new(value, f"{r.helper(types.CellType)}()")
    if value.content is not None:
        if isinstance(value.content, FunctionValue) and id(value.content) in r._open:
            r._open.discard(id(value.content))  # it refers to itself: build it here
        r.builds.append(f"{name}.cell_contents = {r.expression(value.content)}")
    return name


def _object(r: Rebuild, value: ObjectValue) -> str:
    if issubclass(value.cls, BaseException):
        if None in value.arguments:  # a message that only Python knows
            raise CannotRebuild(value)
        return r.new(value, f"{r.helper(value.cls)}({r.many(value.arguments)})")
    new: Any = value.inner.cls.__new__ if isinstance(value, MappingValue) else object.__new__
    name = r.new(value, f"{r.helper(new)}({r.helper(value.cls)})")
    if isinstance(value, MappingValue):
        base: Any = value.inner.cls
        put = r.helper(base.__setitem__)
        for pair in value.inner.entries.values():
            r.builds.append(f"{put}({name}, {r.many(pair)})")
    for attribute, content in value.attributes.items():
        if attribute in value.changed and content is not None:
            made = r.expression(content)
            r.builds.append(f"{r.helper(object.__setattr__)}({name}, {attribute!r}, {made})")
    return name


def _partial(r: Rebuild, value: PartialValue) -> str:
    named = [f"{k}={r.expression(v)}" for k, v in value.kwargs.items()]
    inner = ", ".join([r.expression(value.function), *map(r.expression, value.args), *named])
    return r.new(value, f"{r.helper(value.cls)}({inner})")


def _items(r: Rebuild, value: ItemIterator) -> str:
    return r.new(value, f"iter([{r.many(value.items[value.place :])}])")


_MAKERS: dict[type, Callable[..., str]] = {
    ListValue: lambda r, v: r.new(v, f"[{r.many(v.items)}]"),
    TupleValue: _tuple,
    DictValue: _dict,
    SetValue: _set,
    SliceValue: lambda r, v: r.new(v, f"slice({r.many(v.parts)})"),
    FunctionValue: _function,
    CellValue: _cell,
    MethodValue: lambda r, v: r.new(
        v, f"{r.expression(v.function)}.__get__({r.expression(v.receiver)})"
    ),
    NamedMethod: lambda r, v: r.new(v, f"getattr({r.expression(v.receiver)}, {v.name!r})"),
    ObjectValue: _object,
    MappingValue: _object,
    NamespaceValue: lambda r, v: f"{r.expression(v.owner)}.__dict__",
    Recaptured: lambda r, v: r.new(v, f"{r.helper(r.recapture)}({r.expression(v.function)})"),
    PartialValue: _partial,
    ItemIterator: _items,
    ZipIterator: lambda r, v: r.new(v, f"zip({r.many(v.parts)}, strict={v.strict})"),
    EnumerateIterator: lambda r, v: r.new(v, f"enumerate({r.expression(v.part)}, {v.count})"),
    MapIterator: lambda r, v: r.new(
        v, f"{v.cls.__name__}({r.expression(v.function)}, {r.many(v.parts)})"
    ),
}
