"""The table that is printed, and what goes into the JSON file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from dlrm import machine
from dlrm.benchmark.floor import Machine
from dlrm.benchmark.peers import OWN, PEERS
from dlrm.benchmark.suite import Settings, Suite, growth_lines
from dlrm.benchmark.turns import Row

GROUPS = (*PEERS, *OWN)
MARKS = {"default": "d", "freezing": "f", "max-autotune": "m", "max-autotune, freezing": "mf",
         "reduce-overhead": "r"}  # fmt: skip
LEGEND = (
    "Medians. The best way of TorchInductor and of ours is marked: d default, f freezing, "
    "m max-autotune, mf both, "
    "r reduce-overhead.\n"
    "faster: the best peer's time (or memory) over ours; frozen: the same for frozen weights; "
    "saved: for a\nmodel saved with them for one batch size, and called without Dynamo.\n"
    "of floor: the measured floor over the best of ours. f32: TorchInductor's best in f32 over "
    "ours in bf16."
)


def best_peer(row: Row) -> str | None:
    """The group with the least median, ours left out."""
    found = {g: cell.median for g in PEERS if (cell := row.best(g)) is not None}
    return min(found, key=found.__getitem__, default=None)


def ratio(row: Row, group: str) -> float | None:
    """How many times less the group takes than the best peer."""
    peer, own = best_peer(row), row.best(group)
    if peer is None or own is None or own.median == 0:
        return None
    return row.best(peer).median / own.median  # type: ignore[union-attr]


def own_best(row: Row) -> float | None:
    """The best of ours."""
    return min((cell.median for g in OWN if (cell := row.best(g)) is not None), default=None)


def of_floor(row: Row) -> float | None:
    """The floor as a share of the best of ours: 1 would be perfect."""
    own = own_best(row)
    return None if row.floor is None or not own else row.floor / own


def over_f32(row: Row) -> float | None:
    """TorchInductor's best in f32 over the best of ours, in a row in bf16."""
    own = own_best(row)
    return None if row.peers_f32 is None or not own else row.peers_f32 / own


def text(rows: Sequence[Row]) -> str:
    """The table, a line for each row, all in the same columns."""
    head = ["task", "shape", "batch", "unit", *GROUPS, "floor", "faster", "frozen", "saved",
            "of floor", "f32"]  # fmt: skip
    lines = [head]
    for row in rows:
        line = [row.task, row.shape, str(row.batch), row.unit]
        for group in GROUPS:
            cell = row.best(group)
            mark = "" if cell is None else MARKS.get(cell.variant, "")
            line.append("" if cell is None else f"{_number(cell.median)}{mark and ' ' + mark}")
        share = of_floor(row)
        line += [
            "" if row.floor is None else _number(row.floor),
            *(_times(ratio(row, group)) for group in OWN),
            "" if share is None else f"{share:.0%}",
            _times(over_f32(row)),
        ]
        lines.append(line)
    # a column that nobody fills is left out
    kept = [k for k in range(len(head)) if k < 4 or any(line[k] for line in lines[1:])]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    return "\n".join(
        "  ".join(
            line[k].ljust(widths[k]) if k in (0, 1, 3) else line[k].rjust(widths[k]) for k in kept
        ).rstrip()
        for line in lines
    )


def _number(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2 if value < 100 else 0}f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def floor_text(found: Machine) -> str:
    """What the floor is made of."""
    rates = ", ".join(
        f"{rate / 1e9:.0f} GF/s in {kind} ({found.winners[kind]})"
        for kind, rate in found.rates.items()
    )
    return f"Floor: {rates}; copy {found.copy / 1e9:.1f} GB/s read and written."


def report(run: Suite) -> str:
    """What is printed in the end."""
    lines = [text(run.rows), "", LEGEND, floor_text(run.machine)]
    lines += growth_lines(run.rows)
    return "\n".join(lines + run.notes)


def document(
    command: str, described: dict[str, Any], settings: Settings, run: Suite
) -> dict[str, Any]:
    """What goes into the JSON file."""
    return {
        "command": command,
        "machine": described,
        "settings": {
            "shapes": {s.name: dataclasses.asdict(s) for s in settings.shapes},
            "tasks": list(settings.tasks),
            "rounds": settings.rounds,
            "threads": settings.threads,
            "dense_optimizer": settings.optimizer,
            "quick": settings.quick,
        },
        "floor": dataclasses.asdict(run.machine),
        "rows": as_json(run.rows),
        "growth": growth_lines(run.rows),
        "notes": run.notes,
    }


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row with each contestant's figures."""
    return [
        {
            "task": row.task,
            "shape": row.shape,
            "batch": row.batch,
            "unit": row.unit,
            "peers": {
                group: [dataclasses.asdict(cell) for cell in cells]
                for group, cells in row.cells.items()
            },
            "best_peer": best_peer(row),
            "ratio": ratio(row, OWN[0]),
            "ratio_frozen": ratio(row, OWN[1]),
            "ratio_saved": ratio(row, OWN[2]),
            "inductor_f32_over_ours": over_f32(row),
            "floor": row.floor,
            "share_of_floor": of_floor(row),
        }
        for row in rows
    ]


def describe_machine() -> dict[str, Any]:
    """Processor, memory, threads, load and versions."""
    cxx = machine.find_compiler()
    versions = {}
    for name in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": machine.cpu_name(),
        "instructions": machine.cpu_instructions(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": machine.memory_bytes()[0] / 1e9,
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": "" if cxx is None else cxx.version,
        "versions": versions,
    }
