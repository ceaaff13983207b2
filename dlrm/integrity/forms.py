"""The forms of data sets that a command takes by name, and when their rows happened."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.datasets.base import Dataset
from dlrm.errors import InputError

SYNTHETIC = ("samples", "seed", "dense_in", "zipf", "pooling", "positive_rate", "label_noise")
UNKNOWN = 0  # the row for missing and unknown ids, where a data set has one


@dataclass(frozen=True)
class Source:
    """A data set, and what the checks want to know beside it."""

    name: str  # as the user gave it
    dataset: Dataset
    unknown: int | None  # the id that stands for missing and unknown values; None: there is none
    zero_is_missing: bool = False  # of dense values
    times: dict[str, np.ndarray] = field(default_factory=dict)  # of each part's rows, if known
    in_order: bool | None = None  # whether the parts follow each other in time; None: not known


def open_source(name: str, split: str = "random") -> Source:
    """A preprocessed Criteo folder, a MovieLens folder, or ``synthetic`` with settings.

    ``synthetic:samples=20000,seed=1`` sets fields of ``SyntheticConfig`` (``samples`` of training;
    val and test have a tenth each). ``split`` is for MovieLens: random or time. Checksums of
    preprocessed data are compared. Raises InputError.
    """
    if name.partition(":")[0] == "synthetic":
        return _synthetic(name)
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"{name}: no such folder; name a preprocessed Criteo folder, a MovieLens folder, or "
            "synthetic, as synthetic:samples=20000,seed=1"
        )
    if (folder / "meta.json").exists():
        from dlrm.datasets.criteo.load import load_criteo

        dataset = load_criteo(folder, verify=True)
        settings: Any = dataset.info["settings"]
        return Source(name, dataset, UNKNOWN, True, in_order=settings["split"] != "random")
    from dlrm.datasets.movielens import load_movielens, split_order
    from dlrm.datasets.movielens_files import read_ratings

    dataset = load_movielens(folder, split)
    time = read_ratings(folder).time
    ordered, times, first = time[split_order(time, split)], {}, 0
    for part, rows in dataset.splits.items():
        times[part] = ordered[first : first + len(rows)]
        first += len(rows)
    return Source(name, dataset, UNKNOWN, times=times)


def _synthetic(name: str) -> Source:
    from dlrm.datasets.synthetic import SyntheticConfig, synthetic_dataset

    values: dict[str, Any] = {}
    for item in filter(None, name.partition(":")[2].split(",")):
        key, _, text = item.partition("=")
        try:
            values[key.replace("-", "_")] = float(text) if "." in text else int(text)
        except ValueError:
            raise InputError(f"{name}: {item!r} is not NAME=NUMBER") from None
    samples = values.pop("samples", 100_000)
    if not isinstance(samples, int) or samples < 1:
        raise InputError(f"{name}: samples must be a whole number, at least 1")
    tenth = max(samples // 10, 1000)
    if unknown := [key for key in values if key not in SYNTHETIC]:
        raise InputError(f"{name}: no setting {unknown[0]!r}; there are {', '.join(SYNTHETIC)}")
    config = SyntheticConfig(n_train=samples, n_val=tenth, n_test=tenth)
    return Source(name, synthetic_dataset(dataclasses.replace(config, **values)), None)
