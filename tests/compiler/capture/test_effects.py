"""Side effects: what a function changes outside is changed, in order, and seen in time."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler.capture import capture, explain
from tests.compiler.capture.capturing import Counting, alike, same

X = torch.randn(4, 3)
LOG: list[Any] = []
TOTAL = 0
LAST: Any = None


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.total: Any = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "order", [*getattr(self, "order", []), name])
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class State:
    step: int = 0
    loss: Any = None
    past: list[Any] = dataclasses.field(default_factory=list)


def lists(x: Tensor, items: list[Any]) -> Any:
    items.append(x * 2)
    items.extend([1, x])
    items[0] = items[-1]
    items.insert(1, "between")
    last = items.pop()
    return last is x, len(items)


def dicts(x: Tensor, d: dict[str, Any]) -> Any:
    d["sum"] = x.sum()
    d.setdefault("list", []).append(x + 1)
    d.update(a=1, b={"x": x})
    del d["old"]
    return d.pop("a"), list(d)


def nested(x: Tensor, data: dict[str, Any]) -> Any:
    inner = data["inner"]
    inner.append(x)
    data["again"] = inner
    data["other"], data["inner"] = data["inner"], [len(inner)]
    return inner is data["again"]


def objects(x: Tensor, s: State) -> Any:
    s.step += 1
    s.past.append(s.loss)
    s.loss = x.mean() * s.step
    s.extra = State(step=s.step, past=s.past)  # type: ignore[attr-defined]
    return s.extra  # type: ignore[attr-defined]


def own_setattr(x: Tensor, r: Recorder) -> Any:
    r.total = r.total + x.sum()
    r.seen = [*r.seen, "total"]
    r.by_name["x"] = x
    return r.order  # type: ignore[attr-defined]


def swaps(x: Tensor, s: State) -> None:
    s.step, s.loss = s.loss, s.step
    s.past, s.loss = [s.past], x


def counts(x: Tensor, d: Any) -> Any:
    for name in ("a", "b", "a"):
        d[name].append(x)
    return sorted(d), d["c"]


def sets(x: Tensor, s: set[Any]) -> Any:
    s.add(3)
    s.discard(1)
    s |= {5}
    return x * len(s)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        pytest.param(f, make, id=f.__name__)
        for f, make in [
            (lists, lambda: [0]),
            (dicts, lambda: {"old": 1, "z": 2}),
            (nested, lambda: {"inner": []}),
            (objects, State),
            (own_setattr, Recorder),
            (swaps, lambda: State(1, "loss", [2])),
            (counts, lambda: defaultdict(list, b=[1])),
            (sets, lambda: {1, 2}),
        ]
    ],
)
def test_arguments(function: Any, make: Any) -> None:
    same(function, X, make(), whole=True)


def writes_globals(x: Tensor) -> Any:
    global TOTAL, LAST
    TOTAL += 1
    LAST = x * TOTAL
    LOG.append(LAST)
    return LAST


def test_globals() -> None:
    captured = capture(writes_globals, Counting())
    global TOTAL
    LOG.clear()
    for step in range(1, 6):
        TOTAL = step
        got = captured(X)
        assert step + 1 == TOTAL
        alike(got, X * (step + 1))
        assert LAST is got and LOG[-1] is got and len(LOG) == step
    assert len(explain(captured).graphs) <= 3


def test_nonlocal() -> None:
    count, kept = 0, None

    def run(x: Tensor) -> Any:
        nonlocal count, kept
        count += 2
        kept = [x, count]
        return kept

    captured = capture(run, Counting())
    for step in range(1, 5):
        assert captured(X) is kept
        assert count == 2 * step and kept[1] == count


def test_appending_needs_no_case_a_length() -> None:
    backend = Counting()
    log: list[Any] = []

    def run(x: Tensor) -> Tensor:
        log.append(x.sum())
        return x * 2

    captured = capture(run, backend)
    for _ in range(20):
        captured(X)
    assert len(backend.graphs) == 1 and len(log) == 20


def test_aliases() -> None:
    """A list that is changed under two names: one list, before and after."""

    def run(x: Tensor, a: list[Any], b: list[Any]) -> Any:
        a.append(x)
        return len(b), a

    captured = capture(run, Counting())
    shared: list[Any] = []
    for a, b in (([], []), (shared, shared), ([1], [2]), (shared, shared)):
        want_length = len(b) + (a is b)
        length, out = captured(X, a, b)
        assert length == want_length and out is a and a[-1] is X


def test_alias_that_was_not_looked_at() -> None:
    """An argument that is only passed on may be the list that is changed."""

    def run(x: Tensor, a: list[Any], b: Any) -> Any:
        a.append(1)
        a[0] = 5
        return b, [b], x + len(a)

    captured = capture(run, Counting())
    for a, b in (([1], [1]), (one := [1], one)):
        got = captured(X, a, b)
        assert got[0] is b and b == ([5, 1] if a is b else [1])


def test_objects_under_two_names() -> None:
    def run(x: Tensor, a: State, b: State) -> Any:
        a.step = 10
        return x * b.step

    captured = capture(run, Counting())
    one = State(3)
    alike(captured(X, State(1), State(2)), X * 2)
    alike(captured(X, one, one), X * 10)
    alike(captured(X, State(1), State(2)), X * 2)


def test_identity_of_results() -> None:
    def run(x: Tensor, items: list[Any]) -> Any:
        y = x + 1
        pair = (y, items)
        return {"pair": pair, "again": pair, "y": y, "items": items, "x": x, "first": items[0]}

    items = [object()]
    out = capture(run, Counting())(X, items)
    assert out["pair"] is out["again"] and out["pair"][0] is out["y"]
    assert out["items"] is items and out["first"] is items[0] and out["x"] is X


def test_cyclic_and_held_objects() -> None:
    class Node:
        def __init__(self, parent: Any = None) -> None:
            self.parent, self.children = parent, []
            if parent is not None:
                parent.children.append(self)

    def run(x: Tensor) -> Any:
        root = Node()
        leaf = Node(root)
        root.value = x * 2  # type: ignore[attr-defined]
        return root, leaf

    root, leaf = capture(run, Counting())(X)
    assert leaf.parent is root and root.children == [leaf]
    alike(root.value, X * 2)


def test_functions_that_are_returned() -> None:
    def run(x: Tensor, n: int) -> Any:
        w = x * n
        count = 0

        def scale(t: Tensor, by: int = 2) -> Any:
            nonlocal count
            count += 1
            return t * by + w, count

        return scale, lambda: count

    scale, counter = capture(run, Counting())(X, 3)
    want, _ = run(X, 3)
    alike(scale(X)[0], want(X)[0])
    alike(scale(X, by=5)[0], want(X, by=5)[0])
    assert counter() == 2 and scale.__name__ == "scale" and scale.__defaults__ == (2,)


def test_error_after_changes() -> None:
    """What was done before an exception is done."""

    def run(x: Tensor, log: list[Any]) -> Any:
        log.append(1)
        x.add_(1)
        if x.shape[0] == 4:
            raise ValueError(f"rows: {x.shape[0]}")
        return x

    same(run, X, [], whole=False)


def test_module_buffers_in_place() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
                self.mean[0] = 0
            return x - self.mean

    model, reference = Norm(), Norm()
    captured = capture(model, Counting())
    for _ in range(3):
        alike(captured(X), reference(X))
        alike(model, reference)
    assert explain(captured).whole
