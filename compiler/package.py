"""A compiled model in a folder: ``save`` it once, ``load`` it in a new process without compiling.

The folder holds the generated library, the kernels that it calls, the weights, and the Python
function between them, all readable but for the libraries. It is native code for the CPU that saved
it: loading runs it, so load only what you trust.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compiler import compat, patterns
from compiler.backend import build_module
from compiler.codegen.wrapper import Module
from compiler.graph import size
from compiler.kernels import entry
from compiler.lower import lower
from compiler.options import Options
from compiler.runtime import build
from compiler.saved import VERSION, PackageError


def save(
    model: nn.Module, inputs: Sequence[Any], folder: str | Path, *, dynamic_shapes: Any = "auto",
    **options: Any,
) -> Path:  # fmt: skip
    """Compile ``model(*inputs)`` for inference and write it to ``folder``, which must not exist.

    ``dynamic_shapes`` is as in ``torch.export.export``; by default every size that may vary does
    (give a batch of two rows or more). ``options`` are those of ``compiler.compile``. Raises
    FileExistsError, PackageError for control flow on tensors, and what export or the build raise;
    nothing half-written is left.
    """
    place = Path(folder)
    if place.exists():
        raise FileExistsError(f"{place}: there is something already; name a folder that is not")
    chosen = Options.of(options)
    if chosen.checksums:
        raise PackageError("checksums: a saved model cannot verify its weights; leave it out")
    module, names, flat_out = _compiled(model, inputs, dynamic_shapes, chosen)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    try:
        _write(partial, model, module, names, flat_out)
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return place


def _compiled(
    model: nn.Module, inputs: Sequence[Any], dynamic_shapes: Any, options: Options
) -> tuple[Module, list[str], dict[str, Any]]:
    """The module, the names of its weights in order, and what else the manifest needs."""
    flat, spec = pytree.tree_flatten((tuple(inputs), {}))
    if isinstance(dynamic_shapes, str):
        auto = torch.export.Dim.AUTO
        dynamic_shapes = pytree.tree_map(
            lambda x: dict.fromkeys(range(x.dim()), auto) if isinstance(x, Tensor) else None,
            tuple(inputs),
        )
    with torch.no_grad():
        captured = compat.export_to_torch(model, tuple(inputs), dynamic_shapes)
        for node in captured.graph.nodes:
            if compat.is_control_flow(node.target):
                raise PackageError(f"{node.target}: control flow on tensors cannot be saved")
        lifted, names, tensors = _lift(captured)
        users = [n for n in lifted.graph.nodes if n.op == "placeholder"][len(names) :]
        rewrite = (
            patterns.apply(lifted, [*tensors, *flat], True, options.autotune)
            if options.patterns
            else None
        )
        fakes = [n.meta.get("example_value") for n in lifted.graph.nodes if n.op == "placeholder"]
        aten = compat.trace(rewrite.gm if rewrite else lifted, fakes)
    frozen = range(len(names)) if options.freeze else ()
    graph = lower(aten, options.inlining, frozen, options.autotune)
    if graph.target != "cpp":
        raise PackageError("a model on a GPU cannot be saved compiled: save one on the CPU")
    _, module = build_module(graph, options)
    # index tensors that patterns took for constants are the model's own: they are saved with it
    varying = [k for k, _ in (rewrite.checks if rewrite else []) if k >= len(names)]
    if varying:
        raise PackageError(f"inputs {varying} decide the interaction's pairs: make them buffers")
    return module, names, {
        "arguments": pytree.treespec_dumps(spec),
        "results": pytree.treespec_dumps(compat.output_spec(captured)),
        "shapes": [_shape(n.meta.get("example_value")) for n in users],
        "tensors": tensors,
    }  # fmt: skip


def _shape(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    known = [size(n) for n in value.shape]  # a number where tracing found that only one will do
    return str(value.dtype), [int(n) if n.is_number else None for n in known]


def _lift(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[str], list[Tensor]]:
    """The graph with the model's tensors as its first inputs; their names and values."""
    names: list[str] = []
    tensors: list[Tensor] = []
    placed: dict[str, fx.Node] = {}
    first = next(iter(gm.graph.nodes))
    for node in list(gm.graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        if name not in placed:
            with gm.graph.inserting_before(first):
                placed[name] = gm.graph.placeholder(node.name + "_lifted")
            placed[name].meta.update(node.meta)
            names.append(name)
            tensors.append(attrgetter(name)(gm))
        node.replace_all_uses_with(placed[name])
        gm.graph.erase_node(node)
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return gm, names, tensors


def _write(
    place: Path, model: nn.Module, module: Module, names: list[str], more: dict[str, Any]
) -> None:
    tensors = more.pop("tensors")
    kept = {name: t.detach().contiguous().clone() for name, t in zip(names, tensors, strict=True)}
    save_file({**kept, **module.constants}, str(place / "weights.safetensors"))
    (place / "graph.cpp").write_text(module.cpp)
    (place / "call.py").write_text(module.python)
    if module.cpp:
        shutil.copy(build.load(module.cpp)._name, place / "graph.so")
    for library in {entry.library_of(name) for name in module.kernels}:
        shutil.copy(entry.path(library), place / f"{library}.so")
    files = {file.name: build.digest(file) for file in sorted(place.iterdir())}
    manifest = {
        "version": VERSION,
        "torch": torch.__version__,
        "cpu": build.cpu_name(),
        "files": files,
        "weights": names,
        "constants": list(module.constants),
        "problems": module.problems,
        "kernels": module.kernels,
        "targets": {name: str(target) for name, target in module.targets.items()},
        **more,
    }
    (place / "manifest.json").write_text(json.dumps(manifest, indent=1))
