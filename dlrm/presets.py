"""Training settings of the named presets: what differs from the defaults in ``settings.py``."""

from __future__ import annotations

from typing import Any

TRAIN_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "data": {"batch_size": 256},
        "optim": {"dense_lr": 0.001, "sparse_optimizer": "adam", "sparse_lr": 0.003},
        "run": {"epochs": 2},
    },
    "movielens": {
        "data": {
            "batch_size": 1024,
            "tables": "user,item,genres,liked,disliked,fans,critics",
            "lag": 20_000,
        },
        "optim": {
            "dense_lr": 1e-3,
            "sparse_optimizer": "adam",
            "sparse_lr": 2e-3,
            "sparse_weight_decay": 1e-4,
            "ema": 0.998,
        },
        "run": {"epochs": 25, "early_stop": "auc", "patience": 3},
    },
    "kaggle": {"data": {"batch_size": 2048}},
    "terabyte": {"data": {"batch_size": 2048}},
    "dcnv2": {"data": {"batch_size": 2048}},
}
