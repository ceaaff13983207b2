"""Where the noise comes from: normals addressed by (key, stream, step, place), never by a state.

The guarantee holds against whoever does not know the key. It is drawn from the system's entropy for
each run, kept in the run's own checkpoints (so that a run can be resumed bit for bit), and left out
of the weights that are released. Parameters are streams, optimizer steps are steps; no address is
ever used for two draws. See noise.cpp; `words` and `normals` here say the same in NumPy.

Noise is f32: the attacks on the low bits of floating-point noise (Mironov 2012) are not covered.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compiler.runtime import build

_WORDS = 16


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled noise.cpp; None on a machine without a C++ compiler."""
    try:
        native = build.load((Path(__file__).parent / "noise.cpp").read_text())
    except build.NoCompiler:
        return None
    p, n, u = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    f, i = ctypes.c_float, ctypes.c_int
    native.noise_words.argtypes = [p, u, u, ctypes.c_uint64, p]
    native.noise_add.argtypes = [p, n, p, u, u, f, i]
    native.noise_settle.argtypes = [p, n, p, ctypes.c_int32, p, i]
    native.noise_rows.argtypes = [p, p, n, n, p, u, u, f, i]
    for call in (native.noise_words, native.noise_add, native.noise_settle, native.noise_rows):
        call.restype = None
    return native


def words(key: bytes, stream: int, step: int, places: np.ndarray) -> np.ndarray:
    """ChaCha20 (RFC 8439): words (16, K) u32 of the blocks at ``places`` (K,)."""
    places = np.asarray(places, dtype=np.uint64)
    start = np.empty((_WORDS, len(places)), dtype=np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    start[12], start[13] = places & np.uint64(0xFFFFFFFF), places >> np.uint64(32)
    start[14], start[15] = np.uint32(stream), np.uint32(step)
    x = start.copy()

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for p, q, r, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] += x[q]
            x[r] ^= x[p]
            x[r] = x[r] << np.uint32(n) | x[r] >> np.uint32(32 - n)

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return x + start


def normals(key: bytes, stream: int, step: int, places: np.ndarray) -> np.ndarray:
    """Sixteen normals of each block, (K, 16) f32, by Box and Muller's transform."""
    made = words(key, stream, step, places)  # (16, K)
    a, b = made[:8].astype(np.float64), made[8:]
    u = a * 2.0**-32 + ((b & 255) + 1.0) * 2.0**-40
    angle = (b >> 8) * (2 * np.pi * 2.0**-24)
    radius = np.sqrt(np.maximum(0, -2 * np.log(u)))
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return np.ascontiguousarray(both.T, dtype=np.float32)


@dataclass(frozen=True)
class Noise:
    """Draws under one 32-byte key.

    >>> a, b = torch.zeros(100), torch.zeros(100)
    >>> noise = Noise(bytes(32))
    >>> noise.add(a, 1.0, stream=0, step=7)
    >>> noise.add(b, 1.0, stream=0, step=7)
    >>> bool((a == b).all()), bool(a.std() > 0.5)
    (True, True)
    """

    key: bytes

    @staticmethod
    def new(seed: int | None = None) -> Noise:
        """A secret key; or, for experiments that must be repeatable, the one of a seed.

        Noise from a seed protects nothing from those who know or guess the seed.
        """
        if seed is None:
            return Noise(secrets.token_bytes(32))
        return Noise(hashlib.blake2b(f"seed {seed}".encode(), digest_size=32).digest())

    def generator(self, purpose: str, step: int) -> np.random.Generator:
        """A generator of its own for a purpose (whom a batch has, say) at a step."""
        made = hashlib.blake2b(f"{purpose} {step}".encode(), key=self.key, digest_size=16)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(made.digest(), "little")))

    def add(self, values: Tensor, scale: float, stream: int, step: int) -> None:
        """Add ``scale`` times a normal of its own to each number of a contiguous tensor."""
        if scale == 0 or values.numel() == 0:
            return
        assert values.is_contiguous()
        if not values.is_cpu:
            values.add_(self._on_device(values, stream, step), alpha=scale)
        elif (native := library()) is not None and values.dtype == torch.float32:
            native.noise_add(
                *(values.data_ptr(), values.numel(), self.key, stream, step, scale),
                torch.get_num_threads(),
            )
        else:
            blocks = np.arange(-(-values.numel() // _WORDS), dtype=np.uint64)
            made = torch.from_numpy(normals(self.key, stream, step, blocks).ravel())
            values.view(-1).add_(made[: values.numel()].to(values.dtype), alpha=scale)

    def add_to_rows(
        self, values: Tensor, rows: Tensor, scale: float | Tensor, stream: int, step: int
    ) -> None:
        """Add noise to ``values`` (R, d), each of the row of a table that ``rows`` (R,) names.

        ``scale``: of all, or (R,) of each.
        """
        if rows.numel() == 0 or (not isinstance(scale, Tensor) and scale == 0):
            return
        width = values.shape[1]
        native = library()
        if native is not None and values.is_cpu and values.dtype == torch.float32 and isinstance(
            scale, float
        ):  # fmt: skip
            assert values.is_contiguous() and rows.is_contiguous()
            native.noise_rows(
                *(values.data_ptr(), rows.data_ptr(), len(rows), width, self.key),
                *(stream, step, scale, torch.get_num_threads()),
            )
            return
        if values.is_cpu:
            per_row = -(-width // _WORDS)
            numbers = rows.numpy().astype(np.uint64)[:, None] * np.uint64(per_row)
            places = (numbers + np.arange(per_row, dtype=np.uint64)).ravel()
            made = normals(self.key, stream, step, places).reshape(len(rows), -1)[:, :width]
            drawn = torch.from_numpy(np.ascontiguousarray(made)).to(values.dtype)
        else:
            drawn = self._on_device(values, stream, step)
        values.add_(drawn * (scale[:, None] if isinstance(scale, Tensor) else scale))

    def _on_device(self, like: Tensor, stream: int, step: int) -> Tensor:
        """Normals from a GPU's own generator, seeded for this draw with 63 bits."""
        made = hashlib.blake2b(f"device {stream} {step}".encode(), key=self.key, digest_size=8)
        seed = int.from_bytes(made.digest(), "little") >> 1
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    def settle(
        self,
        tables: Sequence[Owing],
        variance: np.ndarray,
        step: int,
        ids: Sequence[Tensor] | None = None,
    ) -> None:
        """Give rows the noise that steps before ``step`` owe them, and note that they have it.

        ``variance`` (T + 1,) f64: entry t is the summed variance of steps 0 to t - 1. ``ids``: for
        each table the rows to settle, repeats allowed; None: all rows. The draw of a row has the
        variance that it is owed: the sum of normals is a normal.
        """
        native = library()
        for one in tables:
            assert one.values.is_contiguous() and one.last.dtype == torch.int32
        if native is not None and all(
            t.values.is_cpu and t.values.dtype == torch.float32 for t in tables
        ):
            fields: list[int] = []
            kept = [None if ids is None else ids[f].contiguous() for f in range(len(tables))]
            for one, rows in zip(tables, kept, strict=True):
                count = one.values.shape[0] if rows is None else rows.numel()
                fields += [one.values.data_ptr(), one.values.stride(0), one.values.shape[1]]
                fields += [one.stream, 0 if rows is None else rows.data_ptr(), count]
                fields.append(one.last.data_ptr())
            packed = np.array(fields, dtype=np.int64)
            native.noise_settle(
                *(packed.ctypes.data, len(tables), variance.ctypes.data, step, self.key),
                torch.get_num_threads(),
            )
            return
        sums = torch.from_numpy(variance)
        for f, one in enumerate(tables):
            device = one.values.device
            rows = (
                torch.arange(one.values.shape[0], device=device) if ids is None else ids[f].unique()
            )
            owed = sums[step] - sums[one.last[rows].long().cpu()]
            rows, owed = rows[(owed > 0).to(device)], owed[owed > 0]
            drawn = torch.zeros(len(rows), one.values.shape[1], device=device)
            self.add_to_rows(drawn, rows, owed.sqrt().float().to(device), one.stream, step)
            one.values.index_add_(0, rows, drawn.to(one.values.dtype))
            one.last[rows if ids is not None else slice(None)] = step


@dataclass(frozen=True, eq=False)
class Owing:
    """A table whose rows get their noise late."""

    values: Tensor  # (n, d) f32
    last: Tensor  # (n,) i32, the step up to which each row has its noise
    stream: int
