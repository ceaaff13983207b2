"""What is known of expressions: which are tensors, and on what evidence."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch import nn

from compiler.mend.flow import Flow
from compiler.mend.function import Function
from compiler.mend.kinds import Sort, sort_of
from compiler.mend.rewrite import functions

CLASS = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter as P

def helper(a) -> Tensor: ...
def unknown(a): ...

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inherited = nn.Linear(2, 2)

class Model(Base):
    def __init__(self, width: int, limit=0.5, extra=None):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.w = P(torch.ones(2))
        self.first, self.second = nn.Linear(2, 2), nn.ReLU()
        self.width, self.limit, self.extra = width, limit, extra
        self.scale = 2 * width
        self.label: Tensor | None = None

    def forward(self, x: Tensor, n: int, mask: Tensor | None, flag=True, other=None, *rest):
        used = other
        y = x + n
        {line}
        return used.sum()
"""


def sort(expression: str) -> Sort:
    """The sort of an expression within ``Model.forward``."""
    module = ast.parse(CLASS.replace("{line}", f"result = {expression}"))
    forward = next(f for f in functions(module, "f.py") if f.qualname == "Model.forward")
    flow = Flow(forward)
    statement = forward.node.body[2]
    assert isinstance(statement, ast.Assign)
    return sort_of(statement.value, flow.sorts(statement), flow.scope)


@pytest.mark.parametrize(
    "expression",
    [
        *("x", "y", "-x", "x + 1", "x > 0", "0 < x < 1", "x[0]", "x.T", "x.sum()", "x @ x"),
        *("torch.relu(n)", "F.softmax(x, 0)", "torch.linalg.inv(x)", "mask", "helper(n)"),
        *("self.w", "self.mean", "self.first(x)", "self.second(x)", "self.inherited(n)"),
        *("self.label", "x.max(0).values", "x if n else y", "x and y", "(x * 2).mean()"),
    ],
)
def test_tensors(expression: str) -> None:
    assert sort(expression) is Sort.TENSOR


@pytest.mark.parametrize(
    "expression",
    [
        *("n", "n + 1", "n > 2", "1.5", "'text'", "None", "flag", "not flag", "x.shape"),
        *("x.shape[0]", "x.size(0)", "x.dim()", "x.dtype", "x is None", "mask is not None"),
        *("len(x)", "isinstance(x, int)", "n in (1, 2)", "self.width", "self.limit", "self.scale"),
        *("self.training", "torch.float32", "torch.is_tensor(x)", "f'{x}'", "x.numel() > 3"),
        *("x.is_floating_point()", "x.device", "torch.is_grad_enabled()", "x.ndim"),
    ],
)
def test_python_values(expression: str) -> None:
    assert sort(expression) is Sort.PYTHON


@pytest.mark.parametrize(
    "expression",
    [
        *("x.item()", "int(x)", "float(x.sum())", "bool(x)", "x.item() + 1", "x.item() > 2"),
        *("torch.allclose(x, y)", "not x", "abs(x.item())", "n if n else x.item()"),
    ],
)
def test_numbers_read_out_of_tensors(expression: str) -> None:
    assert sort(expression) is Sort.ITEM


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        *(("unknown(x)", Sort.UNKNOWN), ("x if n else 1", Sort.UNKNOWN), ("rest[0]", Sort.UNKNOWN)),
        *(("self.extra", Sort.OBJECT), ("[x]", Sort.OBJECT), ("self.first", Sort.MODULE)),
        *(("torch.overrides.has_torch_function(x)", Sort.UNKNOWN), ("rest", Sort.OBJECT)),
    ],
)
def test_others(expression: str, wanted: Sort) -> None:
    assert sort(expression) is wanted


def test_use_tells_that_a_parameter_is_a_tensor() -> None:
    assert sort("other") is Sort.UNKNOWN  # it is used under another name only
    node = ast.parse("def f(a, b):\n    c = b\n    return a.sum()").body[0]
    assert isinstance(node, ast.FunctionDef)
    flow = Flow(Function(node, "f.py", "f"))
    env = flow.sorts(node.body[1])
    assert env == {"a": Sort.TENSOR, "b": Sort.UNKNOWN, "c": Sort.UNKNOWN}


SOURCE = """
def f(x: Tensor, n):
    y = 1
    z = x
    for i in range(3):
        y = y + 1
        z = z.item()
        a, b = x.max(0)
    while n:
        y = x
    return y
"""


def test_sorts_meet_where_ways_meet() -> None:
    node = ast.parse(textwrap.dedent(SOURCE)).body[0]
    assert isinstance(node, ast.FunctionDef)
    flow = Flow(Function(node, "f.py", "f"))
    loop, end = node.body[2], node.body[4]
    assert isinstance(loop, ast.For)
    assert flow.sorts(loop.body[0])["y"] is Sort.PYTHON
    assert flow.sorts(loop.body[1])["z"] is Sort.UNKNOWN  # a tensor at first, then a number
    env = flow.sorts(end)
    assert (env["y"], env["a"], env["b"], env["i"]) == (
        Sort.UNKNOWN,
        Sort.TENSOR,
        Sort.TENSOR,
        Sort.PYTHON,
    )


class Alive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2)
        self.steps = 3
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        *(("self.scale", Sort.TENSOR), ("self.steps", Sort.PYTHON), ("self.inner", Sort.MODULE)),
        *(("self.inner.weight", Sort.TENSOR), ("TABLE", Sort.TENSOR), ("LIMIT > 2", Sort.PYTHON)),
        ("self.inner(LIMIT)", Sort.TENSOR),
    ],
)
def test_what_is_alive_is_asked(expression: str, wanted: Sort) -> None:
    node = ast.parse(f"def forward(self, x):\n    return {expression}").body[0]
    assert isinstance(node, ast.FunctionDef)
    names = {"TABLE": torch.ones(2), "LIMIT": 3}
    flow = Flow(Function(node, "f.py", "forward", names=names, instance=Alive()))
    statement = node.body[0]
    assert isinstance(statement, ast.Return)
    assert statement.value is not None
    assert sort_of(statement.value, flow.sorts(statement), flow.scope) is wanted
