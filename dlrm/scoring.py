"""Scores of a trained model on data: shared by evaluate, predict and export."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.cli import override
from dlrm.datasets.base import Dataset
from dlrm.datasets.load import load_dataset
from dlrm.datasets.reader import Reader, limited
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.settings import DataConfig


def dataset_of(state: dict[str, Any], model: DLRM, changes: dict[str, Any]) -> Dataset:
    """The data that a checkpoint was trained on, or those that ``changes`` name.

    Raises InputError if ids would not mean what they meant in training.
    """
    source = override(DataConfig(), state["source"], "checkpoint")
    if changes.get("data", source.data) != source.data:
        source = dataclasses.replace(source, input="")
    source = override(source, changes, "settings")
    dataset = load_dataset(source, model.config)
    check_same_meaning(state, dataset)
    return dataset


def check_same_meaning(state: dict[str, Any], dataset: Dataset) -> None:
    """Raise InputError unless features and vocabulary are those of the training data."""
    then = state["dataset"]
    names = {"table_names": dataset.table_names, "dense_names": dataset.dense_names}
    for what, now in names.items():
        if list(now) != list(then[what]):
            raise InputError(
                f"the model was trained with {what.replace('_', ' ')} {', '.join(then[what])}; "
                f"{dataset.name} has {', '.join(now)}"
            )
    if (digest := vocabulary(dataset)) != then["vocabulary"]:
        raise InputError(
            f"{dataset.name}: its ids mean other things than in training (vocabulary {digest}, "
            f"the model's is {then['vocabulary']}); use the data of the training, or preprocess "
            "the new file with --vocab-from"
        )


def vocabulary(dataset: Dataset) -> str:
    """What names the meaning of the ids: the vocabulary's digest, else that of the data."""
    return str(dataset.info.get("vocabulary", dataset.fingerprint))


def logits_of(model: nn.Module, batches: Iterator[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
    """Each batch with its logits (B,) f32."""
    with torch.inference_mode():
        for batch in batches:
            yield batch, model(*batch.inputs()).float().numpy()


def score_split(
    model: nn.Module,
    dataset: Dataset,
    part: str,
    batch_size: int = 4096,
    limit: int = 0,
    quiet: bool = True,
    also: Callable[[Batch], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits, (n,) f32 each, of a split in its order; ``also`` sees each batch."""
    reader = Reader.of(dataset, part, batch_size)
    total = limited(len(reader), limit)
    labels, logits = [], []
    batches = tqdm(
        itertools.islice(reader, total), total=total, disable=quiet, unit="batch", desc=part
    )
    for batch, logit in logits_of(model, batches):
        labels.append(batch.label.numpy())
        logits.append(logit)
        if also is not None:
            also(batch)
    if not labels:
        raise InputError(f"{dataset.name}: its {part} split has no rows")
    label, logit = np.concatenate(labels), np.concatenate(logits)
    if bad := int((~np.isfinite(logit)).sum()):
        raise InputError(
            f"the model's outputs are not finite on {bad:,} of {len(logit):,} rows of the {part} "
            "part: train it again with lower learning rates"
        )
    return label, logit
