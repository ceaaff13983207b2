"""What the patterns share: canonical names of operations, shapes of nodes, and edits of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", F.relu: "relu", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
    F.gelu: "gelu", F.linear: "linear", torch.bmm: "matmul", torch.matmul: "matmul",
    operator.matmul: "matmul", torch.transpose: "transpose", torch.swapaxes: "transpose",
    torch.permute: "permute", torch.einsum: "einsum", torch.stack: "stack", torch.cat: "cat",
    torch.concat: "cat", torch.concatenate: "cat", torch.reshape: "reshape",
    torch.flatten: "flatten", torch.unsqueeze: "unsqueeze", operator.getitem: "getitem",
    F.embedding_bag: "embedding_bag", F.embedding: "embedding", torch.sum: "sum",
    torch.mean: "mean", torch.select: "select", torch.tril_indices: "tril_indices",
    torch.triu_indices: "triu_indices", F.dropout: "dropout",
}  # fmt: skip
_METHODS = {
    "relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "bmm": "matmul", "matmul": "matmul",
    "__matmul__": "matmul", "transpose": "transpose", "swapaxes": "transpose",
    "permute": "permute", "view": "reshape", "reshape": "reshape", "flatten": "flatten",
    "unsqueeze": "unsqueeze", "sum": "sum", "mean": "mean", "select": "select",
    "contiguous": "contiguous",
}  # fmt: skip


def kind(node: Any) -> str:
    """The operation of a node by one name, however it was spelled; empty for others."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method":
        return _METHODS.get(str(node.target), "")
    return ""


def value(node: Any) -> Any:
    """The fake tensor (or number) that a node stands for."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument given by place or by name."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def rank(node: Any) -> int:
    """The number of dimensions of a node's tensor, -1 if it is none."""
    found = value(node)
    return found.dim() if isinstance(found, Tensor) else -1


def dimension(dim: Any, node: Any) -> int:
    """A dimension counted from 0."""
    return int(dim) % rank(node)


def is_transpose_of(node: Any, other: Any) -> bool:
    """Whether a node is ``other`` (B, K, d) with its last two dimensions swapped."""
    if not isinstance(node, fx.Node):
        return False
    if kind(node) == "contiguous":
        return is_transpose_of(node.args[0], other)
    if kind(node) == "transpose" and node.args[0] is other:
        a, b = (int(argument(node, k, f"dim{k - 1}")) % 3 for k in (1, 2))
        return {a, b} == {1, 2}
    if kind(node) == "permute" and node.args[0] is other:
        order = node.args[1] if len(node.args) == 2 else node.args[1:]
        return [int(d) % 3 for d in order] == [0, 2, 1]  # type: ignore[union-attr, arg-type]
    named = node.op == "call_function" and node.target is getattr and node.args[1] in ("mT", "mH")
    return bool(named) and node.args[0] is other


def changes(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place."""
    name = str(node.target)
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    return (
        method
        or node.target is operator.setitem
        or node.kwargs.get("inplace") is True
        or "out" in node.kwargs
    )


class Rewrite:
    """A graph under edit.

    ``found`` lists what was replaced, for people; ``checks`` are inputs whose values the new graph
    takes for granted: (number of the input, its value).
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: list[Any], constants: bool, autotune: bool
    ) -> None:
        self.autotune, self.target = autotune, "cpp"
        self.gm, self.graph, self.inputs, self.constants = gm, gm.graph, inputs, constants
        self.found: list[str] = []
        self.checks: list[tuple[int, Tensor]] = []
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        modes = (getattr(value(n), "fake_mode", None) for n in self.graph.nodes)
        self.fake_mode: Any = next((mode for mode in modes if mode is not None), None)
        self.before: Any = None  # what runs eagerly before the graph: see compiler.bags
        self.early: list[fx.Node] = []  # operations with effects that run there too

    def devices(self) -> set[torch.device]:
        return {v.device for n in self.graph.nodes if isinstance(v := value(n), Tensor)}

    def region(self, node: fx.Node) -> int:
        """How many autocast switches lie before a node: fused nodes must not span one."""
        count = 0
        for other in self.graph.nodes:
            if other is node:
                return count
            if "autocast" in str(other.target) or "grad_enabled" in str(other.target):
                count += 1
        return count

    def place(self, node: fx.Node) -> int:
        """Where a node stands in the graph."""
        return next(k for k, other in enumerate(self.graph.nodes) if other is node)

    def changed_between(self, first: fx.Node | None, last: fx.Node) -> bool:
        """Whether a tensor is changed in place between two nodes (from the start, for None).

        Work must not move across that. An activation in place of its own input does not count.
        """
        inside = first is None
        for node in self.graph.nodes:
            inside = inside or node is first
            if node is last:
                return False
            if inside and changes(node) and not _private(node):
                return True
        return False

    @contextmanager
    def faking(self) -> Iterator[None]:
        """Where example values are computed from each other, without data and gradients."""
        with self.fake_mode or nullcontext(), torch.no_grad():
            yield

    def call(self, op: Callable[..., Any], args: Sequence[Any], before: fx.Node) -> fx.Node:
        """A new node ``op(*args)`` before another, with its fake value."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(op, tuple(args))
        with self.faking():
            node.meta["example_value"] = op(*fx.node.map_arg(tuple(args), value))
        return node

    def known(self, node: Any) -> Tensor | None:
        """The value of an index tensor that is a constant, or an input taken as it is now."""
        if isinstance(node, list | tuple) and all(isinstance(i, int) for i in node):
            return torch.tensor(node)
        if not isinstance(node, fx.Node):
            return None
        if node.op == "placeholder" and self.constants:
            number = self.placeholders.index(node)
            real = self.inputs[number]
            if not isinstance(real, Tensor) or real.requires_grad or hasattr(real, "fake_mode"):
                return None
            kept = real.detach().clone()
            if all(number != n for n, _ in self.checks):
                self.checks.append((number, kept))
            return kept
        if node.op == "get_attr":
            found = getattr(self.gm, str(node.target), None)
            return found if isinstance(found, Tensor) else None
        if kind(node) in ("tril_indices", "triu_indices") and not node.all_input_nodes:
            return node.target(*node.args, **node.kwargs)  # type: ignore[operator]
        if kind(node) in ("getitem", "select"):
            base = self.known(node.args[0])
            index = node.args[1] if kind(node) == "getitem" else argument(node, 2, "index")
            if base is not None and isinstance(index, int):
                return base[index]
        return None

    def drop_identities(self) -> None:
        """Take out dropout that does nothing, so that it parts no chain."""
        for node in list(self.graph.nodes):
            if kind(node) != "dropout":
                continue
            off = argument(node, 2, "training", True) is False or argument(node, 1, "p", 0.5) == 0
            if off and not argument(node, 3, "inplace", False):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def finish(self) -> None:
        """Put the nodes into an order that may run, and drop those that nobody uses."""
        if self.before is not None:
            self.before.build(self.gm, len(self.placeholders) - len(self.before.lookups))
        sort(self.graph)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: not kind(n) or changes(n))
        self.graph.lint()
        self.gm.recompile()


def _private(node: fx.Node) -> bool:
    """Whether an in-place activation is the only reader of a linear layer's output."""
    source = node.args[0] if node.args else None
    return kind(node) in ("relu", "sigmoid") and kind(source) == "linear" and len(source.users) == 1  # type: ignore[union-attr]


def sort(graph: fx.Graph) -> None:
    """Move nodes that come before one of their arguments to just behind it, keeping the order."""
    placed: set[fx.Node] = set()
    last: fx.Node | None = None

    def place(node: fx.Node) -> None:
        nonlocal last
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [a for a in top.all_input_nodes if a not in placed]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if top in placed:
                continue
            if last is not None and last.next is not top:
                last.append(top)
            placed.add(top)
            last = top

    for node in list(graph.nodes):
        if node not in placed:
            place(node)
