"""The effects that mending knows: which calls they are, and what is to run later for each."""

from __future__ import annotations

import ast
import builtins
import functools
import logging

from compiler.mend import cfg
from compiler.mend.findings import Kind
from compiler.mend.function import call, placed
from compiler.mend.kinds import Scope
from compiler.mend.splitting import Declined, Splitter

LEVELS = set(
    "critical debug error exception fatal info info_once log warn warning warning_once".split()
)
LOGGERS = {"logger", "log", "LOG", "LOGGER", "_logger", "_log", "_LOGGER", "_LOG"}
MAKE_LOGGERS = ("getLogger", "get_logger")
WARN = ("warnings.warn", "_warnings.warn", "_py_warnings.warn")


def effect(tree: ast.expr, scope: Scope) -> Kind | None:
    """The kind of effect that an expression is, or None."""
    if not isinstance(tree, ast.Call):
        return None
    full = scope.dotted(tree.func) or _imported_inside(tree.func, scope)
    if isinstance(tree.func, ast.Name) and full == "print" and not _bound("print", scope):
        return Kind.PRINT
    if full in WARN:
        return Kind.WARNING
    match tree.func:
        case ast.Attribute(attr=level, value=logger) if level in LEVELS:
            if full == f"logging.{level}" or _is_logger(logger, scope):
                return Kind.LOGGING
    return None


def body(tree: ast.Call, kind: Kind, splitter: Splitter) -> ast.expr:
    """What to run later for an effect; the splitter is told of its values. Raises Declined."""
    if _imported_inside(tree.func, splitter.scope):
        raise Declined(f"{_root(tree.func)} is imported inside of the function")
    make = {Kind.PRINT: _print, Kind.WARNING: _warning, Kind.LOGGING: _logging}[kind]
    if any(k.arg is None for k in tree.keywords):
        raise Declined("takes arguments by **")
    new = make(tree, splitter)
    splitter.check()
    return placed(new, tree)


def error(tree: ast.Raise, splitter: Splitter) -> ast.expr:
    """What to run later for a ``raise``. Raises Declined."""
    if tree.exc is None:
        raise Declined("raises the exception that is being handled")
    parts = [_exception(tree.exc, splitter)]
    if isinstance(tree.cause, ast.Constant):
        parts.append(tree.cause)
    elif tree.cause is not None:
        parts.append(_exception(tree.cause, splitter))
    splitter.check()
    return call("throw", *parts, at=tree)


def assertion(tree: ast.Assert, splitter: Splitter) -> ast.expr:
    """What to run later for an ``assert`` that fails. Raises Declined."""
    message = [splitter.later(tree.msg)] if tree.msg is not None else []
    splitter.check()
    raised = ast.Call(ast.Name("AssertionError", ast.Load()), message, [])
    return call("throw", placed(raised, tree), at=tree)


def asks_for_level(tree: ast.Call, scope: Scope) -> bool:
    """Whether a call asks a logger what it would log."""
    match tree.func:
        case ast.Attribute(attr="isEnabledFor" | "getEffectiveLevel", value=logger):
            return _is_logger(logger, scope)
    return False


def _print(tree: ast.Call, splitter: Splitter) -> ast.expr:
    keywords = []
    for k in tree.keywords:
        if k.arg == "file":
            if splitter.scope.dotted(k.value) not in ("sys.stderr", "sys.stdout"):
                raise Declined(f"prints to {ast.unparse(k.value)}")
            keywords.append(k)
        else:
            keywords.append(_keyword(k, splitter.later(k.value)))
    return ast.Call(tree.func, [splitter.later(a) for a in tree.args], keywords)


def _logging(tree: ast.Call, splitter: Splitter) -> ast.expr:
    for k in tree.keywords:
        if k.arg in ("stacklevel", "stack_info"):
            raise Declined(f"{k.arg}= asks for the stack")
        if k.arg == "exc_info" and not (isinstance(k.value, ast.Constant) and not k.value.value):
            raise Declined("exc_info= asks for the exception")
    assert isinstance(tree.func, ast.Attribute)
    logger = tree.func.value
    if _root(logger) in splitter.scope.locals:  # self.logger
        was, splitter.lazily = splitter.lazily, False
        logger = splitter.later(logger)
        splitter.lazily = was
    target = ast.Attribute(logger, tree.func.attr, ast.Load())
    keywords = [_keyword(k, splitter.later(k.value)) for k in tree.keywords]
    return ast.Call(target, [splitter.later(a) for a in tree.args], keywords)


def _warning(tree: ast.Call, splitter: Splitter) -> ast.expr:
    given = dict(zip(("message", "category", "stacklevel"), tree.args, strict=False))
    given.update({k.arg: k.value for k in tree.keywords if k.arg})
    if set(given) - {"message", "category", "stacklevel"} or "message" not in given:
        raise Declined("takes arguments other than message, category and stacklevel")
    message = given["message"]
    parts: list[ast.expr] = []
    if isinstance(message, ast.Call) and _is_class(message.func, splitter.scope, Warning):
        parts.append(_exception(message, splitter))
    else:
        parts.append(splitter.later(message))
    if "category" in given:
        if not _is_class(given["category"], splitter.scope, Warning):
            raise Declined(f"warns of {ast.unparse(given['category'])}")
        parts.append(given["category"])
    level = given.get("stacklevel")
    if level is None or (isinstance(level, ast.Constant) and level.value == 1):
        return ast.Call(tree.func, parts, [])
    if not isinstance(level, ast.Constant) or not isinstance(level.value, int) or level.value < 1:
        raise Declined(f"stacklevel={ast.unparse(level)} is no number above zero")
    name = splitter.function.fresh("place")
    splitter.values[name] = call("place", level, at=tree)
    return call("warn_at", ast.Name(name, ast.Load()), *parts, at=tree)


def _exception(tree: ast.expr, splitter: Splitter) -> ast.expr:
    """An exception class, or a call of one, to run later."""
    scope = splitter.scope
    if isinstance(tree, ast.Call) and _is_class(tree.func, scope, BaseException):
        if any(k.arg is None for k in tree.keywords):
            raise Declined("takes arguments by **")
        keywords = [_keyword(k, splitter.later(k.value)) for k in tree.keywords]
        made = ast.Call(tree.func, [splitter.later(a) for a in tree.args], keywords)
        return placed(made, tree)
    if _is_class(tree, scope, BaseException):
        return tree
    raise Declined(f"raises {ast.unparse(tree)}, which is no class of exceptions")


def _is_class(tree: ast.expr, scope: Scope, base: type) -> bool:
    """Whether an expression is a class of exceptions, known by its object or else by its name."""
    if _root(tree) in scope.locals:
        return False
    live = scope.live(tree)
    if live is not None:
        return isinstance(live, type) and issubclass(live, base)
    if scope.function.names is not None:
        return False
    name = (scope.dotted(tree) or "").split(".")[-1]
    built_in = getattr(builtins, name, None)
    if isinstance(built_in, type):
        return issubclass(built_in, base)
    endings = ("Warning",) if base is Warning else ("Error", "Exception", "Warning")
    return name.endswith(endings) or _defined(name, scope, endings)


def _defined(name: str, scope: Scope, endings: tuple[str, ...]) -> bool:
    module = scope.function.module
    for node in module.body if module else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return any(ast.unparse(b).split(".")[-1].endswith(endings) for b in node.bases)
    return False


def _is_logger(tree: ast.expr, scope: Scope) -> bool:
    match tree:
        case ast.Call(func=func, args=args) if (scope.dotted(func) or "") == "logging.getLogger":
            return all(isinstance(a, ast.Constant | ast.Name) for a in args) and not any(
                isinstance(a, ast.Name) and a.id in scope.locals for a in args
            )
        case ast.Attribute(value=ast.Name(id=me), attr=name) if me == scope.self_name:
            instance = scope.function.instance
            if instance is not None:
                return isinstance(getattr(instance, name, None), logging.Logger)
            return name in LOGGERS
        case ast.Name() | ast.Attribute() if _root(tree) not in scope.locals:
            live = scope.live(tree)
            if scope.function.names is not None:
                return isinstance(live, logging.Logger)
            return isinstance(tree, ast.Name) and (tree.id in LOGGERS or _made(tree.id, scope))
    return False


def _made(name: str, scope: Scope) -> bool:
    """Whether the file assigns a logger to a global name."""
    module = scope.function.module
    for node in module.body if module else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(func=func)):
                if target == name and ast.unparse(func).split(".")[-1] in MAKE_LOGGERS:
                    return True
    return False


def _bound(name: str, scope: Scope) -> bool:
    """Whether the file binds a name at its top level."""
    module = scope.function.module
    return module is not None and name in _top_level(module)


@functools.lru_cache(8)
def _top_level(module: ast.Module) -> set[str]:
    return cfg.assigned(module.body)


def _imported_inside(callee: ast.expr, scope: Scope) -> str | None:
    """``warnings.warn`` where the function itself imports ``warnings``."""
    root = _root(callee)
    if root not in scope.locals:
        return None
    for node in cfg.own_nodes(scope.function.node.body):
        match node:
            case ast.Import(names=names):
                for a in names:
                    if (a.asname or a.name) == root:
                        return a.name + ast.unparse(callee)[len(root) :]
            case ast.ImportFrom(module=str() as module, names=names):
                for a in names:
                    if (a.asname or a.name) == root:
                        return f"{module}.{a.name}"
    return None


def _root(tree: ast.expr) -> str:
    while isinstance(tree, ast.Attribute):
        tree = tree.value
    return tree.id if isinstance(tree, ast.Name) else ""


def _keyword(k: ast.keyword, value: ast.expr) -> ast.keyword:
    return ast.copy_location(ast.keyword(k.arg, value), k)
