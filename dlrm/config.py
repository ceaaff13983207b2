"""The model's configuration, and the shapes people know by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrm.errors import InputError

# Table sizes of the Criteo Kaggle data, as the published DLRM counts them.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
# Criteo Terabyte with ids taken modulo 40M (MLPerf training v1).
TERABYTE_ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)
# MLPerf training v3 (DLRM-DCNv2) and the pooling factors of its multi-hot data.
DCNV2_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
DCNV2_POOLING = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)

CHOICES = {
    "interaction": ("dot", "dot_self", "cat", "cross"),
    "pooling": ("sum", "mean", "sqrtn"),
    "weighted_pooling": ("none", "learned"),
    "qr_op": ("mult", "add", "concat"),
}


def option(default: Any, text: str) -> Any:
    """A field with its help text: the command line is made from these."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class DLRMConfig:
    """The shape of a DLRM. ``DLRMConfig.preset("kaggle", dim=32)`` takes a known one, changed."""

    rows: tuple[int, ...] = option((1000,) * 8, "rows of each embedding table")
    dim: int = option(16, "width of an embedding vector")
    dense_in: int = option(13, "dense features, may be 0")
    bottom: tuple[int, ...] = option((64, 32), "hidden widths of the bottom MLP (its last is dim)")
    top: tuple[int, ...] = option((64, 32), "hidden widths of the top MLP (its last is 1)")
    interaction: str = option("dot", "how features meet; dot_self keeps the diagonal")
    cross_layers: int = option(3, "layers of the cross interaction")
    cross_rank: int = option(512, "rank of its weights")
    pooling: str = option("sum", "how a bag becomes one vector; sqrtn: sum / sqrt(number of ids)")
    weighted_pooling: str = option("none", "learned: a trained scalar weight per id")
    qr_collisions: int = option(0, "quotient-remainder tables with this divisor; 0: off")
    qr_threshold: int = option(200, "only tables with more rows than this use it")
    qr_op: str = option("mult", "how quotient and remainder rows are combined")
    md_temperature: float = option(0.0, "mixed dimensions: width ~ rows ** -temperature; 0: off")
    wide: bool = option(False, "add a trained scalar per id to the logit, as Wide & Deep")
    dropout: float = option(0.0, "dropout after each hidden layer")
    sparse: bool = option(True, "table gradients hold only the looked-up rows")

    @staticmethod
    def preset(name: str, **overrides: Any) -> DLRMConfig:
        """A named shape with some fields changed.

        >>> DLRMConfig.preset("kaggle", rows=(100,) * 26).top
        (512, 256)
        """
        if name not in PRESETS:
            raise InputError(f"preset: no {name!r}; there are {', '.join(PRESETS)}")
        return dataclasses.replace(PRESETS[name], **overrides)

    def validate(self) -> None:
        """Raise InputError for a shape that cannot be built, and say why."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        if self.dense_in < 0:
            raise InputError(f"dense_in: {self.dense_in} is negative; give 0 for no dense features")
        for name in ("dim", "cross_layers", "cross_rank"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("rows", "bottom", "top"):
            _positive(name, getattr(self, name))
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout: {self.dropout} must be in [0, 1)")
        if not 0 <= self.md_temperature < float("inf"):
            raise InputError(f"md_temperature: {self.md_temperature} must be 0 or more, and finite")
        if self.qr_collisions < 0 or self.qr_threshold < 0:
            raise InputError("qr_collisions and qr_threshold must not be negative")
        if not self.rows and self.dense_in == 0:
            raise InputError("rows is empty and dense_in is 0: the model would have no input")
        self._validate_combinations()

    def _validate_combinations(self) -> None:
        if self.weighted_pooling == "learned" and self.pooling != "sum":
            raise InputError(
                f"weighted_pooling=learned with pooling={self.pooling}: a weighted mean may divide "
                "by the sum of the weights or by their count, and PyTorch's embedding bag defines "
                "neither; use pooling=sum"
            )
        if self.qr_collisions and self.qr_op == "concat" and self.dim % 2:
            raise InputError(f"qr_op=concat halves dim, and {self.dim} is odd; use an even dim")
        if self.qr_collisions and self.qr_op == "concat" and self.md_temperature > 0:
            raise InputError(
                "qr_op=concat with md_temperature: a mixed dimension may be 1, which has no "
                "halves; use qr_op=mult or add"
            )
        if self.wide and not self.rows:
            raise InputError("wide adds a weight per id to the logit, and there are no tables")
        if self.wide and self.qr_collisions:
            raise InputError(
                "wide with qr_collisions: a weight for each id is the table of as many rows as ids "
                "that quotient and remainder avoid; use one of the two"
            )
        pairs = len(self.rows) + (self.dense_in > 0) + (self.interaction == "dot_self")
        if self.interaction.startswith("dot") and pairs < 2 and self.dense_in == 0:
            raise InputError(
                "interaction=dot with one table and no dense features has no pair to multiply; "
                "use interaction=cat"
            )


def _positive(name: str, values: Sequence[int]) -> None:
    for i, value in enumerate(values):
        if value < 1:
            raise InputError(f"{name}[{i}]: {value} must be at least 1")


PRESETS: dict[str, DLRMConfig] = {
    "tiny": DLRMConfig(
        rows=(300, 200, 100, 100, 50, 50, 30, 20), dim=8, bottom=(32,), top=(64, 32)
    ),
    "movielens": DLRMConfig(
        rows=(), dense_in=1, dim=32, bottom=(16,), top=(64, 32), pooling="sqrtn", dropout=0.3
    ),
    "kaggle": DLRMConfig(rows=KAGGLE_ROWS, dim=16, bottom=(512, 256, 64), top=(512, 256)),
    "terabyte": DLRMConfig(
        rows=TERABYTE_ROWS, dim=128, bottom=(512, 256), top=(1024, 1024, 512, 256)
    ),
    "dcnv2": DLRMConfig(
        rows=DCNV2_ROWS,
        dim=128,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        interaction="cross",
    ),
}
