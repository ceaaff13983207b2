"""``python -m dlrm.integrity data A [B]``: everything that is checked of data."""

from __future__ import annotations

from pathlib import Path

from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.integrity.columns import check_coverage, check_unseen
from dlrm.integrity.drift import check_drift
from dlrm.integrity.duplicates import check_duplicates, check_overlap
from dlrm.integrity.findings import LEVEL, Report, Section
from dlrm.integrity.forms import Source, open_source
from dlrm.integrity.fraud import check_users
from dlrm.integrity.leakage import TOO_GOOD, check_fall, check_leakage, check_order
from dlrm.integrity.rows import read_rows
from dlrm.integrity.schema import check_ranges, check_schema, same_features
from dlrm.integrity.skew import check_skew

ROWS = 500_000  # of a part, unless the user wants more


def check_data(
    a: str,
    b: str = "",
    *,
    split: str = "random",
    users: str = "",
    rows: int = ROWS,
    level: float = LEVEL,
    leak_auc: float = TOO_GOOD,
) -> Report:
    """The report on a data set ``a``; with ``b``, on ``b`` as it follows ``a``.

    Each is a preprocessed Criteo folder, a MovieLens folder or ``synthetic:...``; or both are files
    of scores, offline and online. ``users``: the table whose ids are judged; by default ``user``,
    or the one with the most rows up to 100,000. ``rows``: of each part at most, 0: all.
    """
    if not 0 < level < 1:
        raise InputError(f"--level: {level} must lie between 0 and 1")
    if not 0.5 < leak_auc <= 1:
        raise InputError(f"--leak-auc: {leak_auc} must lie between 0.5 and 1")
    if rows < 0:
        raise InputError(f"--rows: {rows} must be 0 or more")
    if Path(a).is_file() or (b and Path(b).is_file()):
        if not (Path(a).is_file() and b and Path(b).is_file()):
            raise InputError("files of scores are compared with each other: name two of them")
        return Report(
            "Skew between two files of scores", f"{a} and {b}", check_skew(a, b, level=level)
        )
    first = open_source(a, split)
    if not b:
        sections = _parts(first, users, rows, level, leak_auc)
        return Report(f"Integrity of {first.dataset.name}", _about(first), sections)
    second = open_source(b, split)
    same_features(first.dataset, second.dataset)
    sections = _pair(first, second, users, rows, level, leak_auc)
    lead = f"{_about(second)} after {_about(first)}"
    return Report(f"Integrity of {b}, compared with {a}", lead, sections)


def _about(source: Source) -> str:
    sizes = ", ".join(f"{part} {len(s):,}" for part, s in source.dataset.splits.items())
    return f"{source.name}: rows {sizes}"


def _parts(source: Source, users: str, rows: int, level: float, leak_auc: float) -> list[Section]:
    """One data set: its parts by themselves, and test beside training."""
    dataset = source.dataset
    batches = {part: read_rows(dataset, part, rows) for part in dataset.splits}
    sections = [check_schema(batch, dataset, part) for part, batch in batches.items()]
    filled = {part: batch for part, batch in batches.items() if len(batch)}
    sections += [check_duplicates(batch, part) for part, batch in filled.items()]
    if any(s.bad for s in sections if s.title.startswith("Schema")):
        return [*sections, Section("All else", "Not checked: the schema is broken.")]
    if "train" in filled:
        train = filled["train"]
        sections.append(check_leakage(train, dataset, "train", level, leak_auc))
        if "test" in filled:
            sections += _follow(train, filled["test"], source, ("train", "test"), level)
            sections += [check_fall(train, filled["test"], dataset, level), check_order(source)]
        sections.append(_users(train, source, users, level))
    return sections


def _pair(
    first: Source, second: Source, users: str, rows: int, level: float, leak_auc: float
) -> list[Section]:
    """The training part of one data set beside that of another, or what parts there are."""
    a, b = (_largest(s, rows) for s in (first, second))
    sections = [check_schema(a, first.dataset, "A"), check_schema(b, second.dataset, "B")]
    if any(s.bad for s in sections):
        return [*sections, Section("All else", "Not checked: the schema is broken.")]
    sections.append(check_duplicates(b, "B"))
    sections.append(check_leakage(b, second.dataset, "B", level, leak_auc))
    sections += _follow(a, b, first, ("A", "B"), level)
    sections.append(_users(b, second, users, level))
    return sections


def _largest(source: Source, rows: int) -> Batch:
    sizes = {part: len(split) for part, split in source.dataset.splits.items()}
    return read_rows(source.dataset, max(sizes, key=lambda part: sizes[part]), rows)


def _follow(
    a: Batch, b: Batch, source: Source, parts: tuple[str, str], level: float
) -> list[Section]:
    return [
        check_ranges(a, b, source.dataset, parts[1]),
        check_coverage(a, b, source, parts, level),
        check_unseen(a, b, source, parts),
        check_overlap(a, b, parts),
        check_drift(a, b, source.dataset, parts, level),
    ]


def _users(batch: Batch, source: Source, table: str, level: float) -> Section:
    dataset = source.dataset
    if not table:
        sizes = {
            n: k for n, k in zip(dataset.table_names, dataset.rows, strict=True) if k <= 100_000
        }
        table = "user" if "user" in sizes else max(sizes, key=lambda n: sizes[n], default="")
    if not table:
        return Section("Fraud", "Not checked: no table of up to 100,000 rows; name one by --users.")
    return check_users(batch, dataset, table, level)
