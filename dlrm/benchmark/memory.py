"""Training within a memory budget beside eager PyTorch and its checkpointing: memory and time.

The model is a deep DLRM: a top MLP of many wide layers, whose activations are what a step keeps.
Memory is measured in a process of its own for each way (see ``probe``): ``saved`` is the most bytes
that backward had waiting in memory at once, ``step`` what the whole step adds to the process, with
all its temporaries. Time is measured in turns, in one process. ``python -m dlrm.benchmark.memory
SPEC`` is the child.

Published: vDNN (Rhu et al. 2016) lowers average GPU memory by 89% on AlexNet, and trains VGG-16
(batch 256) with 18% less speed than a GPU with memory enough.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import compiler
from compiler.offload import Within, parse_bytes
from compiler.offload.compiled import Manager
from compiler.offload.sizes import show_bytes
from compiler.optim import SparseRows
from dlrm.batch import Batch
from dlrm.benchmark.probe import MALLOC, ProbeFailed, answer, bytes_added, can_measure_memory
from dlrm.benchmark.shapes import Draws, Shape
from dlrm.benchmark.turns import Contestant, race
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.model import DLRM

POLICIES = ("all", "large", "dynamic")
SHARE = 0.12  # of what eager saves: the budget, unless one is given


@dataclasses.dataclass(frozen=True)
class Settings:
    """The model, and how often it is measured."""

    layers: int = 24
    width: int = 1024
    batch: int = 2048
    rounds: int = 5
    budget: int = 0  # bytes; 0: ``SHARE`` of what eager saves
    threads: int = 0
    ways: tuple[str, ...] = ()  # some of them; eager is always one

    def shape(self) -> Shape:
        """The deep DLRM as a shape to draw batches for."""
        model = DLRMConfig(
            rows=(10_000,) * 8, dim=16, bottom=(64,), top=(self.width,) * self.layers
        )
        return Shape("deep", model, (1,) * 8, (self.batch,))


def ways(settings: Settings) -> list[str]:
    """Who is measured; checkpointing in several numbers of segments, the best of which counts."""
    root = max(2, round(settings.layers**0.5))
    every = [
        "eager", *(f"checkpoint {n}" for n in dict.fromkeys((2, root, 2 * root))),
        *(f"offload {p}" for p in POLICIES), "compiled", *(f"compiled {p}" for p in POLICIES),
    ]  # fmt: skip
    for name in settings.ways:
        if name not in every:
            raise InputError(f"--ways: {name!r} is none of {', '.join(every)}")
    return [w for w in every if not settings.ways or w in ("eager", *settings.ways)]


class Way:
    """One way to train the model; ``saved()`` is the most bytes that waited for backward."""

    def __init__(self, name: str, settings: Settings, budget: int) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = DLRM(settings.shape().model)
        self.forward: Callable[..., Any] = self.model
        self.control: Within | Manager | None = None
        kind, _, rest = name.partition(" ")
        if kind == "checkpoint":
            top, count = self.model.top, int(rest)
            top.forward = lambda x: checkpoint_sequential(  # type: ignore[method-assign]
                nn.Sequential(*top), count, x, use_reentrant=False
            )
        elif kind == "offload":
            self.control = self.forward = Within(self.model, budget, rest)
        elif kind == "compiled":
            if rest:
                self.control = Manager(budget, rest)
            self.forward = compiler.compile(self.model, dynamic=False, memory_budget=self.control)
        self.optimizers = [
            torch.optim.SGD(self.model.dense_parameters(), lr=1e-3, fused=True),
            SparseRows(self.model.sparse_parameters(), "rowwise_adagrad", lr=0.01),
        ]

    def step(self, batch: Batch) -> Tensor:
        """A training step; the loss before it."""
        loss = F.binary_cross_entropy_with_logits(self.forward(*batch.inputs()), batch.label)
        loss.backward()
        for one in self.optimizers:
            one.step()
            one.zero_grad(set_to_none=False)
        return loss.detach()

    def plan(self) -> str:
        """What a policy came to."""
        learner = None if self.control is None else self.control.learner
        return "" if learner is None or learner.plan is None else learner.plan.name


class Counter:
    """Bytes that autograd has waiting, by hooks that change nothing: each storage once."""

    def __init__(self, known: set[int]) -> None:
        self.known = known
        self.alive: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self.known:
            self.alive[address] = tensor.untyped_storage().nbytes()
        return tensor

    def total(self) -> int:
        """Bytes of all that was saved."""
        return sum(self.alive.values())


def saved_by_eager(settings: Settings) -> int:
    """Bytes that an eager step keeps for backward, parameters and inputs left out."""
    way = Way("eager", settings, 1)
    batch = Draws(settings.shape(), settings.batch)()
    known = {
        p.untyped_storage().data_ptr() for p in (*way.model.parameters(), *way.model.buffers())
    }
    known |= {t.untyped_storage().data_ptr() for t in (batch.dense, batch.ids, batch.label)}
    counter = Counter(known)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda t: t):
        way.forward(*batch.inputs())
    return counter.total()


# ---- memory: a process for each way -------------------------------------------------------------


def measure(name: str, settings: Settings, budget: int) -> dict[str, Any]:
    """In the child: ``step``, what a step adds at its peak, and ``saved`` where a ledger knows."""
    way, draw = Way(name, settings, budget), Draws(settings.shape(), settings.batch)
    found, saved = [], 0
    for k in range(6):
        batch = draw()
        added = bytes_added(functools.partial(way.step, batch))
        if k >= 4:
            found.append(added)
            if way.control is not None and way.control.ledger is not None:
                saved = max(saved, way.control.ledger.peak)
    return {"step": statistics.median(found), "saved": saved, "plan": way.plan()}


def ask(name: str, settings: Settings, budget: int) -> dict[str, Any]:
    """The child's figures. Raises ProbeFailed with its last words."""
    spec = {"name": name, **dataclasses.asdict(settings), "budget": budget}
    result: dict[str, Any] = answer("dlrm.benchmark.memory", spec, MALLOC)
    return result


# ---- all of it ----------------------------------------------------------------------------------


def compare(settings: Settings) -> dict[str, Any]:
    """Figures of all ways, printed as they come."""
    if min(settings.layers, settings.width, settings.batch, settings.rounds) < 1:
        raise InputError("--layers, --width, --batch and --rounds must be at least 1")
    if not can_measure_memory():
        raise InputError("memory is measured on Linux only, with a writable /proc/self/clear_refs")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    rows = {name: Row(name) for name in ways(settings)}
    eager = saved_by_eager(settings)
    budget = settings.budget or int(SHARE * eager)
    print(
        f"deep DLRM: top MLP of {settings.layers} x {settings.width}, batch {settings.batch}; "
        f"eager keeps {show_bytes(eager)} for backward; budget {show_bytes(budget)}; "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    for name, row in rows.items():
        try:
            row.memory = ask(name, settings, budget)
            print(f"{name}: a step adds {show_bytes(row.memory['step'])}", flush=True)
        except ProbeFailed as error:
            row.problem = str(error)
    _time(rows, settings, budget)
    rows["eager"].memory["saved"] = eager
    print(table(rows, eager))
    return {
        "settings": dataclasses.asdict(settings), "eager_saved": eager, "budget": budget,
        "rows": {name: dataclasses.asdict(row) for name, row in rows.items()},
    }  # fmt: skip


@dataclasses.dataclass
class Row:
    """A way's figures."""

    name: str
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: list[float] = dataclasses.field(default_factory=list)
    same_bits: bool | None = None  # as eager; compiled ones: as compiled without a budget
    problem: str = ""


def _time(rows: dict[str, Row], settings: Settings, budget: int) -> None:
    draw = Draws(settings.shape(), settings.batch)
    first = [draw() for _ in range(4)]  # measuring, and planning
    contestants, digests = [], {}
    for name, row in rows.items():
        if row.problem:
            continue
        way = Way(name, settings, budget)
        losses = [way.step(batch) for batch in first]
        digests[name] = [loss.numpy().tobytes() for loss in losses] + [
            p.detach().numpy().tobytes() for p in way.model.parameters()
        ]
        contestants.append(Contestant(name, "", lambda b: b, way.step))
    budgeted = [name for name in digests if name.startswith("compiled ")]
    for name, row in rows.items():
        if name in digests and name != "compiled":
            # a budget makes compiled chains of layers shorter: so they are compared with their own
            row.same_bits = (
                digests[name] == digests[(budgeted if name in budgeted else ["eager"])[0]]
            )
    race(contestants, draw, settings.rounds)
    for one in contestants:
        rows[one.group].seconds = one.seconds


def table(rows: dict[str, Row], eager: int) -> str:
    """The figures in lines. ``saved`` of those without a ledger is not known, and not shown."""
    base = {
        "eager": statistics.median(rows["eager"].seconds),
        "compiled": statistics.median(
            rows["compiled"].seconds if "compiled" in rows else [float("nan")]
        ),
    }
    step = rows["eager"].memory.get("step", 0)
    lines = [
        f"{'way':<20}{'saved peak':>14}{'':>7}{'step adds':>13}{'':>7}{'ms':>9}{'x eager':>9}"
        f"{'x compiled':>12}  bits  plan"
    ]
    for row in rows.values():
        if row.problem:
            lines.append(f"{row.name:<20}left out: {row.problem}")
            continue
        saved, adds = row.memory.get("saved") or 0, row.memory["step"]
        ms = statistics.median(row.seconds)
        less = f"{saved / eager - 1:+.0%}" if saved else ""
        bits = {True: "same", False: "DIFFER", None: "-"}[row.same_bits]
        own = f"{ms / base['compiled']:.2f}" if row.name.startswith("compiled") else ""
        lines.append(
            f"{row.name:<20}{show_bytes(saved) if saved else '-':>14}{less:>7}"
            f"{show_bytes(adds):>13}{adds / step - 1:>+7.0%}{ms * 1e3:>9.1f}"
            f"{ms / base['eager']:>9.2f}{own:>12}  {bits:<6}{row.memory.get('plan', '')}"
        )
    return "\n".join(lines)


def settings_of(options: Any) -> Settings:
    """From the command line."""
    try:
        budget = parse_bytes(options.budget) if options.budget else 0
    except ValueError as error:
        raise InputError(f"--budget: {error}") from None
    ways = tuple(w for w in map(str.strip, options.ways.split(",")) if w)
    return Settings(
        options.layers, options.width, options.batch, options.rounds, budget, options.threads, ways
    )


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asked = given.pop("name")
    made = Settings(**{**given, "ways": tuple(given["ways"])})
    if made.threads:
        torch.set_num_threads(made.threads)
    print(json.dumps(measure(asked, made, made.budget)))
