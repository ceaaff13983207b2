"""Silent corruption, planted: flipped bits in tables, weights, arithmetic and checkpoints.

A flip is significant if it moves its number by more than 1/16 of the largest number beside it: the
upper four of eight bits, which is what Li et al. 2021 call significant in their tables (published:
99% of these found in embedding bags, with under 10% false alarms, at under 26% overhead).
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiler.kernels import checked, mlp
from compiler.kernels.bags import Bags
from compiler.kernels.checked import Corruption
from compiler.kernels.mlp import Layer
from dlrm import checkpoint
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.integrity.flips import flipped
from dlrm.integrity.guard import TableGuard, table_weights
from dlrm.integrity.planted import Detector, Found, World
from dlrm.model import DLRM

FLIPS = 32  # of a trial: one of each bit, where bits are chosen
SIGNIFICANT = 1 / 16
CONFIG = DLRMConfig(rows=(500, 300, 200), dim=16, dense_in=8, bottom=(64, 32), top=(64, 32))


@cache
def small_model() -> tuple[DLRM, TableGuard]:
    """A model with the checksums of its tables."""
    torch.manual_seed(0)
    model = DLRM(CONFIG).eval()
    return model, TableGuard(model)


def inputs(rng: np.random.Generator, rows: int = 64) -> Batch:
    """Random rows for it, with bags of 0 to 3 ids."""
    lengths = rng.integers(0, 4, size=(len(CONFIG.rows), rows))
    ids = [rng.integers(n, size=k.sum()) for n, k in zip(CONFIG.rows, lengths, strict=True)]
    dense = rng.normal(size=(rows, CONFIG.dense_in))
    return Batch.from_bags(dense, lengths, np.concatenate(ids), np.zeros(rows))


def moved(values: np.ndarray, place: int, bit: int) -> float:
    """How far a flip moves one number of an array, in units of the largest; infinity for NaN."""
    before = values.reshape(-1)[place]
    word = np.array([before], dtype=np.float32).view(np.uint32) ^ np.uint32(1 << bit)
    after = float(word.view(np.float32)[0])
    found = abs(after - float(before)) / float(np.abs(values).max())
    return found if np.isfinite(found) else float("inf")


def _rows_read(batch: Batch, rng: np.random.Generator) -> tuple[int, int]:
    """A table, and a row of it that the batch reads."""
    place = int(rng.integers(len(batch.ids)))
    table = int(np.searchsorted(batch.offsets[:, -1].numpy(), place, side="right"))
    return table, int(batch.ids[place])


def guarded_rows(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """Any bit of a row that is about to be read, found by the guard."""
    model, guard = small_model()
    truth: set[Any] = set()
    found: set[Any] = set()
    for n in range(FLIPS):
        batch = inputs(rng)
        if not faulty:
            found |= {n} if guard.verify(batch) else set()
            continue
        table, row = _rows_read(batch, rng)
        truth.add((n, table, row))
        place = row * CONFIG.dim + int(rng.integers(CONFIG.dim))
        with flipped(table_weights(model)[table], place, int(rng.integers(32))):
            for damage in guard.verify(batch):
                found |= {(n, int(damage.table.split(".")[1]), r) for r in damage.rows}
    return truth, found


def _bags(batch: Batch) -> Bags:
    _, ids, offsets, _ = batch.inputs()
    return Bags(list(ids), offsets, include_last_offset=True)


@cache
def _table_sums() -> list[checked.TableSums]:
    return [checked.table_sums(t) for t in table_weights(small_model()[0])]


def bag_rows(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """Each bit of a row that is read, found by the kernel that pools it."""
    tables = table_weights(small_model()[0])
    sums = _table_sums()
    truth: set[Any] = set()
    found: set[Any] = set()
    for bit in range(FLIPS):
        batch = inputs(rng)
        out = torch.empty(len(batch), len(tables), CONFIG.dim)

        def pool(batch: Batch = batch, out: Tensor = out, bit: int = bit) -> None:
            try:
                checked.pool_into(out, tables, _bags(batch), sums)
            except Corruption as error:
                found.add((bit, error.table, error.place))

        if not faulty:
            pool()
            continue
        table, row = _rows_read(batch, rng)
        truth.add((bit, table, row))
        with flipped(tables[table], row * CONFIG.dim + int(rng.integers(CONFIG.dim)), bit):
            pool()
    return truth, found


def bag_arithmetic(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """A significant flip in a pooled vector, found by the kernel that made it."""
    tables = table_weights(small_model()[0])
    native = checked.bag_library(planted=True)
    truth: set[Any] = set()
    found: set[Any] = set()
    while len(truth) < FLIPS:
        batch, n = inputs(rng), len(truth)
        out = torch.empty(len(batch), len(tables), CONFIG.dim)
        checked.pool_into(out, tables, _bags(batch), _table_sums())
        table, row, column, bit = (
            int(rng.integers(k)) for k in (len(tables), len(batch), CONFIG.dim, 32)
        )
        place = (row * len(tables) + table) * CONFIG.dim + column
        if moved(out.numpy(), place, bit) <= SIGNIFICANT:
            continue
        truth.add(n)
        native.plant(table if faulty else -1, row, column, bit)
        try:
            checked.pool_into(out, tables, _bags(batch), _table_sums(), planted=True)
        except Corruption:
            found.add(n)
        finally:
            native.plant(-1, 0, 0, 0)
    return truth if faulty else set(), found


@cache
def chain() -> tuple[list[Layer], list[Tensor]]:
    """Layers as wide as those of the Kaggle model, and their checksums."""
    g = torch.Generator().manual_seed(0)
    widths = (367, 512, 256, 1)
    layers = []
    for i, o in zip(widths[:-1], widths[1:], strict=True):
        weight = torch.randn(o, i, generator=g) / i**0.5
        layers.append(Layer(weight, torch.randn(o, generator=g), "relu"))
    return layers, [checked.weight_sums(layer.weight) for layer in layers]  # type: ignore[arg-type]


def _alarm(x: Tensor, planted: bool = False) -> bool:
    """Whether the products of x (B, 367) raise the alarm."""
    layers, sums = chain()
    try:
        checked.mlp(x, layers, sums, planted=planted)
    except Corruption:
        return True
    return False


def _x(rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.normal(size=(64, 367)).astype(np.float32))


def weights(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """A significant flip in a weight that is used (its input is not 0 in all rows), found by the
    kernel that multiplies with it.
    """
    layers, _ = chain()
    truth: set[Any] = set()
    found: set[Any] = set()
    for n in range(FLIPS):
        x = _x(rng)
        if not faulty:
            found |= {n} if _alarm(x) else set()
            continue
        layer = int(rng.integers(len(layers)))
        given = mlp.reference(x, layers[:layer]).numpy()
        weight = layers[layer].weight
        assert isinstance(weight, Tensor)
        while True:
            place, bit = int(rng.integers(weight.numel())), int(rng.integers(32))
            used = bool(given[:, place % weight.shape[1]].any())
            if used and moved(weight.numpy(), place, bit) > SIGNIFICANT:
                break
        truth.add(n)
        with flipped(weight, place, bit):
            found |= {n} if _alarm(x) else set()
    return truth, found


def product_arithmetic(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """A significant flip in a number of a product, found by the kernel that makes it."""
    layers, _ = chain()
    native = checked.mlp_library(planted=True)
    truth: set[Any] = set()
    found: set[Any] = set()
    for n in range(FLIPS):
        x, layer = _x(rng), int(rng.integers(len(layers)))
        given, weight = mlp.reference(x, layers[:layer]), layers[layer].weight
        assert isinstance(weight, Tensor)
        product = (given @ weight.t()).numpy()
        while True:
            place, bit = int(rng.integers(product.size)), int(rng.integers(32))
            if moved(product, place, bit) > SIGNIFICANT:
                break
        truth.add(n)
        native.plant(layer if faulty else -1, *divmod(place, product.shape[1]), bit)
        try:
            found |= {n} if _alarm(x, planted=True) else set()
        finally:
            native.plant(-1, 0, 0, 0)
    return truth if faulty else set(), found


def checkpoints(world: World, rng: np.random.Generator, faulty: bool) -> Found:
    """Any bit of any file of a checkpoint, found when it is read."""
    state: dict[str, Any] = {"model": {}, "source": {}, "dataset": {}, "fate": {}, "step": 1}
    truth: set[Any] = set()
    found: set[Any] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        checkpoint.save(path, small_model()[0], state)
        files = sorted(path.iterdir())
        for n in range(FLIPS):
            file = files[n % len(files)]
            content = bytearray(file.read_bytes())
            place, bit = int(rng.integers(len(content))), int(rng.integers(8))
            if faulty:
                truth.add(n)
                content[place] ^= 1 << bit
                file.write_bytes(content)
            try:
                checkpoint.read_state(path)
            except checkpoint.CheckpointError:
                found.add(n)
            content[place] ^= (1 << bit) if faulty else 0
            file.write_bytes(content)
    return truth, found


CORRUPTION = (
    Detector("table rows, guard", "flip", guarded_rows, 0),
    Detector("table rows, kernel", "flip", bag_rows, 0),
    Detector("pooled vectors, kernel", "significant flip", bag_arithmetic, 0),
    Detector("weights, kernel", "significant flip", weights, 0),
    Detector("products, kernel", "significant flip", product_arithmetic, 0),
    Detector("checkpoint", "flip", checkpoints, 0),
)
