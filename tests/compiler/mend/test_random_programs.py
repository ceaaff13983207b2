"""Random programs of branches on tensors: mended and captured, they do what they did."""

from __future__ import annotations

import ast
import textwrap
from random import Random

import pytest
import torch
from torch import Tensor

from compiler.mend import runtime
from compiler.mend.function import RUNTIME, Function
from compiler.mend.where import where
from tests.compiler.mend.branch_cases import assert_same, outcome

CONDITIONS = (
    *("{v}.sum() > {k}", "{v}.max() > {k} and {w}.min() < {k}", "not {v}.mean() > {k}"),
    *("{k} < {v}[0] < 1", "{v}[1] > {k} or {w}[0] > {v}[0]", "n > 2", "{v}.sum().item() > {k}"),
)
VALUES = (
    *("{v} * 2", "{v} + {w}", "torch.sqrt({v}.abs())", "{v} - {k}", "{v} * s", "torch.exp(-{v})"),
    *(
        "{v} / ({w}.abs() + 1)",
        "{v} @ torch.eye(3)",
        "{v}.log()",
        "{w} if {v}.sum() > {k} else {v}",
    ),
)
NAMES = ("x", "y", "z")


class Program:
    """The text of a function, made statement by statement."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lines: list[str] = []
        self.loops = 0

    def source(self) -> str:
        """A function of two tensors and a number."""
        head = ["def program(x: Tensor, y: Tensor, n: int):", "    z = x + y", "    s = 2.0"]
        self.lines = []
        self.block(1, self.random.randint(3, 5), depth=0)
        return "\n".join([*head, *self.lines, "    return x, y * s, z"])

    def fill(self, text: str) -> str:
        r = self.random
        return text.format(v=r.choice(NAMES), w=r.choice(NAMES), k=r.choice((-1, 0, 0.5)))

    def block(self, indent: int, length: int, depth: int) -> None:
        for _ in range(length):
            self.statement(indent, depth)

    def statement(self, indent: int, depth: int) -> None:
        r, pad = self.random, "    " * indent
        kind = r.choice(["assign", "assign", "number", "if", "if", "return", "augment", "for"])
        if kind == "if" and depth < 3:
            self.lines.append(f"{pad}if {self.fill(r.choice(CONDITIONS))}:")
            self.block(indent + 1, r.randint(1, 2), depth + 1)
            if r.random() < 0.3:
                self.lines.append(f"{pad}elif {self.fill(r.choice(CONDITIONS))}:")
                self.block(indent + 1, 1, depth + 1)
            if r.random() < 0.6:
                self.lines.append(f"{pad}else:")
                self.block(indent + 1, r.randint(1, 2), depth + 1)
        elif kind == "return" and depth and not self.loops:
            self.lines.append(f"{pad}return {self.fill('{v}, {w} * 2, {v}')}")
        elif kind == "number":
            self.lines.append(f"{pad}s = {r.choice((0.5, 1.5, 3.0))}")
        elif kind == "augment":
            self.lines.append(f"{pad}z = z * 1.5")
            self.lines.append(f"{pad}z += {r.choice(('x', 'y', '1'))}")
        elif kind == "for" and depth < 2 and not self.loops:
            self.loops += 1
            self.lines.append(f"{pad}for i in range({r.choice(('2', '3', 'n'))}):")
            self.block(indent + 1, r.randint(1, 2), depth + 1)
            if r.random() < 0.5:
                self.lines.append(f"{pad}    if {self.fill(r.choice(CONDITIONS))}:")
                self.lines.append(f"{pad}        {r.choice(('continue', 'break'))}")
                self.lines.append(f"{pad}    x = x + i")
            self.loops -= 1
        else:
            self.lines.append(f"{pad}{r.choice(NAMES)} = {self.fill(r.choice(VALUES))}")


def run(source: str) -> object:
    names = {"torch": torch, "Tensor": Tensor, RUNTIME: runtime}
    exec(source, names)
    return names["program"]


@pytest.mark.parametrize("seed", range(12))
def test_random_program(seed: int) -> None:
    torch._dynamo.reset()
    source = Program(seed).source()
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    function = Function(node, "random.py", "program")
    where(function)
    mended = ast.unparse(ast.fix_missing_locations(node))
    original, changed = run(source), run(mended)
    whole = all(f.mended for f in function.findings)
    compiled = torch.compile(changed, backend="eager", fullgraph=whole)  # type: ignore[call-overload]
    g = torch.Generator().manual_seed(seed)
    for k in range(4):
        given = torch.randn(3, generator=g), torch.randn(3, generator=g), 2 + k % 2
        expected = outcome(original, given, True)
        assert_same(outcome(changed, given, True), expected)
        assert_same(outcome(compiled, given, True), expected)
