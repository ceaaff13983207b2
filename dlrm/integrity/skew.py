"""Offline and online: do two files score the same rows alike?

Both are CSV files as ``python -m dlrm.predict`` writes them: the place of the row first, then
``probability``, and perhaps ``label``. Rows are matched by their place.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm.errors import InputError
from dlrm.integrity.drift import check_predictions
from dlrm.integrity.findings import LEVEL, Finding, Section

TOLERANCE = 1e-3  # difference of a probability that no rounding explains (bf16 is within)
SHARE = 1e-3  # of rows that may differ by more, or be in one file only


@dataclass(frozen=True)
class Scored:
    """A file of scores, its rows by ascending place."""

    place: np.ndarray  # (n,) i64
    probability: np.ndarray  # (n,) f64


def read_scores(path: str | Path) -> Scored:
    """Raises InputError, naming file and line."""
    path = Path(path)
    places, values = [], []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if len(header) < 2 or header[1] != "probability":
            raise InputError(
                f"{path}:1: the header is {','.join(header)[:80]!r}; want row,probability or "
                "line,probability, as python -m dlrm.predict writes it"
            )
        for row in reader:
            try:
                number, p = int(row[0]), float(row[1])
            except (ValueError, IndexError):
                number, p = -1, float("nan")
            if not 0 <= p <= 1 or number < 0:
                raise InputError(
                    f"{path}:{reader.line_num}: {','.join(row)[:80]!r} is not a place and a "
                    "probability"
                )
            places.append(number)
            values.append(p)
    if not places:
        raise InputError(f"{path}: no rows")
    unsorted = np.array(places)
    order = np.argsort(unsorted, kind="stable")
    place = unsorted[order]
    if (twice := np.flatnonzero(place[1:] == place[:-1])).size:
        raise InputError(f"{path}: row {place[twice[0]]} is there twice")
    return Scored(place, np.array(values)[order])


def skewed_rows(a: Scored, b: Scored, tolerance: float = TOLERANCE) -> np.ndarray:
    """The places of rows that both files have, with probabilities further apart than allowed."""
    shared, left, right = np.intersect1d(a.place, b.place, True, return_indices=True)
    return shared[np.abs(a.probability[left] - b.probability[right]) > tolerance]


def check_skew(
    offline: str | Path, online: str | Path, tolerance: float = TOLERANCE, level: float = LEVEL
) -> list[Section]:
    """Rows that differ, rows that only one file has, and the drift between the two as a whole."""
    a, b = read_scores(offline), read_scores(online)
    shared = np.intersect1d(a.place, b.place, True)
    different = skewed_rows(a, b, tolerance)
    only = len(a.place) + len(b.place) - 2 * len(shared)
    section = Section("Skew", f"{len(shared):,} rows are in both files.")
    share = len(different) / max(len(shared), 1)
    said = f"{share:.2%} of the rows differ by more than {tolerance:g}"
    said += f": {', '.join(map(str, different[:5]))}" + (" ..." if len(different) > 5 else "")
    section.findings.append(Finding("skew", "rows", share, SHARE, share > SHARE, said))
    alone = only / (len(a.place) + len(b.place))
    said = f"{only:,} rows are in one of the files only"
    section.findings.append(Finding("skew", "missing rows", alone, SHARE, alone > SHARE, said))
    parts = (Path(offline).name, Path(online).name)
    return [section, check_predictions(a.probability, b.probability, parts, level)]
