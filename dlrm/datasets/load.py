"""From a run's settings to the data set they name, and the model shaped to fit it."""

from __future__ import annotations

import dataclasses

from dlrm.config import DLRMConfig
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.settings import DataConfig


def load_dataset(data: DataConfig, model: DLRMConfig) -> Dataset:
    """The data set that ``data`` names. Only synthetic data take their shape from the model."""
    if data.data == "criteo":
        from dlrm.datasets.criteo.load import load_criteo

        if not data.input:
            raise InputError(
                "--input: name the folder that `python -m dlrm.preprocess --data criteo` wrote"
            )
        return load_criteo(data.input)
    if data.data == "movielens":
        from dlrm.datasets.movielens import load_movielens

        tables = tuple(filter(None, data.tables.split(",")))
        return load_movielens(data.input or None, data.split, lag=data.lag, tables=tables)
    if data.data == "synthetic":
        from dlrm.datasets.synthetic import synthetic_for
        from dlrm.datasets.trace import StackDistances

        return synthetic_for(
            model.rows,
            model.dense_in,
            data.samples,
            seed=data.data_seed,
            zipf=data.zipf,
            pooling=data.pooling_factor,
            pooling_kind=data.pooling_kind,
            label_noise=data.label_noise,
            trace=StackDistances.parse(data.trace) if data.trace else None,
        )
    raise InputError(f"--data: {data.data!r} is none of criteo, movielens, synthetic")


def fit_model(model: DLRMConfig, dataset: Dataset, asked: frozenset[str]) -> DLRMConfig:
    """The model with the data's table sizes and dense features.

    ``asked`` names the fields that the user gave: those must hold the data, and stay.
    """
    fitted = dataclasses.replace(model, rows=dataset.rows, dense_in=len(dataset.dense_names))
    if "dense_in" in asked and model.dense_in != fitted.dense_in:
        raise InputError(
            f"--dense-in: {model.dense_in}, but {dataset.name} has {fitted.dense_in} dense features"
        )
    if "rows" in asked:
        if len(model.rows) != len(dataset.rows):
            raise InputError(
                f"--rows: {len(model.rows)} tables, but {dataset.name} has {len(dataset.rows)}"
            )
        for name, rows, needed in zip(dataset.table_names, model.rows, dataset.rows, strict=True):
            if rows < needed:
                raise InputError(
                    f"--rows: {rows} for {name!r}, but {dataset.name} has ids up to {needed - 1}"
                )
        fitted = dataclasses.replace(fitted, rows=model.rows)
    return fitted
