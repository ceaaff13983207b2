"""What a call could do: PyTorch's operations, modules, the user's own functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable
from typing import Any

import torch

from compiler.mend import cfg, ops
from compiler.mend.flow import Flow
from compiler.mend.function import RUNTIME, Function
from compiler.mend.kinds import Env, Sort, definition, sort_of
from compiler.mend.levels import GATED, Effect, Level, impure

CONTAINER_METHODS = {m for t in (list, dict, set, bytearray) for m in dir(t) if m[0] != "_"}
PURE_CONTAINER_METHODS = set("copy count index get items keys values".split())
PURE_BUILTINS = set(
    "len isinstance issubclass hasattr getattr callable type id repr str bool int float complex"
    " range round abs min max sum any all pow divmod zip enumerate reversed sorted map filter list"
    " tuple dict set frozenset slice hash ord chr format iter".split()
)
DEEPEST = 4  # of calls into the user's own functions


class Callees:
    """Effects of calls in a function; ``owned`` names hold tensors that nothing else can see."""

    def __init__(self, flow: Flow, owned: Iterable[str] = (), depth: int = 0) -> None:
        self.flow, self.scope, self.depth = flow, flow.scope, depth
        self.owned = set(owned)
        self.always_owned = frozenset(owned)

    def suite(self, body: Iterable[ast.stmt]) -> Effect:
        """Of statements."""
        raise NotImplementedError

    def expression(self, tree: ast.expr, env: Env) -> Effect:
        """Of an expression, where names have the sorts of ``env``."""
        raise NotImplementedError

    def call(self, tree: ast.Call, env: Env) -> Effect:
        callee, full = tree.func, self.scope.dotted(tree.func)
        if definition(callee, self.scope) is not None:
            return self._users(callee, env)
        if isinstance(callee, ast.Attribute) and ast.unparse(callee.value) == RUNTIME:
            return self._runtime(tree)
        if full is not None:
            stem = full.split(".")[-1]
            if full == "super" or full.startswith("super."):
                return impure("calls super(), which works in the method itself only")
            if full in ("int", "float", "bool") and tree.args:
                if sort_of(tree.args[0], env, self.scope) is Sort.TENSOR:
                    return impure(f"reads a tensor's value through {full}()")
                return GATED
            if full == "print" or full.startswith(("logging.", "warnings.")):
                return impure("prints" if full == "print" else f"calls {full}()")
            if full in PURE_BUILTINS or full.startswith("math."):
                return GATED
            if full in ("locals", "vars", "eval", "exec", "globals"):
                return impure(f"calls {full}()")
            if full.startswith("torch."):
                return self._operation(full, stem, tree, env)
        if isinstance(callee, ast.Attribute):
            base = self.expression(callee.value, env)
            sort = sort_of(callee.value, env, self.scope)
            if sort in (Sort.TENSOR, Sort.UNKNOWN, Sort.ITEM):
                return base | self._method(callee, sort, tree, env)
            if sort is Sort.PYTHON:
                return base | GATED
            if sort is Sort.OBJECT and callee.attr in CONTAINER_METHODS:
                root = callee.value.id if isinstance(callee.value, ast.Name) else None
                if callee.attr in PURE_CONTAINER_METHODS or root in self.owned:
                    return base | GATED
                return impure(f".{callee.attr}() may change {ast.unparse(callee.value)}")
        return self._users(callee, env)

    def _runtime(self, tree: ast.Call) -> Effect:
        helper = tree.func.attr if isinstance(tree.func, ast.Attribute) else ""
        if helper in ("emit", "trap"):
            if any(k.arg == "when" for k in tree.keywords) or helper == "trap":
                return Effect(Level.GATED, "reports", masked=True)
            return impure("prints, logs or warns")
        if helper == "cond":
            return Effect(Level.COSTLY, "holds a branch that runs only when taken")
        return GATED if helper != "select" else Effect()

    def _operation(self, full: str, stem: str, tree: ast.Call, env: Env) -> Effect:
        name = ops.named(full)
        if full.startswith(("torch.cuda", "torch.distributed", "torch._", "torch.autograd")):
            return impure(f"calls {full}")
        if full.startswith("torch.nn.init."):
            return impure(f"calls {full}, which changes its argument")
        if stem[:1].isupper() and full.startswith("torch.nn."):
            return impure(f"makes a module, {full}")
        return self._facts(name, full, tree, env)

    def _method(self, callee: ast.Attribute, sort: Sort, tree: ast.Call, env: Env) -> Effect:
        name = callee.attr
        owner = callee.value.id if isinstance(callee.value, ast.Name) else None
        if name.endswith("_") and not name.endswith("__"):
            facts = ops.facts(name[:-1])
            if facts is not None and facts.random:
                return impure(f".{name}() draws random numbers")
            if owner in self.owned:
                return GATED
            return impure(f".{name}() changes {ast.unparse(callee.value)} in place")
        if name in ("item", "tolist", "numpy", "backward", "register_hook", "is_nonzero", "equal"):
            return impure(f"calls .{name}()")
        if name in CONTAINER_METHODS and sort is not Sort.TENSOR and owner not in self.owned:
            if name not in PURE_CONTAINER_METHODS:
                return impure(f".{name}() may change {ast.unparse(callee.value)}")
            return GATED
        if name in ("size", "dim", "numel", "stride", "is_contiguous", "element_size"):
            return GATED
        return self._facts(name, f".{name}()", tree, env)

    def _facts(self, name: str, shown: str, tree: ast.Call, env: Env) -> Effect:
        facts = ops.facts(name)
        if facts is None:
            return impure(f"calls {shown}, whose effects are not known")
        if facts.random:
            off = [k.value for k in tree.keywords if k.arg == "training"]
            if not (off and isinstance(off[0], ast.Constant) and off[0].value is False):
                return impure(f"{shown} draws random numbers")
        if facts.mutates:
            return impure(f"calls {shown}, which changes its argument")
        if facts.shape_from_data or (name == "where" and len(tree.args) == 1):
            return impure(f"{shown}: the shape of its result depends on data")
        if facts.checked:
            return impure(f"{shown} may raise, by a check that torch.cond cannot hold")
        if facts.raises:
            return Effect(Level.RAISING, f"{shown} may raise")
        if facts.costly:
            return Effect(Level.COSTLY, f"{shown} costs much")
        if facts.free:
            given = tree.args[0] if tree.args else None
            if isinstance(tree.func, ast.Attribute) and shown.startswith("."):
                given = tree.func.value
            if given is not None and sort_of(given, env, self.scope) is Sort.TENSOR:
                return Effect()
        return GATED

    def _users(self, callee: ast.expr, env: Env) -> Effect:
        """A call of a module, or of one of the user's own functions."""
        name = ast.unparse(callee)
        live = self.scope.live(callee)
        if isinstance(live, torch.nn.Module):
            return self._live_module(live, name)
        found = self._function(callee, live)
        if found is not None:
            if self.depth >= DEEPEST:
                return impure(f"calls {name}, which calls others too deep to follow")
            inner = type(self)(Flow(found), owned_within(found), self.depth + 1)
            effect = inner.suite(found.node.body)
            if effect.level is Level.IMPURE:
                return impure(f"calls {name}, which {effect.reason}")
            hidden = any(
                isinstance(n, ast.Attribute) and sort_of(n, {}, inner.scope) is Sort.TENSOR
                for n in cfg.own_nodes(found.node.body)
            )
            if hidden and effect.level < Level.COSTLY:
                return Effect(Level.COSTLY, f"calls {name}, which reads tensors of its own")
            return effect | GATED
        if sort_of(callee, env, self.scope) is Sort.MODULE:
            listed = self._listed(callee)
            return listed if listed is not None else self._static_module(callee)
        return impure(f"calls {name}, whose effects are not known")

    def _function(self, callee: ast.expr, live: Any) -> Function | None:
        function = self.scope.function
        node = definition(callee, self.scope)
        if node is not None:
            owner = function.owner if isinstance(callee, ast.Attribute) else None
            instance = function.instance if isinstance(callee, ast.Attribute) else None
            return Function(
                node, function.file, node.name, owner, function.module, function.names, instance
            )
        if isinstance(live, types.MethodType):
            return alive(live.__func__, live.__self__)
        if isinstance(live, types.FunctionType):
            return alive(live)
        return None

    def _static_module(self, callee: ast.expr) -> Effect:
        """A module that ``__init__`` makes: by the name of its class."""
        name = ast.unparse(callee)
        effect = Effect()
        made = self.scope.constructors(callee)
        if not made:
            return impure(f"calls {name}, whose effects are not known")
        for value in made:
            effect |= self._constructed(value, name)
        return effect

    def _listed(self, callee: ast.expr) -> Effect | None:
        """A module that a loop takes out of a list of modules, such as ``self.layers``."""
        if not isinstance(callee, ast.Name):
            return None
        iterated = self.flow.graph.iterated.items()
        lists = [over for to, over in iterated if callee.id in cfg.names(to)[1]]
        effect = Effect()
        for over in lists:
            live = self.scope.live(over)
            if isinstance(live, torch.nn.ModuleList | torch.nn.Sequential):
                for child in live:
                    effect |= self._live_module(child, callee.id)
                continue
            for made in self.scope.constructors(over):
                kind = (self.scope.dotted(made.func) or "").split(".")[-1]
                match made.args:
                    case [ast.List(elts=parts)] if kind == "ModuleList":
                        pass
                    case [ast.ListComp(elt=part)] if kind == "ModuleList":
                        parts = [part]
                    case _:
                        parts = list(made.args)
                for part in parts:
                    effect |= self._constructed(part, callee.id)
        return effect if lists and effect != Effect() else None

    def _constructed(self, value: ast.expr, name: str) -> Effect:
        if not isinstance(value, ast.Call):
            return impure(f"calls {name}, whose effects are not known")
        kind = (self.scope.dotted(value.func) or "").split(".")[-1]
        if kind in ops.CONTAINERS:
            effect = Effect()
            for part in value.args:
                effect |= self._constructed(part, name)
            return effect
        return _module_effect(kind, name, training=True)

    def _live_module(self, module: torch.nn.Module, name: str) -> Effect:
        kind = type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return impure(f"calls {name}, which has hooks")
        if not type(module).__module__.startswith("torch.nn."):
            found = alive(type(module).forward, module)
            if found is None or self.depth >= DEEPEST:
                return impure(f"calls {name}, whose effects are not known")
            inner = type(self)(Flow(found), owned_within(found), self.depth + 1)
            effect = inner.suite(found.node.body)
            if effect.level is Level.IMPURE:
                return impure(f"calls {name}, which {effect.reason}")
            return Effect(max(effect.level, Level.COSTLY), effect.reason, effect.masked)
        if kind in ops.CONTAINERS:
            effect = Effect()
            for child in module.children():
                effect |= self._live_module(child, name)
            return effect
        return _module_effect(kind, name, module.training)


def _module_effect(kind: str, name: str, training: bool) -> Effect:
    if training and kind.startswith(ops.RANDOM_MODULES):
        return impure(f"{name}, a {kind}, draws random numbers")
    if training and kind.startswith(ops.STATEFUL_MODULES):
        return impure(f"{name}, a {kind}, changes its statistics")
    if kind.startswith(ops.RAISING_MODULES):
        return Effect(Level.RAISING, f"{name}, a {kind}, may raise")
    if kind in ops.PLAIN_MODULES:
        return GATED
    if kind in ops.PARAMETER_MODULES or not training:
        return Effect(Level.COSTLY, f"{name}, a {kind}, costs much or has parameters")
    return impure(f"calls {name}, a {kind or 'module'}, whose effects are not known")


def alive(function: Any, instance: Any = None) -> Function | None:
    """The source of a live function; None where there is none to be read."""
    if not isinstance(function, types.FunctionType):
        return None
    module = getattr(function, "__module__", "") or ""
    if module.split(".")[0] == "torch":
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    closure = inspect.getclosurevars(function)
    names = {**closure.globals, **closure.nonlocals}
    return Function(
        tree, inspect.getfile(function), function.__qualname__, names=names, instance=instance
    )


def owned_within(function: Function) -> set[str]:
    """Names of a function that hold nothing but what the function itself has made."""
    return Flow(function).fresh_names()
