"""The loop IR: what a tensor's elements are, as expressions, and the operations that store them.

A ``Value`` is a tensor not computed yet: a function from an index to an expression ("define by
run", as TorchInductor calls it). Applying an ATen operation makes a new function that calls the old
ones, so a chain of operations becomes one expression by itself: that is inlining. A value is
realized (stored to a ``Buffer``) where it is needed in memory.

>>> x = Buffer("x", torch.float32, (Integer(4),), (Integer(1),))
>>> doubled = x.value().map(lambda e: Op("mul", (e, Const(2.0, e.dtype)), e.dtype))
>>> str(doubled.at(symbols("i")))
'mul(x[i], 2.0)'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from sympy import Expr as Index
from sympy import Integer, Symbol, expand, symbols

__all__ = [
    "Buffer", "Cast", "Const", "Expr", "Index", "Integer", "Layout", "Load", "Loop", "LoopOp",
    "Number", "Op", "Symbol", "Value", "contiguous", "loops", "product", "same", "symbols", "walk",
]  # fmt: skip

Sizes = tuple[Index, ...]


class Expr:
    """The value of one element; ``dtype`` is the type it is computed in."""

    dtype: torch.dtype
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """An element of a buffer, at ``index`` elements from its start.

    ``indirect`` binds symbols of the index to values: ``table[t0 * 16 + i] where t0 = ids[j]``;
    ``note`` names the node of the graph that such a lookup comes from.
    """

    buffer: Buffer
    index: Index
    indirect: tuple[tuple[Symbol, Expr], ...] = ()
    note: str = ""

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.buffer.dtype

    @property
    def args(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return tuple(value for _, value in self.indirect)

    def __str__(self) -> str:
        where = ", ".join(f"{symbol} = {value}" for symbol, value in self.indirect)
        return f"{self.buffer.name}[{self.index}{' where ' + where if where else ''}]"


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A number that is known when the code is generated."""

    value: bool | int | float
    dtype: torch.dtype

    @property
    def args(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return ()

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Number(Expr):
    """An index as a value: a size, or a loop's counter."""

    index: Index
    dtype: torch.dtype

    @property
    def args(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return ()

    def __str__(self) -> str:
        return f"number({self.index})"


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    """A value converted to another type; to bf16 or f16: rounded to it, but held as f32."""

    value: Expr
    dtype: torch.dtype

    @property
    def args(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return (self.value,)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}({self.value})"


@dataclass(frozen=True, eq=False)
class Op(Expr):
    """An operation of codegen's table.

    ``masked(condition, value, other)`` computes ``value`` only where the condition holds, so what
    it loads may lie outside its buffer elsewhere.
    """

    name: str
    args: tuple[Expr, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


def walk(expr: Expr) -> Iterator[Expr]:
    """Each node of an expression once, arguments first."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(expr, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((arg, False) for arg in node.args)


def product(sizes: Sequence[Index]) -> Index:
    """How many elements."""
    total: Index = Integer(1)
    for size in sizes:
        total = total * size
    return total


def same(a: Index, b: Index) -> bool:
    """Whether two sizes are equal whatever their symbols stand for."""
    return bool(a == b) or expand(a - b) == 0


def moves(index: Index, counter: Index) -> Index:
    """How far an index moves as a counter goes up by one."""
    if counter not in index.free_symbols:
        return Integer(0)
    return expand(index.subs(counter, counter + 1) - index)


def contiguous(size: Sequence[Index]) -> Sizes:
    """Row-major strides."""
    strides, step = [], Integer(1)
    for n in reversed(size):
        strides.append(step)
        step = step * n
    return tuple(reversed(strides))


@dataclass(eq=False)
class Buffer:
    """Memory with a shape: a graph's input, an output, or something between."""

    name: str
    dtype: torch.dtype
    size: Sizes
    stride: Sizes
    kind: str = "temporary"  # input, output, temporary, or constant
    note: str = ""  # the node of the graph that it holds

    def layout(self) -> Layout:
        """All of it."""
        return Layout(self, self.size, self.stride, Integer(0))

    def value(self) -> Value:
        """All of it, as a tensor."""
        return self.layout().value()

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.size))
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{shape}]"


@dataclass(frozen=True, eq=False)
class Layout:
    """A strided view of a buffer."""

    buffer: Buffer
    size: Sizes
    stride: Sizes
    offset: Index

    def index(self, at: Sequence[Index]) -> Index:
        """Where the element ``at`` lies, counted in elements from the buffer's start."""
        place = self.offset
        for i, stride in zip(at, self.stride, strict=True):
            place = place + i * stride
        return place

    def value(self) -> Value:
        """The view as a tensor."""
        return Value(
            self.buffer.dtype, self.size, lambda at: Load(self.buffer, self.index(at)), self
        )

    def is_contiguous(self) -> bool:
        """Row-major and without gaps; dimensions of size 1 do not count."""
        wanted = contiguous(self.size)
        return all(n == 1 or a == b for n, a, b in zip(self.size, self.stride, wanted, strict=True))


@dataclass(eq=False)
class Value:
    """A tensor: its element at an index is ``at(index)``.

    ``layout`` is set if it lies in memory.
    """

    dtype: torch.dtype
    size: Sizes
    fn: Callable[[tuple[Index, ...]], Expr]
    layout: Layout | None = None

    def at(self, *index: Index) -> Expr:
        """The element at an index."""
        return self.fn(tuple(index))

    def map(self, change: Callable[[Expr], Expr], dtype: torch.dtype | None = None) -> Value:
        """Each element changed."""
        fn = self.fn
        return Value(dtype or self.dtype, self.size, lambda at: change(fn(at)))

    def view(self, size: Sizes, place: Callable[[tuple[Index, ...]], tuple[Index, ...]]) -> Value:
        """Another shape whose element at ``i`` is this one's at ``place(i)``."""
        fn = self.fn
        return Value(self.dtype, size, lambda at: fn(place(at)))


@dataclass(eq=False)
class LoopOp:
    """Store ``body`` at ``buffer[store]`` for each index of ``outer``.

    With ``reduce`` (sum, prod, max, min, argmax, argmin, any or all) the body is reduced over
    ``inner`` first. Loops of size 1 are left out.
    """

    buffer: Buffer
    store: Index
    outer: tuple[Loop, ...]
    body: Expr
    reduce: str = ""
    inner: tuple[Loop, ...] = ()
    note: str = ""
    loads: list[Load] = field(init=False)

    def __post_init__(self) -> None:
        self.loads = [node for node in walk(self.body) if isinstance(node, Load)]

    def reads(self) -> list[Buffer]:
        """The buffers that it loads from."""
        return list(dict.fromkeys(load.buffer for load in self.loads))

    def writes(self) -> list[Buffer]:
        """The buffer that it stores to."""
        return [self.buffer]

    def __str__(self) -> str:
        head = f"for {', '.join(map(str, self.outer))}: " if self.outer else ""
        body = str(self.body)
        if self.reduce:
            body = f"{self.reduce}({', '.join(map(str, self.inner))}: {body})"
        return f"{head}{self.buffer.name}[{self.store}] = {body}"


@dataclass(frozen=True)
class Loop:
    """A counter from 0 to below ``size``."""

    symbol: Symbol
    size: Index

    def __str__(self) -> str:
        return f"{self.symbol} < {self.size}"


def loops(prefix: str, sizes: Sequence[Index]) -> tuple[tuple[Index, ...], tuple[Loop, ...]]:
    """An index into ``sizes``, with counters named by ``prefix``, and the loops that run it."""
    made = [Loop(Symbol(f"{prefix}{k}", integer=True), n) for k, n in enumerate(sizes)]
    index = tuple(Integer(0) if loop.size == 1 else loop.symbol for loop in made)
    return index, tuple(loop for loop in made if loop.size != 1)
