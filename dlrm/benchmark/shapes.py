"""The models that are raced, by name, and batches of new ids for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from dlrm.batch import Batch
from dlrm.config import DCNV2_POOLING, DCNV2_ROWS, PRESETS, DLRMConfig
from dlrm.errors import InputError

CAP = 200_000  # rows of a dcnv2 table at most: 0.8 GB in all, where the published ones take 105 GB


@dataclass(frozen=True)
class Shape:
    """A model, how many ids its bags have, and the batch sizes it is measured at."""

    name: str
    model: DLRMConfig
    pooling: tuple[int, ...]  # ids per bag of each table
    batches: tuple[int, ...]
    about: str = ""

    def scaled(self, rows: int) -> Shape:
        """The same with at most ``rows`` rows in a table."""
        model = dataclasses.replace(self.model, rows=tuple(min(n, rows) for n in self.model.rows))
        return dataclasses.replace(self, model=model)

    def table_bytes(self) -> int:
        """Memory of the tables in f32."""
        return sum(self.model.rows) * self.model.dim * 4


def kaggle(rows: int, tables: int = 26) -> DLRMConfig:
    """The Kaggle preset's layers over tables of one size."""
    return DLRMConfig.preset("kaggle", rows=(rows,) * tables)


def wide() -> DLRMConfig:
    """Rows of 64, and a bottom MLP that ends there."""
    return DLRMConfig.preset("kaggle", rows=(100_000,) * 26, dim=64, bottom=(512, 256))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "kaggle", kaggle(100_000), (1,) * 26, (1, 128, 2048, 8192),
            "26 tables of 100k x 16, one id per bag",
        ),
        Shape(
            "kaggle-1m", kaggle(1_000_000), (1,) * 26, (2048,),
            "26 tables of 1M x 16, one id per bag",
        ),
        Shape(
            "multi-hot", wide(), (10,) * 26, (2048,), "26 tables of 100k x 64, ten ids per bag"
        ),
        Shape(
            "dcnv2",
            DLRMConfig.preset("dcnv2", rows=tuple(min(n, CAP) for n in DCNV2_ROWS)),
            DCNV2_POOLING, (2048,),
            f"MLPerf's DLRM-DCNv2, x 128, with at most {CAP:,} rows in a table to fit the memory",
        ),
        Shape(
            "tiny", PRESETS["tiny"], (1,) * 8, (128,), "8 tables of up to 300 x 8, one id per bag"
        ),
    )
}  # fmt: skip
OF_PRESET = {
    "kaggle": ("kaggle", "kaggle-1m", "multi-hot", "dcnv2"),
    "dcnv2": ("dcnv2",),
    "tiny": ("tiny",),
}


def chosen(presets: list[str], names: list[str], batches: list[int]) -> list[Shape]:
    """The shapes of ``names``, or else of ``presets``, at ``batches``, or else at their own.

    Raises InputError for a name that is none, and for a batch size below 1.
    """
    for preset in presets:
        if preset not in OF_PRESET:
            raise InputError(f"--preset: {preset!r} is none of {', '.join(OF_PRESET)}")
    names = names or [name for preset in presets for name in OF_PRESET[preset]]
    for name in names:
        if name not in SHAPES:
            raise InputError(f"--shapes: {name!r} is none of {', '.join(SHAPES)}")
    for batch in batches:
        if batch < 1:
            raise InputError(f"--batch: {batch} must be at least 1")
    shapes = [SHAPES[name] for name in dict.fromkeys(names)]
    if batches:
        own = tuple(dict.fromkeys(batches))
        shapes = [dataclasses.replace(shape, batches=own) for shape in shapes]
    return shapes


class Draws:
    """Batches of uniformly drawn ids, new ones each time, the same from the same seed."""

    def __init__(self, shape: Shape, batch: int, seed: int = 0) -> None:
        self.shape, self.batch = shape, batch
        self.random = np.random.default_rng(seed)

    def __call__(self) -> Batch:
        model, size = self.shape.model, self.batch
        ids = [
            self.random.integers(rows, size=size * pooling)
            for rows, pooling in zip(model.rows, self.shape.pooling, strict=True)
        ]
        return Batch.from_bags(
            torch.from_numpy(self.random.standard_normal((size, model.dense_in), np.float32)),
            np.repeat(np.array(self.shape.pooling)[:, None], size, axis=1),  # (F, B)
            np.concatenate(ids),
            self.random.integers(2, size=size).astype(np.float32),
        )
