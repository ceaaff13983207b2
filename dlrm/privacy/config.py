"""What a private run is told: one field per flag of ``python -m dlrm.train``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dlrm.config import option
from dlrm.errors import InputError

ACCOUNTANTS = ("prv", "rdp")
TABLE_NOISE = ("lazy", "dense", "selected")


@dataclass(frozen=True)
class PrivacyConfig:
    """Differentially private training (DP-SGD on Poisson samples), or private labels."""

    private: bool = option(
        False, "train with differential privacy, one row of the data as its unit"
    )
    epsilon: float = option(0.0, "the budget of the whole run; the noise follows from it")
    delta: str = option("auto", "its delta: auto (rows ** -1.1), or a number below 1 / rows")
    noise_multiplier: float = option(0.0, "instead of --epsilon: noise per clipping norm")
    max_grad_norm: float = option(1.0, "clipping norm: the largest 2-norm of a row's gradient")
    accountant: str = option("prv", "prv (tight), or rdp")
    table_noise: str = option(
        "lazy", "lazy: rows get their noise when next read; dense: all rows at each step; "
        "selected: only rows chosen privately are updated"
    )  # fmt: skip
    select_share: float = option(0.1, "selected: part of the budget for choosing rows")
    select_threshold: float = option(4.0, "selected: by how many deviations a count must stand out")
    noise_seed: int = option(
        0, "for repeatable experiments only: noise that is no secret; 0: secret"
    )
    label_epsilon: float = option(0.0, "private labels only, by randomised response; 0: off")

    def validate(self) -> None:
        """Raise InputError naming the first argument that cannot be right."""
        for flag, value in (
            ("epsilon", self.epsilon),
            ("noise-multiplier", self.noise_multiplier),
            ("label-epsilon", self.label_epsilon),
        ):
            if math.isnan(value) or value < 0:
                raise InputError(f"--{flag}: {value} must be above 0")
        if not self.private:
            for flag, value in (
                ("epsilon", self.epsilon), ("noise-multiplier", self.noise_multiplier)
            ):  # fmt: skip
                if value:
                    raise InputError(f"--{flag} belongs to private training: add --private")
            return
        if self.label_epsilon:
            raise InputError(
                "--label-epsilon with --private: private training covers the labels already; "
                "give one of the two"
            )
        if self.epsilon and self.noise_multiplier:
            raise InputError(
                "--epsilon and --noise-multiplier: one follows from the other; give one"
            )
        if not (self.epsilon or self.noise_multiplier):
            raise InputError(
                "--private: give --epsilon (above 0), the budget, or --noise-multiplier; "
                "--epsilon inf clips and samples without noise, which protects nobody"
            )
        if self.delta != "auto":
            self.explicit_delta()
        if not 0 < self.max_grad_norm < math.inf:
            raise InputError(f"--max-grad-norm: {self.max_grad_norm} must be above 0, and finite")
        if math.isinf(self.noise_multiplier):
            raise InputError("--noise-multiplier: inf is all noise; give a finite number")
        if self.accountant not in ACCOUNTANTS:
            raise InputError(
                f"--accountant: {self.accountant!r} is none of {', '.join(ACCOUNTANTS)}"
            )
        if self.table_noise not in TABLE_NOISE:
            raise InputError(
                f"--table-noise: {self.table_noise!r} is none of {', '.join(TABLE_NOISE)}"
            )
        if not 0 < self.select_share < 1:
            raise InputError(f"--select-share: {self.select_share} must be between 0 and 1")
        if not 0 <= self.select_threshold < math.inf:
            raise InputError(f"--select-threshold: {self.select_threshold} must be 0 or more")
        if self.noise_seed < 0:
            raise InputError(f"--noise-seed: {self.noise_seed} must be 0 or more")

    def explicit_delta(self) -> float:
        """The number that ``delta`` is."""
        try:
            delta = float(self.delta)
        except ValueError:
            raise InputError(f"--delta: {self.delta!r} is neither auto nor a number") from None
        if not 0 < delta < 1:
            raise InputError(f"--delta: {delta} must be between 0 and 1")
        return delta


def private_preset(preset: str) -> dict[str, dict[str, Any]]:
    """What a preset takes instead of its usual settings when the run is private.

    Plain SGD on the tables (the one update that noise may reach late), no decay of looked-up rows
    (it would tell which they were), no averages (they would hold rows before their noise). Clipping
    at 3, a usual norm of these models: far below it, every row pulls as hard as any other, and
    predictions lose their calibration.
    """
    optim: dict[str, Any] = {
        "sparse_optimizer": "sgd", "sparse_weight_decay": 0.0, "ema": 0.0, "sparse_lr": 8.0,
    }  # fmt: skip
    found: dict[str, dict[str, Any]] = {"optim": optim, "privacy": {"max_grad_norm": 3.0}}
    if preset == "movielens":  # without the histories, which are made of other rows
        found["data"] = {"tables": "user,item,genres"}
        found["run"] = {"early_stop": "none"}
    return found
