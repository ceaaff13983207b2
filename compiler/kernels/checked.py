"""Kernels that verify what they read and compute (checked_bags.cpp, checked_mlp.cpp).

Algorithm-based fault tolerance (Huang and Abraham 1984), as Li et al. 2021 ("Efficient Soft-Error
Detection for Low-precision Deep Learning Recommendation Models") brought it to DLRM's operators:
sums that were taken of a weight when it was last changed must agree with what a call makes of it.

* Embedding bags: the bytes of all rows that are read, exactly; pooled vectors, up to rounding.
* Linear layers: each row of a product, up to rounding.

What the sums cannot see: a fault between two kernels, in an input, in an activation function, in
the choice of a maximum; and rows of an input that are not finite, or whose norm is beyond 1e19.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.kernels import source
from compiler.kernels.bags import BagError, Bags, Problem
from compiler.kernels.embedding_bag import BATCH, Pooled, _row_fields
from compiler.kernels.linear import ACTIVATIONS, Packed, address, pack, reads_plain, row_major
from compiler.kernels.mlp import Layer
from compiler.runtime import build

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
ROW, POOLED, PRODUCT = 3, 4, 5  # kinds of struct Problem in bags.h


class Corruption(RuntimeError):
    """A checksum does not agree: memory or arithmetic has failed. The result was thrown away.

    ``kind``: row (of a table), pooled (vectors) or product (of a linear layer). ``table`` is the
    number of the table or layer in its kernel; ``place`` the damaged row, the first bag of the
    tile, or the row of the batch. A call that failed in passing succeeds when it is made again.
    """

    def __init__(self, kind: str, table: int, place: int, message: str) -> None:
        super().__init__(message)
        self.kind, self.table, self.place = kind, table, place


def corruption(name: str, kind: int, table: int, position: int, value: int) -> Corruption:
    """The exception for what a kernel reported; ``name`` is that of the table or chain."""
    if kind == ROW:
        where = f"row {value} (position {position} in the ids)"
        said = f"table {table} ({name}): {where} is not what it was when its checksum was taken"
        return Corruption("row", table, value, said)
    if kind == POOLED:
        said = f"table {table} ({name}): pooled vectors of bags {position} to {value - 1} are wrong"
        return Corruption("pooled", table, position, said)
    said = f"layer {table} of {name}: the product of row {position} is wrong, or the weight damaged"
    return Corruption("product", table, position, said)


@functools.cache
def bag_library(planted: bool = False) -> ctypes.CDLL:
    """The compiled kernel; with ``planted``, one whose arithmetic can be made to fail."""
    native = build.load(source("checked_bags.cpp"), ("-DPLANT",) if planted else ())
    p, i = ctypes.c_void_p, ctypes.c_int64
    native.embedding_bags_checked.argtypes = [p, p, i, i, p]
    native.table_sums.argtypes = [p, i, i, i, i, p, p, i]
    native.embedding_bags_checked.restype = native.table_sums.restype = None
    if planted:
        native.plant.argtypes, native.plant.restype = [i, i, i, i], None
    return native


@functools.cache
def mlp_library(planted: bool = False) -> ctypes.CDLL:
    """The compiled kernel; with ``planted``, one whose arithmetic can be made to fail."""
    native = build.load(source("checked_mlp.cpp"), ("-DPLANT",) if planted else ())
    p, i = ctypes.c_void_p, ctypes.c_int64
    for suffix in SUFFIX.values():
        call = getattr(native, f"mlp_checked_{suffix}")
        call.argtypes, call.restype = [p, i, i, p, p, i, i, p], None
    if planted:
        native.plant.argtypes, native.plant.restype = [i, i, i, i], None
    return native


@dataclass(frozen=True)
class _Library:
    """What `entry` asks a kernel's module for."""

    library: Callable[[], ctypes.CDLL]


BAGS, MLP = _Library(bag_library), _Library(mlp_library)


@dataclass(frozen=True)
class TableSums:
    """What the rows of a table should be."""

    rows: Tensor  # (n,) u8: the bytes of each row added up, mod 251
    largest: Tensor  # () f32: the largest absolute value


def table_sums(table: Tensor) -> TableSums:
    """The checksums of a table (n, d), f32 or bf16."""
    if table.dtype not in SUFFIX or not table.is_cpu or table.dim() != 2:
        raise BagError(f"rows of {table.dtype} on {table.device}: want f32 or bf16 on the CPU")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise BagError("the numbers of a row must lie side by side")
    count, width = table.shape
    sums = TableSums(torch.empty(count, dtype=torch.uint8), torch.empty(()))
    bag_library().table_sums(
        *(table.data_ptr(), table.stride(0) * table.element_size()),
        *(int(table.dtype == torch.bfloat16), width, count),
        *(sums.rows.data_ptr(), sums.largest.data_ptr(), torch.get_num_threads()),
    )
    return sums


def weight_sums(weight: Tensor) -> Tensor:
    """(inputs + 1,) f32: the sums of the columns of a weight (outputs, inputs), and its norm."""
    exact = weight.detach().double()
    return torch.cat([exact.sum(0), exact.norm()[None]]).float()


def pool_into(
    out: Tensor | Sequence[Tensor],
    tables: Sequence[Tensor],
    bags: Bags,
    sums: Sequence[TableSums],
    planted: bool = False,
) -> None:
    """``embedding_bag.pool_into``, verified. Raises Corruption; BagError as there."""
    fields: list[int] = []
    pooled = Pooled(out, bags)
    for f, own in enumerate(bags.all_fields([table.shape[0] for table in tables])):
        own += _row_fields(tables[f], bags, f)
        own += [*pooled.fields(f, own[BATCH], tables[f].shape[1]), 0]
        fields += own
    native, known = array("q", fields), array("q")
    for one in sums:
        known.extend([one.rows.data_ptr(), one.largest.data_ptr()])
    problem = Problem()
    bag_library(planted).embedding_bags_checked(
        *(native.buffer_info()[0], known.buffer_info()[0], len(tables)),
        *(torch.get_num_threads(), ctypes.byref(problem)),
    )
    _raise(problem, bags, tables)


def _raise(problem: Problem, bags: Bags, tables: Sequence[Tensor]) -> None:
    if problem.kind >= ROW:
        name = "" if bags.names is None else bags.names[problem.table]
        raise corruption(name, problem.kind, problem.table, problem.position, problem.value)
    problem.check(bags, [table.shape[0] for table in tables])


def mlp(
    x: Tensor, layers: Sequence[Layer], sums: Sequence[Tensor], planted: bool = False
) -> Tensor:
    """``mlp.mlp``, verified by the ``weight_sums`` of each layer. Raises Corruption."""
    x = row_major(x)
    out = torch.empty(x.shape[0], layers[-1].outputs, dtype=x.dtype)
    fields = array("q")
    kept: list[object] = []
    for layer in layers:
        weight = layer.weight
        if isinstance(weight, Tensor) and not reads_plain(weight, x.shape[0]):
            weight = pack(weight)
        data, row = (weight.data, 0) if isinstance(weight, Packed) else (weight, weight.stride(0))
        bias = None if layer.bias is None else layer.bias.contiguous()
        kept += [weight, bias]
        fields.extend([data.data_ptr(), row, address(bias) or 0, layer.inputs, layer.outputs])
        fields.append(ACTIVATIONS.index(layer.activation))
        fields.extend([out.data_ptr(), out.stride(0)] if layer is layers[-1] else [0, 0])
        fields.extend([0, 0, 0, 0])
    known = array("q", [one.data_ptr() for one in sums])
    problem = Problem()
    getattr(mlp_library(planted), f"mlp_checked_{SUFFIX[x.dtype]}")(
        *(x.data_ptr(), x.stride(0), x.shape[0], fields.buffer_info()[0]),
        *(known.buffer_info()[0], len(layers), torch.get_num_threads(), ctypes.byref(problem)),
    )
    if problem.kind:
        raise corruption("a chain", problem.kind, problem.table, problem.position, problem.value)
    return out


class Sums:
    """Checksums of a graph's weights, taken again when PyTorch says that a weight was changed.

    Every change in place raises a tensor's version: an optimizer's step, ``copy_``,
    ``load_state_dict``. A bit that flips in memory does not, and neither does writing through
    ``.data`` or NumPy. Called with the weights, it returns the addresses of their sums as one
    tensor i64, which keeps the sums alive.
    """

    def __init__(self, name: str, tables: bool, fresh: bool = False) -> None:
        self.name, self.tables = name, tables
        self.fresh = fresh  # the graph makes the weights: they are new at each call
        self.known: _Known | None = None

    def __str__(self) -> str:
        return self.name

    def __call__(self, weights: Sequence[Tensor]) -> Tensor:
        if self.known is None or self.fresh or not self.known.fits(weights):
            sums = [table_sums(w) if self.tables else weight_sums(w) for w in weights]
            self.known = _Known(weights, sums)
        return self.known.addresses


class _Known:
    """Sums, and the state of the weights that they are of."""

    def __init__(self, weights: Sequence[Tensor], sums: Sequence[TableSums | Tensor]) -> None:
        from compiler import compat  # not above: saved graphs are loaded without TorchDynamo

        self.storages = [compat.StorageWeakRef(w.untyped_storage()) for w in weights]
        self.versions = [_version(w) for w in weights]
        parts = [[s] if isinstance(s, Tensor) else [s.rows, s.largest] for s in sums]
        self.addresses = torch.tensor([t.data_ptr() for part in parts for t in part])
        self.addresses.kept = parts  # type: ignore[attr-defined]

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        same = zip(weights, self.storages, self.versions, strict=True)
        return all(
            _version(w) == version and w.untyped_storage()._cdata == storage.cdata
            for w, storage, version in same
        )


def _version(weight: Tensor) -> tuple[int, int]:
    """Where it starts in its storage, and how often it was changed in place."""
    return int(weight.storage_offset()), 0 if weight.is_inference() else weight._version
