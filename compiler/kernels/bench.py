"""Embedding bags side by side: ours, FBGEMM's TBE and nn.EmbeddingBag, forward and update.

    python -m compiler.kernels.bench                      # all cases
    python -m compiler.kernels.bench --case multi-hot --threads 1 --clock cpu

Forward ends with (B, F, d), what an interaction reads: ours writes into a buffer that stays, as in
a compiled model; eager stacks. The update is exact row-wise Adagrad from the gradient of the pooled
vectors. Contestants take turns on the same ids, so that a busy machine slows all alike:
compare ratios, not times. ``--clock cpu --threads 1`` counts only the time that the process ran.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels.bags import Bags
from compiler.kernels.embedding_bag import pool_into
from compiler.kernels.pages import use_huge_pages
from compiler.kernels.row_update import Update, new_state, reference, update_bags

Contestant = tuple[Callable[[], object], Callable[[object], object]]  # untimed, then timed


@dataclass(frozen=True)
class Case:
    """F tables of ``rows`` rows of ``dim`` numbers; ``batch`` bags of ``pooling`` ids in each."""

    rows: int
    dim: int
    pooling: int
    batch: int = 2048
    tables: int = 26


CASES = {
    "kaggle": Case(100_000, 16, 1),
    "large": Case(1_000_000, 16, 1),
    "multi-hot": Case(100_000, 64, 10),
    "one": Case(100_000, 16, 1, batch=1),
    "small-batch": Case(100_000, 16, 1, batch=128),
    "big-batch": Case(100_000, 16, 1, batch=8192),
}
RULE = Update("rowwise_adagrad", lr=0.01)


def contestants(case: Case, huge_pages: bool) -> dict[str, dict[str, Contestant]]:
    """For forward and update, what to run by name."""
    torch.manual_seed(0)
    count = case.batch * case.pooling
    ids = [torch.randint(case.rows, (count,)) for _ in range(case.tables)]
    offsets = (torch.arange(case.batch + 1) * case.pooling).repeat(case.tables, 1)
    grad = torch.randn(case.batch, case.tables, case.dim)
    tbe = _tbe(case)
    tables = [torch.empty(case.rows, case.dim) for _ in ids]
    if huge_pages:  # as SparseRows does; FBGEMM and eager keep the pages that they ask for
        use_huge_pages(tables, seconds=0)
    for table in tables:
        table.uniform_(-0.01, 0.01)
    eager_tables = [table.clone() for table in tables] if huge_pages else tables
    if tbe is not None:
        for table in tbe.split_embedding_weights():  # type: ignore[operator]
            table.uniform_(-0.01, 0.01)
    out = torch.empty(case.batch, case.tables, case.dim)
    states = [new_state(RULE.kind, t) for t in tables]

    def bags() -> Bags:
        return Bags(ids, offsets, include_last_offset=True)

    def eager_forward() -> list[Tensor]:
        return [
            F.embedding_bag(i, t, o, mode="sum", sparse=True, include_last_offset=True)
            for i, t, o in zip(ids, eager_tables, offsets, strict=True)
        ]

    def eager_pooled() -> list[Tensor]:
        for table in eager_tables:
            table.requires_grad_().grad = None
        return eager_forward()

    def eager_update(pooled: object) -> None:
        torch.autograd.backward(pooled, list(grad.unbind(1)))  # type: ignore[arg-type]
        for table, state in zip(eager_tables, states, strict=True):
            assert table.grad is not None
            reference(table, table.grad, RULE, state)
            table.requires_grad_(False)

    nothing = torch.no_grad()(lambda: None)
    forward: dict[str, Contestant] = {
        "ours": (nothing, lambda _: pool_into(out, tables, bags())),
        "nn.EmbeddingBag": (nothing, lambda _: torch.stack(eager_forward(), dim=1)),
    }
    update: dict[str, Contestant] = {
        "ours": (nothing, lambda _: update_bags(tables, bags(), grad, RULE, states)),
        "nn.EmbeddingBag": (eager_pooled, eager_update),
    }
    if tbe is not None:
        flat = torch.cat(ids)
        starts = torch.arange(case.tables * case.batch + 1) * case.pooling
        flat_grad = grad.flatten(1)

        def tbe_forward(_: object) -> Tensor:
            with torch.no_grad():
                return tbe(flat, starts)

        forward["FBGEMM TBE"] = (nothing, tbe_forward)
        update["FBGEMM TBE"] = (
            lambda: tbe(flat, starts),
            lambda pooled: pooled.backward(flat_grad),  # type: ignore[attr-defined]
        )
    return {"forward": forward, "update": update}


def _tbe(case: Case) -> torch.nn.Module | None:
    """FBGEMM's tables of that case on the CPU, or None where it is not installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, *where)] * case.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RULE.lr,
        eps=RULE.eps,
    )


def measure(
    runs: dict[str, Contestant], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, in turning order; two rounds go before.

    Each starts from caches full of other things, or one would find the rows its forerunner read.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, others = list(runs), torch.zeros(2**24)  # 64 MB
    for turn in range(rounds + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare, run = runs[name]
            given = prepare()
            others.add_(1)
            start = clock()
            run(given)
            if turn >= 2:
                times[name].append(clock() - start)
    return times


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m compiler.kernels.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--case", choices=CASES, action="append", help="one or more; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument(
        "--huge-pages", action=argparse.BooleanOptionalAction, default=True,
        help="large pages for our tables, as compiler.optim.SparseRows gives them",
    )  # fmt: skip
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    print(f"{args.threads} threads, {args.clock} clock, {args.rounds} rounds; milliseconds")
    print(f"{'case':12} {'what':8} {'who':16} {'median':>8} {'least':>8} {'ours is faster by':>18}")
    for name in args.case or CASES:
        for what, runs in contestants(CASES[name], args.huge_pages).items():
            times = measure(runs, args.rounds, clock)
            ours = times["ours"]
            for who, seconds in times.items():
                ratio = f"{median(seconds) / median(ours):.2f}x, {min(seconds) / min(ours):.2f}x"
                print(
                    f"{name:12} {what:8} {who:16} {median(seconds) * 1e3:8.3f} "
                    f"{min(seconds) * 1e3:8.3f} {ratio:>18}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
