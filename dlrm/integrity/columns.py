"""Each feature by itself: how often it is there, and how many of its ids training never saw."""

from __future__ import annotations

import numpy as np

from dlrm.batch import Batch
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.forms import Source
from dlrm.integrity.rows import table_ids

CHANGE = 0.05  # change of a share that matters, whatever its significance
UNSEEN = 0.1  # share of unseen ids that matters


def present(batch: Batch, source: Source) -> dict[str, np.ndarray]:
    """For each feature whether a row has a value: (B,) bool. NaN, an empty bag, and where the data
    set has such, a dense 0 and the id of unknown values, are none.
    """
    found = {}
    for i, name in enumerate(source.dataset.dense_names):
        values = batch.dense[:, i].numpy()
        found[name] = np.isfinite(values) & (not source.zero_is_missing or values != 0)
    for f, name in enumerate(source.dataset.table_names):
        ids, row = table_ids(batch, f)
        known = row if source.unknown is None else row[ids != source.unknown]
        found[name] = np.bincount(known, minlength=len(batch)) > 0
    return found


def check_coverage(
    a: Batch, b: Batch, source: Source, parts: tuple[str, str], level: float = LEVEL
) -> Section:
    """The share of rows with a value, in the reference and beside it; a change is bad if it is
    larger than ``CHANGE`` and significant (two proportions, Holm over the features).
    """
    before, after = present(a, source), present(b, source)
    section = Section(
        f"Coverage, {parts[0]} to {parts[1]}",
        "The share of rows that have a value.",
        header=("feature", parts[0], parts[1]),
    )
    p = []
    for name, here in before.items():
        p.append(two_shares(here.sum(), len(here), after[name].sum(), len(after[name])))
    for (name, here), corrected in zip(before.items(), holm(p), strict=True):
        x, y = float(here.mean()), float(after[name].mean())
        bad = abs(y - x) > CHANGE and corrected < level
        said = f"{name}: {x:.1%} of the rows of {parts[0]} have a value, {y:.1%} of {parts[1]}"
        section.findings.append(
            Finding("coverage", name, abs(y - x), CHANGE, bad, said, float(corrected))
        )
        section.rows.append((name, x, y))
    return section


def check_unseen(a: Batch, b: Batch, source: Source, parts: tuple[str, str]) -> Section:
    """The share of ids that the reference does not hold: rows of a table that were never trained.

    The id of unknown values, where there is one, counts among them. A finding is bad if the share's
    lower 99% bound is above ``UNSEEN``.
    """
    section = Section(
        f"Out of vocabulary, {parts[1]}",
        f"Ids of {parts[1]} that {parts[0]} does not hold, and ids that stand for unknown values.",
        header=("table", "unseen or unknown", "distinct ids", f"rows of the table in {parts[0]}"),
    )
    for f, name in enumerate(source.dataset.table_names):
        known, (ids, _) = np.unique(table_ids(a, f)[0]), table_ids(b, f)
        if source.unknown is not None:
            known = known[known != source.unknown]
        share = float(1 - np.isin(ids, known).mean()) if len(ids) else 0.0
        error = 2.33 * (share * (1 - share) / max(len(ids), 1)) ** 0.5
        said = f"{name}: {share:.1%} of the ids of {parts[1]} were never seen in {parts[0]}"
        bad = share - error > UNSEEN
        section.findings.append(Finding("out of vocabulary", name, share, UNSEEN, bad, said))
        covered = len(known) / source.dataset.rows[f]
        section.rows.append((name, share, len(np.unique(ids)), covered))
    return section


def two_shares(k: float, n: float, m: float, o: float) -> float:
    """The two-sided p value of the shares k / n and m / o being the same, by the normal."""
    from scipy.stats import norm

    if not n or not o:
        return 1.0
    pooled = (k + m) / (n + o)
    error = (pooled * (1 - pooled) * (1 / n + 1 / o)) ** 0.5
    return float(2 * norm.sf(abs(k / n - m / o) / error)) if error > 0 else 1.0
