"""Bags of ids, table by table, as the kernels read them; and what they say of bad ones."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("sum", "mean", "max")
_WIDE = {torch.int32: 0, torch.int64: 1}
_LIMIT = 2**32 - 1  # the update sorts 32-bit row numbers and positions


class BagError(ValueError):
    """An id or an offset is out of range; the message names table, position and value."""


@dataclass(frozen=True)
class Bags:
    """The ids of F tables, each cut into B bags, with the meaning of ``F.embedding_bag``.

    * ``ids``: F tensors (N_f,) i32 or i64; or (B, L), bags of L ids each, without offsets.
    * ``offsets``: F tensors (B,), or (B + 1,) with ``include_last_offset``, where each bag starts
      in its table's own ids; or one tensor of F such rows. Required unless the ids are (B, L).
    * ``mode``: sum, mean or max, for all tables or for each. An empty bag gives 0.
    * ``weights``: F tensors (N_f,) f32 or None, one weight per id; mode sum only.
    * ``padding``: for each table an id that counts for nothing, or None.
    * ``names``: how errors call the tables.
    """

    ids: Sequence[Tensor]
    offsets: Sequence[Tensor] | Tensor | None = None
    mode: str | Sequence[str] = "sum"
    weights: Sequence[Tensor | None] | None = None
    padding: Sequence[int | None] | None = None
    include_last_offset: bool = False
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        ids = [_plain(t, self, f, "ids") for f, t in enumerate(self.ids)]
        object.__setattr__(self, "ids", ids)
        for what in ("offsets", "weights", "padding", "names"):
            given = getattr(self, what)
            if given is not None and len(given) != len(ids):
                raise BagError(f"{what}: {len(given)} given for the ids of {len(ids)} tables")
        if not isinstance(self.mode, str) and len(self.mode) != len(ids):
            raise BagError(f"mode: {len(self.mode)} given for the ids of {len(ids)} tables")
        if isinstance(self.offsets, Tensor):
            offsets = self.offsets
            if offsets.dim() != 2 or offsets.dtype not in _WIDE:
                raise BagError(f"offsets: wanted (F, B) i32 or i64, got {_seen(offsets)}")
            if offsets.stride(1) != 1 and offsets.numel():
                object.__setattr__(self, "offsets", offsets.contiguous())
        elif self.offsets is not None:
            rows = [_plain(t, self, f, "offsets") for f, t in enumerate(self.offsets)]
            object.__setattr__(self, "offsets", rows)
        if self.weights is not None:
            kept = [None if w is None else w.contiguous() for w in self.weights]
            object.__setattr__(self, "weights", kept)

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, f: int) -> str:
        """What errors call table ``f``."""
        return f"table {f}" if self.names is None else f"table {f} ({self.names[f]})"

    def mode_of(self, f: int) -> str:
        """sum, mean or max."""
        mode = self.mode if isinstance(self.mode, str) else self.mode[f]
        if mode not in MODES:
            raise BagError(f"mode: {mode!r} is none of {', '.join(MODES)}")
        return mode

    @functools.cached_property
    def modes(self) -> list[int]:
        """The place of each table's mode in ``MODES``."""
        if isinstance(self.mode, str) and len(self):
            return [MODES.index(self.mode_of(0))] * len(self)
        return [MODES.index(self.mode_of(f)) for f in range(len(self))]

    def padding_of(self, f: int, rows: int) -> int:
        """The padding id of table ``f`` counted from 0, or -1 for none."""
        given = None if self.padding is None else self.padding[f]
        if given is None:
            return -1
        if not -rows <= given < rows:
            raise BagError(f"{self.name(f)}: padding id {given} is outside its {rows} rows")
        return given % rows

    def batch(self, f: int) -> int:
        """The number of bags of table ``f``."""
        ids = self.ids[f]
        if self.offsets is None:
            if ids.dim() != 2:
                raise BagError(f"{self.name(f)}: ids {tuple(ids.shape)} without offsets")
            return ids.shape[0]
        if ids.dim() != 1:
            raise BagError(f"{self.name(f)}: ids {tuple(ids.shape)} with offsets: wanted (N,)")
        of_table = self.offsets
        size = of_table.shape[1] if isinstance(of_table, Tensor) else of_table[f].numel()
        if self.include_last_offset and size == 0:
            raise BagError(f"{self.name(f)}: include_last_offset needs at least one offset")
        return size - self.include_last_offset

    def fields(self, f: int, rows: int) -> list[int]:
        """``struct Bags`` of bags.h for table ``f`` of ``rows`` rows, as int64."""
        return self._fields(f, rows, self._shared())

    def all_fields(self, rows: Sequence[int]) -> list[list[int]]:
        """``fields`` of every table; addresses are read anew by each call."""
        shared = self._shared()
        return [self._fields(f, n, shared) for f, n in enumerate(rows)]

    def _shared(self) -> tuple[int, int, int, int] | None:
        """Address, bytes from table to table, whether i64, and bags of offsets in one tensor."""
        offsets = self.offsets
        if not isinstance(offsets, Tensor):
            return None
        if not offsets.is_cpu:
            raise BagError(f"offsets {_seen(offsets)}: wanted on the CPU")
        size = offsets.element_size()
        bags = offsets.shape[1] - self.include_last_offset
        return offsets.data_ptr(), offsets.stride(0) * size, _WIDE[offsets.dtype], bags

    def _fields(self, f: int, rows: int, shared: tuple[int, int, int, int] | None) -> list[int]:
        ids = self.ids[f]
        count, length = ids.numel(), 0
        if not ids.is_cpu:
            raise BagError(f"{self.name(f)}: ids {_seen(ids)}: wanted on the CPU")
        if count > _LIMIT or rows > _LIMIT:
            raise BagError(f"{self.name(f)}: more than 2^32 - 1 ids or rows")
        if shared is not None and shared[3] >= 0 and ids.dim() == 1:
            start, wide, bags = shared[0] + f * shared[1], shared[2], shared[3]
        else:
            bags = self.batch(f)
            if self.offsets is None:
                start, wide, length = 0, 0, ids.shape[1]
            else:
                offsets = self.offsets[f]
                if not offsets.is_cpu:
                    raise BagError(f"{self.name(f)}: offsets {_seen(offsets)}: wanted on the CPU")
                start, wide = offsets.data_ptr(), _WIDE[offsets.dtype]
        weight = None if self.weights is None else self.weights[f]
        if weight is not None:
            if self.mode_of(f) != "sum":
                raise BagError(f"{self.name(f)}: weights go with mode sum, not {self.mode_of(f)}")
            if weight.dtype != torch.float32 or weight.numel() != count:
                raise BagError(f"{self.name(f)}: weights {_seen(weight)} for {count} ids: want f32")
        return [
            *(ids.data_ptr(), _WIDE[ids.dtype], count),
            *(start, wide, int(self.include_last_offset), length, bags),
            0 if weight is None else weight.data_ptr(),
            *(-1 if self.padding is None else self.padding_of(f, rows), rows),
        ]


class Problem(ctypes.Structure):
    """``struct Problem`` of bags.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "table", "position", "value")]

    def check(self, bags: Bags, rows: Sequence[int]) -> None:
        """Raise BagError for what the kernel found."""
        if self.kind == 0:
            return
        f = self.table
        if self.kind == 1:
            raise BagError(
                f"{bags.name(f)}: id {self.value} at position {self.position} is outside its "
                f"{rows[f]} rows"
            )
        raise BagError(
            f"{bags.name(f)}: offsets[{self.position}] is {self.value}: offsets start at 0, do not "
            f"fall, and end within its {bags.ids[f].numel()} ids"
        )


def _plain(tensor: Tensor, bags: Bags, f: int, what: str) -> Tensor:
    if tensor.dtype not in _WIDE:
        raise BagError(f"{bags.name(f)}: {what} must be i32 or i64, not {_seen(tensor)}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _seen(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
