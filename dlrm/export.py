"""Export a checkpoint: ``python -m dlrm.export RUN --out FILE.pt2 [--tables int8]``.

The file holds the whole model, for any batch size (ONNX: at least 1) and any pooling factors. Its
format is that of its name: ``.pt2`` for torch.export, ``.onnx`` for ONNX. With smaller tables, the
change of the metrics is measured and shown.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as symbolic_sizes

from dlrm import cli
from dlrm.batch import Batch, ModelInputs
from dlrm.checkpoint import load_model
from dlrm.errors import InputError
from dlrm.evaluate import add_source, given_source
from dlrm.files import named, parents, remove, require_writable
from dlrm.metrics import Scores, scores
from dlrm.model import DLRM
from dlrm.quantize import bytes_of, quantize_tables
from dlrm.scoring import dataset_of, score_split

TABLES = {"f32": 32, "int8": 8, "int4": 4}


def export_model(model: DLRM, path: str | Path) -> None:
    """Write ``model`` to ``path`` (.pt2 or .onnx), for any batch size and pooling factors.

    Inputs of the file: dense (B, D) f32; ids, one (N_f,) i64 per table; offsets (F, B + 1) i64 from
    each table's own first id. Output: logits (B,). It is compared with the model before it is
    kept: RuntimeError if they differ by more than 1e-4.
    """
    path = checked_out(path)
    model = copy.deepcopy(model).eval()
    for table in model.tables.modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag):  # only gradients would be sparse
            table.sparse = False
    example, check = (_example(model, size, seed) for size, seed in ((3, 0), (5, 1)))
    folder = path.with_name(f".partial-{path.name}")
    with parents(path):
        try:
            with named(path, folder):
                folder.mkdir(exist_ok=True)
                _write_checked(model, example, check, folder / path.name)
                for file in os.listdir(folder):  # large ONNX models have their weights in a second
                    os.replace(folder / file, path.parent / file)
        finally:
            remove(folder)


def checked_out(path: str | Path) -> Path:
    """The file to write. Raises InputError if it cannot be one."""
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise InputError(f"--out: {path}: the name must end in .pt2 or .onnx")
    if path.is_dir():
        raise InputError(f"--out: {path} is a folder; name a file")
    require_writable(path, "--out")
    return path


def _write_checked(
    model: DLRM, example: tuple[Any, ...], check: tuple[Any, ...], path: Path
) -> None:
    with _exporting():
        if path.suffix == ".onnx":
            _write_onnx(model, example, path)
        else:
            program = torch.export.export(model, example, dynamic_shapes=_shapes(model))
            held = io.BytesIO()  # writing to a full disk directly would abort the process
            torch.export.save(program, held)
            path.write_bytes(held.getbuffer())
        got = read_onnx(path)(check) if path.suffix == ".onnx" else read_pt2(path)(check)
    with torch.inference_mode():
        worst = float((got - model(*check)).abs().max())
    if not worst <= 1e-4:
        raise RuntimeError(f"the exported model differs by {worst:g}; nothing was written")


def read_pt2(path: str | Path) -> Any:
    """A function of ``(dense, ids, offsets)`` from a .pt2 file."""
    module = torch.export.load(path).module()

    def run(inputs: Sequence[Any]) -> Tensor:
        with torch.inference_mode():
            return module(*inputs[:3])

    return run


def read_onnx(path: str | Path) -> Any:
    """A function of ``(dense, ids, offsets)`` from an .onnx file, run by ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError("ONNX needs more packages: pip install 'dlrm[export]'") from None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def run(inputs: Sequence[Any]) -> Tensor:
        dense, ids, offsets = inputs[:3]
        known = {"dense": dense, "offsets": offsets}
        known |= {f"ids_{f}": values for f, values in enumerate(ids)}
        outputs = session.run(None, {name: known[name].numpy() for name in names})
        return torch.from_numpy(outputs[0])

    return run


def _write_onnx(model: DLRM, example: tuple[Any, ...], path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError("ONNX needs more packages: pip install 'dlrm[export]'") from None
    program = torch.onnx.export(
        model, example, dynamo=True, dynamic_shapes=_shapes(model), verbose=False
    )
    assert program is not None
    program.save(str(path))


def _shapes(model: DLRM) -> dict[str, Any]:
    ids = tuple({0: Dim.AUTO} for _ in model.config.rows)
    return {"dense": {0: Dim.AUTO}, "ids": ids, "offsets": {1: Dim.AUTO}}


def _example(model: DLRM, size: int, seed: int) -> tuple[Any, ...]:
    """Random inputs of ``size`` samples, empty bags among them."""
    g = torch.Generator().manual_seed(seed)
    rows = model.config.rows
    lengths = torch.randint(0, 4, (len(rows), size), generator=g)
    lengths[:, 0] = 2
    ids = [
        torch.randint(n, (int(k.sum()),), generator=g) for n, k in zip(rows, lengths, strict=True)
    ]
    dense = torch.randn(size, model.config.dense_in, generator=g)
    batch = Batch.from_bags(dense, lengths, torch.cat(ids), torch.zeros(size))
    inputs: ModelInputs = batch.inputs()
    return tuple(
        t.clone() if isinstance(t, Tensor) else tuple(map(torch.clone, t)) for t in inputs[:3]
    )


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """No sizes taken as constant; no chatter of the exporters, nor warnings about themselves."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            # without this the file refuses batches of 0 and 1
            symbolic_sizes.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def compare(model: DLRM, small: DLRM, dataset: Any, quiet: bool) -> tuple[Scores, Scores]:
    """Test metrics of the model and of its smaller twin."""
    found = []
    for candidate in (model, small):
        label, logit = score_split(candidate, dataset, "test", quiet=quiet)
        found.append(scores(label, logit))
    return found[0], found[1]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.export",
        description="Export a model to one file, with tables in f32, int8 or int4.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("checkpoint", help="a run's --out (its best weights), or a checkpoint")
    flags.add_argument("--out", required=True, help="file to write: NAME.pt2 or NAME.onnx")
    flags.add_argument("--tables", choices=list(TABLES), default="f32", help="type of the tables")
    flags.add_argument("--quiet", action=argparse.BooleanOptionalAction, default=False)
    add_source(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        options = vars(parser().parse_args(argv))
        source = given_source(options)
        out = checked_out(options["out"])
        model, state = load_model(options["checkpoint"])
        bits = TABLES[options["tables"]]
        small = model if bits == 32 else quantize_tables(model, bits)
        if bits != 32:
            before, after = compare(
                model, small, dataset_of(state, model, source), options["quiet"]
            )
            print(f"tables: {bytes_of(model.tables):,} bytes in f32, {bytes_of(small.tables):,} in "
                  f"{options['tables']}")  # fmt: skip
            print("test        f32        " + options["tables"] + "       change")
            for name in ("auc", "logloss", "ne", "calibration"):
                a, b = getattr(before, name), getattr(after, name)
                print(f"{name:<12}{a:<11.6f}{b:<11.6f}{b - a:+.2e}")
        export_model(small, out)
        print(f"written: {out} ({out.stat().st_size:,} bytes)")
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
