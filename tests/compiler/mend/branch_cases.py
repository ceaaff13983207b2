"""Shared by the tests of branches and loops: cases, mended modules, and the comparison."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from compiler.mend import cfg, runtime
from compiler.mend.findings import Finding, Kind
from compiler.mend.function import RUNTIME
from compiler.mend.rewrite import functions
from compiler.mend.where import where
from compiler.survey.register import Drawn as Case

Mended = tuple[dict[str, Any], dict[str, list[Finding]]]
BRANCHES = (Kind.BRANCH, Kind.LOOP, Kind.ITEM)
DRAWS = 16


def mend_source(
    source: str, file: str = "corpus.py"
) -> tuple[ast.Module, dict[str, list[Finding]]]:
    """A file's tree with all functions mended, and the findings by qualified name."""
    module = ast.parse(source)
    found: dict[str, list[Finding]] = {}
    for function in functions(module, file):
        where(function)
        found[function.qualname] = function.findings
    return ast.fix_missing_locations(module), found


def mend_module(module: types.ModuleType) -> Mended:
    """A module's names, with its functions mended, and the findings."""
    file = str(module.__file__)
    tree, found = mend_source(inspect.getsource(module), file)
    names: dict[str, Any] = {"__name__": f"mended_{module.__name__}", RUNTIME: runtime}
    mended = types.ModuleType(names["__name__"])
    mended.__dict__.update(names)
    sys.modules[names["__name__"]] = mended
    exec(compile(tree, file, "exec"), mended.__dict__)
    return mended.__dict__, found


def make(target: Any, training: bool = True) -> Any:
    """The function, or a module with the same parameters at every call."""
    if isinstance(target, type) and issubclass(target, nn.Module):
        torch.manual_seed(7)
        return target().train(training)
    return target


def outcome(run: Any, inputs: tuple[Any, ...], gradients: bool) -> dict[str, Any]:
    """Result, gradients, inputs afterwards and state of a call, or the exception it raises."""
    given = copy.deepcopy(inputs)
    leaves = [t for t in tree_flatten(given)[0] if isinstance(t, Tensor)]
    wanted = [t for t in leaves if gradients and t.is_floating_point()]
    for t in wanted:
        t.requires_grad_()
    found: dict[str, Any] = {}
    try:
        result = run(*given)
    except Exception as error:
        found["raised"] = type(error), str(error).split("\n")[0]
        return found
    found["result"] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, result)
    found["inputs"] = [t.detach().clone() for t in leaves]
    if isinstance(run, nn.Module):
        wanted += list(run.parameters())
        state = run.state_dict().items()
        found["state"] = {k.removeprefix("_orig_mod."): v.detach().clone() for k, v in state}
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and t.requires_grad]
    if outputs and gradients:
        total = sum((t * torch.arange(1, t.numel() + 1).reshape(t.shape)).sum() for t in outputs)
        got = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
        pairs = zip(got, wanted, strict=True)
        found["gradients"] = [torch.zeros_like(t) if g is None else g for g, t in pairs]
    elif gradients:
        found["gradients"] = [torch.zeros_like(t) for t in wanted]
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Equal types, dtypes, shapes and values, NaN equal to NaN; values but for rounding."""
    leaves, spec = tree_flatten(found)
    wanted, other = tree_flatten(expected)
    assert spec == other, f"{found} for {expected}"
    for a, b in zip(leaves, wanted, strict=True):
        assert type(a) is type(b), f"{a!r} for {b!r}"
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            assert a == b


def check(case: Case, mended: Mended) -> None:
    """Original, mended, and mended and compiled: all the same, over all draws of the inputs."""
    names, found = mended
    every = [f for n, fs in found.items() if n.split(".")[0] == case.name for f in fs]
    report = [f for f in every if f.kind in BRANCHES]
    inputs = [case.maker(torch.Generator().manual_seed(k)) for k in range(DRAWS)]
    telling = _check_draws(case, inputs)
    if case.declined is not None:
        reasons = [f.reason for f in report if not f.mended]
        assert any(case.declined in r for r in reasons), report
    else:
        assert report and all(f.mended for f in report), "\n".join(map(str, report))
    torch._dynamo.reset()
    whole = case.declined is None
    compiled = torch.compile(make(names[case.name]), backend="eager", fullgraph=whole)
    for k, given in enumerate(inputs):
        torch.manual_seed(0)
        expected = outcome(make(case.target), given, case.gradients)
        torch.manual_seed(0)
        assert_same(outcome(make(names[case.name]), given, case.gradients), expected)
        if whole and k in telling:
            assert_same(outcome(compiled, given, case.gradients), expected)


def _check_draws(case: Case, inputs: list[tuple[Any, ...]]) -> set[int]:
    """The graph must break without mending, and some draw must run each statement.

    Returns the numbers of draws that run statements which those before did not, and some more.
    """
    with torch.no_grad():
        assert breaks(make(case.target), inputs[0]), "nothing to mend"
    code = case.target.forward if isinstance(case.target, type) else case.target
    ran: set[int] = set()
    telling = {1, 2, 3}
    for k, given in enumerate(inputs):
        run = make(case.target)
        new = lines_run(code, lambda m=run, g=given: outcome(m, g, False))  # type: ignore[misc]
        if new - ran:
            telling.add(k)
        ran |= new
    assert not statement_lines(code) - ran, "some draw must run every statement"
    return telling


def breaks(run: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether the graph breaks, from TorchDynamo's refusal to capture it whole."""
    torch._dynamo.reset()
    try:
        torch.compile(run, backend="eager", fullgraph=True)(*copy.deepcopy(inputs))
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError):
        return True
    return False


def lines_run(function: Callable[..., Any], call: Callable[[], Any]) -> set[int]:
    """The lines of a function that a call runs."""
    code, found = function.__code__, set()

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            found.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return found


def statement_lines(function: Callable[..., Any]) -> set[int]:
    """The first lines of a function's statements, but for its docstring."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    quiet = ast.Pass | ast.Global | ast.Nonlocal
    found = set()
    for node in cfg.own_nodes(tree.body[0].body):  # type: ignore[attr-defined]
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not isinstance(node, quiet) and not text:
            found.add(first + node.lineno - 1)
    return found
