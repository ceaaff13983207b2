"""Training settings of the named presets: what differs from the defaults in ``settings.py``."""

from __future__ import annotations

from typing import Any

TRAIN_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "data": {"batch_size": 256},
        "optim": {"dense_lr": 0.001, "sparse_optimizer": "adam", "sparse_lr": 0.003},
        "run": {"epochs": 2},
    },
    "movielens": {},
    "kaggle": {"data": {"batch_size": 2048}},
    "terabyte": {"data": {"batch_size": 2048}},
    "dcnv2": {"data": {"batch_size": 2048}},
}
