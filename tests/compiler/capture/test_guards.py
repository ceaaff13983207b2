"""Guards: whatever a capture took for granted is checked, and what failed is said."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiler.capture import capture, explain
from tests.compiler.capture.capturing import Counting, alike

X = torch.arange(6.0).reshape(2, 3)
FACTOR = 2
NAMES = ["a", "b"]
SETTINGS: dict[str, Any] = {"on": True, "deep": {"k": 1}}


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Options:
    width: Any = 3
    flag: Any = None


class Plain:
    level = 1

    def __init__(self, n: Any) -> None:
        self.n = n

    def value(self) -> Any:
        return self.n * self.level


class Other(Plain):
    def value(self) -> Any:
        return -self.n


def use(x: Tensor, v: Any) -> Any:
    """Looks at a value in the way that goes with its type."""
    if isinstance(v, Tensor):
        return x + v.sum() if v.dtype.is_floating_point else x + v.shape[0] * v.dim()
    if v is None:
        return x
    if isinstance(v, bool):
        return x + 1 if v else x - 1
    if isinstance(v, int | float | complex):
        return x * v
    if isinstance(v, str):
        return x.sum() if v == "sum" else (x, v + "!")
    if isinstance(v, dict):
        return {k: x * i if isinstance(i, int) else i for k, i in v.items()}
    if isinstance(v, Pair):
        return x * v.a + v.b
    if isinstance(v, tuple | list):
        return [x + i for i in v], type(v) is list
    if isinstance(v, set | frozenset):
        return sorted(v), x
    if isinstance(v, range | slice):
        return x[v] if isinstance(v, slice) else (x, list(v))
    if isinstance(v, Mode):
        return x if v is Mode.FAST else -x
    if isinstance(v, Options):
        return x * v.width, v.flag
    if isinstance(v, Plain):
        return x * v.value()
    if isinstance(v, torch.dtype):
        return x.to(v)
    if isinstance(v, types.MethodType):
        return x, v()
    if callable(v):
        return v(x)
    return x, str(v)


def times(n: Any) -> Callable[[Any], Any]:
    return lambda t: t * n


VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [5, True, 1.0, 6],
    "float": [0.5, 1.5, -0.0, 0.0],
    "none": [None, 0],
    "text": ["sum", "max", ""],
    "list": [[1], [1, 2], (1,), [1.0]],
    "tuple": [(1,), (2,), ()],
    "dict": [
        {"a": 1},
        {"b": 1},
        {"a": 2},
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        OrderedDict(a=1),
        defaultdict(int, a=1),
    ],
    "set": [{1, 2}, {1, 3}, frozenset({1, 2})],
    "range": [range(3), range(1, 3)],
    "nested": [{"a": [1, 2]}, {"a": [1, 3]}, {"a": (1, 2)}],
    "slice": [slice(0, 1), slice(1, None), slice(None)],
    "enum": [Mode.FAST, Mode.SLOW],
    "named": [Pair(1, 2), Pair(1, 3), Pair(2.0, 2)],
    "dataclass": [Options(), Options(4), Options(flag="x")],
    "object": [Plain(1), Plain(3), Other(1), Plain(1.5)],
    "dtype": [torch.float64, torch.int32],
    "function": [torch.relu, torch.neg, times(2), times(3), functools.partial(torch.mul, other=2)],
    "method": [Plain(2).value, Plain(3).value, Other(2).value],
    "tensor": [
        torch.ones(2),
        torch.ones(3),
        torch.ones(2, 2),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.int64),
        torch.ones(4)[::2],
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor(1.0),
    ],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values(kind: str) -> None:
    """Each value in turn, twice round: always what Python gives."""
    captured = capture(use, Counting(), limit=16)
    for value in VALUES[kind] * 2:
        alike(captured(X, value), use(X, value))
    found = explain(captured)
    assert found.recompiles and not found.fallbacks and not found.breaks, str(found)


def test_unused_arguments_are_not_guarded() -> None:
    backend = Counting()
    captured = capture(lambda x, y, z=None: x + 1, backend)
    for value in (1, "a", None, X, [X]):
        captured(X, value, z=value)
    assert len(backend.graphs) == 1


def test_reason() -> None:
    captured = capture(use, Counting())
    captured(X, 2.5)
    captured(X, 3.5)
    captured(torch.zeros(2, 3, dtype=torch.float64), 3.5)
    first, second = explain(captured).recompiles
    assert "v == 2.5" in first
    assert "tensor 'x' dtype mismatch" in second


def test_explanation_shows_all_stages() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x + 1
        print(end="")
        return y * 2

    text = str(explain(broken, X))
    for part in (
        "guards",
        "guard code",
        "graph",
        "break",
        "function",
        "rewritten bytecode",
        "bytecode",
    ):
        assert part in text
    assert "JUMP_FORWARD" in text and "Tail" not in text.split("graph")[0]


def globals_(x: Tensor) -> Any:
    out = x * FACTOR + len(NAMES)
    return out + SETTINGS["deep"]["k"] if SETTINGS["on"] else out


def test_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(globals_, Counting())

    def check() -> None:
        alike(captured(X), globals_(X))

    check()
    monkeypatch.setitem(globals(), "FACTOR", 5)
    check()
    monkeypatch.setitem(SETTINGS, "on", False)
    check()
    monkeypatch.setitem(SETTINGS, "on", True)
    monkeypatch.setitem(SETTINGS["deep"], "k", 7)
    check()
    NAMES.append("c")
    try:
        check()
    finally:
        NAMES.pop()
    monkeypatch.setitem(globals(), "len", lambda items: 100)
    check()
    monkeypatch.delitem(globals(), "len")
    monkeypatch.setitem(globals(), "SETTINGS", {"on": False})
    check()
    assert not explain(captured).fallbacks


def helper(x: Tensor, by: int = 2) -> Tensor:
    return x * by


def test_functions_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Any:
        return helper(x), Plain(3).value(), torch.relu(x)

    captured = capture(run, Counting())
    alike(captured(X), run(X))
    monkeypatch.setitem(globals(), "helper", lambda x: x - 1)
    alike(captured(X), run(X))
    monkeypatch.setattr(Plain, "value", lambda self: "other")
    alike(captured(X), run(X))
    monkeypatch.setattr(Plain, "level", 9)
    alike(captured(X), run(X))
    monkeypatch.setattr(torch, "relu", torch.neg)
    alike(captured(X), run(X))
    monkeypatch.undo()
    alike(captured(X), run(X))
    monkeypatch.setattr(helper, "__defaults__", (10,))
    alike(captured(X), run(X))


def test_closures() -> None:
    n, items = 2, [1]

    def run(x: Tensor) -> Tensor:
        return x * n + items[0]

    captured = capture(run, Counting())
    alike(captured(X), run(X))
    n = 3
    alike(captured(X), run(X))
    items[0] = 9
    alike(captured(X), run(X))


def test_identity_of_arguments() -> None:
    def run(x: Tensor, a: Any, b: Any) -> Any:
        a.append(1)
        return len(b), a is b, x is a

    captured = capture(run, Counting())
    for one in (False, True, False):
        a: list[Any] = []
        b = a if one else []
        assert captured(X, a, b) == ((1, True, False) if one else (0, False, False))

    same_ = capture(lambda x, y: (x is y, x + y), Counting())
    y = X.clone()
    for pair in ((X, y), (X, X), (y, X), (y, y)):
        alike(same_(*pair), (pair[0] is pair[1], pair[0] + pair[1]))


def test_attributes_appear_and_vanish() -> None:
    def run(x: Tensor, o: Any) -> Any:
        return x * getattr(o, "extra", 1), hasattr(o, "more")

    captured = capture(run, Counting())
    o = Plain(1)
    alike(captured(X, o), run(X, o))
    o.extra = 3  # type: ignore[attr-defined]
    alike(captured(X, o), run(X, o))
    o.more = None  # type: ignore[attr-defined]
    alike(captured(X, o), run(X, o))
    del o.extra  # type: ignore[attr-defined]
    alike(captured(X, o), run(X, o))


def test_global_state() -> None:
    def run(x: Tensor) -> Any:
        return x @ x.T, torch.zeros(1), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    backend = Counting()
    captured = capture(run, backend)
    x = X.clone().requires_grad_()
    managers: list[Any] = [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ]
    alike(captured(x), run(x))
    for manager in managers:
        with manager:
            got, want = captured(x), run(x)
        assert [getattr(g, "dtype", g) for g in got] == [getattr(w, "dtype", w) for w in want]
        assert [getattr(g, "requires_grad", g) for g in got] == [
            getattr(w, "requires_grad", w) for w in want
        ]
        assert got[1].device == want[1].device
    torch.set_default_dtype(torch.float64)
    try:
        assert captured(x)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    alike(captured(x), run(x))
    assert len(backend.graphs) == 5
    assert explain(captured).fallbacks == {"a torch mode is active": 1}


def test_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    captured = capture(lambda x, n: (x * 2).sum() + n, Counting(), limit=8)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda k: float(captured(torch.ones(k % 5 + 2), k % 3)), range(60)))
    assert results == [2 * (k % 5 + 2) + k % 3 for k in range(60)]


def test_dynamo_can_compile_around_it() -> None:
    """A captured function inside torch.compile is a break there, and right."""
    inner = capture(lambda x: x * 2, Counting())
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager")
    alike(outer(X), X * 2 + 1)
    torch._dynamo.reset()
