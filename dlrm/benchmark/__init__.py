"""Measure this package on this machine, beside its peers.

* ``python -m dlrm.benchmark [compile]``: our compiler beside PyTorch's eager mode, TorchInductor
  at its best, and FBGEMM's tables without and with TorchInductor: inference, training, embedding
  bags, compile time, memory, growth. One run, one table.
* ``python -m dlrm.benchmark overhead``: calls per second at small batches, beside TorchInductor.
* ``python -m dlrm.benchmark loop``: what the training loop costs over the bare step.
* ``python -m dlrm.benchmark memory``: training within a memory budget, beside eager PyTorch and its
  checkpointing: peak memory and time.
* ``python -m dlrm.benchmark disk``: training with tables on disk beside tables in memory.
* ``python -m dlrm.benchmark preprocess``: rows/s of ``dlrm.preprocess`` beside polars reading the
  same file.

The sides of a comparison take turns in the same process; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm import cli
from dlrm.benchmark.loop import loop_table
from dlrm.config import PRESETS
from dlrm.errors import InputError
from dlrm.files import require_writable, write_json

COMMANDS = ("compile", "overhead", "loop", "preprocess", "memory", "disk")
COMPILE = """Our compiler beside its peers, in one table.

Peers take turns, round by round, on new ids for each call; medians of the rounds are shown, and how
many times faster ours is than the best peer. Before anything is timed, all must agree: whoever does
not, or fails, is left out with a line that says so. The exit status is 1 if somebody's result was
wrong, or ours failed.

Rows: inference in f32 and bf16; a training step with row-wise Adagrad on the tables; embedding bags
alone, forward and fused update; time to compile forward and backward, with empty caches and with
filled ones; peak memory of a training step, above what the model takes; growth of the step's time
with the batch, the pooling factor and the table rows. Floor: the arithmetic at the best rate that
any library reached in this run, and the bytes that must be moved at the speed of a copy.

The whole takes about an hour on two cores; --tasks, --shapes and --batch choose parts of it.

With --device cuda the same on a GPU, at batch 8192 and 65536, in about five minutes: training,
inference, bags; a call is timed until the device is done."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = flags.add_subparsers(dest="what", required=True, metavar="|".join(COMMANDS))
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", default="", help="also write the figures to this file")
    race = commands.add_parser(
        "compile",
        parents=[shared],
        description=COMPILE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="the compiler beside its peers (the default)",
    )
    race.add_argument("--preset", action="append", help="shapes: kaggle, dcnv2, tiny (kaggle)")
    race.add_argument("--shapes", default="", help="shapes by name instead: " + _shape_list())
    race.add_argument("--tasks", default="", help="some of " + ", ".join(_tasks()) + " (all)")
    race.add_argument("--batch", type=cli.integers, default=(), help="batch sizes instead: 1,2048")
    race.add_argument("--rounds", type=int, default=15, help="turns of each contestant (15)")
    race.add_argument("--threads", type=int, default=0, help="CPU threads of all (all cores)")
    race.add_argument("--dense-optimizer", default="sgd", help="sgd or adagrad, for the layers")
    race.add_argument("--device", default="cpu", help="cpu or cuda: the GPU table (cpu)")
    race.add_argument(
        "--seconds", type=float, default=280.0,
        help="with --device cuda: begin no part later than that (280)",
    )  # fmt: skip
    race.add_argument(
        "--quick", action="store_true",
        help="a try of every part in a few minutes: small tables and batches, 3 rounds, "
        "TorchInductor in its default mode",
    )  # fmt: skip
    small = commands.add_parser(
        "overhead", parents=[shared], help="calls per second at small batches"
    )
    small.add_argument("--shapes", default="kaggle,tiny", help="by name (kaggle,tiny)")
    small.add_argument("--tasks", default="", help="some of inference, train (both)")
    small.add_argument("--batch", type=cli.integers, default=(1, 4, 16, 64), help="(1,4,16,64)")
    small.add_argument("--rounds", type=int, default=15, help="turns of each contestant (15)")
    small.add_argument("--threads", type=int, default=0, help="CPU threads of all (all cores)")
    steps = commands.add_parser("loop", parents=[shared], help="the training loop")
    steps.add_argument("--preset", action="append", help="repeatable; tiny and kaggle")
    steps.add_argument("--steps", type=int, default=60, help="steps of a round (60)")
    steps.add_argument("--rounds", type=int, default=21, help="rounds of each side (21)")
    rows = commands.add_parser("preprocess", parents=[shared], help="preprocessing")
    rows.add_argument("--input", default="", help="a raw Criteo file")
    budget = commands.add_parser("memory", parents=[shared], help="training in little memory")
    budget.add_argument("--layers", type=int, default=24, help="of the top MLP (24)")
    budget.add_argument("--width", type=int, default=1024, help="of each (1024)")
    budget.add_argument("--batch", type=int, default=2048, help="samples (2048)")
    budget.add_argument("--budget", default="", help="as 64MiB (12%% of what eager keeps)")
    budget.add_argument("--ways", default="", help='some of them, as "offload all,compiled" (all)')
    budget.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    budget.add_argument("--threads", type=int, default=0, help="CPU threads of all (all cores)")
    disk = commands.add_parser("disk", parents=[shared], help="tables on disk")
    disk.add_argument(
        "--rows", type=cli.integers, default=(10**6,) * 26, help="of the tables (1000000*26)"
    )
    disk.add_argument("--dim", type=int, default=16, help="width of a row (16)")
    disk.add_argument("--batch", type=int, default=2048, help="samples (2048)")
    disk.add_argument("--zipf", type=float, default=1.05, help="exponent of the ids (1.05)")
    disk.add_argument("--cache", default="", help="as 512MiB (a tenth of the tables)")
    disk.add_argument("--steps", type=int, default=20, help="steps of a turn (20)")
    disk.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    disk.add_argument("--threads", type=int, default=0, help="CPU threads of both (all cores)")
    disk.add_argument("--folder", default="", help="where the files go (the temporary folder)")
    disk.add_argument(
        "--drop-cache",
        action="store_true",
        help="before each turn, let the system forget the files",
    )
    return flags


def _shape_list() -> str:
    from dlrm.benchmark.shapes import SHAPES

    return "; ".join(f"{shape.name} ({shape.about})" for shape in SHAPES.values())


def _tasks() -> tuple[str, ...]:
    from dlrm.benchmark.suite import TASKS

    return TASKS


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        given = list(sys.argv[1:] if argv is None else argv)
        if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
            given = ["compile", *given]
        o = parser().parse_args(given)
        if o.json:
            require_writable(Path(o.json), "--json")
        if o.what == "compile":
            return compare(o, shlex.join(["python", "-m", "dlrm.benchmark", *given]))
        if o.what == "overhead":
            return _overhead(o, shlex.join(["python", "-m", "dlrm.benchmark", *given]))
        print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
        commands = {"loop": _loop, "memory": _memory, "disk": _disk, "preprocess": _preprocess}
        figures = commands[o.what](o)
        if o.json:
            write_json(Path(o.json), figures)
        return 0

    return cli.run(command)


def compare(o: argparse.Namespace, command: str) -> int:
    """The compiler beside its peers."""
    from dlrm.benchmark import floor, suite, table
    from dlrm.benchmark.shapes import chosen

    if o.rounds < 1:
        raise InputError(f"--rounds: {o.rounds} must be at least 1")
    if o.threads < 0:
        raise InputError(f"--threads: {o.threads} must be at least 1, or 0 for all cores")
    if o.dense_optimizer not in ("sgd", "adagrad"):
        raise InputError(f"--dense-optimizer: {o.dense_optimizer!r} is none of sgd, adagrad")
    tasks = _names(o.tasks) or list(suite.TASKS)
    for task in tasks:
        if task not in suite.TASKS:
            raise InputError(f"--tasks: {task!r} is none of {', '.join(suite.TASKS)}")
    if o.device == "cuda":
        from dlrm.benchmark import cuda

        return cuda.compare(o, command, tasks)
    if o.device != "cpu":
        raise InputError(f"--device: {o.device!r} is none of cpu, cuda")
    shapes = chosen(o.preset or ["kaggle"], _names(o.shapes), list(o.batch))
    rounds = o.rounds
    if o.quick:
        rounds = min(3, rounds)
        shapes = [suite.small(shape) for shape in shapes]
    if o.threads:
        torch.set_num_threads(o.threads)
    settings = suite.Settings(
        shapes, tasks, rounds, torch.get_num_threads(), o.dense_optimizer, o.quick
    )
    logging.getLogger("compiler").setLevel(logging.ERROR)  # what freeze=True means is known here
    machine = table.describe_machine()
    print(
        f"{machine['cpu']}, {settings.threads} threads, load {machine['load']:.1f}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        flush=True,
    )
    run = suite.Suite(settings, floor.measure(shapes, 0.02 if o.quick else 0.3))

    def keep() -> None:
        if o.json:
            write_json(Path(o.json), table.document(command, machine, settings, run))

    try:
        run.run(keep)
    finally:  # also after Ctrl-C, what there is
        if run.rows:
            print(table.report(run))
    keep()
    return 1 if run.wrong else 0


def _overhead(o: argparse.Namespace, command: str) -> int:
    from dlrm.benchmark import overhead, table
    from dlrm.benchmark.shapes import chosen

    if o.rounds < 1 or o.threads < 0:
        raise InputError("--rounds must be at least 1, and --threads 0 (all cores) or more")
    tasks = _names(o.tasks) or list(overhead.TASKS)
    for task in tasks:
        if task not in overhead.TASKS:
            raise InputError(f"--tasks: {task!r} is none of {', '.join(overhead.TASKS)}")
    shapes = chosen([], _names(o.shapes), list(o.batch))
    if o.threads:
        torch.set_num_threads(o.threads)
    machine = table.describe_machine()
    print(f"{machine['cpu']}, {torch.get_num_threads()} threads, load {machine['load']:.1f}")
    run = overhead.Overhead(shapes, tasks, o.rounds)

    def keep() -> None:
        if o.json:
            write_json(Path(o.json), overhead.document(run, command, machine))

    try:
        run.run(keep)
    finally:  # also after Ctrl-C, what there is
        if run.rows:
            print("\n".join([*overhead.lines(run.rows), *run.notes]))
    keep()
    return 1 if run.wrong else 0


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _loop(o: argparse.Namespace) -> Any:
    if o.rounds < 1 or o.steps < 1:
        raise InputError("--rounds and --steps must be at least 1")
    presets = o.preset or ["tiny", "kaggle"]
    for preset in presets:
        if preset not in PRESETS:
            raise InputError(f"--preset: no {preset!r}; there are {', '.join(PRESETS)}")
    figures = loop_table(presets, o.steps, o.rounds)
    print(f"{'preset':<12}{'batch':>7}{'bare step':>13}{'loop':>12}{'loop / bare':>13}")
    for f in figures:
        print(
            f"{f['preset']:<12}{f['batch']:>7}{f['bare_ms']:>10.2f} ms"
            f"{f['loop_ms']:>9.2f} ms{f['ratio']:>13.3f}"
        )
    return figures


def _memory(o: argparse.Namespace) -> Any:
    from dlrm.benchmark import memory

    return memory.compare(memory.settings_of(o))


def _disk(o: argparse.Namespace) -> Any:
    from dlrm.benchmark import disk

    return disk.compare(o)


def _preprocess(o: argparse.Namespace) -> Any:
    from dlrm.datasets.criteo.rate import measure

    if not o.input:
        raise InputError("--input: name a raw Criteo file")
    return measure(o.input)
