"""Expressions of the loop IR as Triton: one statement for each node, none twice.

Values are blocks: along ``x``, the outer loops of a group flattened, and in loops inside of rows
along ``r`` too. Which of the two a value varies along decides what its loads are masked by.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sympy import Integer, Symbol

from compiler.codegen.expressions import index_text
from compiler.codegen.types import computed
from compiler.ir import Buffer, Cast, Const, Expr, Index, Load, Number, Op, Value, loops, same, walk

TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16", torch.int64: "tl.int64", torch.int32: "tl.int32",
    torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip

# {0}, {1}: arguments; {T}: the type of the result
OPS: dict[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "reciprocal": "1.0 / {0}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})",
    "logical_and": "({0} != 0) & ({1} != 0)", "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) != ({1} != 0)", "logical_not": "{0} == 0",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}", "isnan": "{0} != {0}", "isinf": "tl.abs({0}) == float('inf')",
    "sgn": "({0} > 0).to({T}) - ({0} < 0).to({T})", "div_trunc": "scalar.trunc({0} / {1})",
    "sign": "({0} > 0).to({T}) - ({0} < 0).to({T})",
    "log10": "tl.log({0}) * 0.4342944819032518",
    **{name: f"tl.{name}({{0}})" for name in (
        "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor",
        "ceil")},
    **{name: f"scalar.{name}({{0}})" for name in (
        "relu", "sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "log1p", "expm1", "trunc")},
    **{name: f"scalar.{name}({{0}}, {{1}})" for name in ("maximum", "minimum", "fmax", "fmin")},
}  # fmt: skip
INTEGER = {  # where integers need another form
    "div_trunc": "{0} // {1}", "mod_floor": "scalar.mod_floor({0}, {1})", "fmod": "{0} % {1}",
    "div_floor": "scalar.div_floor({0}, {1})", "floor": "{0}", "ceil": "{0}", "trunc": "{0}",
    "relu": "tl.where({0} < 0, 0, {0})",
}  # fmt: skip
BOOL = {
    "add": "{0} | {1}", "mul": "{0} & {1}", "maximum": "{0} | {1}", "minimum": "{0} & {1}",
    "bitwise_xor": "{0} != {1}", "bitwise_not": "{0} == 0",
    **dict.fromkeys(("neg", "sign", "sgn"), "{0}"),
}  # fmt: skip
SINGLE = {"tanh", "gelu_tanh", "log1p", "expm1"}  # made for f32: not for f64
CHECKED = ("masked", "place", "place_unsigned")
Registers = dict[Buffer, tuple[Index, str, str]]  # where an element is, its name, its axes


def form(node: Op) -> str | None:
    """An operation in Triton; None if there is none that is good enough, or interpretable."""
    dtype = node.args[0].dtype if node.dtype == torch.bool else node.dtype
    if node.dtype == torch.bool and dtype == torch.bool and node.name in BOOL:
        return BOOL[node.name]
    if dtype == torch.uint8 and node.name == "bitwise_not":
        return "{0} ^ 255"
    if not dtype.is_floating_point and node.name in INTEGER:
        return INTEGER[node.name]
    if dtype == torch.float64 and node.name in SINGLE:
        return None
    return OPS.get(node.name)


def computes(value: Value) -> bool:
    """Whether generated Triton can compute a value's expression; otherwise ATen does."""
    index, _ = loops("i", value.size)
    return all(
        node.dtype in TYPES
        and (not isinstance(node, Op) or node.name in CHECKED or form(node) is not None)
        for node in walk(value.fn(index))
    )


def literal(value: Any, dtype: torch.dtype) -> str:
    """A constant: blocks of f32 and i32 take Python's numbers, other types need their own."""
    if dtype == torch.bool:
        return "True" if value else "False"
    if not dtype.is_floating_point:  # it wraps around, as a C++ conversion does
        info = torch.iinfo(dtype)
        value = (int(value) - info.min) % 2**info.bits + info.min
    if dtype.is_floating_point and (math.isnan(value) or math.isinf(value)):
        text = f"float('{value}')"
    else:
        text = repr(float(value) if dtype.is_floating_point else int(value))
    if dtype in (torch.float32, torch.int32) and not abs(value) > 3e38:
        return text
    return f"tl.full([], {text}, {TYPES[dtype]})"


class Statements:
    """Lines of Triton that compute expressions; each value is computed once and named.

    ``registers`` says which elements are at hand. ``prefix`` keeps the names of parts of a kernel
    apart. A symbol that starts with ``o`` varies along x, one with ``r`` along r.
    """

    def __init__(
        self, registers: Registers, prefix: str = "t", before: Statements | None = None
    ) -> None:
        self.lines: list[str] = []
        self.registers = registers
        self.prefix = prefix
        # names made ``before`` in the same program, by what they stand for; their axes
        self.named: dict[str, str] = {} if before is None else before.named
        self.axes: dict[str, str] = {} if before is None else before.axes
        self.places = False  # whether an index is checked
        self.used: set[Buffer] = set()  # loaded from memory

    def value(self, expr: Expr, mask: str = "") -> str:
        """The name or literal of an expression's value; ``mask``: where it may be computed."""
        return self._value(expr, mask, {})

    def of(self, text: str) -> str:
        """The axes along which a named value varies."""
        return self.axes.get(text, "")

    def forget(self, axis: str) -> None:
        """Forget what varies along an axis, as that begins anew."""
        for buffer, (_, _, axes) in list(self.registers.items()):
            if axis in axes:
                del self.registers[buffer]
        for text, name in list(self.named.items()):
            if axis in self.of(name):
                del self.named[text]

    def keep(self, buffer: Buffer, index: Index, name: str) -> None:
        """Remember where an element is that these statements make."""
        self.registers[buffer] = (index, name, self.of(name))

    def _value(self, expr: Expr, mask: str, made: dict[tuple[int, str], str]) -> str:
        key = (id(expr), mask)
        if key not in made:
            made[key] = self._make(expr, mask, made)
        return made[key]

    def _make(self, node: Expr, mask: str, made: dict[tuple[int, str], str]) -> str:
        if isinstance(node, Const):
            return literal(node.value, node.dtype)
        if isinstance(node, Number):
            return self._number(node)
        if isinstance(node, Cast):
            return self._cast(node, self._value(node.value, mask, made))
        if isinstance(node, Load):
            return self._load(node, mask, made)
        assert isinstance(node, Op)
        if node.name == "masked":
            inside = self._value(node.args[0], mask, made)
            both = self._name(f"{mask} & {inside}", inside, mask) if mask else inside
            value = self._value(node.args[1], both, made)
            other = self._value(node.args[2], mask, made)
            return self._name(f"tl.where({inside}, {value}, {other})", inside, value, other)
        args = [self._value(arg, mask, made) for arg in node.args]
        if node.name.startswith("place"):
            return self._place(node.name, args, mask)
        text = form(node)
        if text is None:
            raise NotImplementedError(f"{node.name} of {node.dtype} has no form in Triton")
        if all(isinstance(arg, Const) for arg in node.args):  # Python numbers would not do
            args = [
                f"tl.full([], {arg}, {TYPES[computed(a.dtype)]})" if "tl." not in arg else arg
                for arg, a in zip(args, node.args, strict=True)
            ]
        text = text.format(*args, T=TYPES[computed(node.dtype)])
        small = node.dtype in (torch.int8, torch.int16, torch.uint8)
        return self._name(f"({text}).to({TYPES[node.dtype]})" if small else text, *args)

    def _number(self, node: Number) -> str:
        text, axes = self.index(node.index)
        wanted = TYPES[computed(node.dtype)]
        if not axes:
            return self._name(f"tl.full([], {text}, {wanted})")
        return self._name(f"({text}).to({wanted})", axes=axes)

    def _cast(self, node: Cast, value: str) -> str:
        if node.dtype in (torch.bfloat16, torch.float16):
            return self._name(f"({value}).to({TYPES[node.dtype]}).to(tl.float32)", value)
        if node.dtype == torch.bool:
            return self._name(f"({value}) != 0", value)
        if isinstance(node.value, Const):
            return literal(node.value.value, node.dtype)
        return self._name(f"({value}).to({TYPES[node.dtype]})", value)

    def _place(self, name: str, args: list[str], mask: str) -> str:
        """A checked index; one outside is reported, and taken for 0."""
        at, size = args
        if name == "place":
            at = self._name(f"tl.where({at} < 0, {at} + {size}, {at})", at)
        outside = self._name(f"({at} < 0) | ({at} >= {size})", at)
        self.places = True
        where = [m for m in (self.masks(self.of(at)), mask, outside) if m]
        # an address that is a block like the mask; all who write, write the same
        self.lines.append(
            f"tl.store(problem + ({at}) * 0, problem_number, mask={' & '.join(where)})"
        )
        return self._name(f"tl.where({outside}, 0, {at}).to(INDEX)", at)

    def masks(self, axes: str) -> str:
        """The condition of being inside the loops, for what varies along ``axes``."""
        return " & ".join(f"{axis}_mask" for axis in axes)

    def index(self, index: Index) -> tuple[str, str]:
        """An index as text, and the axes along which it varies."""
        axes = {a for s in index.free_symbols for a in self._axes_of(s.name)}
        return index_text(index, "//"), "".join(a for a in "xr" if a in axes)

    def _axes_of(self, name: str) -> str:
        if name in self.axes:
            return self.axes[name]
        if name[0] in "or" and name[1:].isdigit():
            return "x" if name[0] == "o" else "r"
        return ""

    def _load(self, node: Load, mask: str, made: dict[tuple[int, str], str]) -> str:
        if node.buffer in self.registers and not node.indirect:
            at, name, axes = self.registers[node.buffer]
            if same(node.index, at):
                self.axes[name] = axes
                return name
        index = node.index
        for symbol, value in node.indirect:
            name = self._value(value, mask, made)
            if not name.isidentifier():
                name = self._name(f"tl.full([], {name}, INDEX)")
            index = index.xreplace({symbol: Symbol(name, integer=True)})
        self.used.add(node.buffer)
        text, axes = self.index(index)
        needed = "".join(a for a in "xr" if a in axes + self.of(mask))
        if needed != axes:  # an address must be a block if its mask is one
            text = f"{text} + {' + '.join(f'{a} * 0' for a in needed if a not in axes)}"
        both = " & ".join(m for m in (self.masks(needed), mask) if m)
        loaded = (
            f"tl.load({node.buffer.name} + ({text}){f', mask={both}, other=0' if both else ''})"
        )
        if computed(node.dtype) != node.dtype:
            loaded += ".to(tl.float32)"
        return self._name(loaded, axes=needed)

    def _name(self, text: str, *parts: str, axes: str | None = None) -> str:
        if text.isidentifier():
            return text
        if text not in self.named:
            name = f"{self.prefix}{len(self.axes)}"
            self.named[text] = name
            self.lines.append(f"{name} = {text}")
            if axes is None:
                found = {a for part in parts for a in self.of(part)}
                axes = "".join(a for a in "xr" if a in found)
            self.axes[name] = axes
        return self.named[text]


def size_text(size: Index) -> str:
    """A size in Triton or Python."""
    return index_text(size + Integer(0), "//")
