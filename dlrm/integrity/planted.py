"""Faults planted in clean data, with the truth of where they are: what the detectors are scored on.

Each trial draws new rows of synthetic data. A trial function takes ``(world, rng, faulty)`` and
returns two sets: where it planted something (none unless ``faulty``), and what the detector found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.datasets.base import Dataset
from dlrm.datasets.planted import PlantedTruth
from dlrm.datasets.synthetic import SyntheticConfig, synthetic_dataset
from dlrm.integrity.calibration import check_calibration
from dlrm.integrity.columns import check_coverage, check_unseen
from dlrm.integrity.drift import check_drift, check_predictions
from dlrm.integrity.duplicates import duplicate_rows, row_hashes
from dlrm.integrity.findings import LEVEL, Section
from dlrm.integrity.forms import Source
from dlrm.integrity.fraud import bad_ids
from dlrm.integrity.guard import table_weights
from dlrm.integrity.leakage import check_fall, check_leakage, check_order
from dlrm.integrity.robust import (
    check_missing,
    check_quantization,
    check_staleness,
    score_rows,
)
from dlrm.integrity.rows import one_id, table_ids
from dlrm.integrity.schema import check_ranges, check_schema
from dlrm.integrity.skew import Scored, skewed_rows
from dlrm.integrity.slices import check_fairness, check_slices
from dlrm.metrics import sigmoid
from dlrm.model import DLRM

Found = tuple[Set[Any], Set[Any]]
Trial = Callable[["World", np.random.Generator, bool], Found]
ROWS = 10_000  # of each of the two sets of a trial
USERS = 1000
LABELS = 20_000  # predictions of a trial


@dataclass(frozen=True)
class World:
    """Clean data to draw from: rows with many features, and rows of users."""

    dataset: Dataset
    pool: Batch
    users: Dataset
    people: Batch

    @staticmethod
    def of(seed: int) -> World:
        """Synthetic data of a seed."""
        data = synthetic_dataset(SyntheticConfig(n_train=1 << 17, n_val=1, n_test=1, seed=seed))
        users = synthetic_dataset(
            SyntheticConfig(rows=(USERS, 200, 50), dense_in=4, zipf=(0.3, 1.0, 0.5),
                            n_train=1 << 17, n_val=1, n_test=1, seed=seed, null=(), pairs=())
        )  # fmt: skip
        return World(
            data,
            data.splits["train"].read(0, 1 << 17),
            users,
            users.splits["train"].read(0, 1 << 17),
        )

    def draw(self, rng: np.random.Generator, sets: int = 2, rows: int = ROWS) -> list[Batch]:
        """Sets of rows that have none in common."""
        picked = rng.permutation(len(self.pool))[: sets * rows].reshape(sets, rows)
        return [self.pool.take(index) for index in picked]

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.dataset.dense_names, *self.dataset.table_names)

    @property
    def source(self) -> Source:
        return Source("clean", self.dataset, None)


def _bad(section: Section) -> set[str]:
    return {f.where for f in section.bad}


def _some(rng: np.random.Generator, names: tuple[str, ...], count: int) -> list[str]:
    return [str(n) for n in rng.choice(names, size=count, replace=False)]


def with_dense(batch: Batch, place: int, values: np.ndarray) -> Batch:
    """The rows with another dense feature (B,)."""
    dense = batch.dense.clone()
    dense[:, place] = torch.from_numpy(values.astype(np.float32))
    return dataclasses.replace(batch, dense=dense)


def with_ids(batch: Batch, table: int, ids: np.ndarray) -> Batch:
    """The rows with other ids (B,) of a table, one each."""
    flat = batch.ids.clone()
    flat[batch.offsets[table, 0] : batch.offsets[table, -1]] = torch.from_numpy(
        ids.astype(np.int64)
    )
    return dataclasses.replace(batch, ids=flat)


def changed(world: World, batch: Batch, name: str, rng: np.random.Generator, share: float) -> Batch:
    """One feature changed: a number moved by 0.7, ids made uniform in a ``share`` of the rows."""
    names = world.dataset.dense_names
    if name in names:
        place = names.index(name)
        return with_dense(batch, place, batch.dense[:, place].numpy() + 0.7)
    f = world.dataset.table_names.index(name)
    ids = one_id(batch, f)
    other = rng.integers(world.dataset.rows[f], size=len(ids))
    return with_ids(batch, f, np.where(rng.random(len(ids)) < share, other, ids))


# Data


def schema(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    (batch,) = world.draw(rng, 1)
    truth: set[str] = set()
    for name in _some(rng, ("label", *world.features), 3) if faulty else []:
        row = int(rng.integers(len(batch)))
        if name == "label":
            batch.label[row] = 2
        elif name in world.dataset.dense_names:
            batch.dense[row, world.dataset.dense_names.index(name)] = float("nan")
        else:
            f = world.dataset.table_names.index(name)
            batch.ids[int(batch.offsets[f, row])] = world.dataset.rows[f]
        truth.add(f"part {name}")
    return truth, _bad(check_schema(batch, world.dataset, "part"))


def ranges(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    names = _some(rng, world.dataset.dense_names, 2) if faulty else []
    for name in names:
        place = world.dataset.dense_names.index(name)
        values = b.dense[:, place].numpy().copy()
        values[rng.random(len(values)) < 0.01] *= 100  # another unit, in one row of a hundred
        b = with_dense(b, place, values)
    return {f"B {n}" for n in names}, _bad(check_ranges(a, b, world.dataset, "B"))


def coverage(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    names = _some(rng, world.features, 3) if faulty else []
    for name in names:
        gone = rng.random(len(b)) < 0.15
        if name in world.dataset.dense_names:
            place = world.dataset.dense_names.index(name)
            b = with_dense(b, place, np.where(gone, np.nan, b.dense[:, place].numpy()))
            continue
        lengths, ids = b.lengths().numpy().copy(), []
        lengths[world.dataset.table_names.index(name), gone] = 0
        for f in range(b.tables):
            own, row = table_ids(b, f)
            ids.append(own[lengths[f][row] > 0])
        b = Batch.from_bags(b.dense, lengths, np.concatenate(ids), b.label)
    return set(names), _bad(check_coverage(a, b, world.source, ("A", "B")))


def unseen(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    names = _some(rng, world.dataset.table_names, 2) if faulty else []
    for name in names:
        f = world.dataset.table_names.index(name)
        ids = one_id(a, f)
        a = with_ids(a, f, np.where(ids % 4 == 1, 0, ids))  # a quarter of the ids is new in B
    return set(names), _bad(check_unseen(a, b, world.source, ("A", "B")))


def drift(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    names = _some(rng, world.features, 3) if faulty else []
    for name in names:
        b = changed(world, b, name, rng, 0.5)
    return set(names), _bad(check_drift(a, b, world.dataset, ("A", "B")))


def _logits(world: World, rng: np.random.Generator, rows: int) -> np.ndarray:
    truth = world.dataset.truth
    assert isinstance(truth, PlantedTruth)
    return truth.logit(world.draw(rng, 1, rows)[0]).numpy()


def predictions(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = np.split(_logits(world, rng, 2 * ROWS), 2)
    b = b + 0.7 if faulty else b
    return {"prediction"} if faulty else set(), _bad(check_predictions(a, b, ("A", "B")))


def _leaky(world: World, batch: Batch, name: str, rng: np.random.Generator, noise: float) -> Batch:
    """A feature replaced by the label and noise."""
    signal = batch.label.numpy() + rng.normal(size=len(batch)) * noise
    if name in world.dataset.dense_names:
        return with_dense(batch, world.dataset.dense_names.index(name), signal)
    f = world.dataset.table_names.index(name)
    rank = np.argsort(np.argsort(signal))
    return with_ids(batch, f, rank * world.dataset.rows[f] // len(batch))


def leakage(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    (batch,) = world.draw(rng, 1)
    names = _some(rng, world.features, 2) if faulty else []
    for name in names:
        batch = _leaky(world, batch, name, rng, 0.5)  # an AUC of 0.92
    return set(names), _bad(check_leakage(batch, world.dataset, "train"))


def leakage_by_time(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    names = _some(rng, world.features, 2) if faulty else []
    for name in names:
        a = _leaky(world, a, name, rng, 1.0)  # an AUC of 0.76 in training, none in test
        blank = dataclasses.replace(b, label=torch.full_like(b.label, 0.5))
        b = dataclasses.replace(_leaky(world, blank, name, rng, 1.0), label=b.label)
    return set(names), _bad(check_fall(a, b, world.dataset))


def order(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    times = np.sort(rng.integers(1 << 30, size=1000))
    cut = rng.permutation(times) if faulty else times
    source = dataclasses.replace(world.source, times={"train": cut[:900], "test": cut[900:]})
    return {"test"} if faulty else set(), _bad(check_order(source))


def duplicates(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    (batch,) = world.draw(rng, 1)
    copies = rng.choice(len(batch), size=100 if faulty else 0, replace=False)
    batch = Batch.concat([batch, batch.take(copies)]) if faulty else batch
    truth = set(range(len(batch) - len(copies), len(batch)))
    return truth, set(np.flatnonzero(duplicate_rows(batch)).tolist())


def overlap(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    a, b = world.draw(rng)
    copies = a.take(rng.choice(len(a), size=100, replace=False))
    whole = Batch.concat([b, copies]) if faulty else b
    truth = set(range(len(b), len(whole)))
    return truth, set(np.flatnonzero(np.isin(row_hashes(whole), row_hashes(a))).tolist())


def _people(
    world: World, rng: np.random.Generator, rows: int, change: Callable[..., np.ndarray]
) -> Found:
    """Eight users with at least ``rows`` rows whose labels are changed."""
    batch = world.people.take(rng.permutation(len(world.people))[: 4 * ROWS])
    ids = one_id(batch, 0)
    busy = np.flatnonzero(np.bincount(ids, minlength=USERS) >= rows)
    chosen = rng.choice(busy, size=8, replace=False)
    label = change(batch.label.numpy().copy(), np.isin(ids, chosen))
    batch = dataclasses.replace(batch, label=torch.from_numpy(label))
    return set(chosen.tolist()), set(bad_ids(batch, world.users, "C1").tolist())


def click_fraud(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    def farm(label: np.ndarray, own: np.ndarray) -> np.ndarray:
        if faulty:
            label[own & (rng.random(len(label)) < 0.9)] = 1
        return label

    truth, found = _people(world, rng, 30, farm)
    return truth if faulty else set(), found


def poisoning(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    def turn(label: np.ndarray, own: np.ndarray) -> np.ndarray:
        return np.where(own, 1 - label, label).astype(np.float32) if faulty else label

    truth, found = _people(world, rng, 80, turn)
    return truth if faulty else set(), found


def skew(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    logit = _logits(world, rng, ROWS)
    offline = sigmoid(logit)
    online = offline * (1 + rng.uniform(-(2.0**-9), 2.0**-9, size=len(logit)) / 8)  # roundings
    truth = rng.choice(ROWS, size=100, replace=False) if faulty else np.zeros(0, dtype=np.int64)
    online[truth] = sigmoid(logit[truth] + rng.choice([-0.5, 0.5], size=len(truth)))
    place = np.arange(ROWS)
    found = skewed_rows(Scored(place, offline), Scored(place, online))
    return set(truth.tolist()), set(found.tolist())


# Models: labels are drawn from probabilities that are known


def _drawn(rng: np.random.Generator, logit: np.ndarray) -> np.ndarray:
    return (rng.random(len(logit)) < sigmoid(logit)).astype(np.float32)


def calibration(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    x = _logits(world, rng, 2 * LABELS)
    y = _drawn(rng, x)
    seen = 1.4 * x + 0.2 if faulty else x
    val, test = (y[:LABELS], seen[:LABELS]), (y[LABELS:], seen[LABELS:])
    return {"test"} if faulty else set(), _bad(check_calibration(val, test))


def slices(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    x = _logits(world, rng, LABELS)
    groups = rng.integers(10, size=LABELS).astype(str)
    chosen = _some(rng, tuple(map(str, range(10))), 2) if faulty else []
    y = _drawn(rng, np.where(np.isin(groups, chosen), x + 0.5, x))
    return set(chosen), _bad(check_slices(y, x, groups, "slices"))


def fairness(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    x = _logits(world, rng, LABELS)
    who = rng.integers(500, size=LABELS)
    groups = np.array(["f", "m"])[rng.integers(2, size=500)][who]
    y = _drawn(rng, x)
    blind = rng.permutation(x)  # of one group the model knows nothing
    seen = np.where(groups == "f", blind, x) if faulty else x
    section = check_fairness(y, seen, groups, who, "groups")
    return {"groups"} if faulty else set(), {f.where for f in section.bad if f.check == "fairness"}


def staleness(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    x = _logits(world, rng, LABELS)
    age = np.linspace(0, 1, LABELS) if faulty else np.zeros(LABELS)
    seen = x + rng.normal(size=LABELS) * age * 1.2  # what the model missed grows day by day
    return {"test"} if faulty else set(), _bad(check_staleness(_drawn(rng, x), seen, 8))


def _truthful(
    rng: np.random.Generator, outlier: float, scale: float
) -> tuple[DLRM, Batch, Dataset, np.ndarray]:
    """A model, rows, the data set they are of, and logits, from which the labels are drawn.

    ``outlier``: the first column of all tables is that large, and ignored by the model; but the
    steps of quantization have to span it. ``scale``: of the first table, next to the others.
    """
    seed = int(rng.integers(2**31))
    data = synthetic_dataset(
        SyntheticConfig(rows=(50, 40, 30), dense_in=3, n_train=ROWS, n_val=1, n_test=1, seed=seed)
    )
    torch.manual_seed(seed)
    model = DLRM(DLRMConfig(rows=data.rows, dense_in=3, dim=8, bottom=(8,), top=(16,),
                            interaction="cat")).eval()  # fmt: skip
    with torch.no_grad():
        for weight in table_weights(model):
            weight.mul_(4)
            weight[:, 0] += outlier
        first = model.top[0]
        assert isinstance(first, torch.nn.Linear)
        first.weight[:, 8::8] = 0
        first.weight[:, 8:16] *= scale
    batch = data.splits["train"].read(0, ROWS)
    logit = score_rows(model, batch)
    label = torch.from_numpy(_drawn(rng, logit))
    return model, dataclasses.replace(batch, label=label), data, logit


def quantization(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    model, batch, _, logit = _truthful(rng, 1000.0 if faulty else 0.0, 1.0)
    bad = _bad(check_quantization(model, batch, logit, np.repeat("one", len(batch)), "none"))
    # 15 steps are coarse for any table: only int8 is expected to cost nothing
    return {"int8, all"} if faulty else set(), {name for name in bad if name == "int8, all"}


def missing(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    model, batch, data, logit = _truthful(rng, 0.0, 20.0 if faulty else 1.0)
    return {"C1"} if faulty else set(), _bad(check_missing(model, batch, data, logit))


@dataclass(frozen=True)
class Detector:
    """A detector: what is planted, in which units, and the chance of an alarm in clean data."""

    name: str
    unit: str
    trial: Trial
    level: float  # 0: exact


DATA = (
    Detector("schema", "column", schema, 0),
    Detector("ranges", "feature", ranges, 0),
    Detector("coverage", "feature", coverage, LEVEL),
    Detector("out of vocabulary", "table", unseen, LEVEL),
    Detector("drift (PSI)", "feature", drift, LEVEL),
    Detector("prediction drift", "set", predictions, LEVEL),
    Detector("leakage, one feature", "feature", leakage, LEVEL),
    Detector("leakage by time", "feature", leakage_by_time, LEVEL),
    Detector("order of time", "set", order, 0),
    Detector("duplicates", "row", duplicates, 0),
    Detector("train/test overlap", "row", overlap, 0),
    Detector("click fraud", "id", click_fraud, LEVEL),
    Detector("poisoned users", "id", poisoning, LEVEL),
    Detector("offline/online skew", "row", skew, 0),
)
MODEL = (
    Detector("calibration", "set", calibration, LEVEL),
    Detector("slices", "slice", slices, LEVEL),
    Detector("fairness", "set", fairness, LEVEL),
    Detector("staleness", "set", staleness, LEVEL),
    Detector("quantization", "set", quantization, LEVEL),
    Detector("missing features", "feature", missing, LEVEL),
)
