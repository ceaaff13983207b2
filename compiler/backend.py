"""The torch.compile backend "dlrm": read this first.

    Dynamo's FX graph ─ patterns ─► fused operations in it ─ AOTAutograd ─► two ATen graphs,
    forward and backward ─ lower ─► loop IR ─ schedule ─► groups ─ codegen ─► C++ ─ build ─► a call

AOTAutograd (PyTorch's) traces the backward pass and cuts the joint graph in two. Each half goes
through ``compile_graph`` here, the whole path from ATen to native code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiler import compat, patterns
from compiler.codegen.wrapper import Module, generate
from compiler.graph import Graph
from compiler.ir import Layout
from compiler.lower import lower
from compiler.options import Options
from compiler.order import reorder
from compiler.runtime.build import NoCompiler
from compiler.schedule import Step, schedule


def dlrm(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """The backend's entry point, as ``torch.compile(model, backend="dlrm")`` calls it."""
    options = Options.of(given)
    try:
        if not options.patterns:
            return _traced(gm, example_inputs, options)
        run, checks = _with_patterns(gm, example_inputs, options, constants=True)
        return _Checked(run, checks, gm, options) if checks else run
    except NoCompiler as error:
        warnings.warn(f"running eagerly: {error}", stacklevel=2)
        return gm.forward


def _traced(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """AOTAutograd traces the graph's backward; each half goes to ``compile_graph``."""
    frozen = compat.static_inputs(gm) if options.freeze else ()
    return compat.aot_autograd(
        fw_compiler=lambda g, x: compile_graph(g, x, options, "forward"),
        bw_compiler=lambda g, x: compile_graph(g, x, options, "backward"),
        inference_compiler=lambda g, x: compile_graph(g, x, options, "inference", frozen),
        decompositions=compat.decompositions(),
        partition_fn=compat.min_cut_rematerialization_partition,
    )(gm, example_inputs)


def _with_patterns(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, constants: bool
) -> tuple[Callable[..., Any], list[tuple[int, Tensor]]]:
    rewrite = patterns.apply(
        compat.copy_module(gm), example_inputs, constants, options.autotune,
        longest=0 if options.memory_budget is None else 1,
    )  # fmt: skip
    options.report_patterns(gm, rewrite.found)
    run = _traced(rewrite.gm, rewrite.inputs, options)
    if rewrite.before is None:
        return run, rewrite.checks
    before = rewrite.before

    def with_bags(*inputs: Any) -> Any:
        return run(*inputs, *before(*inputs))

    return with_bags, rewrite.checks


class _Checked:
    """A compiled graph that took some index inputs for constants; if they change, another one."""

    def __init__(
        self, run: Callable[..., Any], checks: list[tuple[int, Tensor]], whole: fx.GraphModule,
        options: Options,
    ) -> None:  # fmt: skip
        self.run, self.checks, self.whole, self.options = run, checks, whole, options
        self.general: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if all(torch.equal(inputs[k], kept) for k, kept in self.checks):
            return self.run(*inputs)
        if self.general is None:
            self.general, _ = _with_patterns(self.whole, inputs, self.options, constants=False)
        return self.general(*inputs)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    half: str,
    frozen: Sequence[int] = (),
) -> Callable[[list[Any]], Any]:
    """One ATen graph, from lowering to a callable that takes its inputs as a list."""

    def branch(part: fx.GraphModule) -> Callable[..., Any]:
        run = compile_graph(part, (), options, f"{half}, {part._get_name()}")
        single = isinstance(part.graph.output_node().args[0], fx.Node)
        return lambda *inputs: run(list(inputs))[0] if single else run(list(inputs))

    graph = lower(gm, options.inlining, frozen, options.autotune, branch)
    graph.frees_inputs = half == "backward"
    if options.memory_budget is not None and half in ("forward", "backward"):
        manage(graph, options.memory_budget, half)
    steps, module = build_module(graph, options)
    module.keep_arena = options.mode == "reduce-overhead"
    options.report(half, gm, graph, steps, module)
    return module.load()


def manage(graph: Graph, manager: Any, half: str) -> None:
    """Let the manager of a memory budget have what goes from forward to backward.

    In forward these are the outputs after the user's own: whole temporaries that no other output
    shows.
    """
    graph.manager = manager
    count = compat.outputs_of_forward() if half == "forward" else None
    if count is None:
        return
    shown = {o.buffer for o in graph.outputs[:count] if isinstance(o, Layout)}
    number = manager.graph()
    for place, one in enumerate(graph.outputs[count:]):
        if not isinstance(one, Layout) or one.buffer in shown or one.buffer.kind != "temporary":
            continue
        views = [o for o in graph.outputs if isinstance(o, Layout) and o.buffer is one.buffer]
        whole = (one.size, one.stride) == (one.buffer.size, one.buffer.stride)
        if whole and len(views) == 1:
            graph.parked[one.buffer] = f"{number}, {place}"


def build_module(graph: Graph, options: Options) -> tuple[list[Step], Module]:
    """From a lowered graph to its generated code: schedule, order, generate."""
    steps = schedule(graph, options.fusion)
    if options.ordering:
        steps = reorder(graph, steps)
    return steps, generate(graph, steps, options.reuse)


__all__ = ["build_module", "compile_graph", "dlrm"]
