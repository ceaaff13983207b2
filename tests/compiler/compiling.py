"""Shared by the compiler's tests: functions through AOTAutograd and our stages, without Dynamo."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from compiler import compat
from compiler.codegen.wrapper import generate
from compiler.graph import Graph
from compiler.lower import lower
from compiler.schedule import Step, schedule

# "triton" runs the tests of loops in Triton's interpreter: see triton/test_interpreted.py
TARGET = os.environ.get("DLRM_TEST_TARGET", "")


class Stages:
    """Compiles functions and keeps what each stage made of each graph, forward then backward."""

    def __init__(self, inlining: bool = True, fusion: bool = True, reuse: bool = True) -> None:
        self.inlining, self.fusion, self.reuse = inlining, fusion, reuse
        self.fx: list[fx.GraphModule] = []
        self.graphs: list[Graph] = []
        self.steps: list[list[Step]] = []
        self.modules: list[Any] = []

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled at its first call for the shapes of that call."""
        return aot_function(
            function,
            fw_compiler=self._graph,
            bw_compiler=self._graph,
            decompositions=compat.decompositions(),
            partition_fn=compat.min_cut_rematerialization_partition,
        )

    def _graph(self, gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph = lower(gm, self.inlining, target=TARGET)
        if graph.target == "triton":
            from compiler.codegen import triton_wrapper
            from compiler.split import split_reductions

            split_reductions(graph)
            steps = schedule(graph, self.fusion)
            module: Any = triton_wrapper.generate(graph, steps, self.reuse)
        else:
            steps = schedule(graph, self.fusion)
            module = generate(graph, steps, self.reuse)
        self.fx.append(gm)
        self.graphs.append(graph)
        self.steps.append(steps)
        self.modules.append(module)
        return module.load()

    def targets(self) -> set[Any]:
        """The ATen operations of all graphs."""
        return {node.target for gm in self.fx for node in gm.graph.nodes}

    def scheduled(self) -> str:
        """All scheduled steps, as text."""
        return "\n".join(str(step) for steps in self.steps for step in steps)


def checked(function: Callable[..., Any], *inputs: Tensor) -> Stages:
    """The stages of a function without gradients, after comparing its result with eager's."""
    stages = Stages()
    with torch.no_grad():
        torch.testing.assert_close(stages.compile(function)(*inputs), function(*inputs))
    return stages


def calls(function: Callable[..., Any], samples: Sequence[Any]) -> tuple[Any, list[Tensor]]:
    """One function that makes all the calls of ``samples``, (args, kwargs) each, and its tensors.

    It returns the tensors among the results, a list for each sample.
    """
    flat = [tree_flatten(sample) for sample in samples]
    tensors = [leaf for leaves, _ in flat for leaf in leaves if isinstance(leaf, Tensor)]

    def all_calls(*given: Tensor) -> list[list[Tensor]]:
        remaining = iter(given)
        results = []
        for leaves, spec in flat:
            own = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(own, spec)
            found = tree_leaves(function(*args, **kwargs))
            results.append([x for x in found if isinstance(x, Tensor)])
        return results

    return all_calls, tensors


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; dimensions of size 1 do not count."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(n == 1 or p == q for n, p, q in strides)


def assert_as_good(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """bf16: no further from the f32 result than eager is, give or take the roundings of one op.

    Fused code keeps f32 between the operations that it fuses, where eager rounds to bf16.
    """
    assert found.shape == eager.shape and found.dtype == eager.dtype
    exact, ours, theirs = exact.float(), found.float(), eager.float()
    allowed = 2 * (theirs - exact).abs() + 0.02 * (1 + exact.abs())
    good = ((ours - exact).abs() <= allowed) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert bool(good.all()), f"{ours[~good][:5]} for {theirs[~good][:5]}, exact {exact[~good][:5]}"


def upcast(tree: Any) -> Any:
    """bf16 tensors and types as f32."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16:
            return leaf.float()
        return torch.float32 if leaf is torch.bfloat16 else leaf

    leaves, spec = tree_flatten(tree)
    return tree_unflatten([one(leaf) for leaf in leaves], spec)
