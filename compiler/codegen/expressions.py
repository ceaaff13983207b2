"""Expressions of the loop IR as C++: one statement for each node, none twice."""

from __future__ import annotations

import math
from typing import Any

import torch
from sympy import Add, Float, Mul, Pow, Rational, expand

from compiler.codegen.types import CTYPES, computed, register_type
from compiler.ir import (
    Buffer,
    Cast,
    Const,
    Expr,
    Index,
    Integer,
    Load,
    Number,
    Op,
    Symbol,
    same,
    walk,
)

# {0}, {1}: arguments; {T}: the type of the result
OPS: dict[str, str] = {
    "add": "({T})({0} + {1})", "sub": "({T})({0} - {1})", "mul": "({T})({0} * {1})",
    "div": "({0} / {1})", "div_trunc": "({T})std::trunc({0} / {1})", "neg": "({T})(-{0})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    "gt": "({0} > {1})", "ge": "({0} >= {1})", "where": "({0} ? {1} : {2})",
    "logical_and": "(({0} != 0) & ({1} != 0))", "logical_or": "(({0} != 0) | ({1} != 0))",
    "logical_xor": "(({0} != 0) != ({1} != 0))", "logical_not": "({0} == 0)",
    "bitwise_and": "({T})({0} & {1})", "bitwise_or": "({T})({0} | {1})",
    "bitwise_xor": "({T})({0} ^ {1})", "bitwise_not": "({T})~{0}",
    "isnan": "({0} != {0})", "isinf": "(absolute({0}) == INFINITY)",
    "reciprocal": "(1 / {0})", "sqrt": "std::sqrt({0})", "rsqrt": "(1 / std::sqrt({0}))",
    "abs": "absolute({0})", "sgn": "sign({0})", "signbit": "std::signbit({0})",
    "exp": "exp_({0})", "log": "log_({0})", "log1p": "log1p_({0})", "expm1": "expm1_({0})",
    "tanh": "tanh_({0})", "erf": "erf_({0})", "mod_floor": "({T})mod_floor({0}, {1})",
    "div_floor": "({T})div_floor({0}, {1})", "place": "place({0}, {1}, bad)",
    "place_unsigned": "place_unsigned({0}, {1}, bad)",
    **{name: f"{name}({{0}})" for name in ("relu", "sign", "sigmoid", "silu", "gelu", "gelu_tanh")},
    **{name: f"{name}({{0}}, {{1}})" for name in ("maximum", "minimum")},
    **{name: f"std::{name}({{0}})" for name in (
        "exp2", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "asinh", "acosh", "atanh", "erfc", "floor", "ceil", "trunc")},
    **{name: f"std::{name}({{0}}, {{1}})" for name in (
        "pow", "atan2", "fmod", "hypot", "copysign", "fmax", "fmin")},
}  # fmt: skip

Registers = dict[Buffer, tuple[Index, str]]

NOT_VECTOR = {  # calls into the C library: a loop with one of them stays scalar
    *("exp2", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"),
    *("asinh", "acosh", "atanh", "erfc", "pow", "atan2", "fmod", "hypot", "mod_floor"),
    *("div_floor",),
}
_BOOL = {
    *("bitwise_and", "bitwise_or", "bitwise_xor", "maximum", "minimum"),
    *("add", "mul", "bitwise_not", "neg"),
}


def index_text(index: Index, division: str = "/") -> str:
    """An index expression in C++, or in Python with ``division="//"``.

    >>> i, j = (Symbol(s, integer=True, nonnegative=True) for s in "ij")
    >>> index_text(16 * i + j)
    '16 * i + j'
    """
    return _sum(expand(index) if index.is_integer and not index.is_Atom else index, division)


def _sum(index: Index, division: str) -> str:
    if isinstance(index, Add):
        terms = sorted(index.as_ordered_terms(), key=lambda t: (not t.free_symbols, ""))
        text = " + ".join(_sum(term, division) for term in terms)
        return text.replace("+ -", "- ")
    if isinstance(index, Mul):
        factors = [_factor(f, division) for f in index.as_ordered_factors()]
        if factors[0] == "-1":
            return "-" + " * ".join(factors[1:])
        return " * ".join(factors)
    return _factor(index, division)


def _factor(index: Index, division: str) -> str:
    if isinstance(index, Integer | Symbol):
        return str(int(index)) if isinstance(index, Integer) else index.name
    if isinstance(index, Rational | Float):
        return repr(float(index))
    if isinstance(index, Add | Mul):
        return f"({_sum(index, division)})"
    if isinstance(index, Pow) and index.exp.is_Integer and index.exp > 0:
        return " * ".join([_factor(index.base, division)] * int(index.exp))
    name = type(index).__name__
    args = [f"({_sum(a, division)})" for a in index.args]
    python = division == "//"
    if name == "ToFloat":
        return f"float({args[0]})" if python else f"((double){args[0]})"
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        return f"({args[0]} / {args[1]})" if python else f"((double){args[0]} / {args[1]})"
    if name == "OpaqueUnaryFn_sqrt" or (isinstance(index, Pow) and index.exp == Rational(1, 2)):
        return f"{'math.' if python else 'std::'}sqrt({args[0]})"
    if isinstance(index, Pow) and index.exp == -1:
        return f"(1.0 / {args[0]})"
    if name in ("FloorDiv", "CleanDiv", "PythonMod", "Mod"):  # of numbers that are not negative
        sign = {"FloorDiv": division, "CleanDiv": division}.get(name, "%")
        return f"({args[0]} {sign} {args[1]})"
    if name == "ModularIndexing":
        return f"(({args[0]} {division} {args[1]}) % {args[2]})"
    if name in ("Max", "Min"):
        text = args[0]
        for arg in args[1:]:
            sign = ">" if name == "Max" else "<"
            chosen = f"({text} {sign} {arg} ? {text} : {arg})"
            text = f"{name.lower()}({text}, {arg})" if python else chosen
        return text
    raise NotImplementedError(f"the index {index} has {name}, which generated code cannot compute")


def literal(value: Any, dtype: torch.dtype) -> str:
    """A constant in C++."""
    ctype = register_type(dtype)
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        if math.isnan(value) or math.isinf(value):
            word = "NAN" if math.isnan(value) else ("INFINITY" if value > 0 else "-INFINITY")
            return f"({ctype}){word}"
        if computed(dtype) == torch.float32:
            text = repr(float(torch.tensor(value, dtype=torch.float32)))
            return text + "f" if "inf" not in text else f"(float){'-' if value < 0 else ''}INFINITY"
        return repr(float(value))
    if value == -(2**63):
        return "INT64_MIN"
    return f"({ctype}){value}" if ctype != "Int" else f"Int({value})"


class Statements:
    """Lines of C++ that compute expressions; each value is computed once and named ``t<n>``.

    ``registers`` says which elements are at hand: (index, name) of a buffer. What does not change
    with ``counter``, the innermost loop's, goes to ``before``, to be put in front of that loop; the
    C++ compiler cannot know that no store changes it. ``number`` keeps such names apart.
    """

    def __init__(
        self, registers: Registers, counter: Symbol | None = None, number: int = 0
    ) -> None:
        self.lines: list[str] = []
        self.before: list[str] = []
        self.registers = registers
        self.counter = counter
        self.number = number
        self.made: set[Buffer] = set()  # by these statements themselves
        self.named: dict[str, str] = {}
        self.vector = True  # whether a loop of these statements can become vector code
        self.places = False  # whether an index is checked, and by ``lines`` themselves:
        self.checks = False

    def value(self, expr: Expr) -> str:
        """The C++ name or literal of an expression's value."""
        made: dict[int, str] = {}
        varying: set[int] = set()
        inside_mask: set[int] = set()
        for node in walk(expr):
            if isinstance(node, Op) and node.name == "masked":
                inside_mask.update(id(n) for n in walk(node.args[1]))
        for node in walk(expr):
            if self._varies(node) or any(id(arg) in varying for arg in node.args):
                varying.add(id(node))
            if id(node) in inside_mask and not self._safe(node):
                made[id(node)] = self._text(node, made)
                continue
            text = self._text(node, made)
            made[id(node)] = self._name(text, node, id(node) in varying)
        return made[id(expr)]

    def keep(self, buffer: Buffer, index: Index, name: str) -> None:
        """Remember where an element is that these statements make."""
        self.registers[buffer] = (index, name)
        self.made.add(buffer)

    def _varies(self, node: Expr) -> bool:
        """Whether a node itself changes with the counter, or cannot be told not to."""
        if self.counter is None:
            return True
        if isinstance(node, Load):
            return node.buffer in self.made or self.counter in node.index.free_symbols
        return isinstance(node, Number) and self.counter in node.index.free_symbols

    def _safe(self, node: Expr) -> bool:
        return isinstance(node, Const | Number)

    def _name(self, text: str, node: Expr, varies: bool) -> str:
        if isinstance(node, Const) or text.isidentifier():
            return text
        if text not in self.named:
            letter = "t" if self.counter is not None and varies else f"c{self.number}_"
            name = f"{letter}{len(self.named)}"
            self.named[text] = name
            line = f"{register_type(node.dtype)} {name} = {text};"
            self.checks |= varies and "place" in text
            (self.lines if varies else self.before).append(line)
        return self.named[text]

    def _text(self, node: Expr, made: dict[int, str]) -> str:
        if isinstance(node, Const):
            return literal(node.value, node.dtype)
        if isinstance(node, Number):
            return f"({register_type(node.dtype)})({index_text(node.index)})"
        if isinstance(node, Cast):
            return self._cast(node, made[id(node.value)])
        if isinstance(node, Load):
            return self._load(node, made)
        assert isinstance(node, Op)
        args = [made[id(arg)] for arg in node.args]
        if node.name in NOT_VECTOR:
            self.vector = False
        if node.name.startswith("place"):
            self.places = True
        if node.name == "masked":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if node.dtype == torch.bool and node.name in _BOOL:
            return {
                "bitwise_and": "({0} & {1})", "bitwise_or": "({0} | {1})",
                "bitwise_xor": "({0} != {1})", "maximum": "({0} | {1})",
                "minimum": "({0} & {1})", "add": "({0} | {1})", "mul": "({0} & {1})",
                "bitwise_not": "!{0}", "neg": "{0}",
            }[node.name].format(*args)  # fmt: skip
        integral = not node.dtype.is_floating_point
        if node.name == "div_trunc" and integral:
            return f"({register_type(node.dtype)})({args[0]} / {args[1]})"
        if node.name in ("floor", "ceil", "trunc") and integral:
            return args[0]
        if node.name == "fmod" and integral:
            return f"({register_type(node.dtype)})({args[0]} % {args[1]})"
        if node.name in ("mod_floor", "div_floor") and integral:
            args = [f"(Int){a}" for a in args]
        return OPS[node.name].format(*args, T=register_type(node.dtype))

    def _cast(self, node: Cast, value: str) -> str:
        if node.dtype == torch.bfloat16:
            return f"round_bf16({value})"
        if node.dtype == torch.bool:
            return f"({value} != 0)"
        if node.value.dtype == torch.bool:  # g++ has vectors for a choice, none for a conversion
            return f"({value} ? ({CTYPES[node.dtype]})1 : ({CTYPES[node.dtype]})0)"
        return f"({CTYPES[node.dtype]}){value}"

    def _load(self, node: Load, made: dict[int, str]) -> str:
        if node.buffer in self.registers and not node.indirect:
            at, name = self.registers[node.buffer]
            if same(node.index, at):
                return name
        index = node.index
        for symbol, value in node.indirect:
            index = index.xreplace({symbol: Symbol(made[id(value)], integer=True)})
        return f"get({node.buffer.name}[{index_text(index)}])"
