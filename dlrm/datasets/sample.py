"""The bundled sample: synthetic rows with planted truth, written in the Criteo format.

    python -m dlrm.datasets.sample            # writes data/criteo_sample.tsv again, byte for byte
    python -m dlrm.datasets.sample --check    # compares the file with what would be written

A line is label, I1 to I13 (whole numbers), C1 to C26 (eight hex digits), separated by tabs, and a
field is empty where the value is missing, as in the Criteo Kaggle file. Dense values x become
counts, ``floor(exp(location + spread * x))``, so their logarithm carries the planted effect.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm import cli
from dlrm.batch import Batch
from dlrm.datasets import draws
from dlrm.datasets.base import Dataset
from dlrm.datasets.synthetic import SyntheticConfig, synthetic_dataset
from dlrm.errors import InputError

ROWS = 20_000
DEFAULT_OUT = Path("data") / "criteo_sample.tsv"

# Small tables, as 16,000 training rows can teach few ids; C3 and C12 are long-tailed and mean
# nothing, so that a vocabulary threshold has something to drop.
CONFIG = SyntheticConfig(
    rows=(
        *(12, 60, 5000, 40, 12, 5, 50, 15, 3, 60, 30, 5000, 40),
        *(9, 40, 50, 8, 30, 14, 4, 50, 6, 5, 40, 10, 30),
    ),
    zipf=1.1,
    n_train=ROWS,
    seed=2026,
    positive_rate=0.256,
    main_scale=2.2,
    pair_scale=0.6,
    null=("I10", "I12", "C3", "C9", "C12", "C22"),
)

# location, spread and share of missing values of I1 to I13
_DENSE = (
    *((1.6, 1.2, 0.3), (2.5, 1.6, 0.0), (2.6, 1.4, 0.17), (2.2, 0.8, 0.18), (7.5, 1.6, 0.03)),
    *((3.9, 1.3, 0.22), (2.2, 1.2, 0.05), (2.7, 0.8, 0.0), (4.4, 1.1, 0.05), (0.2, 0.6, 0.45)),
    *((1.4, 0.9, 0.05), (0.1, 0.9, 0.77), (2.4, 0.9, 0.18)),
)
_SHIFT = {1: 3}  # I2 is a count less 3: Criteo's I2 has negative values too
# the id that stands for a missing value, which thus has its own effect in the truth
_MISSING = {2: 7, 3: 6, 5: 1, 11: 7, 15: 5, 18: 0, 19: 0, 21: 0, 23: 6, 24: 0, 25: 0}


def sample_dataset() -> Dataset:
    """The synthetic data whose training rows are the sample's, with their truth.

    Its Bayes scores are a bound for the sample: a count tells less than the value it was made from,
    and values are missing.
    """
    return synthetic_dataset(CONFIG)


def sample_bytes() -> bytes:
    """The whole file."""
    batch = sample_dataset().splits["train"].read(0, ROWS)
    columns = [batch.label.int().numpy().astype(str).tolist()]
    columns += _dense_columns(batch) + _token_columns(batch)
    lines = map("\t".join, zip(*columns, strict=True))
    return ("\n".join(lines) + "\n").encode("ascii")


def _dense_columns(batch: Batch) -> list[list[str]]:
    word = draws.words(CONFIG.seed, 5 << 20, 0, 0, ROWS * len(_DENSE))
    chance = draws.uniform(word).reshape(len(_DENSE), ROWS)
    columns = []
    for i, (location, spread, missing) in enumerate(_DENSE):
        value = batch.dense[:, i].numpy().astype(np.float64)
        count = np.exp(location + spread * value).astype(np.int64) - _SHIFT.get(i, 0)
        columns.append(np.where(chance[i] < missing, "", count.astype(str)).tolist())
    return columns


def _token_columns(batch: Batch) -> list[list[str]]:
    columns = []
    for f, rows in enumerate(CONFIG.rows):
        code = draws.hashed(np.arange(rows), draws.salt(CONFIG.seed, 6, f)) >> np.uint64(32)
        tokens = [f"{c:08x}" for c in code.tolist()]
        if f in _MISSING:
            tokens[_MISSING[f]] = ""
        ids = batch.ids[batch.offsets[f, 0] : batch.offsets[f, -1]]
        columns.append([tokens[i] for i in ids.tolist()])
    return columns


def write_sample(out: Path) -> bytes:
    """Write the sample to ``out``, whole or not at all, and return it."""
    content = sample_bytes()
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, out)
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}; name another file with --out") from None
    finally:
        temporary.unlink(missing_ok=True)
    return content


def first_difference(content: bytes, wanted: bytes) -> int | None:
    """The number of the first line that differs, from 1; None if there is none."""
    if content == wanted:
        return None
    pairs = zip(content.split(b"\n"), wanted.split(b"\n"), strict=False)
    for number, (a, b) in enumerate(pairs, start=1):
        if a != b:
            return number
    return min(content.count(b"\n"), wanted.count(b"\n")) + 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dlrm.datasets.sample",
        description="Make the bundled Criteo-format sample again, or compare it.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"default {DEFAULT_OUT}")
    parser.add_argument(
        "--check", action="store_true", help="compare, write nothing; 1 if it differs"
    )

    def command() -> int:
        args = parser.parse_args(argv)
        if args.check:
            return _check(args.out)
        content = write_sample(args.out)
        print(f"{args.out}: {ROWS} rows, {len(content)} bytes, SHA-256 {_digest(content)}")
        return 0

    return cli.run(command)


def _check(out: Path) -> int:
    try:
        content = out.read_bytes()
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}; name the file with --out") from None
    line = first_difference(content, sample_bytes())
    if line is not None:
        print(
            f"error: {out}:{line}: not what python -m dlrm.datasets.sample writes", file=sys.stderr
        )
        return 1
    print(f"{out}: identical, SHA-256 {_digest(content)}")
    return 0


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
