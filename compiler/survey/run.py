"""The survey's groups, one after the other, and what is printed and written."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from compiler.survey import table
from compiler.survey.case import Case, SurveyError
from compiler.survey.latency import latency
from compiler.survey.measure import WAYS, Row, measure

# where each group's cases are; the last is a package that this one does not depend on
GROUPS = {
    "corpus": "compiler.survey.corpus",
    "models": "compiler.survey.models",
    "dlrm": "dlrm.survey",
}
TITLES = {
    "corpus": "Small functions and modules",
    "models": "Real models, from packages, with small random configurations",
    "dlrm": "This package's own models",
}


def survey(given: argparse.Namespace) -> int:
    """Run what the command line asks for; the exit code."""
    if given.rounds < 1:
        raise SurveyError(f"--rounds {given.rounds}: must be at least 1")
    groups = _chosen(given)
    if not any(groups.values()):
        raise SurveyError(f"--only {given.only}: no case has that in its name")
    if given.json and not Path(given.json).resolve().parent.is_dir():
        raise SurveyError(f"--json {given.json}: there is no such folder; make it first")
    rows: list[Row] = []
    extra: dict[str, object] = {"versions": _versions(groups)}
    for group, cases in groups.items():
        if given.latency != "only":
            some = [_measured(case, group) for case in cases]
            rows += some
            _print(group, some)
        if given.latency and group != "corpus":
            here = [case for case in cases if not _missing(case)]
            text, figures = latency(here, given.rounds)
            print(f"\n### Latency: {TITLES.get(group, group)}\n\n{text}", flush=True)
            for case in cases:
                if _missing(case):
                    print(f"* {case.name}: skipped: pip install {' '.join(_missing(case))}")
            extra[f"latency {group}"] = figures
    if given.latency == "only":
        if given.json:
            _write(Path(given.json), json.dumps(extra, indent=1))
        return 0
    return _close(rows, extra, given.json)


def _chosen(given: argparse.Namespace) -> dict[str, list[Case]]:
    """Cases by group."""
    own = list(given.cases or [])
    named = given.group or ([] if own else list(GROUPS))
    groups = {group: _cases(GROUPS[group]) for group in named}
    groups |= {module: _cases(module) for module in own}
    for group, cases in groups.items():
        if given.only:
            cases = [case for case in cases if given.only.lower() in case.name.lower()]
        if given.quick:
            cases = list({(case.family, case.expect): case for case in reversed(cases)}.values())
        groups[group] = cases
    return groups


def _cases(module: str) -> list[Case]:
    """The CASES of a module."""
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SurveyError(f"{module}: {error}; give a module that Python can import") from error
    finally:
        sys.path.remove(os.getcwd())
    cases = getattr(found, "CASES", None)
    if not cases or not all(isinstance(case, Case) for case in cases):
        raise SurveyError(f"{module}: wants CASES, a tuple of compiler.survey.case.Case")
    return list(cases)


def _measured(case: Case, group: str) -> Row:
    """A row, also where a package is missing or something fails."""
    start = time.perf_counter()
    missing = _missing(case)
    if missing:
        row = Row(group, case.name, case.family, case.expect)
        row.skipped = f"skipped: pip install {' '.join(missing)}"
    else:
        try:
            row = measure(case, group, WAYS)
        except Exception as error:
            row = Row(group, case.name, case.family, case.expect)
            row.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = time.perf_counter() - start
    print(f"{group}: {case.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return row


def _missing(case: Case) -> list[str]:
    return [need for need in case.needs if not _installed(need)]


def _installed(need: str) -> bool:
    try:
        metadata.version(need)
    except metadata.PackageNotFoundError:
        return False
    return True


def _print(group: str, rows: Sequence[Row]) -> None:
    run = [row for row in rows if not row.skipped]
    body = table.by_family(rows) if group == "corpus" else table.by_name(rows)
    print(f"\n## {TITLES.get(group, group)}\n\n{body}\n\n{table.by_kind(run)}", flush=True)
    print(f"\n{table.mended_and_declined(run)}", flush=True)


def _close(rows: Sequence[Row], extra: dict[str, object], file: str | None) -> int:
    print(f"\n{table.LEGEND}")
    for title, said in (
        ("Otherwise than expected", table.surprises(rows)),
        ("TorchDynamo alone, not as in eager mode", table.of_torchdynamo(rows)),
        ("Not as in eager mode", table.problems(rows)),
    ):
        if said:
            print(f"\n## {title}\n\n" + "\n".join(f"* {line}" for line in said))
    if file:
        _write(Path(file), json.dumps(table.document(rows, extra), indent=1))
    differs = table.problems(rows)
    print(f"\n{len(rows)} cases, {len(differs)} differences from eager mode")
    return 1 if differs else 0


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as handle:
        handle.write(text + "\n")
    os.replace(handle.name, file)


def _versions(groups: dict[str, list[Case]]) -> dict[str, str]:
    needs = {need for cases in groups.values() for case in cases for need in case.needs}
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{need: metadata.version(need) for need in sorted(needs) if _installed(need)},
    }
