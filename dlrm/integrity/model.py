"""``python -m dlrm.integrity model CKPT --data ...``: everything that is checked of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlrm import bootstrap
from dlrm.batch import Batch
from dlrm.checkpoint import load_model, resolve
from dlrm.cli import override
from dlrm.datasets.base import Dataset
from dlrm.datasets.reader import Reader, limited
from dlrm.errors import InputError
from dlrm.integrity.calibration import check_calibration
from dlrm.integrity.drift import check_predictions
from dlrm.integrity.findings import LEVEL, Report, Section
from dlrm.integrity.robust import (
    check_missing,
    check_quantization,
    check_staleness,
    score_rows,
)
from dlrm.integrity.rows import read_rows
from dlrm.integrity.slices import check_fairness, check_slices, popularity, slice_labels
from dlrm.metrics import scores
from dlrm.scoring import dataset_of
from dlrm.settings import DataConfig

SAMPLE = 20_000  # rows that are scored again for each missing feature
GROUPS = ("gender", "age", "occupation")


def check_model(
    checkpoint: str | Path,
    *,
    slices: Sequence[str] = (),
    days: int = 8,
    limit_batches: int = 0,
    level: float = LEVEL,
    quiet: bool = True,
    source: dict[str, Any] | None = None,
) -> Report:
    """The report on a checkpoint.

    ``source``: fields of ``DataConfig``; those not given are as in training. ``slices``: features
    to look at besides the popularity of ids. Raises InputError.
    """
    if days < 2:
        raise InputError(f"--days: {days} must be at least 2")
    if not 0 < level < 1:
        raise InputError(f"--level: {level} must lie between 0 and 1")
    path = resolve(checkpoint)
    model, state = load_model(path)
    dataset = dataset_of(state, model, source or {})
    rows = {part: _rows(dataset, part, limit_batches) for part in ("val", "test")}
    if not len(rows["test"]):
        raise InputError(f"{dataset.name}: its test split has no rows")
    train = read_rows(dataset, "train", 200_000)
    logit = {part: score_rows(model, batch) for part, batch in rows.items()}
    test, label = rows["test"], rows["test"].label.numpy()
    named = {"popularity": popularity(test, dataset, train)}
    named |= {name: slice_labels(test, dataset, name) for name in slices}
    few = read_rows_of(test, SAMPLE)
    few_logit = score_rows(model, few)

    steps: list[Any] = [
        lambda: _overall(label, logit["test"]),
        lambda: check_calibration((rows["val"].label.numpy(), logit["val"]), (label, logit["test"]),
                                  level),
        lambda: check_predictions(logit["val"], logit["test"], ("val", "test"), level),
    ]  # fmt: skip
    for name, groups in named.items():
        steps += [
            lambda groups=groups, name=name: check_slices(
                label, logit["test"], groups, f"By {name}", level
            ),
            lambda groups=groups, name=name: check_quantization(
                model, test, logit["test"], groups, name, level
            ),
        ]
    steps.append(lambda: check_missing(model, few, dataset, few_logit, level))
    settings = override(DataConfig(), {**state["source"], **(source or {})}, "settings")
    steps.append(lambda: _staleness(dataset, settings, label, logit["test"], days, level))
    sections: list[Section] = [step() for step in tqdm(steps, disable=quiet, unit="check")]
    sections += _fairness(dataset, settings, label, logit["test"], level)
    return Report(f"Integrity of {path}", f"{dataset.name}: {len(test):,} rows of test.", sections)


def _rows(dataset: Dataset, part: str, limit: int) -> Batch:
    reader = Reader.of(dataset, part, 4096)  # it refuses ids that the tables do not have
    count = limited(len(reader), limit)
    batches = [batch for _, batch in zip(range(count), reader, strict=False)]
    return Batch.concat(batches) if batches else dataset.splits[part].read(0, 0)


def read_rows_of(batch: Batch, most: int) -> Batch:
    """At most ``most`` rows of a batch, evenly."""
    if len(batch) <= most:
        return batch
    return batch.take(np.linspace(0, len(batch) - 1, most).astype(np.int64))


def _overall(label: np.ndarray, logit: np.ndarray) -> Section:
    header = ("metric", "value", "from", "to")
    section = Section("Overall", "95% intervals by the bootstrap.", header=header)
    found = scores(label, logit).as_dict()
    for name, (low, high) in bootstrap.intervals(label, logit).items():
        section.rows.append((name, found[name], low, high))
    return section


def _staleness(
    dataset: Dataset, settings: DataConfig, label: np.ndarray, logit: np.ndarray, days: int,
    level: float,
) -> Section:  # fmt: skip
    if settings.data == "synthetic":
        return Section("Staleness", "Not checked: these data do not say when their rows happened.")
    split: Any = dataset.info.get("settings", {})
    at_random = settings.split == "random" if settings.data == "movielens" else (
        split.get("split") == "random"
    )  # fmt: skip
    if at_random:
        return Section("Staleness", "Not checked: the rows were split at random, not by time.")
    return check_staleness(label, logit, days, level)


def _fairness(
    dataset: Dataset, settings: DataConfig, label: np.ndarray, logit: np.ndarray, level: float
) -> list[Section]:
    if settings.data != "movielens":
        return [Section("Fairness", "Not checked: only MovieLens says who its users are.")]
    groups, who = movielens_groups(dataset, settings.input)
    return [
        check_fairness(label, logit, values[: len(label)], who[: len(label)], f"Fairness by {name}",
                       level)
        for name, values in groups.items()
    ]  # fmt: skip


def movielens_groups(dataset: Dataset, folder: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Gender, age and occupation of the users of the test rows, (n,) str each; and the users."""
    from dlrm.datasets.movielens import AGES, MovieLensSplit, find_movielens
    from dlrm.datasets.movielens_files import read_ratings

    users = read_ratings(find_movielens(folder or None)).users
    split = dataset.splits["test"]
    assert isinstance(split, MovieLensSplit)
    who = split.rows.user[split.first : split.last]
    bucket = np.searchsorted(AGES, [u.age for u in users], side="right") - 1
    of_user = {
        "gender": [u.gender for u in users],
        "age": [f"from {AGES[b]}" for b in bucket],
        "occupation": [u.occupation for u in users],
    }
    return {name: np.array(values)[who] for name, values in of_user.items()}, who
