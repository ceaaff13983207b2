"""``python -m dlrm.integrity data|model|flips|score|cost``: see ``--help`` of each.

Exit status: 0 nothing bad was found, 1 something was, 2 the input cannot be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm import cli
from dlrm.evaluate import add_source, given_source
from dlrm.files import require_writable
from dlrm.integrity.findings import LEVEL, Report
from dlrm.integrity.leakage import TOO_GOOD


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(prog="python -m dlrm.integrity", description=__doc__)
    commands = flags.add_subparsers(dest="command", required=True)
    shape = argparse.ArgumentDefaultsHelpFormatter

    data = commands.add_parser(
        "data",
        help="check a data set, or one against another",
        description="Check a data set: schema, coverage, leakage, duplicates, drift, fraud.",
        formatter_class=shape,
    )
    data.add_argument("a", metavar="A", help="a preprocessed Criteo folder, a MovieLens folder, or "
                      "synthetic[:samples=N,seed=N]; or a file of scores")  # fmt: skip
    data.add_argument("b", metavar="B", nargs="?", default="", help="what follows A, in that form")
    data.add_argument("--split", choices=["random", "time"], default="random", help="of MovieLens")
    data.add_argument("--users", default="", help="table whose ids are judged; empty: chosen")
    data.add_argument("--rows", type=int, default=500_000, help="of a part, at most; 0: all")
    data.add_argument("--level", type=float, default=LEVEL, help="chance of a false alarm")
    data.add_argument(
        "--leak-auc", type=float, default=TOO_GOOD, help="AUC that one feature may have"
    )

    model = commands.add_parser(
        "model",
        help="check a trained model",
        description="Check a model: calibration, slices, fairness, staleness, robustness.",
        formatter_class=shape,
    )
    model.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    add_source(model)
    model.add_argument("--slice", action="append", default=[], metavar="FEATURE", help="repeatable")
    model.add_argument("--days", type=int, default=8, help="pieces of time that test is cut into")
    model.add_argument("--limit-batches", type=int, default=0, help="of 4096 rows; 0: all")
    model.add_argument("--level", type=float, default=LEVEL, help="chance of a false alarm")

    flips = commands.add_parser(
        "flips",
        help="flip bits of a model, and see what it does",
        description="Flip bits by region and position; the effect on NE and AUC.",
        formatter_class=shape,
    )
    flips.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    add_source(flips)
    flips.add_argument("--rows", type=int, default=4096, help="of test that are scored")
    flips.add_argument("--trials", type=int, default=8, help="flips of each region and bit")
    flips.add_argument("--seed", type=int, default=0)

    score = commands.add_parser(
        "score",
        help="score the detectors on planted faults",
        description="Plant faults of every kind in clean data; precision, recall, false alarms.",
        formatter_class=shape,
    )
    score.add_argument(
        "--trials", type=int, default=20, help="clean and faulty data sets of a kind"
    )
    score.add_argument("--only", default="", help="detectors that have this in their name")
    score.add_argument("--seed", type=int, default=0)

    cost = commands.add_parser(
        "cost",
        help="measure what the checksums cost",
        description="Time with and without checksums, in turns.",
        formatter_class=shape,
    )
    cost.add_argument("--preset", default="kaggle")
    cost.add_argument("--table-rows", type=int, default=100_000, help="of a table, at most")
    cost.add_argument("--batch", type=int, default=2048)
    cost.add_argument("--pooling", type=int, default=1, help="ids in a bag")
    cost.add_argument("--turns", type=int, default=100)
    cost.add_argument("--seed", type=int, default=0)

    for command in (data, model, flips, score, cost):
        command.add_argument("--json", default="", help="file to write")
        command.add_argument("--html", default="", help="page to write, complete in itself")
        command.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)
    return flags


def run(options: dict[str, Any]) -> Report:
    """The report of the command that ``options`` name."""
    command, quiet = options.pop("command"), options.pop("quiet")
    if command == "data":
        from dlrm.integrity.data import check_data

        return check_data(**options)
    if command == "score":
        from dlrm.integrity.score import score

        return score(**options, quiet=quiet)
    if command == "cost":
        from dlrm.integrity.cost import cost

        return cost(**options, quiet=quiet)
    if command == "flips":
        from dlrm.integrity.flips import flips

        source = given_source(options)
        return flips(**options, quiet=quiet, source=source)
    from dlrm.integrity.model import check_model

    source = given_source(options)
    slices = options.pop("slice")
    return check_model(**options, slices=slices, quiet=quiet, source=source)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        options = vars(parser().parse_args(argv))
        json, html = options.pop("json"), options.pop("html")
        for path, flag in ((json, "--json"), (html, "--html")):
            if path:
                require_writable(Path(path), flag)
        report = run(options)
        print(report.show())
        written = report.write(json, html)
        if written:
            print(f"written: {', '.join(map(str, written))}")
        return int(bool(report.bad))

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
