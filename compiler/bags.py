"""Embedding bags in training: one native call forward, and backward no more than is needed.

The gradient of a table is never made dense. If a ``compiler.optim.SparseRows`` optimizes the
tables, backward only notes the lookup and the gradient of the pooled vectors, and the optimizer's
step sums and updates the looked-up rows in one pass (as FBGEMM's table-batched embeddings fuse the
optimizer into the backward, Khudia et al. 2021). Otherwise backward makes PyTorch's gradients, one
row for each different id where the table asks for sparse ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from compiler.kernels import cpp
from compiler.kernels.bags import Bags
from compiler.kernels.triton import require

# tables whose gradient an optimizer takes as lookups: see take_lookups
_takers: Any = WeakIdKeyDictionary()


def take_lookups(table: Tensor, taker: Callable[..., None]) -> None:
    """Let ``taker(tables, bags, grad, argmax)``, a method, have a table's gradients from now on.

    It ends with the life of the method's object.
    """
    _takers[table] = weakref.WeakMethod(taker)


def _taker(table: Tensor) -> Callable[..., None] | None:
    found = _takers.get(table)
    return None if found is None else found()


@dataclass(frozen=True)
class Lookup:
    """What is fixed about a group of bags."""

    modes: tuple[str, ...]
    padding: tuple[int, ...]
    include_last_offset: bool
    names: tuple[str, ...]
    sparse: tuple[bool, ...] = ()  # which tables ask for sparse gradients
    target: str = "cpp"  # whose kernels: cpp or triton

    def bags(
        self, ids: Sequence[Tensor], offsets: Sequence[Tensor] | None,
        weights: Sequence[Tensor] | None,
    ) -> Bags:  # fmt: skip
        if offsets is None:
            ids = [i if i.dim() == 2 else i[:, None] for i in ids]
        padding = [None if p < 0 else p for p in self.padding]
        return Bags(
            ids, offsets, self.modes, weights, padding, self.include_last_offset, self.names
        )


def kernels_of(target: str) -> Any:
    """The functions that run the kernels: for the CPU, or with the same names for a GPU."""
    if target == "cpp":
        return cpp
    require()
    from compiler.kernels.triton import faces

    return faces


class _Pooled(torch.autograd.Function):
    """F tables of one width to (B, F, d)."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, bags: Bags, count: int, *parts: Tensor) -> Tensor:
        tables = parts[:count]
        out = tables[0].new_empty(bags.batch(0), count, tables[0].shape[1])
        argmax = None
        if "max" in lookup.modes:
            argmax = [t.new_empty(bags.batch(f), t.shape[1], dtype=torch.int32)
                      for f, t in enumerate(tables)]  # fmt: skip
        kernels_of(lookup.target).pool_into(out, tables, bags, argmax)
        ctx.lookup, ctx.bags, ctx.argmax, ctx.tables = lookup, bags, argmax, tables
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tables, bags, kernels = ctx.tables, ctx.bags, kernels_of(ctx.lookup.target)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        wanted = ctx.needs_input_grad[3 : 3 + len(tables)]
        takers = {_taker(t) for t, w in zip(tables, wanted, strict=True) if w}
        found: list[Any] = [None] * len(tables)
        if len(takers) == 1 and None not in takers and all(wanted):
            next(iter(takers))(tables, bags, grad, ctx.argmax)  # type: ignore[misc]
            # an empty gradient stands for the lookups, so that zeroing the gradients is seen
            nothing = tables[0].new_empty(0, tables[0].shape[1])
            found[0] = torch.sparse_coo_tensor(
                nothing.new_empty(1, 0, dtype=torch.int64), nothing, tables[0].shape,
                check_invariants=False,
            )  # fmt: skip
        elif any(wanted):
            rows = [t.shape[0] for t in tables]
            dense = not any(ctx.lookup.sparse) and ctx.lookup.target == "triton"
            make = kernels.dense_gradients if dense else kernels.sparse_gradients
            made = make(rows, bags, grad, ctx.argmax)
            for f, (table, want) in enumerate(zip(tables, wanted, strict=True)):
                if want:
                    one = made[f].to(table.dtype)
                    found[f] = one if ctx.lookup.sparse[f] or dense else one.to_dense()
        scales = ctx.needs_input_grad[3 + len(tables) :]
        if any(scales):
            return (None, None, None, *found, *kernels.weight_gradients(tables, bags, grad))
        return (None, None, None, *found, *[None] * len(scales))


@dataclass(eq=False)
class Prologue:
    """What runs before a compiled graph in training: its bags, and what their arguments need."""

    graph: fx.Graph
    effects: Sequence[fx.Node] = ()  # operations with effects that come before the bags
    lookups: list[Lookup] = field(default_factory=list)
    parts: list[list[list[Any]]] = field(default_factory=list)
    _run: fx.GraphModule | None = None

    def add(self, lookup: Lookup, parts: list[list[Any]]) -> None:
        """``parts``: the nodes of tables, ids, offsets and weights (None where not given)."""
        self.lookups.append(lookup)
        self.parts.append(parts)

    def build(self, gm: fx.GraphModule, inputs: int) -> None:
        """Cut what the bags' arguments need out of the graph, into a module of its own.

        ``inputs``: how many placeholders the original graph has; they are this module's too.
        """
        new = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n.op == "placeholder"][:inputs]:
            made[node] = new.placeholder(node.name)
        wanted: set[fx.Node] = set()
        stack = [n for parts in self.parts for part in parts for n in part if n is not None]
        stack += self.effects
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        for node in self.graph.nodes:
            if node in wanted and node not in made:
                made[node] = new.node_copy(node, lambda n: made[n])
        for node in self.effects:
            self.graph.erase_node(node)
        new.output(fx.node.map_arg(self.parts, lambda n: made[n]))
        self._run = fx.GraphModule(gm, new)

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """The pooled vectors of each group."""
        assert self._run is not None
        results = []
        for lookup, (tables, ids, offsets, weights) in zip(
            self.lookups, self._run(*inputs), strict=True
        ):
            given = None if offsets[0] is None else offsets
            scales = [] if weights[0] is None else weights
            bags = lookup.bags(ids, given, [w.detach() for w in scales] or None)
            results.append(_Pooled.apply(lookup, bags, len(tables), *tables, *scales))
        return results
