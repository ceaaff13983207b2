"""Iterators: where a loop stands, and what it gives next.

They are as lazy as Python's own, so that two loops over one iterator share its items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.capture.values import (
    Constant,
    DictValue,
    SetValue,
    TupleValue,
    Unsupported,
    Value,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame


class IteratorValue(Value):
    """Where a loop stands. ``named``: a variable may hold it too, so it must not be drained."""

    named = False

    def advance(self, frame: Frame) -> Value | None:
        raise NotImplementedError

    def drainable(self) -> bool:
        return not self.named


class ItemIterator(IteratorValue):
    """Over items, which for a list may still grow; the keys ``of`` a dictionary may not."""

    def __init__(self, items: list[Value], of: DictValue | SetValue | None = None) -> None:
        self.items, self.place, self.of, self.cls = items, 0, of, type(iter(()))

    def advance(self, frame: Frame | None = None) -> Value | None:
        if self.of is not None and len(self.of.entries) != len(self.items):
            raise Unsupported(f"a {self.of.cls.__name__} that changes while it is gone through")
        if self.place >= len(self.items):
            return None
        self.place += 1
        return look(self.items[self.place - 1])


class ZipIterator(IteratorValue):
    cls = zip

    def __init__(self, parts: list[IteratorValue], strict: bool = False) -> None:
        self.parts, self.strict = parts, strict

    def advance(self, frame: Frame) -> Value | None:
        found = []
        for k, part in enumerate(self.parts):
            item = part.advance(frame)
            if item is None:
                if self.strict and (k or any(p.advance(frame) is not None for p in self.parts[1:])):
                    raise Unsupported("zip() with strict over different lengths")
                return None
            found.append(item)
        return TupleValue(found) if found else None

    def drainable(self) -> bool:
        return not self.named and not self.strict and all(p.drainable() for p in self.parts)


class EnumerateIterator(IteratorValue):
    cls = enumerate

    def __init__(self, part: IteratorValue, count: int) -> None:
        self.part, self.count = part, count

    def advance(self, frame: Frame) -> Value | None:
        item = self.part.advance(frame)
        if item is None:
            return None
        self.count += 1
        return TupleValue([Constant(self.count - 1), item])

    def drainable(self) -> bool:
        return not self.named and self.part.drainable()


class MapIterator(IteratorValue):
    """``map`` or ``filter``: calls a function when asked for an item."""

    def __init__(self, cls: type, function: Value, parts: list[IteratorValue]) -> None:
        self.cls, self.function, self.parts = cls, function, parts

    def advance(self, frame: Frame) -> Value | None:
        while True:
            items = [part.advance(frame) for part in self.parts]
            found = [item for item in items if item is not None]
            if len(found) < len(items):
                return None
            if self.cls is map:
                return look(frame.call(self.function, found))
            if isinstance(self.function, Constant):
                kept = frame.truth(found[0])
            else:
                kept = frame.truth(look(frame.call(self.function, found)))
            if kept:
                return found[0]

    def drainable(self) -> bool:
        return False


class Generator(IteratorValue):
    """A generator function's frame, which goes on where it stopped."""

    def __init__(self, inner: Frame) -> None:
        self.inner, self.cls, self.done = inner, type(_ for _ in ()), False

    def advance(self, frame: Frame) -> Value | None:
        if self.done:
            return None
        value = self.inner.go_on()
        self.done = value is None
        return value

    def drainable(self) -> bool:
        return False
