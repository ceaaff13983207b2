"""The slower memories that saved tensors wait in, and the transfers to and from them.

A ``Tier`` has two threads, so that a write and a read go on beside compute: Python's I/O calls and
copies let go of the interpreter. ``Disk`` is a file without a name, so that nothing is left of it
however the process ends; it is written through the system's cache of files, which here is faster
than O_DIRECT once the file has its blocks, and whose pages the system takes back when it needs
them. ``Pinned`` is page-locked host memory for tensors of a GPU, with the disk below it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

FOLDER = "DLRM_OFFLOAD_DIR"
PIECE = 1 << 23  # bytes: written or read by one call of the system


class Tier(Protocol):
    """A slower memory."""

    def write(self, source: Tensor) -> tuple[int, Future[None]]:
        """Start to write a flat u8 tensor; the place it will have, and when it is there."""
        ...

    def read(self, place: int, target: Tensor) -> Future[None]:
        """Start to read what is at ``place`` into a flat u8 tensor of the same size."""
        ...

    def blank(self, size: int) -> Tensor:
        """A flat u8 tensor to read into."""
        ...

    def free(self, place: int, size: int) -> None:
        """Let the place be used again."""
        ...

    def rates(self) -> tuple[float, float]:
        """Bytes per second of the writes and reads since the last call."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class _Meter:
    """Bytes and seconds of transfers in one direction."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def rate(self) -> float:
        """Since the last call; 1 GB/s where nothing was moved."""
        found = self.bytes / self.seconds if self.seconds else 1e9
        self.bytes, self.seconds = 0, 0.0
        return found

    def timed(self, size: int, transfer: Callable[[], None]) -> None:
        start = time.perf_counter()
        transfer()
        self.seconds += time.perf_counter() - start
        self.bytes += size


class Disk:
    """A file without a name in ``folder``, else in DLRM_OFFLOAD_DIR, else in the temporary folder.

    Raises OSError, at the transfer, for a full disk.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        place = Path(folder or os.environ.get(FOLDER) or tempfile.gettempdir())
        if is_memory(place):
            warnings.warn(
                f"{place} lies in memory (tmpfs), so what waits there saves none: name a folder on "
                f"a disk by {FOLDER}",
                stacklevel=2,
            )
        self.file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115
        self.fd = self.file.fileno()
        self.end = 0
        self.unused: dict[int, list[int]] = defaultdict(list)  # places by size
        self.lock = Lock()
        self.written, self.got = _Meter(), _Meter()
        self.writer = ThreadPoolExecutor(1, "dlrm-offload-write")
        self.reader = ThreadPoolExecutor(1, "dlrm-offload-read")

    def write(self, source: Tensor) -> tuple[int, Future[None]]:
        size = source.numel()
        with self.lock:
            if self.unused[size]:
                place = self.unused[size].pop()
            else:
                place, self.end = self.end, self.end + -(-size // 4096) * 4096
        return place, self.writer.submit(self.written.timed, size, lambda: self._out(place, source))

    def read(self, place: int, target: Tensor) -> Future[None]:
        size = target.numel()
        return self.reader.submit(self.got.timed, size, lambda: self._in(place, target))

    def blank(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def free(self, place: int, size: int) -> None:
        with self.lock:
            self.unused[size].append(place)

    def rates(self) -> tuple[float, float]:
        return self.written.rate(), self.got.rate()

    def _out(self, place: int, source: Tensor) -> None:
        view, at = _memory(source), 0
        while at < len(view):
            at += os.pwrite(self.fd, view[at : at + PIECE], place + at)

    def _in(self, place: int, target: Tensor) -> None:
        view, at = _memory(target), 0
        while at < len(view):
            got = os.preadv(self.fd, [view[at : at + PIECE]], place + at)
            if got == 0:
                raise OSError(f"the offload file ends at {place + at}")
            at += got

    def close(self) -> None:
        """Give the file back to the system."""
        self.writer.shutdown(wait=True)
        self.reader.shutdown(wait=True)
        self.file.close()


class Copies(Protocol):
    """Copies between a device and host memory: all that ``Pinned`` asks of a device."""

    def host(self, size: int) -> Tensor:
        """A flat u8 tensor in host memory that the device copies to and from directly."""
        ...

    def device(self, size: int) -> Tensor:
        """The same in the device's memory."""
        ...

    def start(self, to: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy beside compute; the result waits for its end."""
        ...


class CudaCopies:
    """On streams of their own, one each way. A copy waits, on the GPU, for what compute has been
    given before it; neither makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device
        self.streams = {True: torch.cuda.Stream(device), False: torch.cuda.Stream(device)}

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.on)

    def start(self, to: Tensor, source: Tensor) -> Callable[[], None]:
        stream = self.streams[to.is_cuda]
        stream.wait_stream(torch.cuda.current_stream(self.on))
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            done.record(stream)
        return done.synchronize


class Pinned:
    """Page-locked host memory up to ``limit`` bytes, and below it another tier for the rest.

    What goes further down stays in a host buffer only while it is moved.
    """

    def __init__(self, copies: Copies, limit: int, below: Tier) -> None:
        self.copies, self.limit, self.below = copies, limit, below
        self.used = 0
        self.homes: dict[int, Tensor | int] = {}  # by place: a buffer, or a place in ``below``
        self.count = 0
        self.unused: dict[int, list[Tensor]] = defaultdict(list)
        self.lock = Lock()
        self.written, self.got = _Meter(), _Meter()
        self.writer = ThreadPoolExecutor(1, "dlrm-offload-down")
        self.reader = ThreadPoolExecutor(1, "dlrm-offload-up")

    def write(self, source: Tensor) -> tuple[int, Future[None]]:
        size, buffer = source.numel(), self._buffer(source.numel())
        with self.lock:
            place, self.count = self.count, self.count + 1
            stays = self.used + size <= self.limit
            self.used += size if stays else 0
        wait = self.copies.start(buffer, source)

        def move() -> None:
            wait()
            if stays:
                self.homes[place] = buffer
                return
            lower, done = self.below.write(buffer)
            done.result()
            self.homes[place] = lower
            self._spare(buffer)

        return place, self.writer.submit(self.written.timed, size, move)

    def read(self, place: int, target: Tensor) -> Future[None]:
        home = self.homes[place]
        if isinstance(home, Tensor):
            wait = self.copies.start(target, home)
            return self.reader.submit(self.got.timed, target.numel(), wait)
        buffer = self._buffer(target.numel())

        def move() -> None:
            self.below.read(home, buffer).result()
            self.copies.start(target, buffer)()
            self._spare(buffer)

        return self.reader.submit(self.got.timed, target.numel(), move)

    def blank(self, size: int) -> Tensor:
        return self.copies.device(size)

    def free(self, place: int, size: int) -> None:
        home = self.homes.pop(place)
        if isinstance(home, Tensor):
            self._spare(home)
            with self.lock:
                self.used -= size
        else:
            self.below.free(home, size)

    def rates(self) -> tuple[float, float]:
        return self.written.rate(), self.got.rate()

    def close(self) -> None:
        self.writer.shutdown(wait=True)
        self.reader.shutdown(wait=True)
        self.homes.clear()
        self.unused.clear()
        self.below.close()

    def _buffer(self, size: int) -> Tensor:
        with self.lock:
            spare = self.unused[size]
            return spare.pop() if spare else self.copies.host(size)

    def _spare(self, buffer: Tensor) -> None:
        with self.lock:
            self.unused[buffer.numel()].append(buffer)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat u8 CPU tensor, not copied."""
    kind: Any = ctypes.c_char * tensor.numel()
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def is_memory(folder: Path) -> bool:
    """Whether a folder lies in memory (tmpfs): offloading to it would save nothing."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    real = str(folder.resolve())
    inside = [m for m in mounts if real == m[0] or real.startswith(m[0].rstrip("/") + "/")]
    return bool(inside) and max(inside, key=lambda m: len(m[0]))[1] in ("tmpfs", "ramfs")


__all__ = ["CudaCopies", "Disk", "Pinned", "Tier", "is_memory"]
