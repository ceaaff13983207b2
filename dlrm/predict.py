"""Score a file: ``python -m dlrm.predict RUN --input FILE --out scores.csv``.

What FILE is follows from what the model was trained on: raw Criteo rows, 39 columns, or 40 with a
label; or MovieLens pairs, with the header ``user_id,item_id``. Without ``--input``, a part of the
data is scored. The output is CSV: the place of the row, its probability, and its label where there
is one.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlrm import cli
from dlrm.batch import Batch
from dlrm.checkpoint import load_model
from dlrm.datasets.reader import Reader
from dlrm.errors import InputError
from dlrm.files import require_writable, written
from dlrm.metrics import sigmoid
from dlrm.model import DLRM
from dlrm.scoring import dataset_of, logits_of

Numbered = tuple[Batch, np.ndarray]  # a batch, and the place (B,) of each of its rows


def predict(
    path: str | Path,
    out: str | Path,
    file: str = "",
    part: str = "test",
    data_dir: str = "",
    bad_rows: str = "error",
    quiet: bool = True,
) -> dict[str, int]:
    """Score ``file``, or a part of the training data, into the CSV ``out``.

    data_dir: the folder that gives ids their meaning, if it is no longer where it was in training.
    Returns the number of rows, of bad rows left out, and of unknown users and items where there are
    such. Raises InputError, and leaves no output.
    """
    out = Path(out)
    if out.exists() and not out.is_file():
        raise InputError(f"--out: {out} is not a regular file; name a CSV file to write")
    require_writable(out, "--out")
    if file and not os.path.exists(file):
        raise InputError(f"--input: there is no file {file}")
    if file and os.path.isdir(file):
        raise InputError(f"--input: {file} is a folder; name a file to score")
    if file and out.exists() and os.path.samefile(out, file):
        raise InputError(f"--out: {out} is the input; name another file")
    model, state = load_model(path, from_disk=True)
    if file:
        source, counts = _file_batches(state, model, file, data_dir, bad_rows)
        header = "line"
    else:
        dataset = dataset_of(state, model, {"input": data_dir} if data_dir else {})
        source, counts = _number(iter(Reader.of(dataset, part, 4096))), dict
        header = "row"
    with written(out) as partial:
        rows = _write(model, source, partial, header, quiet)
        if rows == 0:
            raise InputError(f"{file or part}: no rows to score")
    return {"rows": rows, "bad_rows": 0, **counts()}


def _write(model: DLRM, source: Iterator[Numbered], path: Path, header: str, quiet: bool) -> int:
    places: list[np.ndarray] = []  # of the batch that is being scored

    def batches() -> Iterator[Batch]:
        for batch, place in source:
            places.append(place)
            yield batch

    rows = 0
    with open(path, "w", newline="") as handle, tqdm(disable=quiet, unit="row") as bar:
        writer = csv.writer(handle, lineterminator="\n")
        for batch, logit in logits_of(model, batches()):
            label = batch.label.numpy()
            labelled = not np.isnan(label).any()
            if rows == 0:
                writer.writerow([header, "probability", *(["label"] if labelled else [])])
            columns = [places.pop().tolist(), [f"{p:.7g}" for p in sigmoid(logit)]]
            if labelled:
                columns.append(label.astype(int).tolist())
            writer.writerows(zip(*columns, strict=True))
            rows += len(batch)
            bar.update(len(batch))
    return rows


def _number(batches: Iterator[Batch]) -> Iterator[Numbered]:
    first = 0
    for batch in batches:
        yield batch, np.arange(first, first + len(batch))
        first += len(batch)


def _file_batches(
    state: dict[str, Any], model: DLRM, file: str, data_dir: str, bad_rows: str
) -> tuple[Iterator[Numbered], Callable[[], dict[str, int]]]:
    """Batches of a file, encoded as the training data were; and the counts once it is read."""
    name = state["source"]["data"]
    # refuses other vocabularies
    dataset = dataset_of(state, model, {"input": data_dir} if data_dir else {})
    if name == "criteo":
        from dlrm.datasets.criteo.encode import encode_lines
        from dlrm.datasets.criteo.report import BadRows

        folder = data_dir or state["source"]["input"]
        report = BadRows([file])
        lines = encode_lines(file, folder, bad_rows=bad_rows, report=report)
        return lines, lambda: {"bad_rows": report.total}
    if name == "movielens":
        from dlrm.datasets.movielens_pairs import PairCounts, encode_pairs

        counts = PairCounts()
        pairs = encode_pairs(file, dataset, bad_rows=bad_rows, counts=counts)
        return pairs, lambda: dataclasses.asdict(counts)
    raise InputError(f"--input: a model of {name} data has no file format; leave it out")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.predict",
        description="Score a file with a trained model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    flags.add_argument(
        "--input", default="", help="a file of raw Criteo rows, or of MovieLens pairs"
    )
    flags.add_argument("--part", default="test", help="without --input: this part of the data")
    flags.add_argument("--out", required=True, help="CSV file to write")
    flags.add_argument("--data-dir", default="", help="training data, if they have moved")
    flags.add_argument("--bad-rows", choices=["error", "skip"], default="error", help="in --input")
    flags.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        o = parser().parse_args(argv)
        result = predict(
            o.checkpoint, o.out, o.input, o.part, o.data_dir, o.bad_rows, quiet=o.quiet
        )
        said = [f"{result['rows']:,} rows"]
        for name, text in (
            ("bad_rows", "bad rows left out"),
            ("unknown_users", "of users that training never saw"),
            ("unknown_items", "of items that training never saw"),
        ):
            said += [f"{result[name]:,} {text}"] if result.get(name) else []
        print(f"written: {o.out} ({', '.join(said)})")
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
