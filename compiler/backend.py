"""The torch.compile backend "dlrm": read this first.

    Dynamo's FX graph ─ patterns ─► fused operations in it ─ AOTAutograd ─► two ATen graphs,
    forward and backward ─ lower ─► loop IR ─ schedule ─► groups ─ codegen ─► C++ ─ build ─► a call
                                                                      └─► Triton, on a GPU ─► a call

AOTAutograd (PyTorch's) traces the backward pass and cuts the joint graph in two. Each half goes
through ``compile_graph`` here, the whole path from ATen to native code.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiler import compat, patterns
from compiler.codegen.wrapper import generate
from compiler.graph import Graph
from compiler.ir import Layout
from compiler.kernels.triton import NoTriton, require
from compiler.lower import lower
from compiler.options import Options
from compiler.order import reorder
from compiler.runtime import trace
from compiler.runtime.build import NoCompiler
from compiler.runtime.cudagraph import Graphed
from compiler.runtime.cudagraph_policy import NO_GPU
from compiler.runtime.facts import facts_of
from compiler.runtime.launch import heard
from compiler.schedule import Step, schedule


def dlrm(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """The backend's entry point, as ``torch.compile(model, backend="dlrm")`` calls it."""
    options = Options.of(given)
    try:
        if not options.patterns:
            return _traced(gm, example_inputs, options)
        run, checks = _with_patterns(gm, example_inputs, options, constants=True)
        return _Checked(run, checks, gm, options) if checks else run
    except (NoCompiler, NoTriton) as error:
        warnings.warn(f"running eagerly: {error}", stacklevel=2)
        return gm.forward


def _traced(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """AOTAutograd traces the graph's backward; each half goes to ``compile_graph``."""
    static = compat.static_inputs(gm)
    frozen = static if options.freeze else ()
    return compat.aot_autograd(
        fw_compiler=lambda g, x: compile_graph(g, x, options, "forward", (), static),
        bw_compiler=lambda g, x: compile_graph(g, x, options, "backward"),
        inference_compiler=lambda g, x: compile_graph(g, x, options, "inference", frozen, static),
        decompositions=compat.decompositions(),
        partition_fn=compat.min_cut_rematerialization_partition,
    )(gm, example_inputs)


def _with_patterns(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, constants: bool
) -> tuple[Callable[..., Any], list[tuple[int, Tensor]]]:
    rewrite = patterns.apply(
        compat.copy_module(gm), example_inputs, constants, options.autotune, target=options.target,
        longest=0 if options.memory_budget is None else 1,
    )  # fmt: skip
    options.report_patterns(gm, rewrite.found)
    run = _traced(rewrite.gm, rewrite.inputs, options)
    if rewrite.before is None:
        return run, rewrite.checks
    before = rewrite.before
    if options.checksums:
        warnings.warn("checksums: embedding bags in training are not verified", stacklevel=2)

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
        self.seen: dict[int, tuple[Any, int]] = {}  # tensors found equal, and their versions then

    def __call__(self, *inputs: Any) -> Any:
        if all(self._holds(k, inputs[k], kept) for k, kept in self.checks):
            return self.run(*inputs)
        if self.general is None:
            self.general, _ = _with_patterns(self.whole, inputs, self.options, constants=False)
        return self.general(*inputs)

    def _holds(self, k: int, given: Tensor, kept: Tensor) -> bool:
        """Whether an input is what it was.

        On a GPU to read it means to wait: one that was equal is not read again until its version
        changes, which a change through ``.data`` does not do. A recording wants the comparison.
        """
        version = given._version if given.is_cuda and not given.is_inference() else -1
        before = self.seen.get(k)
        same = before is not None and before[0]() is given and before[1] == version >= 0
        if same and not heard():
            return True
        if not torch.equal(given, kept):
            return False
        self.seen[k] = weakref.ref(given), version
        return True


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    half: str,
    frozen: Sequence[int] = (),
    static: Sequence[int] = (),
) -> Callable[[list[Any]], Any]:
    """One ATen graph, from lowering to a callable that takes its inputs as a list.

    ``static``: inputs that are parameters and buffers; ``frozen``: those to take as they are now.
    """

    def branch(part: fx.GraphModule) -> Callable[..., Any]:
        run = compile_graph(part, (), options, f"{half}, {part._get_name()}")
        single = isinstance(part.graph.output_node().args[0], fx.Node)
        return lambda *inputs: run(list(inputs))[0] if single else run(list(inputs))

    checksums = options.checksums and half != "backward"
    target = options.target
    graph = lower(gm, options.inlining, frozen, options.autotune, branch, target, checksums)
    if checksums and not graph.checksums:
        warnings.warn("checksums: code for a GPU is not verified", stacklevel=2)
    graph.frees_inputs = half == "backward"
    if options.memory_budget is not None and half in ("forward", "backward"):
        if graph.target == "triton":
            warnings.warn(
                "memory_budget: code for a GPU keeps what backward needs; for eager models there "
                "is compiler.offload.Within", stacklevel=2,
            )  # fmt: skip
        else:
            manage(graph, options.memory_budget, half)
    steps, module = build_module(graph, options)
    module.keep_arena = options.mode == "reduce-overhead"
    options.report(half, gm, graph, steps, module)
    facts = facts_of(half, gm, graph, static)
    run = trace.watched(module.load(), facts)
    graphed = Graphed(run, facts, options.mode == "reduce-overhead")
    options.report_graphed(graphed)
    if any(isinstance(x, Tensor) and x.is_cuda for x in example_inputs):
        return graphed
    graphed.policy.last_reason = NO_GPU
    return run


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


def build_module(graph: Graph, options: Options) -> tuple[list[Step], Any]:
    """From a lowered graph to its generated code: schedule, order, generate."""
    if graph.target == "triton":
        return _triton_module(graph, options)
    steps = schedule(graph, options.fusion)
    if options.ordering:
        steps = reorder(graph, steps)
    return steps, generate(graph, steps, options.reuse)


def _triton_module(graph: Graph, options: Options) -> tuple[list[Step], Any]:
    """The same for a GPU, with its long reductions cut first."""
    require()
    from compiler.codegen import triton_wrapper
    from compiler.split import split_reductions

    split_reductions(graph)
    steps = schedule(graph, options.fusion)
    if options.ordering:
        steps = reorder(graph, steps)
    return steps, triton_wrapper.generate(graph, steps, options.reuse)


__all__ = ["build_module", "compile_graph", "dlrm"]
