"""A control-flow graph of a function, and the two walks over it that the passes need.

A node is a simple statement, the test of an ``if`` or ``while``, or the header of a ``for``,
``with`` or ``except``. The graph is built backwards: each statement is told which node follows it.

* ``liveness``: names that may still be read after a node.
* ``bound``: names that have a value, whichever way a node was reached.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

State = TypeVar("State")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PASSING = set(
    "no_grad enable_grad inference_mode set_grad_enabled autocast record_function device".split()
)
Arguments = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class Block:
    """One node: what it evaluates, the names it reads and binds, and where control goes next."""

    tree: ast.AST | None
    reads: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    following: list[int] = field(default_factory=list)


class Graph:
    """The control-flow graph of a function's body."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.blocks: list[Block] = []
        self.of: dict[ast.AST, int] = {}  # statement: the node it begins with
        self.after: dict[ast.AST, int] = {}  # statement: the node that follows it
        self.iterated: dict[ast.expr, ast.expr] = {}  # target of a for loop: what it goes over
        self.parameters = parameters(function)
        self.captured = captured(function)
        self._handlers: list[int] = []  # where an exception may go
        self._loops: list[tuple[int, int]] = []  # where continue and break go
        self.exit = self._block(None)
        self.blocks[self.exit].reads = self.captured | declared(function)
        self.entry = self._suite(function.body, self.exit)
        self.preceding: list[list[int]] = [[] for _ in self.blocks]
        for k, block in enumerate(self.blocks):
            for other in block.following:
                self.preceding[other].append(k)

    def liveness(self) -> list[set[str]]:
        """For each node, the names that may be read from there on."""

        def before(block: Block, after: set[str] | None) -> set[str]:
            return block.reads | ((after or set()) - block.binds)

        found = self._solve(
            lambda k: self.blocks[k].following, self.preceding, before, set.union, None
        )
        return [live or set() for live in found]

    def bound(self, given: Iterable[str] = ()) -> list[set[str] | None]:
        """For each node, the names that surely have a value once it was run; None: never run."""

        def after(block: Block, before: set[str] | None) -> set[str]:
            return (before or set()) | block.binds

        start = self.parameters | set(given)
        return self._solve(
            lambda k: self.preceding[k],
            [block.following for block in self.blocks],
            after,
            set.intersection,
            (self.entry, start),
        )

    def bound_before(self, node: int, bound: Sequence[set[str] | None]) -> set[str]:
        """Names that surely have a value when control comes to ``node``."""
        states = [bound[k] for k in self.preceding[node]]
        known = [s for s in states if s is not None]
        if node == self.entry:
            known.append(self.parameters)
        return set.intersection(*known) if known else set()

    def _solve(
        self,
        sources: Callable[[int], Sequence[int]],
        dependents: Sequence[Sequence[int]],
        transfer: Callable[[Block, State | None], State],
        join: Callable[..., State],
        start: tuple[int, State] | None,
    ) -> list[State | None]:
        """A fixed point over the graph: the state on the far side of each node."""
        found: list[State | None] = [None] * len(self.blocks)
        work = [start[0]] if start else list(range(len(self.blocks)))
        while work:
            k = work.pop()
            states = [s for other in sources(k) if (s := found[other]) is not None]
            if start and k == start[0]:
                states.append(start[1])
            new = transfer(self.blocks[k], join(*states) if states else None)
            if new != found[k]:
                found[k] = new
                work.extend(dependents[k])
        return found

    # ── building ──

    def _block(self, tree: ast.AST | None, *following: int, binds: Iterable[str] = ()) -> int:
        """A node, entered through one from which an exception goes on, where that is caught."""
        block = Block(tree, following=list(dict.fromkeys(following)))
        if tree is not None:
            block.reads, block.binds = names(tree)
        block.binds |= set(binds)
        self.blocks.append(block)
        node = len(self.blocks) - 1
        if tree is None or not self._handlers:
            return node
        return self._block(None, node, *self._handlers)

    def _suite(self, body: Sequence[ast.stmt], follow: int) -> int:
        for statement in reversed(body):
            self.after[statement] = follow
            follow = self.of[statement] = self._statement(statement, follow)
        return follow

    def _statement(self, s: ast.stmt, follow: int) -> int:
        match s:
            case ast.If():
                sides = self._suite(s.body, follow), self._suite(s.orelse, follow)
                return self._block(s.test, *sides)
            case ast.While():
                header = self._block(None)
                body, otherwise = self._loop(s, header, follow)
                self.blocks[header].following = [self._block(s.test, body, otherwise)]
                return header
            case ast.For() | ast.AsyncFor():
                header = self._block(None)
                body, otherwise = self._loop(s, header, follow)
                self.blocks[header].following = [self._block(s.target, body), otherwise]
                self.iterated[s.target] = s.iter
                return self._block(s.iter, header)
            case ast.Return():
                return self._block(s, self.exit)
            case ast.Raise():
                return self._block(s, *([] if self._handlers else [self.exit]))
            case ast.Continue():
                return self._block(s, self._loops[-1][0])
            case ast.Break():
                return self._block(s, self._loops[-1][1])
            case ast.With() | ast.AsyncWith():
                return self._with(s, follow)
            case ast.Try() | ast.TryStar():
                return self._try(s, follow)
            case ast.Match():
                return self._match(s, follow)
            case _:
                return self._block(s, follow)

    def _loop(
        self, s: ast.While | ast.For | ast.AsyncFor, header: int, follow: int
    ) -> tuple[int, int]:
        self._loops.append((header, follow))
        body = self._suite(s.body, header)
        self._loops.pop()
        return body, self._suite(s.orelse, follow)

    def _with(self, s: ast.With | ast.AsyncWith, follow: int) -> int:
        passes = all(_passes_exceptions(item.context_expr) for item in s.items)
        if not passes:
            self._handlers.append(follow)  # the context may swallow an exception
        entry = self._suite(s.body, follow)
        for item in reversed(s.items):
            if item.optional_vars is not None:
                entry = self._block(item.optional_vars, entry)
            entry = self._block(item.context_expr, entry)
        if not passes:
            self._handlers.pop()
        return entry

    def _try(self, s: ast.Try | ast.TryStar, follow: int) -> int:
        final = self._suite(s.finalbody, follow)
        if s.finalbody:
            self._handlers.append(final)  # also after a return
        handlers = []
        for handler in s.handlers:
            bound = [handler.name] if handler.name else []
            entry = self._suite(handler.body, final)
            handlers.append(self._block(handler.type, entry, binds=bound))
        otherwise = self._suite(s.orelse, final)
        self._handlers.extend(handlers)
        entry = self._suite(s.body, otherwise)
        del self._handlers[len(self._handlers) - len(handlers) :]
        if s.finalbody:
            self._handlers.pop()
        return self._block(None, entry, *handlers)

    def _match(self, s: ast.Match, follow: int) -> int:
        following = follow
        for case in reversed(s.cases):
            body = self._suite(case.body, follow)
            bound = [
                n.name
                for n in ast.walk(case.pattern)
                if isinstance(n, ast.MatchAs | ast.MatchStar) and n.name
            ]
            guard = self._block(case.guard, body, following, binds=bound)
            following = self._block(case.pattern, guard, following)
        return self._block(s.subject, following)


def _passes_exceptions(context: ast.expr) -> bool:
    """Whether a context manager is one of PyTorch's that swallow no exception."""
    callee = context.func if isinstance(context, ast.Call) else context
    name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
    return name in PASSING


# ── names ──


def parameters(function: Arguments) -> set[str]:
    """The names of a function's parameters."""
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return {
        p.arg for p in (*every, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else []))
    }


def names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a simple statement or expression reads, and those that it binds."""
    reads: set[str] = set()
    binds: set[str] = set()

    def visit(node: ast.AST, local: frozenset[str]) -> None:
        match node:
            case ast.Name():
                stored = isinstance(node.ctx, ast.Store)
                if node.id not in local:
                    (binds if stored else reads).add(node.id)
            case ast.AugAssign(target=ast.Name() as target):
                reads.add(target.id)
                binds.add(target.id)
                visit(node.value, local)
            case ast.NamedExpr():
                binds.add(node.target.id)
                visit(node.value, local)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                if not isinstance(node, ast.Lambda):
                    binds.add(node.name)
                    for decorator in node.decorator_list:
                        visit(decorator, local)
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default is not None:
                        visit(default, local)
                reads.update(free(node) - local)
            case ast.ClassDef():
                binds.add(node.name)
                reads.update({n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - local)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = local | {
                    n.id
                    for g in node.generators
                    for n in ast.walk(g.target)
                    if isinstance(n, ast.Name)
                }
                for child in ast.iter_child_nodes(node):
                    visit(child, inner)
            case ast.comprehension():
                visit(node.iter, local)
                for test in node.ifs:
                    visit(test, local)
            case ast.Import() | ast.ImportFrom():
                binds.update((a.asname or a.name).split(".")[0] for a in node.names)
            case ast.AnnAssign():
                if node.value is not None:
                    visit(node.value, local)
                    visit(node.target, local)
                elif not isinstance(node.target, ast.Name):
                    visit(node.target, local)
            case _:
                for child in ast.iter_child_nodes(node):
                    visit(child, local)

    visit(tree, frozenset())
    return reads, binds


def own_nodes(tree: ast.AST | Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a tree, or of several, but those of functions and classes defined inside."""
    stack = [tree] if isinstance(tree, ast.AST) else list(tree)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def assigned(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind, in whichever way."""
    found: set[str] = set()
    for node in own_nodes(body):
        if isinstance(node, ast.stmt) and not isinstance(
            node, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match
        ):
            found |= names(node)[1]
        elif isinstance(node, ast.For | ast.AsyncFor):
            found |= names(node.target)[1]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            found |= names(node.optional_vars)[1]
        elif isinstance(node, ast.NamedExpr):
            found.add(node.target.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
    return found


def free(function: Arguments) -> set[str]:
    """The names that a nested function takes from outside."""
    body = function.body if isinstance(function.body, list) else [function.body]
    inside = parameters(function) | assigned(body)

    reads: set[str] = set()
    for node in own_nodes(body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            reads.add(node.id)
        elif isinstance(node, FUNCTIONS):
            reads |= free(node)
        elif isinstance(node, ast.ClassDef):
            reads |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Nonlocal):
            inside -= set(node.names)
            reads |= set(node.names)
    return reads - inside


def captured(function: ast.FunctionDef) -> set[str]:
    """The names that functions defined inside hold on to: they may be read at any time."""
    found: set[str] = set()
    for node in own_nodes(function.body):
        if isinstance(node, FUNCTIONS) and not hasattr(node, "effect"):
            found |= free(node)  # a function with an effect is a side, called at once
    return found


def declared(function: ast.FunctionDef) -> set[str]:
    """The names declared global or nonlocal, which outlive the call."""
    return {
        name
        for node in own_nodes(function.body)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }


def always_leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether every path through the statements ends in a return or raise."""
    for s in body:
        match s:
            case ast.Return() | ast.Raise():
                return True
            case ast.If() if always_leaves(s.body) and always_leaves(s.orelse):
                return True
            case ast.With() if always_leaves(s.body):
                return True
    return False


def subexpressions(tree: ast.AST) -> list[ast.expr]:
    """The expressions right below a tree, those in keywords and comprehensions among them."""
    found: list[ast.expr] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            found.append(child)
        elif isinstance(child, ast.keyword | ast.comprehension):
            found.extend(subexpressions(child))
    return found
