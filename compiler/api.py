"""What a user calls: ``compile`` a model or function, and ``explain`` what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from compiler import options as listeners
from compiler.backend import dlrm
from compiler.options import Options

logger = logging.getLogger("compiler")


def compile(  # the verb that users know from torch.compile
    model: Callable[..., Any],
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mend: bool = False,
    capture: str = "dynamo",
    **options: Any,
) -> Any:
    """``torch.compile`` with the backend of this package.

    * ``fullgraph``, ``dynamic``: as in ``torch.compile``.
    * ``mend``: first rewrite what breaks graphs, in the model and in all of your code that it calls
      (see ``compiler.mend``). With ``fullgraph``, a break that is left is an error that names file,
      line and reason (``compiler.mend.report.GraphBreak``).
    * ``capture``: what makes graphs of Python: "dynamo", PyTorch's, or "bytecode", that of this
      package (see ``compiler.capture``).
    * ``options``: see ``compiler.options.Options`` (``mode``, ``fusion``, ``freeze``, ...). With
      ``mode="reduce-overhead"`` calls without gradients are recorded and replayed as one native
      call (see ``compiler.runtime.replayed``); for training steps see ``compiler.step``.

    Raises ValueError for an unknown option, or an unknown capture.

    >>> double = compile(lambda x: 2 * torch.relu(x))
    >>> double(torch.tensor([-1.0, 3.0])).tolist()
    [0.0, 6.0]
    """
    chosen = Options.of(options)  # refuse what is unknown now, not at the first call
    if chosen.memory_budget is not None:  # one for all graphs
        options["memory_budget"] = chosen.memory_budget
    if chosen.freeze:
        logger.warning(
            "freeze=True: weights are taken as the first call finds them; later changes do not show"
        )
    front = partial(
        _front_end(capture), backend=partial(dlrm, **options), fullgraph=fullgraph, dynamic=dynamic
    )
    if mend:
        from compiler.mend.report import compile_mended

        return compile_mended(model, front, fullgraph)
    if chosen.mode == "reduce-overhead" and capture == "dynamo":
        from compiler.runtime.replayed import replayed

        return replayed(model, front)
    return front(model)


def _front_end(capture: str) -> Callable[..., Any]:
    if capture == "dynamo":
        return torch.compile
    if capture != "bytecode":
        raise ValueError(f"capture {capture!r}: want dynamo or bytecode")
    from compiler.capture import capture as of_bytecode

    return of_bytecode


@dataclass
class Explanation:
    """Each stage of a compilation as text, in order; ``str()`` joins them."""

    stages: dict[str, str] = field(default_factory=dict)
    graph_breaks: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)  # operation: why it has no loops
    findings: list[str] = field(default_factory=list)  # of mending
    graphed: list[Any] = field(default_factory=list)  # who decides on CUDA graphs, by graph

    def __str__(self) -> str:
        return "\n\n".join(f"──── {name} ────\n{text}" for name, text in self.stages.items())

    def save(self, folder: str | Path) -> list[Path]:
        """Write each stage to a file of ``folder``, numbered in order; return the files."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = []
        for k, (name, text) in enumerate(self.stages.items()):
            ending = {"C++": "cpp", "Python": "py", "Triton": "py"}.get(name.split()[-1], "txt")
            file = place / f"{k:02d}_{name.replace(' ', '_').replace(':', '')}.{ending}"
            file.write_text(text + "\n")
            files.append(file)
        return files


def explain(
    function: Callable[..., Any], *inputs: Any, folder: str | Path | None = None,
    backward: bool | None = None, mend: bool = False, **options: Any,
) -> Explanation:  # fmt: skip
    """Compile ``function(*inputs)`` and return every stage as text.

    The stages: graph breaks with their reasons, guards, Dynamo's graph, the matched patterns, and
    for each half (forward and backward, or inference) the ATen graph, the loop IR before and after
    fusion, and the generated C++ and Python; last, why each graph was captured as a CUDA graph or
    was not. ``folder`` writes them there too. The backward half is
    compiled where an output asks for a gradient, unless ``backward`` is False. With ``mend``, the
    source before and after mending come first, and ``findings`` say what was mended, and why the
    rest was not.

    >>> found = explain(lambda x: torch.softmax(x, 1), torch.zeros(2, 3))
    >>> [name for name in found.stages if "after fusion" in name]
    ['inference: loops after fusion']
    """
    result = Explanation()
    if mend:
        from compiler.mend.live import mend_callable

        mended = mend_callable(function)
        result.findings = [str(f) for f in mended.findings]
        result.stages["findings"] = "\n".join(result.findings) or "nothing breaks"
        result.stages["source before mending"] = mended.before
        result.stages["source after mending"] = mended.after
        with mended.swapped():
            broken = torch._dynamo.explain(mended.call)(*inputs)
    else:
        broken = torch._dynamo.explain(function)(*inputs)
    result.graph_breaks = [str(b.reason) for b in broken.break_reasons]
    result.stages["graph breaks"] = "\n".join(
        [f"{broken.graph_count} graphs, {broken.graph_break_count} breaks"] + [
            f"{b.reason}\n{''.join(str(frame) for frame in b.user_stack)}"
            for b in broken.break_reasons
        ]
    )  # fmt: skip
    guards = broken.out_guards or []
    result.stages["guards"] = "\n".join(
        f"{g.guard_types[0]}: {g.name}" for g in guards if g.guard_types and g.name
    )
    with _listening(result):
        outputs = compile(function, mend=mend, **options)(*inputs)
        if backward is not False:
            _backward(outputs)
    result.stages["CUDA graphs"] = "\n".join(map(str, result.graphed))
    if folder is not None:
        result.save(folder)
    return result


def _backward(outputs: Any) -> None:
    """Make PyTorch ask for the backward half, without changing any ``.grad``."""
    wanted = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = {t for output in wanted for t in _leaves(output)}
    if leaves:
        total = sum(output.sum() for output in wanted)
        torch.autograd.grad(total, list(leaves), allow_unused=True)  # type: ignore[arg-type]


def _leaves(output: torch.Tensor) -> set[torch.Tensor]:
    """The tensors that a backward pass from ``output`` ends in."""
    found, seen, stack = set(), set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


@contextmanager
def _listening(result: Explanation) -> Iterator[None]:
    count: dict[str, int] = {}

    def listener(half: str, *stage: Any) -> None:
        if half == "graphed":
            result.graphed += stage
            return
        count[half] = count.get(half, 0) + 1
        name = half if count[half] == 1 else f"{half} {count[half]}"
        if half == "patterns":
            graph, found = stage
            result.patterns += found
            result.stages[f"Dynamo graph {count[half]}"] = graph
            result.stages[name] = "\n".join(found) or "nothing found"
            return
        gm, graph, steps, module = stage
        result.fallbacks.update(graph.fallbacks)
        result.stages[f"{name}: ATen graph"] = gm.print_readable(print_output=False)
        result.stages[f"{name}: loops before fusion"] = "\n".join(map(str, graph.ops))
        result.stages[f"{name}: loops after fusion"] = "\n".join(map(str, steps))
        if graph.fallbacks:
            result.stages[f"{name}: computed by ATen"] = "\n".join(
                f"{op}: {why}" for op, why in graph.fallbacks.items()
            )
        result.stages.update({f"{name}: {made}": text for made, text in module.stages().items()})

    with listeners.listening(listener):
        yield


__all__ = ["Explanation", "compile", "explain"]
