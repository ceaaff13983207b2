"""Which calls only compute: they may run later, or not at all, and nobody can tell.

What is asked of a value under a name of this table is taken for what PyTorch, strings and numbers
mean by it.
"""

from __future__ import annotations

import ast

from compiler.mend.kinds import ONLY_TENSORS, TO_NUMBER, Scope

BUILTINS = set(
    "abs all any ascii bool complex dict enumerate float format hex int isinstance len list max min"
    " range repr reversed round set sorted str sum tuple type zip".split()
)
METHODS = ONLY_TENSORS | TO_NUMBER | set(
    # tensors
    "amax amin argsort bool ceil clone conj count_nonzero cpu cumsum diff double element_size eq"
    " exp2 float floor frac ge gt half histc int isclose isfinite isreal le log10 log1p log2 long"
    " lt median mode movedim nan_to_num nansum ndimension ne neg nelement nonzero numpy prod"
    " quantile ravel reciprocal round rsqrt select sign sort split square stride sum t tan to topk"
    " trace transpose tril triu trunc type unbind unique values"
    # texts, lists and dicts
    " capitalize center count endswith find format get index items join keys ljust lower lstrip"
    " replace rjust rstrip splitlines startswith strip title upper zfill".split()
)  # fmt: skip
STATEFUL = set(  # functions of torch: random numbers, settings, files
    "bernoulli compile dropout load manual_seed multinomial normal poisson rand rand_like randint"
    " randint_like randn randn_like randperm save seed".split()
)
FORMATTING = {"str", "repr", "ascii", "format", "float", "int", "bool", "round", "complex"}


def pure(call: ast.Call, scope: Scope) -> bool:
    """Whether a call, its arguments aside, only computes."""
    if any(k.arg in (None, "out") for k in call.keywords):
        return False
    full = scope.dotted(call.func)
    if full in BUILTINS and isinstance(call.func, ast.Name):
        return True
    if full is not None and full.startswith("math."):
        return True
    if full is not None and full.startswith("torch."):
        stem = full.split(".")[-1]
        outside = full.startswith(("torch.cuda.", "torch.distributed.", "torch.utils."))
        plain = stem.islower() and not stem.endswith("_") and not stem.startswith("set_")
        return plain and not outside and stem not in STATEFUL
    return isinstance(call.func, ast.Attribute) and call.func.attr in METHODS


def formats(tree: ast.expr, scope: Scope) -> bool:
    """Whether a node turns tensors to texts or Python numbers, or asks for their truth."""
    match tree:
        case ast.JoinedStr():
            return any(isinstance(part, ast.FormattedValue) for part in tree.values)
        case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str()) | ast.JoinedStr()):
            return True
        case ast.IfExp() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in FORMATTING and scope.dotted(tree.func) == name
        case ast.Call(func=ast.Attribute(attr="item" | "tolist" | "numpy" | "is_nonzero")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Constant() | ast.JoinedStr())):
            return True
        case ast.Call():
            return scope.dotted(tree.func) in ("torch.equal", "torch.allclose", "torch.is_nonzero")
    return False
