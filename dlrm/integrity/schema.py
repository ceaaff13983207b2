"""Schema and ranges, by pandera: what every row must be, and what a reference data set had.

The schema follows from the data set alone: labels are 0 or 1, dense values are finite, ids lie in
their tables. Ranges are learned from a reference: a dense value far outside of what the reference
holds is no error, but many of them are news.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.integrity.findings import Finding, Section, names
from dlrm.integrity.rows import table_ids

CHUNK = 1 << 16  # rows that pandera sees at a time
OUTSIDE = 1e-3  # share of a feature's values outside of the reference's range that is bad
SLACK = 0.5  # how far a range reaches beyond the reference's values, in units of its width


@dataclass(frozen=True)
class Failures:
    """Values of one column that the schema refuses: how many, and the first row and value."""

    column: str
    rule: str
    count: int
    row: int
    value: float


def check_schema(batch: Batch, dataset: Dataset, part: str) -> Section:
    """Every row against the schema; a finding for each column."""
    failures: dict[tuple[str, str], Failures] = {}
    for start in range(0, len(batch), CHUNK):
        piece = batch.slice(start, min(start + CHUNK, len(batch)))
        for f in _failures(piece, dataset, start):
            key = (f.column, f.rule)
            old = failures.get(key)
            failures[key] = f if old is None else _add(old, f)
    section = Section(f"Schema, {part}", f"{len(batch):,} rows.")
    columns = ("label", *dataset.dense_names, *dataset.table_names)
    for column in columns:
        own = [f for f in failures.values() if f.column == column]
        count = sum(f.count for f in own)
        said = "; ".join(
            f"{part}: {column}: {f.count:,} not {f.rule}, first {f.value:g} in row {f.row}"
            for f in own
        )
        section.findings.append(Finding("schema", f"{part} {column}", count, 0, count > 0, said))
    return section


def _add(old: Failures, new: Failures) -> Failures:
    return Failures(old.column, old.rule, old.count + new.count, old.row, old.value)


def _failures(batch: Batch, dataset: Dataset, first: int) -> list[Failures]:
    pandas, pandera = _libraries()
    frames: list[tuple[Any, Any, np.ndarray]] = []
    columns = {"label": batch.label.numpy()}
    rules = {"label": pandera.Column(float, _isin(pandera), coerce=True, nullable=True)}
    for i, name in enumerate(dataset.dense_names):
        columns[name] = batch.dense[:, i].numpy()
        rules[name] = pandera.Column(float, _finite(pandera), coerce=True, nullable=True)
    frames.append(
        (pandas.DataFrame(columns), pandera.DataFrameSchema(rules), np.arange(len(batch)))
    )
    for f, name in enumerate(dataset.table_names):
        ids, row = table_ids(batch, f)
        within = pandera.Check(
            _within(dataset.rows[f]), name=f"an id from 0 to {dataset.rows[f] - 1}", ignore_na=False
        )
        schema = pandera.DataFrameSchema({name: pandera.Column("int64", within)})
        frames.append((pandas.DataFrame({name: ids}), schema, row))
    found = []
    for frame, schema, row in frames:
        try:
            schema.validate(frame, lazy=True)
        except pandera.errors.SchemaErrors as error:
            cases = error.failure_cases
            for (column, rule), group in cases.groupby(["column", "check"], sort=False):
                at = int(group["index"].iloc[0])
                value = float(frame[column].iloc[at])
                found.append(Failures(column, rule, len(group), first + int(row[at]), value))
    return found


def _isin(pandera: Any) -> Any:
    return pandera.Check(lambda s: s.isin([0.0, 1.0]), name="0 or 1", ignore_na=False)


def _finite(pandera: Any) -> Any:
    return pandera.Check(lambda s: np.isfinite(s), name="a finite number", ignore_na=False)


def _within(rows: int) -> Any:
    return lambda s: (s >= 0) & (s < rows)


def check_ranges(
    reference: Batch, batch: Batch, dataset: Dataset, part: str, limit: float = OUTSIDE
) -> Section:
    """The share of each dense feature's values that lie outside of the reference's range."""
    section = Section(f"Ranges, {part}", "Dense values outside of what the reference holds.")
    for i, name in enumerate(dataset.dense_names):
        known, values = reference.dense[:, i].numpy(), batch.dense[:, i].numpy()
        known = known[np.isfinite(known)]
        if not len(known) or not len(values):
            continue
        low, high = float(known.min()), float(known.max())
        slack = SLACK * (high - low)
        outside = float(((values < low - slack) | (values > high + slack)).mean())
        said = f"{part}: {name}: {outside:.2%} of its values lie outside of {low:.4g} to {high:.4g}"
        section.findings.append(
            Finding("range", f"{part} {name}", outside, limit, outside > limit, said)
        )
    return section


def same_features(a: Dataset, b: Dataset) -> None:
    """Raise InputError unless two data sets have the same features with the same meaning."""
    for what in ("dense_names", "table_names"):
        left, right = getattr(a, what), getattr(b, what)
        if left != right:
            raise InputError(
                f"{a.name} and {b.name} have other {what.replace('_', ' ')}: {names(left)}; "
                f"{names(right)}"
            )
    meaning = [d.info.get("vocabulary") for d in (a, b)]
    if meaning[0] != meaning[1]:
        raise InputError(
            "ids mean other things in the two data sets: preprocess the second one with "
            "--vocab-from the first"
        )
    if a.rows != b.rows:
        raise InputError(f"{a.name} and {b.name} have tables of other sizes: {a.rows}; {b.rows}")


def _libraries() -> tuple[Any, Any]:
    try:
        import pandas
        import pandera.pandas as pandera
    except ImportError:
        raise InputError("the checks need more packages: pip install 'dlrm[integrity]'") from None
    return pandas, pandera
