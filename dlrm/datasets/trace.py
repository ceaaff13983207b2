"""Ids replayed with a chosen reuse distance, and the reuse distances of any ids.

The stack distance of an access is the number of distinct other ids since the last access of the
same id; a first access has none (Mattson et al. 1970, "Evaluation techniques for storage
hierarchies", counts one more). An LRU cache of c rows hits exactly the accesses with a distance
under c, so this one distribution fixes the hit rate of every size of cache. The generator follows
the synthetic trace of Naumov et al. 2019 (the DLRM paper): keep the ids as a stack by recency, draw
a depth, take the id there and move it to the top.

    python -m dlrm.datasets.trace make --rows 100000 --length 1000000 --distances power:1.1,20000 \\
        --out trace.npy
    python -m dlrm.datasets.trace measure trace.npy
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm import cli
from dlrm.datasets import draws
from dlrm.datasets.distances import COLD, StackDistances
from dlrm.datasets.lru import LRUStack
from dlrm.errors import InputError

__all__ = ["COLD", "StackDistances", "check_trace", "lru_trace", "stack_distances"]


def lru_trace(request: StackDistances, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Ids (length,) i64 of a table of ``rows`` whose stack distances follow ``request``.

    The stack starts full of :func:`initial_stack`, so every drawn distance is there from the first
    access on: none is cut or redrawn. A first access takes the next row that was never on the
    stack. Raises InputError for a table too small for the longest distance, or for all first
    accesses.

    O(log n) an access, and most need one move in a short list: on one core 4M accesses/s where
    distances are short, 0.16M/s where they are around 100,000.
    """
    if length < 1:
        raise InputError(f"trace length: {length} must be at least 1")
    held = len(initial_stack(request, rows))
    distances = request.draw(draws.words(seed, 0, 0, 0, length))
    fresh = int((distances == COLD).sum())
    if held + fresh > rows:
        raise InputError(
            f"trace: {fresh} of {length} accesses are to rows never seen, and the table has "
            f"{rows - held} beside the {held} on the stack; choose a smaller cold, a shorter "
            "trace, or a larger table"
        )
    stack = LRUStack(range(held))
    unseen = iter(range(held, rows))
    out = np.empty(length, dtype=np.int64)
    for i, distance in enumerate(distances.tolist()):
        if distance == COLD:
            out[i] = next(unseen)
            stack.push(int(out[i]))
        else:
            out[i] = stack.access(distance)
    return _scatter(out, rows)


def initial_stack(request: StackDistances, rows: int) -> np.ndarray:
    """The ids on the stack before the first access, the least recent first: (longest,) i64."""
    if request.longest > rows:
        raise InputError(
            f"trace: distances go up to {request.longest - 1}, which needs a table of "
            f"{request.longest} rows, and it has {rows}; choose a shorter one, or a larger table"
        )
    return _scatter(np.arange(request.longest), rows)


def _scatter(number: np.ndarray, rows: int) -> np.ndarray:
    """A permutation of a table's rows: neighbours in a stack are not neighbours in memory."""
    if rows > 1 << 31:
        raise InputError(f"trace: a table of {rows} rows; at most 2^31 can be traced")
    step = max(1, round(rows * 0.6180339887))
    while math.gcd(step, rows) != 1:
        step += 1
    return number * step % rows


def stack_distances(ids: np.ndarray) -> np.ndarray:
    """The stack distance of every access: ids (N,) to (N,) i64, COLD for a first access.

    With p(t) the time of the access before t of the same id, the distance is the number of j
    between p(t) and t with p(j) < p(t), and all j up to p(t) have that too: so it is the number of
    earlier accesses with a smaller p, less p(t) + 1. Those are counted bit by bit, O(N log N) in
    NumPy, 1 to 3M accesses/s.

    >>> stack_distances(np.array([7, 8, 9, 8, 8, 7])).tolist()
    [-1, -1, -1, 1, 0, 2]
    """
    ids = np.asarray(ids)
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    before = np.full(len(ids), -1, dtype=np.int64)
    before[order[1:][again]] = order[:-1][again]
    warm = np.flatnonzero(before >= 0)  # (M,)
    rank = np.zeros(len(ids), dtype=np.int64)
    rank[before[warm]] = 1
    rank = np.cumsum(rank) - 1
    first = np.cumsum(before < 0)  # first accesses so far: their p, none, is smaller than any
    out = np.full(len(ids), COLD, dtype=np.int64)
    out[warm] = _smaller_before(rank[before[warm]]) + first[warm] - before[warm] - 1
    return out


def _smaller_before(order: np.ndarray) -> np.ndarray:
    """For a permutation of 0..M-1: how many earlier elements are smaller, (M,) i64.

    Elements with the same high bits form a group, in their first order. In it, an element whose
    next bit is 1 is larger than those whose bit is 0; then the group is cut in two by that bit.
    """
    value, place = order, np.arange(len(order))
    found = np.zeros(len(order), dtype=np.int64)
    for bit in reversed(range(max(len(order) - 1, 0).bit_length())):
        one = (value >> bit) & 1
        zeros = np.cumsum(1 - one) - (1 - one)  # before this element
        start = value >> (bit + 1) << (bit + 1)  # where its group starts
        zeros -= zeros[start]
        found += one * zeros
        at = np.arange(len(value))
        target = np.where(one == 1, at + (1 << bit) - zeros, start + zeros)
        value, place, found = (_moved(x, target) for x in (value, place, found))
    out = np.empty_like(found)
    out[place] = found
    return out


def _moved(values: np.ndarray, target: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    out[target] = values
    return out


def ks_distance(distances: np.ndarray, request: StackDistances) -> float:
    """The largest difference of the two cumulative distributions (Kolmogorov-Smirnov).

    A first access counts as infinitely far.
    """
    warm = np.sort(distances[distances >= 0])
    values, counts = np.unique(warm, return_counts=True)
    seen = np.cumsum(counts) / len(distances)
    # both are step functions on whole numbers: look at each step, and just before it
    after = np.abs(seen - request.cdf(values))
    before = np.abs(np.append(0.0, seen[:-1]) - request.cdf(values - 1))
    end = abs(len(warm) / len(distances) - (1 - request.cold))
    return float(max(after.max(initial=0), before.max(initial=0), end))


def ks_tolerance(count: int, alpha: float = 1e-6) -> float:
    """What a true sample of ``count`` exceeds with a probability of at most ``alpha``.

    The inequality of Dvoretzky, Kiefer and Wolfowitz, with Massart's constant (1990).
    """
    return math.sqrt(math.log(2 / alpha) / (2 * count))


def check_trace(ids: np.ndarray, request: StackDistances, rows: int) -> tuple[float, float]:
    """The KS distance between a trace of :func:`lru_trace` and its request, and the tolerance.

    The trace is measured behind its initial stack, so that accesses to rows that lay there count
    with the distance they were drawn with.
    """
    start = initial_stack(request, rows)
    distances = stack_distances(np.concatenate([start, ids]))[len(start) :]
    return ks_distance(distances, request), ks_tolerance(len(ids))


def _make(args: argparse.Namespace) -> int:
    request = StackDistances.parse(args.distances)
    ids = lru_trace(request, args.rows, args.length, args.seed)
    found, allowed = check_trace(ids, request, args.rows)
    temporary = args.out.with_name(args.out.name + f".{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.save(file, ids, allow_pickle=False)
        os.replace(temporary, args.out)
    except OSError as error:
        raise InputError(f"{args.out}: {error.strerror}; name another file with --out") from None
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{args.out}: {len(ids)} ids, {len(np.unique(ids))} distinct")
    print(f"KS distance to the request {found:.6f}, tolerance {allowed:.6f}")
    if found > allowed:
        print("error: the trace does not match its request", file=sys.stderr)
        return 1
    return 0


def _measure(args: argparse.Namespace) -> int:
    try:
        ids = np.load(args.trace, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{args.trace}: no such file") from None
    except (OSError, ValueError, EOFError):
        raise InputError(f"{args.trace}: not a .npy file of ids") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{args.trace}: expected a one-dimensional array of whole numbers")
    if not len(ids):
        raise InputError(f"{args.trace}: no ids")
    distances = stack_distances(ids)
    print(f"{len(ids)} accesses, {len(np.unique(ids))} distinct ids")
    print(f"first accesses {np.mean(distances < 0):.4%}")
    warm = distances[distances >= 0]
    if len(warm):
        for q in (10, 50, 90, 99):
            print(f"stack distance, {q}th percentile {np.percentile(warm, q):.0f}")
        for size in (2**k for k in range(4, 31, 3) if 2**k < 8 * (warm.max() + 1)):
            hits = np.mean((distances >= 0) & (distances < size))
            print(f"LRU cache of {size} rows: hit rate {hits:.4f}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dlrm.datasets.trace",
        description="Write a trace of ids with chosen stack distances, or measure one.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write a trace, and check it against the request")
    make.add_argument("--rows", type=int, required=True, help="rows of the table")
    make.add_argument("--length", type=int, required=True, help="accesses")
    make.add_argument(
        "--distances",
        required=True,
        help="power:EXPONENT,LONGEST  geometric:MEAN  lognormal:MEDIAN,SIGMA[,LONGEST], "
        "each with ;cold=P for first accesses",
    )
    make.add_argument("--seed", type=int, default=0, help="default 0")
    make.add_argument("--out", type=Path, required=True, help="a .npy file")
    make.set_defaults(run=_make)
    measure = commands.add_parser("measure", help="print stack distances and LRU hit rates")
    measure.add_argument("trace", type=Path, help="a .npy file of ids")
    measure.set_defaults(run=_measure)

    def command() -> int:
        args = parser.parse_args(argv)
        return args.run(args)

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
