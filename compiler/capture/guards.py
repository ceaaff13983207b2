"""Guards: what a capture took for granted, as one flat generated function.

``guard(x, y, ...)`` returns None if all holds, else the number of the first condition that fails;
``Guards.texts`` says what that condition was. Steps that several conditions share, such as
``x.batch``, are fetched once. Where CPython counts a dictionary's changes, what a known dictionary
holds (the attributes of a module, a file's globals) is looked into only if its count is another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from compiler.capture.sources import Constants, Source


class Guards:
    """Conditions in the order in which they were met: earlier ones vouch for later ones."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._conditions: dict[tuple[str, tuple[Source, ...]], str] = {}
        self.late: list[tuple[str, tuple[Source, ...], str]] = []  # after all others
        self.texts: list[str] = []
        self.dict_version: Callable[[Any], int] | None = None  # new after each change of a dict
        self.details: dict[str, tuple[tuple[Source, ...], Any]] = {}  # tensor checks, by text

    def add(self, condition: str, *sources: Source, text: str = "") -> None:
        """``condition`` is code with a ``{}`` for each source."""
        text = text or _named(condition, self.constants).format(*(s.text for s in sources))
        self._conditions.setdefault((condition, sources), text)

    def same(self, source: Source, obj: Any) -> None:
        """The source still leads to this very object."""
        name = repr(obj) if obj is None or type(obj) is bool else self.constants.keep(obj)
        self.add(f"{{}} is {name}", source, text=f"{source.text} is the same {_kind(obj)}")

    def absent(self, source: Source, name: str) -> None:
        """A dictionary has nothing under a name."""
        self.add(f"{name!r} not in {{}}", source, text=f"{source.text} has no own {name}")

    def equal(self, source: Source, constant: Any) -> None:
        """The source leads to an equal value of the same type."""
        if constant is None or type(constant) is bool:
            return self.add(f"{{}} is {constant}", source)
        if source.known:  # as a rule the very same object, which is quick to see
            name = self.constants.keep(constant)
            self.add(
                f"{{}} is {name} or same({{}}, {name})", source, source,
                text=f"{source.text} == {constant!r:.60}",
            )  # fmt: skip
        else:
            plain = type(constant) is int
            name = repr(constant) if plain else self.constants.keep(constant)
            self.add(f"same({{}}, {name})", source, text=f"{source.text} == {constant!r:.60}")

    def generate(self, parameters: Sequence[str]) -> tuple[Callable[..., int | None], str]:
        """The function and its source text."""
        everything = [(c, s, t) for (c, s), t in self._conditions.items()] + self.late
        tables: dict[int, Any] = {}
        about: dict[int, list[Any]] = {}
        rest = []
        for one in everything:
            table = self._table(one[1]) if self.dict_version else None
            if table is None:
                rest.append(one)
            else:
                tables[id(table)] = table
                about.setdefault(id(table), []).append(one)
        quick = [one for group in about.values() for one in group]
        self.texts = [text for _, _, text in (*quick, *rest)]
        lines = [f"def guard({', '.join(parameters)}):", "    try:"]
        namespace = {**self.constants.namespace, "same": same}
        if quick:
            namespace |= {"__tables": list(tables.values()), "__version": self.dict_version}
            namespace["__versions"] = [-1] * len(tables)
            lines += [
                "        __now = list(map(__version, __tables))",
                "        if __now != __versions:",
                "            __failed = __look_again(__now)",
                "            if __failed is not None: return __failed",
            ]  # fmt: skip
        self._write(lines, rest, len(quick))
        lines += ["        return None", "    except Exception:", "        return -1"]
        count = 0
        for k, group in enumerate(about.values()):
            lines += [f"def __look_{k}():", "    if True:"]
            self._write(lines, group, count)
            count += len(group)
        lines += [
            f"__looks = [{', '.join(f'__look_{k}' for k in range(len(about)))}]",
            "def __look_again(now):",
            "    for k, look in enumerate(__looks):",
            "        if now[k] != __versions[k]:",
            "            failed = look()",
            "            if failed is not None: return failed",
            "            __versions[k] = now[k]",
        ]
        code = "\n".join(lines)
        exec(compile(code, "<guards>", "exec"), namespace)
        return namespace["guard"], code

    def _table(self, sources: tuple[Source, ...]) -> Any:
        """The known dictionary that a condition is about, if it is about nothing else."""
        if not sources or len({*sources}) > 1 or not sources[0].known:
            return None
        at = sources[0] if sources[0].base is None else sources[0].base
        obj = self.constants.namespace.get(at.expression) if at.base is None else None
        return obj if type(obj) is dict else None

    def _write(
        self, lines: list[str], conditions: list[tuple[str, tuple[Source, ...], str]], first: int
    ) -> None:
        fetched: dict[str, str] = {}

        def fetch(source: Source) -> str:
            if source.base is None:
                return source.expression
            if source.expression not in fetched:
                value = source.template.format(fetch(source.base))
                fetched[source.expression] = f"v{len(fetched)}"
                lines.append(f"        {fetched[source.expression]} = {value}")
            return fetched[source.expression]

        for number, (condition, sources, _) in enumerate(conditions, first):
            whole = condition.format(*[fetch(source) for source in sources])
            lines.append(_shorter(f"        if not ({whole}): return {number}"))

    def describers(self, parameters: Sequence[str]) -> dict[str, Callable[..., str]]:
        """For a check of many tensors: which of them it was, and how it differs."""
        found: dict[str, Callable[..., str]] = {}
        for text, (sources, check) in self.details.items():
            fetch = ", ".join(source.expression for source in sources)
            scope = dict(self.constants.namespace)
            exec(f"def fetch({', '.join(parameters)}): return ({fetch},)", scope)
            names = [source.text for source in sources]

            def describe(
                *values: Any, fetch: Any = scope["fetch"], check: Any = check, names: Any = names
            ) -> str:
                return str(check.check_verbose(*fetch(*values), tensor_check_names=names))

            found[text] = describe
        return found


def same(a: Any, b: Any) -> bool:
    """Equal and of the same type, all the way down; NaN equals itself, 0.0 isn't -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


def _shorter(line: str) -> str:
    """``if not (a is b)`` as ``if a is not b``."""
    return re.sub(r"if not \((\S+) is (\S+)\): return", r"if \1 is not \2: return", line)


def _kind(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return f"{type(obj).__name__}{f' {name}' if isinstance(name, str) else ''}"


def _named(condition: str, constants: Constants) -> str:
    """Known objects by their names, for people."""

    def shown(match: re.Match[str]) -> str:
        obj = constants.namespace.get(match[0])
        name = getattr(obj, "__qualname__", None)
        return name if isinstance(name, str) else match[0]

    return re.sub(r"\bc\d+\b", shown, condition)
