"""Print the survey: mending and capture, before and after, beside TorchDynamo.

    python -m compiler.survey                       # all groups
    python -m compiler.survey --quick               # a case of each kind: two minutes
    python -m compiler.survey --group models --json survey.json
    python -m compiler.survey --group models --latency only --json latency.json
    python -m compiler.survey --only T5             # names that contain it, in any group
    python -m compiler.survey --cases my_module     # your own: a module with CASES

Exit code 0: nothing differs from eager mode; 1: something does; 2: bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from compiler.survey.case import SurveyError
from compiler.survey.run import GROUPS, survey


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        "python -m compiler.survey", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--group", action="append", choices=GROUPS, help="may be repeated")
    parser.add_argument("--cases", action="append", metavar="MODULE", help="a module with CASES")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--quick", action="store_true", help="few cases, no reordered logging")
    parser.add_argument(
        "--latency", nargs="?", const="too", choices=("too", "only"),
        help="time the models, cold and steady, after comparing them or instead of it",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="of the timing (default 5)")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    given = parser.parse_args(arguments)
    try:
        return survey(given)
    except SurveyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
