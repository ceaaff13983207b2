"""Values computed before a branch whose gradient may be infinite: computed again in its sides.

    s = torch.sqrt(t)          s = torch.sqrt(t)
    if s > 0:            →     y = _mend.both(s > 0, lambda x, t: x / torch.sqrt(t), ...)
        y = x / s

Where ``y = x / s`` is not taken, the source never asks for the gradient of ``s``. A zero gradient
through the square root of zero would be NaN; masked at ``t``, before the root, it is zero. A
compiler computes the root once all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compiler.mend import cfg
from compiler.mend.flow import Flow
from compiler.mend.kinds import Sort, sort_of
from compiler.mend.purity import Level, Purity
from compiler.mend.sides import changed

SINGULAR = set(  # infinite slopes, or none, at some finite arguments
    "sqrt rsqrt log log2 log10 log1p logit pow float_power reciprocal div divide true_divide acos"
    " arccos asin arcsin acosh atanh std std_mean norm vector_norm cdist xlogy cosine_similarity"
    " normalize".split()
)


def singular(tree: ast.expr, flow: Flow, s: ast.stmt) -> bool:
    """Whether an expression holds an operation whose gradient is not finite everywhere."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Div() | ast.Pow()):
                if sort_of(node.right, flow.sorts(s), flow.scope) is not Sort.PYTHON:
                    return True
                if isinstance(node.op, ast.Pow):
                    return True
            case ast.Call(func=ast.Attribute(attr=name)) if name in SINGULAR:
                return True
    return False


def to_repeat(
    flow: Flow, body: Sequence[ast.stmt], i: int, read: set[str], fresh: set[str]
) -> list[ast.stmt]:
    """Of the statements before ``body[i]``, those that give ``read`` names such values."""
    found: list[ast.stmt] = []
    wanted = set(read)
    after: set[str] = set()  # names bound between the statement and the branch
    for j in reversed(range(i)):
        s = body[j]
        if changed(flow, [s]):
            break
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in wanted:
                reads = cfg.names(value)[0]
                pure = Purity(flow, fresh).expression(value, flow.sorts(s)).level <= Level.GATED
                if (
                    pure
                    and name not in after | reads
                    and not reads & after
                    and singular(value, flow, s)
                ):
                    found.insert(0, s)
                    wanted |= reads
        after |= cfg.assigned([s])
    return found
