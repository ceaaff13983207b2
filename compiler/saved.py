"""Loading a saved model: see ``compiler.package``. Imports no compiler, so it is quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils import _pytree as pytree

from compiler.codegen.wrapper import Module
from compiler.runtime import build

VERSION = 1


class PackageError(ValueError):
    """A folder that is no saved model, or one for another machine."""


def load(folder: str | Path) -> Callable[..., Any]:
    """The saved model as a function of its inputs. Nothing is compiled.

    Raises PackageError for a folder that is not a saved model, is damaged, or is for another CPU.
    """
    place = Path(folder)
    try:
        manifest = json.loads((place / "manifest.json").read_text())
    except FileNotFoundError:
        raise PackageError(f"{place}: no saved model (there is no manifest.json)") from None
    except (OSError, ValueError) as error:
        raise PackageError(f"{place}/manifest.json cannot be read: {error}") from None
    if manifest.get("version") != VERSION:
        raise PackageError(
            f"{place}: version {manifest.get('version')}, want {VERSION}: save again"
        )
    if manifest["cpu"] != build.cpu_name():
        raise PackageError(
            f"{place}: compiled for another CPU ({manifest['cpu'][:40]}…): save again"
        )
    for name, digest in manifest["files"].items():
        if not (place / name).is_file() or build.digest(place / name) != digest:
            raise PackageError(f"{place / name}: missing or damaged: save again")
    weights = load_file(place / "weights.safetensors")
    constants = {name: weights.pop(name) for name in manifest["constants"]}
    targets = {name: _operator(place, target) for name, target in manifest["targets"].items()}
    module = Module(
        (place / "graph.cpp").read_text(), (place / "call.py").read_text(), manifest["problems"],
        manifest["kernels"], constants, targets,
    )  # fmt: skip
    call = module.load(place)
    return _Loaded(call, [weights[name] for name in manifest["weights"]], manifest)


def _operator(place: Path, name: str) -> Any:
    """An operation that PyTorch or a library computes, by its name."""
    if name.startswith("dlrm."):
        import compiler.ops  # noqa: F401  # registers them
    try:
        return attrgetter(name)(torch.ops)
    except AttributeError:
        raise PackageError(f"{place}: {name} is unknown: import the library that has it") from None


class _Loaded:
    """A loaded model: call it as the saved one was called."""

    def __init__(
        self, call: Callable[..., Any], weights: list[Tensor], manifest: dict[str, Any]
    ) -> None:
        self.call, self.weights = call, weights
        self.arguments = pytree.treespec_loads(manifest["arguments"])
        self.results = pytree.treespec_loads(manifest["results"])
        self.shapes = manifest["shapes"]
        self.taken_apart = taken_apart(self.arguments.child(0), self.shapes)

    def __call__(self, *inputs: Any) -> Any:
        flat = self.taken_apart(inputs) or self._flat(inputs)
        results = self.call([*self.weights, *flat])
        if self.results.is_leaf():
            return results[0]
        return pytree.tree_unflatten(results, self.results)

    def _flat(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The same for any arrangement, slower; raises for what does not fit."""
        flat, spec = pytree.tree_flatten((inputs, {}))
        if spec != self.arguments:
            raise ValueError(f"inputs are arranged as {spec}, but were saved as {self.arguments}")
        for k, (value, shape) in enumerate(zip(flat, self.shapes, strict=True)):
            _check(value, shape, k)
        return flat


def taken_apart(
    arguments: pytree.TreeSpec, shapes: list[Any]
) -> Callable[[tuple[Any, ...]], list[Any] | None]:
    """A function that gives the leaves of inputs arranged like ``arguments``, with these types and
    sizes, or None for others. It is generated, one line for each tensor: a small batch is worth it.
    """
    lines = ["def take(inputs):", "    try:"]
    leaves: list[str] = []

    def take(spec: pytree.TreeSpec, name: str) -> None:
        if spec.is_leaf():
            if shapes[len(leaves)] is not None:
                dtype, sizes = shapes[len(leaves)]
                whole = all(n is not None for n in sizes)
                tests = [f"{name}.dtype is not {dtype}"]
                tests += [f"{name}.shape != {tuple(sizes)}"] if whole else [
                    f"{name}.dim() != {len(sizes)}",
                    *(f"{name}.shape[{d}] != {n}" for d, n in enumerate(sizes) if n is not None),
                ]  # fmt: skip
                lines.append(f"        if {' or '.join(tests)}: return None")
            leaves.append(name)
            return
        if spec.type not in (tuple, list):
            lines.append("        return None")
            return
        parts = [f"{name}_{k}" for k in range(spec.num_children)]
        lines.append(f"        if type({name}) is not {spec.type.__name__}: return None")
        lines.append(f"        [{', '.join(parts)}] = {name}")
        for part, child in zip(parts, spec.children(), strict=True):
            take(child, part)

    take(arguments, "inputs")
    lines.append("    except (AttributeError, TypeError, ValueError): return None")
    lines.append(f"    return [{', '.join(leaves)}]")
    scope: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), scope)
    found: Callable[[tuple[Any, ...]], list[Any] | None] = scope["take"]
    return found


def _check(value: Any, shape: Any, k: int) -> None:
    """Whether an input is what the code was generated for."""
    if shape is None:
        return
    dtype, sizes = shape
    good = isinstance(value, Tensor) and str(value.dtype) == dtype and value.dim() == len(sizes)
    if good:
        good = all(n is None or n == m for n, m in zip(sizes, value.shape, strict=True))
    if not good:
        raise ValueError(
            f"input {k} is {_seen(value)}, but the model was saved for {dtype} {sizes}"
        )


def _seen(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
