"""Why a DLRM says what it says.

* ``python -m dlrm.interpret RUN --data … --html out.html``: a trained model explained on one page:
  baselines, feature importance, interactions, neurons, single predictions.
* ``python -m dlrm.interpret score``: every method against planted truth.
* ``python -m dlrm.interpret speed``: integrated gradients of the compiled model, beside Captum.
* ``python -m dlrm.interpret --matrix``: which method takes which form of input, and how.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm import cli
from dlrm.errors import InputError
from dlrm.evaluate import add_source, given_source
from dlrm.files import require_writable, write_json

COMMANDS = ("report", "score", "speed", "matrix")


def parser() -> argparse.ArgumentParser:
    """The command line; a checkpoint alone means ``report``."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.interpret",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = flags.add_subparsers(dest="what", required=True, metavar="RUN|score|speed|--matrix")
    shared: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    _add_report(commands.add_parser("report", help="a model on one page (the default)", **shared))
    _add_score(commands.add_parser("score", help="the methods against planted truth", **shared))
    _add_speed(commands.add_parser("speed", help="compiled beside eager", **shared))
    commands.add_parser("matrix", help="methods and forms of input", **shared)
    return flags


def _add_report(flags: argparse.ArgumentParser) -> None:
    from dlrm.interpret.baselines import BASELINES
    from dlrm.interpret.report import FOR_REPORT

    flags.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    add_source(flags)
    flags.add_argument("--html", required=True, help="the page to write")
    flags.add_argument("--part", default="test", help="train, val or test")
    flags.add_argument("--method", default="integrated_gradients", help=", ".join(FOR_REPORT))
    flags.add_argument("--baseline", default="mean", help=", ".join(BASELINES))
    flags.add_argument("--rows", type=int, default=2000, help="rows that are explained")
    flags.add_argument("--pair-rows", type=int, default=200, help="of these, for interactions")
    flags.add_argument("--background", type=int, default=2000, help="training rows for baselines")
    flags.add_argument("--example", type=int, action="append", default=[], metavar="ROW",
                       help="a row of the part to explain by itself, repeatable")  # fmt: skip
    flags.add_argument("--layer", default="", help="whose neurons; the last hidden one if empty")
    flags.add_argument("--missing", type=float, default=None, help="what stands for NaN in dense")
    flags.add_argument("--seed", type=int, default=0, help="of what is sampled")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False,
                       help="compute by our compiler's graphs")  # fmt: skip
    flags.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)


def _add_score(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--samples", type=int, default=500_000, help="training rows")
    flags.add_argument("--explained", type=int, default=500, help="test rows explained")
    flags.add_argument("--background", type=int, default=2000, help="training rows for baselines")
    flags.add_argument("--pooling-factor", type=float, default=1.0,
                       help="mean ids in a bag; 1: always one, else Poisson")  # fmt: skip
    flags.add_argument("--methods", default="", help="some of them, with commas; all if empty")
    flags.add_argument("--seed", type=int, default=0, help="of data and weights")
    flags.add_argument("--json", default="", help="also write the figures to this file")
    flags.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)


def _add_speed(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--preset", default="kaggle", help="shape of the model")
    flags.add_argument("--rows", type=int, default=10_000, help="samples that are explained")
    flags.add_argument("--steps", type=int, default=50, help="of the path")
    flags.add_argument("--table-rows", type=int, default=100_000, help="of a table at most")
    flags.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    flags.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    flags.add_argument("--json", default="", help="also write the figures to this file")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        given = list(sys.argv[1:] if argv is None else argv)
        given = ["matrix" if word == "--matrix" else word for word in given]
        if given and given[0] not in (*COMMANDS, "-h", "--help"):
            given = ["report", *given]
        o = vars(parser().parse_args(given))
        return {"report": _report, "score": _score, "speed": _speed, "matrix": _matrix}[
            o.pop("what")
        ](o)

    return cli.run(command)


def _report(o: dict[str, Any]) -> int:
    from dlrm.interpret.report import report

    source = given_source(o)
    found = report(
        o["checkpoint"], o["html"], o["part"], o["method"], o["baseline"], o["rows"],
        o["pair_rows"], o["background"], o["example"], o["layer"], o["compile"], o["missing"],
        o["seed"], o["quiet"], **source,
    )  # fmt: skip
    print("the features that move the logit most:")
    for one in sorted(found.importance, key=lambda i: -i.size)[:5]:
        print(f"  {one.name:<16}{one.size:.4f}   95% {one.size_low:.4f} to {one.size_high:.4f}")
    print(f"written: {o['html']}")
    return 0


def _score(o: dict[str, Any]) -> int:
    from dlrm.interpret.score import BY_FEATURE, score, show

    path = _json(o)
    methods = tuple(name for name in o["methods"].split(",") if name) or BY_FEATURE
    found = score(
        o["samples"], o["explained"], o["background"], o["pooling_factor"], o["seed"], methods,
        o["quiet"],
    )  # fmt: skip
    print(show(found))
    if path:
        write_json(path, {"command": shlex.join(sys.argv), **found.as_dict()})
    return 0


def _speed(o: dict[str, Any]) -> int:
    from dlrm.interpret.speed import measure, show

    path = _json(o)
    found = measure(o["preset"], o["rows"], o["steps"], o["table_rows"], o["rounds"], o["threads"])
    print(show(found))
    if path:
        write_json(path, {"command": shlex.join(sys.argv), **found.as_dict()})
    return 0 if found.agree else 1


def _matrix(_: dict[str, Any]) -> int:
    from dlrm.interpret.matrix import show

    print(show())
    return 0


def _json(o: dict[str, Any]) -> Path | None:
    if not o["json"]:
        return None
    path = Path(o["json"])
    if path.is_dir():
        raise InputError(f"--json: {path} is a folder; name a file")
    require_writable(path, "--json")
    return path


if __name__ == "__main__":
    sys.exit(main())
