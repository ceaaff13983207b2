"""The control-flow graph: what may be read, and what surely has a value."""

from __future__ import annotations

import ast
import textwrap

import pytest

from compiler.mend import cfg


def graph(source: str) -> tuple[cfg.Graph, dict[int, ast.stmt]]:
    """The graph of a function's source, and its statements by line."""
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    return cfg.Graph(node), {
        s.lineno: s for s in cfg.own_nodes(node.body) if isinstance(s, ast.stmt)
    }


def live_after(source: str, line: int) -> set[str]:
    found, lines = graph(source)
    return found.liveness()[found.after[lines[line]]]


def bound_before(source: str, line: int) -> set[str]:
    found, lines = graph(source)
    return found.bound_before(found.of[lines[line]], found.bound())


LOOP = """\
def f(x):
    y = x
    for i in range(3):
        t = x + y
        if t > 1:
            break
        y = t
    else:
        z = 1
    return y
"""


def test_liveness_goes_around_loops() -> None:
    assert live_after(LOOP, 4) == {"t", "x", "y"}
    assert live_after(LOOP, 7) == {"x", "y"}  # x and y for the next round
    assert live_after(LOOP, 3) == {"y"}


def test_bound_needs_every_path() -> None:
    assert bound_before(LOOP, 10) == {"x", "y"}  # t and i only if there was a round
    assert "t" in bound_before(LOOP, 7)


BRANCH = """\
def f(x, c):
    if c:
        a = 1
        b = 2
    else:
        a = 3
        return a
    d = a
    return b
"""


def test_a_side_that_returns_does_not_count() -> None:
    assert bound_before(BRANCH, 8) == {"x", "c", "a", "b"}
    assert live_after(BRANCH, 2) == {"a", "b"}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("try:\n        y = g(x)\n    except E as e:\n        pass\n    return y", {"x"}),
        ("with g(x) as y:\n        z = y\n    return y", {"x"}),  # it may swallow an exception
        ("y = 1\n    while x:\n        z = y\n    return y", {"x", "y"}),
        ("match x:\n        case [a, *b]:\n            y = a\n    return x", {"x"}),
        ("y = [t for t in x if t]\n    return y", {"x", "y"}),
        ("if (y := x) > 1:\n        pass\n    return y", {"x", "y"}),
        ("import a.b as y, c.d\n    return y", {"x", "y", "c"}),
        ("y: int\n    return y", {"x"}),
        ("def y(a=x):\n        return b\n    return y", {"x", "y"}),
    ],
)
def test_bound_at_the_return(body: str, wanted: set[str]) -> None:
    found, lines = graph(f"def f(x):\n    {body}\n")
    last = max(lines)
    assert found.bound_before(found.of[lines[last]], found.bound()) == wanted


def test_captured_names_are_always_live() -> None:
    source = "def f(x):\n    y = x\n    g = lambda: y\n    y = 2\n    return g\n"
    assert "y" in live_after(source, 4)


def test_handlers_see_what_is_bound_before_the_exception() -> None:
    source = """\
    def f(x):
        y = 1
        try:
            y = 2
            z = g(y)
        finally:
            h(y)
        return z
    """
    assert "y" in live_after(source, 4)
    assert bound_before(source, 7) == {"x", "y"}


@pytest.mark.parametrize(
    ("body", "always"),
    [
        ("if c:\n        return 1\n    else:\n        raise E", True),
        ("if c:\n        return 1", False),
        ("while c:\n        return 1", False),
        ("with c:\n        return 1", True),
        ("x = 1\n    return x", True),
    ],
)
def test_always_leaves(body: str, always: bool) -> None:
    node = ast.parse(f"def f(c):\n    {body}\n").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert cfg.always_leaves(node.body) is always


def test_names_of_comprehensions_and_lambdas_are_their_own() -> None:
    reads, binds = cfg.names(ast.parse("y = [a + b for a in c] + f(lambda d: d + e)").body[0])
    assert reads == {"b", "c", "e", "f"}
    assert binds == {"y"}
