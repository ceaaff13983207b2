"""Evaluate a checkpoint: ``python -m dlrm.evaluate RUN --data criteo --input DIR``.

Prints the metrics with 95% confidence intervals, in all and by slice, and writes
``evaluation.json`` and a reliability plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm import bootstrap, cli
from dlrm.checkpoint import load_model, resolve
from dlrm.errors import InputError
from dlrm.files import require_writable, write_json
from dlrm.metrics import Scores, scores
from dlrm.plots import reliability_plot
from dlrm.scoring import dataset_of, score_split
from dlrm.slices import Slicer


def evaluate(
    path: str | Path,
    out: str | Path,
    part: str = "test",
    slices: Sequence[str] = (),
    replicates: int = 200,
    limit: int = 0,
    quiet: bool = True,
    **source: Any,
) -> dict[str, Any]:
    """Metrics of a checkpoint (or a run's best) on one part of a data set, and where they stand.

    ``source``: fields of ``DataConfig``; those not given are as in training. Writes
    ``evaluation.json`` and ``reliability.png`` into ``out`` and returns what the former holds.
    """
    if replicates < 1:
        raise InputError(f"--bootstrap: {replicates} must be at least 1")
    if limit < 0:
        raise InputError(f"--limit-batches: {limit} must not be negative; 0 reads all")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder for the results")
    require_writable(out, "--out")
    model, state = load_model(path, from_disk=True)
    if part == "train" and state.get("privacy"):
        raise InputError(
            "--part train: the model was trained with privacy, and metrics on its training rows "
            "would be a use of these rows and labels that nothing accounts for; take val or test"
        )
    dataset = dataset_of(state, model, source)
    slicer = Slicer(dataset, slices)
    label, logit = score_split(
        model, dataset, part, limit=limit, quiet=quiet, also=slicer.update if slices else None
    )
    whole = scores(label, logit)
    if warning := whole.one_class(part):
        print(f"warning: {warning}", file=sys.stderr)
    result = {
        "checkpoint": str(resolve(path)),
        "data": dataset.name,
        "part": part,
        **whole.as_dict(),
        "interval_95": bootstrap.intervals(label, logit, replicates),
        "slices": {
            name: {k: s.as_dict() for k, s in by_value.items()}
            for name, by_value in slicer.result(label, logit).items()
        },
    }
    reliability_plot(label, logit, out / "reliability.png", f"{dataset.name}, {part}")
    write_json(out / "evaluation.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{result['data']}, {result['part']}: {result['rows']:,} rows"]
    for title, name in (
        ("AUC", "auc"),
        ("logloss", "logloss"),
        ("normalized entropy (NE)", "ne"),
        ("calibration", "calibration"),
    ):
        low, high = result["interval_95"][name]
        lines.append(f"  {title:<24}{result[name]:.4f}   95% {low:.4f} to {high:.4f}")
    for feature, by_value in result["slices"].items():
        lines.append(f"by {feature}:")
        for value, values in by_value.items():
            s = Scores(**values)
            lines.append(
                f"  {value:<24}AUC {s.auc:.4f}  NE {s.ne:.4f}  calibration {s.calibration:.3f}"
                f"  {s.rows:,} rows"
            )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.evaluate",
        description="Metrics of a checkpoint with confidence intervals, slices, reliability plot.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    add_source(flags)
    flags.add_argument("--part", default="test", help="train, val or test")
    flags.add_argument("--out", default="", help="folder for the results; RUN/evaluation if empty")
    flags.add_argument("--slice", action="append", default=[], metavar="FEATURE", help="repeatable")
    flags.add_argument("--bootstrap", type=int, default=200, help="replicates for the intervals")
    flags.add_argument("--limit-batches", type=int, default=0, help="of 4096 rows; 0: all")
    flags.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)
    return flags


def add_source(flags: argparse.ArgumentParser) -> None:
    """Flags that name the data; what is not given is as in training."""
    group = flags.add_argument_group("data (as in training where not given)")
    for name in ("data", "input", "split"):
        group.add_argument(f"--{name}", default=argparse.SUPPRESS)
    for name in ("samples", "data-seed"):
        group.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)


def given_source(options: dict[str, Any]) -> dict[str, Any]:
    """The data flags that were given, taken out of ``options``."""
    names = ("data", "input", "split", "samples", "data_seed")
    return {name: options.pop(name) for name in names if name in options}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        options = vars(parser().parse_args(argv))
        source = given_source(options)
        path = resolve(options["checkpoint"])
        out = Path(options["out"] or path.parent / "evaluation")
        result = evaluate(
            path,
            out,
            options["part"],
            options["slice"],
            options["bootstrap"],
            options["limit_batches"],
            options["quiet"],
            **source,
        )
        print(show(result))
        print(f"written: {out / 'evaluation.json'}, {out / 'reliability.png'}")
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
