"""All that can be seen of a call: result or exception, effects, gradients, changed inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from compiler.survey.case import call
from compiler.survey.effects import Effect, recording


@dataclass
class Raised:
    """An exception, without its traceback."""

    kind: str
    text: str
    cause: str = ""


@dataclass
class Observed:
    """One call. Tensors are copies."""

    outcome: Any  # the result, or Raised
    effects: list[Effect]
    gradients: dict[str, Tensor | None]
    inputs: Any
    state: dict[str, Tensor]


def observe(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    owner: Callable[..., Any] | None = None,
    backward: bool = True,
    let: tuple[type[BaseException], ...] = (),
) -> list[Observed]:
    """Make the calls in order; what each showed.

    ``owner`` is the module whose parameters and buffers are looked at (default: ``function``,
    where it is one). Exceptions of the types ``let`` are not observed but raised.
    """
    module = owner if owner is not None else function
    return [_one(function, args, module, k, backward, let) for k, args in enumerate(calls)]


def _one(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    module: Callable[..., Any],
    seed: int,
    backward: bool,
    let: tuple[type[BaseException], ...],
) -> Observed:
    named = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    leaves = {f"input {k}": x for k, x in enumerate(tree_leaves(plain(args))) if _is_leaf(x)}
    wanted = {**named, **leaves}
    for tensor in wanted.values():
        tensor.grad = None
    torch.manual_seed(seed)
    outcome: Any
    with recording() as effects:
        try:
            result = call(function, args)
            if backward:
                _backward(result)
            outcome = copied(result)
        except let:
            raise
        except Exception as error:
            outcome = Raised(type(error).__name__, str(error), type(error.__cause__).__name__)
    state = dict(module.named_buffers()) if isinstance(module, nn.Module) else {}
    return Observed(
        outcome,
        effects,
        {k: None if t.grad is None else t.grad.detach().clone() for k, t in wanted.items()},
        copied(args),
        {k: b.detach().clone() for k, b in state.items()},
    )


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_leaf and x.requires_grad


def _backward(result: Any) -> None:
    """Gradients of a weighted sum of all results, so that no symmetry hides an error."""
    outputs = [t for t in tree_leaves(plain(result)) if isinstance(t, Tensor) and t.requires_grad]
    if outputs:
        weights = [
            torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
            for t in outputs
        ]
        torch.autograd.backward(outputs, weights)


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, so that their tensors are found."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def copied(value: Any) -> Any:
    """``plain``, with copies of tensors that the graph does not hold."""
    leaves, spec = tree_flatten(plain(value))
    return torch.utils._pytree.tree_unflatten(
        [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves], spec
    )


def differences(
    observed: Sequence[Observed], expected: Sequence[Observed], rtol: float, atol: float
) -> list[str]:
    """What differs, in words, each with the number of its call; empty if nothing does.

    No gradient counts as a gradient of zeros: what a branch that is not taken reads has no gradient
    in eager mode, and one of zeros where both sides are in the graph.
    """
    said = []
    for k, (ours, theirs) in enumerate(zip(observed, expected, strict=True)):
        for name in ("outcome", "effects", "gradients", "inputs", "state"):
            found, wanted = getattr(ours, name), getattr(theirs, name)
            if name == "gradients":
                found, wanted = _zeros_for_none(found, wanted), _zeros_for_none(wanted, found)
            text = _difference(found, wanted, rtol, atol)
            if text:
                said.append(f"call {k + 1}: {name}: {text}")
    return said


def _zeros_for_none(
    gradients: dict[str, Tensor | None], others: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Zeros where a gradient is missing that the other side has."""
    return {
        name: torch.zeros_like(other) if own is None and other is not None else own
        for (name, own), other in zip(gradients.items(), others.values(), strict=True)
    }


def _difference(ours: Any, theirs: Any, rtol: float, atol: float) -> str:
    mine, own_spec = tree_flatten(ours)
    other, spec = tree_flatten(theirs)
    if own_spec != spec:
        return f"{_short(ours)} for {_short(theirs)}"
    for a, b in zip(mine, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            try:
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                return " ".join(str(error).split())[:200]
        elif not _same(a, b):
            return f"{_short(a)} for {_short(b)}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (a != a and b != b) or abs(a - b) <= 1e-5 * max(abs(a), abs(b))
    if isinstance(a, str | bytes | int | bool | complex | type(None) | Raised):
        return bool(a == b)
    return True  # objects of the user's: their tensors and numbers are what counts


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
