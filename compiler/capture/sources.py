"""Where a value came from: the Python expression that fetches it again at the next call.

    x            a parameter             x[0].weight    found by going on from there
    c3           an object known by identity, kept under a name of the generated code's globals

An expression that starts from a known object needs no walk from the parameters: once a guard has
checked that ``self`` is the very module that was captured, its parts are known objects as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """``expression`` is code; ``text`` is what a person reads; ``known``: starts at an object."""

    expression: str
    text: str
    known: bool = False
    base: Source | None = None
    template: str = ""

    def __str__(self) -> str:
        return self.text

    def then(self, template: str, text: str = "") -> Source:
        """One step on: ``source.then("{}.shape")``."""
        text = (text or template).format(self.text)
        return Source(template.format(self.expression), text, self.known, self, template)

    def attribute(self, name: str) -> Source:
        return self.then("{}." + name) if name.isidentifier() else self.item(name)

    def item(self, key: Any) -> Source:
        shown = repr(key).replace("{", "{{").replace("}", "}}")
        return self.then("{}[" + shown + "]")


class Constants:
    """Objects that generated code refers to, as its globals ``c0``, ``c1``, ..."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def name(self, obj: Any) -> str:
        """The global under which ``obj`` is kept; literals stand for themselves."""
        if obj is None or obj is True or obj is False or obj is Ellipsis:
            return repr(obj)
        if type(obj) is int or (type(obj) is str and len(obj) < 100):
            return repr(obj)
        return self.keep(obj)

    def keep(self, obj: Any) -> str:
        """The global under which this very object is kept."""
        if id(obj) not in self._names:
            self._names[id(obj)] = f"c{len(self._names)}"
            self.namespace[self._names[id(obj)]] = obj
        return self._names[id(obj)]

    def source(self, obj: Any, text: str) -> Source:
        """The source of an object known by identity."""
        return Source(self.name(obj), text, known=True)
