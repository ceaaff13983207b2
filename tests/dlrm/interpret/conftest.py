"""A model trained on planted data, once for all tests that need one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from dlrm.batch import Batch
from dlrm.checkpoint import load_model
from dlrm.datasets.base import Dataset
from dlrm.datasets.planted import PlantedTruth
from dlrm.datasets.synthetic import Pair, SyntheticConfig, synthetic_dataset
from dlrm.interpret.score import trained
from dlrm.model import DLRM

PAIRS = (Pair("C1", "C2", 0.9), Pair("C3", "C4", 0.7), Pair("I1", "C5", 0.5))


@dataclass(frozen=True)
class Planted:
    """A model, its data, rows to explain and rows to start from."""

    model: DLRM
    dataset: Dataset
    truth: PlantedTruth
    run: Path
    test: Batch
    background: Batch


def planted(folder: Path, **changes: object) -> Planted:
    """Train on data with three interactions and two features that do nothing."""
    config = SyntheticConfig(
        rows=(12,) * 6, dense_in=4, zipf=0.5, n_train=80_000, n_val=2000, n_test=4000,
        main_scale=1.5, pairs=PAIRS, null=("I3", "C6"), **changes,
    )  # type: ignore[arg-type]  # fmt: skip
    dataset = synthetic_dataset(config)
    trained(dataset, folder, seed=0)
    assert isinstance(dataset.truth, PlantedTruth)
    return Planted(
        load_model(folder)[0], dataset, dataset.truth, folder,
        dataset.splits["test"].read(0, 400), dataset.splits["train"].read(0, 1000),
    )  # fmt: skip


@pytest.fixture(scope="session")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Bags of Poisson sizes, empty ones among them."""
    return planted(tmp_path_factory.mktemp("bags"), pooling=2.0, pooling_kind="poisson")


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """One id a bag, one label in ten flipped."""
    return planted(tmp_path_factory.mktemp("noisy"), label_noise=0.1)
