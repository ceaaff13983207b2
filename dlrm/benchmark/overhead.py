"""Small batches, where calling costs more than computing: calls per second, peers side by side.

Inference and whole training steps (forward, backward, update; plain SGD for tables and layers,
which all peers have). Ours is shown compiled, and replayed as one native call (mode
reduce-overhead).
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compiler
from compiler.optim import SparseRows as NativeRows
from dlrm.batch import Batch
from dlrm.benchmark import peers
from dlrm.benchmark.peers import DENSE_LR, EAGER, INDUCTOR, SAVED, Saved, agreeing, inductor
from dlrm.benchmark.shapes import Draws, Shape
from dlrm.benchmark.suite import TOLERANCE, losses
from dlrm.benchmark.tables import DensePart, Tables, build
from dlrm.benchmark.turns import Contestant, Row, race

TASKS = ("inference", "train")
BATCHES = (1, 4, 16, 64)
COMPILED, REPLAYED = "ours compiled", "ours replayed"
GROUPS = (EAGER, INDUCTOR, COMPILED, SAVED, REPLAYED)
INFERENCE = ("default", "reduce-overhead", "C++ wrapper", "C++ wrapper, freezing")
TRAINING = ("default", "reduce-overhead", "C++ wrapper")
DENSE_BYTES = 1 << 22  # of tables up to which TorchInductor also gets dense gradients


@dataclass
class Overhead:
    """A run; ``rows`` are in milliseconds per call."""

    shapes: Sequence[Shape]
    tasks: Sequence[str]
    rounds: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: bool = False

    def run(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Race all; ``after_each`` is called when there is a new row."""
        for shape, task in itertools.product(self.shapes, self.tasks):
            for batch in shape.batches:
                self.rows.append(self._row(task, shape, batch))
                after_each()

    def _row(self, task: str, shape: Shape, batch: int) -> Row:
        peers.reset()
        gc.collect()
        where = f"{task}, {shape.name}, batch {batch}"
        tables, draw = Tables(shape, fbgemm=False), Draws(shape, batch)
        one = draw()
        found = inference(shape, tables) if task == "inference" else training(shape, tables)

        def result(c: Contestant) -> Tensor:
            if task == "inference":  # the third call is a replay
                return [c.call(one).float() for _ in range(3)][-1].clone()
            return losses(c, tables, one)

        kept, lines, wrong = agreeing(found, result, TOLERANCE["train"])
        self.notes += [f"{where}: {line}" for line in lines]
        self.wrong |= wrong
        before = peers.graphs()
        race(kept, draw, self.rounds)
        if peers.graphs() != before:
            self.notes.append(f"{where}: something was compiled again while it was timed")
        return Row(task, shape.name, batch).add(kept)


def inference(shape: Shape, tables: Tables) -> list[Contestant]:
    """Contestants that give logits (B,)."""
    model = build(shape, tables).eval()

    def contestant(
        group: str, variant: str, forward: Callable[..., Any], **more: Any
    ) -> Contestant:
        def run(inputs: Any) -> Any:
            with torch.inference_mode():
                return forward(*inputs)

        return Contestant(group, variant, Batch.inputs, run, **more)

    return [
        contestant(EAGER, "", model),
        contestant(SAVED, "", Saved(model)),  # before those that Dynamo compiles, as in peers
        *(
            contestant(INDUCTOR, v, inductor(model, v), first=functools.partial(peers.settings, v))
            for v in INFERENCE
        ),
        contestant(COMPILED, "", compiler.compile(model, dynamic=False)),
        contestant(REPLAYED, "", compiler.compile(model, dynamic=False, mode="reduce-overhead")),
    ]


def training(shape: Shape, tables: Tables) -> list[Contestant]:
    """Contestants that do a training step and return its loss before the update.

    TorchInductor gets everything but the tables, which stay ``nn.EmbeddingBag`` with PyTorch's own
    SGD on sparse gradients; and for small tables the whole model with dense ones, too.
    """
    model = build(shape, tables)
    found = [_peer(EAGER, "", model, model, {})]
    for variant in TRAINING:
        first = {"first": functools.partial(peers.settings, variant)}
        model = build(shape, tables)
        part = inductor(DensePart(model), variant)
        found.append(_peer(INDUCTOR, variant, _outside(model, part), model, first))
        if shape.table_bytes() <= DENSE_BYTES:
            model = build(shape, tables, sparse=False)
            name = f"{variant}, dense gradients"
            found.append(_peer(INDUCTOR, name, inductor(model, variant), model, first))
    found += [_ours(COMPILED, "default", shape, tables)]
    found += [_ours(REPLAYED, "reduce-overhead", shape, tables)]
    return found


def _outside(model: Any, part: Callable[..., Any]) -> Callable[..., Any]:
    return lambda dense, ids, offsets, _: part(dense, model.tables(ids, offsets))


def _peer(
    group: str, variant: str, forward: Callable[..., Any], model: Any, more: dict[str, Any]
) -> Contestant:
    tables = model.sparse_parameters()
    dense = torch.optim.SGD(model.dense_parameters(), lr=DENSE_LR, fused=True)
    optimizers = [dense, *([torch.optim.SGD(tables, lr=DENSE_LR)] if tables else [])]

    def run(given: tuple[Any, Tensor]) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(forward(*given[0]), given[1])
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        return loss.detach()

    return Contestant(group, variant, lambda b: (b.inputs(), b.label), run, **more)


def _ours(group: str, mode: str, shape: Shape, tables: Tables) -> Contestant:
    model: Any = build(shape, tables)
    optimizers = [
        torch.optim.SGD(model.dense_parameters(), lr=DENSE_LR, fused=True),
        NativeRows(model.sparse_parameters(), "sgd", lr=DENSE_LR),
    ]
    step = compiler.step(
        model, F.binary_cross_entropy_with_logits, optimizers, mode=mode, dynamic=False
    )
    return Contestant(
        group, "", lambda b: (b.inputs(), b.label), lambda given: step(given[0], given[1])
    )


def ratio(row: Row, over: str) -> float | None:
    """How many times the calls per second of ``over``'s best way the replays reach."""
    ours, theirs = row.best(REPLAYED), row.best(over)
    return None if ours is None or theirs is None else theirs.median / ours.median


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table: calls per second by medians, best way of each, and ratios."""
    yield (
        f"{'task':<10}{'shape':<11}{'batch':>6}"
        + "".join(f"{group:>15}" for group in GROUPS)
        + f"{'over Inductor':>15}{'over compiled':>15}  Inductor's best"
    )
    for row in rows:
        cells = [row.best(group) for group in GROUPS]
        shown = "".join(f"{'' if c is None else f'{1e3 / c.median:,.0f}/s':>15}" for c in cells)
        ratios = [ratio(row, INDUCTOR), ratio(row, COMPILED)]
        best = row.best(INDUCTOR)
        yield (
            f"{row.task:<10}{row.shape:<11}{row.batch:>6}{shown}"
            + "".join(f"{'' if r is None else f'{r:.2f}x':>15}" for r in ratios)
            + f"  {'' if best is None else best.variant}"
        )


def document(run: Overhead, command: str, machine: dict[str, Any]) -> dict[str, Any]:
    """What goes into the JSON file."""
    return {
        "command": command,
        "machine": machine,
        "rounds": run.rounds,
        "rows": [
            {
                "task": row.task, "shape": row.shape, "batch": row.batch,
                "calls_per_second": {
                    group: {c.variant or group: 1e3 / c.median for c in cells}
                    for group, cells in row.cells.items()
                },
                "over_inductor": ratio(row, INDUCTOR), "over_compiled": ratio(row, COMPILED),
            }
            for row in run.rows
        ],
        "notes": run.notes,
    }  # fmt: skip
