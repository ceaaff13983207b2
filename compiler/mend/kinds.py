"""Which expressions are tensors: a forward dataflow over the control-flow graph.

The lattice of sorts: PYTHON (numbers, texts, shapes, None), ITEM (a Python number read out of a
tensor), OBJECT (other objects; what they hold is unknown), MODULE, TENSOR, and above them UNKNOWN.
Evidence, strongest first: objects that are alive, annotations, what ``__init__`` assigns, what the
functions and methods of PyTorch return, and how a parameter is used.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from compiler.mend import cfg, ops
from compiler.mend.classes import assignments, owners
from compiler.mend.function import RUNTIME, Function

TORCH = "torch"
NAMESPACES = {
    TORCH,
    *(f"torch.{n}" for n in ("nn.functional", "linalg", "special", "fft", "Tensor")),
}
METADATA = set(
    "shape dtype device ndim layout is_cuda requires_grad is_leaf is_sparse itemsize nbytes name"
    " names is_meta is_quantized grad_fn output_nr _version is_mps".split()
)
TENSOR_ATTRIBUTES = set("T mT H mH data grad real imag values indices".split())
TO_NUMBER = set("item tolist is_nonzero equal allclose".split())
TO_PYTHON = set(
    "size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex"
    " element_size data_ptr get_device storage_offset is_signed type numpy tolist".split()
)
PYTHON_FUNCTIONS = set(
    "len isinstance issubclass hasattr callable type id repr str bool int float range round"
    " hash ord chr format".split()
)
TORCH_PYTHON = set(
    "is_tensor numel is_floating_point is_complex is_grad_enabled get_default_dtype device Size"
    " finfo iinfo is_storage is_inference_mode_enabled".split()
)
TORCH_ITEM = {"equal", "allclose", "is_nonzero"}
ONLY_TENSORS = set(  # methods that nothing else is likely to have
    "abs all any argmax argmin amax amin clamp clamp_min clamp_max exp isnan isinf isfinite log"
    " logical_and logical_or logical_not max mean min norm numel pow relu sigmoid softmax sqrt std"
    " sum tanh unsqueeze squeeze var view reshape permute transpose detach item masked_fill"
    " matmul contiguous flatten expand expand_as new_zeros new_ones sin cos dim size".split()
)
ANNOTATIONS = {
    **dict.fromkeys(("Tensor", "torch.Tensor", "FloatTensor", "LongTensor", "Parameter"), "TENSOR"),
    **dict.fromkeys(("float", "int", "bool", "str", "complex", "bytes", "None"), "PYTHON"),
}


class Sort(Enum):
    """What an expression evaluates to."""

    PYTHON = "a Python value"
    ITEM = "a number read out of a tensor"
    OBJECT = "an object"
    MODULE = "a module"
    TENSOR = "a tensor"
    UNKNOWN = "unknown"

    def __or__(self, other: Sort) -> Sort:
        """The sort of a value that is of either sort."""
        if self is other:
            return self
        if {self, other} == {Sort.PYTHON, Sort.ITEM}:
            return Sort.ITEM
        return Sort.UNKNOWN


Env = dict[str, Sort]


def of_object(value: Any) -> Sort:
    """The sort of an object that is alive."""
    if isinstance(value, torch.Tensor):
        return Sort.TENSOR
    if isinstance(value, torch.nn.Module):
        return Sort.MODULE
    if value is None or isinstance(value, int | float | complex | str | torch.Size | torch.dtype):
        return Sort.PYTHON
    return Sort.OBJECT


def of_annotation(annotation: ast.expr | None) -> Sort:
    """The sort that an annotation promises."""
    match annotation:
        case ast.Constant(value=str() as text):
            try:
                return of_annotation(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return Sort.UNKNOWN
        case ast.Constant(value=None):
            return Sort.PYTHON
        case ast.Name() | ast.Attribute():
            text = ast.unparse(annotation)
            known = ANNOTATIONS.get(text) or ANNOTATIONS.get(text.split(".")[-1])
            if known is None:
                return Sort.MODULE if text in ("nn.Module", "torch.nn.Module") else Sort.OBJECT
            return Sort[known]
        case ast.BinOp(op=ast.BitOr()):  # Tensor | None may be a tensor
            sides = of_annotation(annotation.left), of_annotation(annotation.right)
            if Sort.TENSOR in sides:
                return (
                    Sort.TENSOR
                    if Sort.PYTHON in sides and _names_none(annotation)
                    else Sort.UNKNOWN
                )
            return sides[0] | sides[1]
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional")):
            return of_annotation(annotation.slice)
        case ast.Subscript():
            return Sort.OBJECT
    return Sort.UNKNOWN


def _names_none(annotation: ast.BinOp) -> bool:
    return any(isinstance(n, ast.Constant) and n.value is None for n in ast.walk(annotation))


class Scope:
    """What names mean outside of the function, from live objects or from the file's imports."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.imports = dict(_imports(function.module)) if function.module else {}
        for name, full in (("torch", TORCH), ("F", "torch.nn.functional"), ("nn", "torch.nn")):
            self.imports.setdefault(name, full)
        first = [*function.node.args.posonlyargs, *function.node.args.args][:1]
        methods = function.owner is not None or function.instance is not None
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.node.decorator_list
        )
        self.self_name = first[0].arg if first and methods and not static else None
        self.locals = cfg.parameters(function.node) | cfg.assigned(function.node.body)
        self._attributes: dict[str, Sort] | None = None

    def dotted(self, tree: ast.expr) -> str | None:
        """``torch.nn.functional.relu`` for ``F.relu``; None for what is no global name."""
        match tree:
            case ast.Name() if tree.id not in self.locals:
                live = self.live(tree)
                if live is not None and hasattr(live, "__name__"):
                    return _qualified(live)
                return self.imports.get(tree.id, tree.id)
            case ast.Attribute():
                base = self.dotted(tree.value)
                return f"{base}.{tree.attr}" if base else None
        return None

    def live(self, tree: ast.expr) -> Any:
        """The object that a global name or a chain of attributes means, where that is alive."""
        match tree:
            case ast.Name() if tree.id == self.self_name:
                return self.function.instance
            case ast.Name() if tree.id not in self.locals and self.function.names is not None:
                return self.function.names.get(tree.id)
            case ast.Attribute():
                base = self.live(tree.value)
                if base is None or isinstance(getattr(type(base), tree.attr, None), property):
                    return None
                return getattr(base, tree.attr, None)
        return None

    def attribute(self, name: str) -> Sort:
        """The sort of ``self.name``."""
        instance = self.function.instance
        if instance is not None:
            if isinstance(getattr(type(instance), name, None), property):
                return Sort.UNKNOWN
            if hasattr(instance, name):
                return of_object(getattr(instance, name))
        if self._attributes is None:
            self._attributes = {}
            self._from_class(self._attributes)
        return self._attributes.get(name, Sort.PYTHON if name == "training" else Sort.OBJECT)

    def module_kind(self, callee: ast.expr) -> str:
        """The name of the class of a module that is called; empty where that is not known."""
        live = self.live(callee)
        if isinstance(live, torch.nn.Module):
            return type(live).__name__ if type(live).__module__.startswith("torch.nn") else ""
        made = {ast.unparse(c.func).split(".")[-1] for c in self.constructors(callee)}
        return made.pop() if len(made) == 1 else ""

    def constructors(self, callee: ast.expr) -> list[ast.Call]:
        """The calls that the class assigns to an attribute of self."""
        match callee:
            case ast.Attribute(value=ast.Name(id=me), attr=name) if me == self.self_name:
                values = [v for n, v in assignments(self.function) if n == name]
                return [v for v in values if isinstance(v, ast.Call)]
        return []

    def _from_class(self, found: dict[str, Sort]) -> None:
        """The sorts of what the methods of the class assign to attributes of self."""
        env: Env = {}
        for owner in owners(self.function):
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    env.update(parameter_sorts(method, numbers=True))
        for name, value in assignments(self.function):
            sort = Sort.TENSOR if value is None else self._initial(value, env)
            found[name] = found[name] | sort if name in found else sort

    def _initial(self, value: ast.expr, env: Env) -> Sort:
        if isinstance(value, ast.Call):
            full = self.dotted(value.func) or ""
            if full.endswith("Parameter"):
                return Sort.TENSOR
            if full.startswith("torch.nn.") and not full.startswith("torch.nn.functional"):
                return Sort.MODULE
            if self._is_module_class(value.func):
                return Sort.MODULE
        sort = sort_of(value, env, self)
        return Sort.OBJECT if sort is Sort.UNKNOWN else sort

    def _is_module_class(self, callee: ast.expr) -> bool:
        module = self.function.module
        if not isinstance(callee, ast.Name) or module is None:
            return False
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == callee.id:
                return any("Module" in ast.unparse(base) for base in node.bases)
        return False


def _qualified(live: Any) -> str:
    name = getattr(live, "__name__", "")
    if isinstance(live, types.ModuleType):  # torch.warnings is the module warnings, too
        return str(name)
    if name.startswith("torch."):
        return str(name)
    if getattr(torch, name, None) is live:
        return f"torch.{name}"
    if getattr(torch.nn.functional, name, None) is live:
        return f"torch.nn.functional.{name}"
    module = getattr(live, "__module__", None)
    if module == "builtins":
        return str(name)
    return f"{module}.{name}" if module else str(name)


@functools.lru_cache(maxsize=16)
def _imports(module: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for a in node.names:
                found[a.asname or a.name.split(".")[0]] = (
                    a.name if a.asname else a.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for a in node.names:
                found[a.asname or a.name] = f"{node.module}.{a.name}"
    return found


def parameter_sorts(function: ast.FunctionDef, numbers: bool = False) -> Env:
    """Parameters by their annotations, else by their defaults."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    found: Env = {}
    for p, default in (
        *zip(plain, defaults, strict=True),
        *zip(a.kwonlyargs, a.kw_defaults, strict=True),
    ):
        if p.annotation is not None:
            found[p.arg] = of_annotation(p.annotation)
        elif isinstance(default, ast.Constant) and default.value is not None:
            found[p.arg] = Sort.PYTHON
        else:
            found[p.arg] = Sort.OBJECT if numbers else Sort.UNKNOWN
    for rest in (a.vararg, a.kwarg):
        if rest:
            found[rest.arg] = Sort.OBJECT
    return found


# ── expressions ──


def sort_of(tree: ast.expr, env: Mapping[str, Sort], scope: Scope) -> Sort:
    """The sort of an expression, where names have the sorts of ``env``."""
    of = functools.partial(sort_of, env=env, scope=scope)
    match tree:
        case ast.Constant() | ast.JoinedStr():
            return Sort.PYTHON
        case ast.Name():
            return _name(tree, env, scope)
        case ast.Attribute():
            return _attribute(tree, env, scope)
        case ast.BinOp():
            return arithmetic([of(tree.left), of(tree.right)])
        case ast.UnaryOp(op=ast.Not()):  # not of a tensor asks for its truth: a Python value
            inner = of(tree.operand)
            return Sort.ITEM if inner in (Sort.TENSOR, Sort.ITEM) else Sort.PYTHON
        case ast.UnaryOp():
            return arithmetic([of(tree.operand)])
        case ast.Compare():
            if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in tree.ops):
                return Sort.PYTHON
            return arithmetic([of(tree.left), *map(of, tree.comparators)])
        case ast.BoolOp():
            return functools.reduce(Sort.__or__, map(of, tree.values))
        case ast.IfExp():
            return of(tree.body) | of(tree.orelse)
        case ast.NamedExpr():
            return of(tree.value)
        case ast.Call():
            return _call(tree, env, scope)
        case ast.Subscript():
            base = of(tree.value)
            return base if base in (Sort.TENSOR, Sort.PYTHON, Sort.ITEM) else Sort.UNKNOWN
        case ast.Tuple() | ast.List():
            return Sort.PYTHON if all(of(e) is Sort.PYTHON for e in tree.elts) else Sort.OBJECT
        case ast.Starred():
            return of(tree.value)
    return Sort.OBJECT


def _name(tree: ast.Name, env: Mapping[str, Sort], scope: Scope) -> Sort:
    if tree.id in env:
        return env[tree.id]
    live = scope.live(tree)
    if live is not None:
        return of_object(live)
    return Sort.UNKNOWN if tree.id in scope.locals else Sort.OBJECT


def _attribute(tree: ast.Attribute, env: Mapping[str, Sort], scope: Scope) -> Sort:
    if isinstance(tree.value, ast.Name) and tree.value.id == scope.self_name:
        return scope.attribute(tree.attr)
    live = scope.live(tree)
    if live is not None:
        return of_object(live)
    base = sort_of(tree.value, env, scope)
    if base is Sort.TENSOR:
        if tree.attr in TENSOR_ATTRIBUTES:
            return Sort.TENSOR
        return Sort.PYTHON if tree.attr in METADATA else Sort.UNKNOWN
    if base is Sort.UNKNOWN:
        return Sort.PYTHON if tree.attr in METADATA else Sort.UNKNOWN
    if base is Sort.MODULE:
        return Sort.TENSOR if tree.attr in ("weight", "bias") else Sort.OBJECT
    if (scope.dotted(tree) or "").startswith(TORCH):
        return Sort.PYTHON  # torch.float32, torch.pi
    return base


def arithmetic(sorts: list[Sort]) -> Sort:
    for strongest in (Sort.TENSOR, Sort.UNKNOWN, Sort.ITEM):
        if strongest in sorts:
            return strongest
    return Sort.PYTHON if all(s is Sort.PYTHON for s in sorts) else Sort.OBJECT


def _call(tree: ast.Call, env: Mapping[str, Sort], scope: Scope) -> Sort:
    sorts = [sort_of(a, env, scope) for a in (*tree.args, *(k.value for k in tree.keywords))]
    full = scope.dotted(tree.func)
    if full is not None:
        known = _function(full, tree, sorts)
        if known is not None:
            return known
    if isinstance(tree.func, ast.Attribute):
        method = tree.func.attr
        if isinstance(tree.func.value, ast.Name) and tree.func.value.id == RUNTIME:
            return _runtime(method, tree, sorts, env, scope)
        base = sort_of(tree.func.value, env, scope)
        if base is Sort.MODULE and method == "forward":
            return Sort.TENSOR
        if method in TO_NUMBER and base in (Sort.TENSOR, Sort.UNKNOWN):
            return Sort.ITEM
        if base is Sort.TENSOR:
            return Sort.PYTHON if method in TO_PYTHON else Sort.TENSOR
        if base is Sort.UNKNOWN:
            if method in TO_PYTHON:
                return Sort.PYTHON
            return Sort.TENSOR if method in ONLY_TENSORS else Sort.UNKNOWN
        if base is Sort.PYTHON:
            return Sort.PYTHON
    callee = sort_of(tree.func, env, scope)
    if callee is Sort.MODULE:
        return Sort.TENSOR
    annotated = _annotated(tree.func, scope)
    return annotated if annotated is not None else Sort.UNKNOWN


def _function(full: str, tree: ast.Call, sorts: list[Sort]) -> Sort | None:
    """What a function with a full name returns; None: not known."""
    if full in ("bool", "int", "float") and sorts:
        return Sort.ITEM if sorts[0] in (Sort.TENSOR, Sort.ITEM) else Sort.PYTHON
    if full in ("abs", "max", "min", "sum", "pow", "round") and sorts:
        return arithmetic(sorts) if sorts[0] is not Sort.OBJECT else Sort.UNKNOWN
    if full in ("any", "all") and sorts:
        return Sort.PYTHON
    if full in PYTHON_FUNCTIONS or full.startswith("math."):
        return (
            Sort.ITEM
            if {Sort.TENSOR, Sort.ITEM} & set(sorts) and full.startswith("math.")
            else Sort.PYTHON
        )
    if full in ("list", "tuple", "dict", "set", "zip", "enumerate", "reversed", "sorted", "map"):
        return Sort.OBJECT
    if full.startswith(TORCH + "."):
        home, _, stem = full.rpartition(".")
        if stem in TORCH_ITEM:
            return Sort.ITEM
        if stem in TORCH_PYTHON or full.startswith(("torch.cuda", "torch.compiler", "torch.jit")):
            return Sort.PYTHON
        if stem[:1].isupper() or stem == "no_grad":
            return Sort.OBJECT
        known = home in NAMESPACES and ops.facts(ops.named(full)) is not None
        return Sort.TENSOR if known else Sort.UNKNOWN
    return None


def _runtime(
    helper: str, tree: ast.Call, sorts: list[Sort], env: Mapping[str, Sort], scope: Scope
) -> Sort:
    """Calls that mending has made."""
    if helper == "select" and len(sorts) == 3:
        return sorts[1] | sorts[2]
    if helper in ("both", "cond"):
        sides = [a for a in tree.args[1:3] if isinstance(a, ast.Lambda)]
        if len(sides) == 2:
            first, second = (sort_of(s.body, env, scope) for s in sides)
            return first | second
        return Sort.UNKNOWN
    if helper in ("truth", "negate", "every", "some", "item", "as_int", "as_index", "as_float"):
        return Sort.TENSOR if {Sort.TENSOR, Sort.ITEM} & set(sorts) else Sort.UNKNOWN
    return Sort.OBJECT if helper in ("emit", "trap") else Sort.UNKNOWN


def _annotated(callee: ast.expr, scope: Scope) -> Sort | None:
    """What the annotation of a function of the same file, or method of the class, promises."""
    found = definition(callee, scope)
    if found is None or found.returns is None:
        return None
    return of_annotation(found.returns)


def definition(callee: ast.expr, scope: Scope) -> ast.FunctionDef | None:
    """The source of a function of the same file, or of a method of the class, that is called."""
    function = scope.function
    match callee:
        case ast.Name() if callee.id not in scope.locals and function.module is not None:
            body: list[ast.stmt] = function.module.body
            wanted = callee.id
        case ast.Attribute(value=ast.Name(id=me)) if me == scope.self_name and function.owner:
            body, wanted = function.owner.body, callee.attr
        case _:
            return None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return node
    return None
