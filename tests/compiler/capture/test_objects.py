"""Objects as libraries make them: subclasses of dict, copies, metaclasses, context variables."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.capture import capture, explain
from tests.compiler.capture.capturing import Counting, same


class Output(OrderedDict):  # type: ignore[type-arg]
    """A dictionary, an object and a tuple at once, as the outputs of some libraries are."""

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            value = self.__dict__.get(name)
            if value is not None:
                self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.as_tuple()[key]

    def as_tuple(self) -> tuple[Any, ...]:
        return tuple(self[k] for k in self)


@dataclass
class Pair(Output):
    first: Any = None
    second: Any = None


class Registry(dict):  # type: ignore[type-arg]
    def get(self, key: Any) -> Any:
        return super().get(str(key)) or {}


REGISTRY = Registry()
REGISTRY["1"] = {"scale": 2.0}
SCALE: ContextVar[float] = ContextVar("SCALE", default=3.0)


def makes(x: Tensor) -> Any:
    out = Pair(first=x + 1)
    out["second"] = x * 2
    return out, out[0], out["second"], len(out), list(out), "first" in out, bool(out), {**out}


def takes(x: Tensor, out: Pair) -> Any:
    out.second = x * out["first"]
    return out.as_tuple(), out.first + 1, out == {"first": 2}


def looks_up(x: Tensor) -> Any:
    return x * REGISTRY.get(1)["scale"], REGISTRY.get(2)


def reads_context(x: Tensor) -> Tensor:
    return x * SCALE.get()


@contextmanager
def doubled(x: Tensor) -> Iterator[Tensor]:
    yield x * 2


def enters(x: Tensor) -> Tensor:
    with doubled(x) as y:
        y = y + 1
    return y


def _rows(count: int) -> Iterator[int]:
    yield from range(count)
    yield from [7, 8]


def delegates(x: Tensor) -> list[Tensor]:
    return [x * k for k in _rows(2)]


class Node:
    def __init__(self) -> None:
        self.items = [1, {"two": 2}]
        self.alias = self.items


NODE = Node()


def copies(x: Tensor) -> Any:
    deep, shallow = copy.deepcopy(NODE), copy.copy(NODE)
    deep.items.append(5)
    return deep.alias is deep.items, deep.items, shallow.items is NODE.items, NODE.items, x + 1


def deletes(x: Tensor) -> Any:
    node = Node()
    node.shift = 3  # type: ignore[attr-defined]
    del node.alias
    return hasattr(node, "alias"), sorted(vars(node)) if x.dim() > 5 else node.__dict__.get("shift")


class Counted(type):
    """Whose classes make their instances in a way of its own."""

    def __call__(cls, *args: Any) -> Any:
        made = cls.__new__(cls)
        made.__init__(*args)
        made.marked = True
        return made


class Marked(metaclass=Counted):
    def __init__(self, value: Tensor) -> None:
        self.value = value


def by_metaclass(x: Tensor) -> Any:
    made = Marked(x + 1)
    return made.marked, made.value


def asks_signature(x: Tensor) -> Any:
    return x * len(inspect.signature(takes).parameters), hasattr(x, "no_such_attribute")


@pytest.mark.parametrize(
    "function",
    [makes, looks_up, reads_context, enters, delegates, copies, deletes, by_metaclass,
     asks_signature],
)  # fmt: skip
def test_is_one_graph(function: Callable[..., Any]) -> None:
    same(function, torch.tensor([1.0, 2.0], requires_grad=True))


def test_changes_of_a_given_mapping_are_replayed() -> None:
    same(takes, torch.ones(2), Pair(first=torch.ones(2)))


def test_a_context_variable_is_guarded() -> None:
    captured = capture(reads_context, Counting())
    assert captured(torch.ones(1)) == 3
    token = SCALE.set(5.0)
    assert captured(torch.ones(1)) == 5
    SCALE.reset(token)
    assert "SCALE" in explain(captured).recompiles[0]


def test_a_size_given_as_a_tensor_is_read_by_python() -> None:
    def draws(x: Tensor, count: Tensor) -> Tensor:
        return torch.multinomial(x + 1, count) + 1

    found = same(draws, torch.rand(8), torch.tensor(3), whole=False)
    assert not any(why.startswith("internal") for why in found.fallbacks)
