"""The torch.compile backend "dlrm": read this first.

    Dynamo's FX graph ─ patterns ─► graph with fused operations ─ AOTAutograd ─► forward and backward
    ATen graphs ─ lower ─► loop IR ─ schedule ─► groups ─ codegen ─► C++ ─ build ─► a function

AOTAutograd (PyTorch's) traces the backward pass and cuts the joint graph in two. Each half goes
through ``compile_graph`` here, the whole path from ATen to native code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compiler import compat
from compiler.codegen.wrapper import Module, generate
from compiler.lower import lower
from compiler.options import Options
from compiler.runtime.build import NoCompiler
from compiler.schedule import schedule


def dlrm(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """The backend's entry point, as ``torch.compile(model, backend="dlrm")`` calls it."""
    options = Options.of(given)
    try:
        return compat.aot_autograd(
            fw_compiler=lambda g, x: compile_graph(g, x, options, "forward"),
            bw_compiler=lambda g, x: compile_graph(g, x, options, "backward"),
            inference_compiler=lambda g, x: compile_graph(g, x, options, "inference"),
            decompositions=compat.decompositions(),
            partition_fn=compat.min_cut_rematerialization_partition,
        )(gm, example_inputs)
    except NoCompiler as error:
        warnings.warn(f"running eagerly: {error}", stacklevel=2)
        return gm.forward


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, half: str
) -> Callable[[list[Any]], Any]:
    """One ATen graph, from lowering to a callable that takes its inputs as a list."""
    graph = lower(gm, options.inlining)
    steps = schedule(graph, options.fusion)
    module = generate(graph, steps, options.reuse)
    options.report(half, gm, graph, steps, module)
    return module.load()


__all__ = ["Module", "compile_graph", "dlrm", "torch"]
