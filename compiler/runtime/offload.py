"""The slower memories that saved tensors wait in, and the transfers to and from them.

A ``Tier`` has two threads, so that a write and a read go on beside compute: Python's I/O calls and
copies let go of the interpreter. ``Disk`` is a file without a name, so that nothing is left of it
however the process ends. ``Pinned`` is page-locked host memory for tensors of a GPU.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
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


class Pinned:
    """Page-locked host memory, copied to and from on streams of their own.

    A transfer waits for what the current stream has been given so far, and compute for the
    transfer, on the GPU: neither makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers: list[Tensor | None] = []
        self.unused: dict[int, list[Tensor]] = defaultdict(list)
        self.written, self.got = _Meter(), _Meter()
        self.waiter = ThreadPoolExecutor(2, "dlrm-offload-pinned")

    def write(self, source: Tensor) -> tuple[int, Future[None]]:
        size = source.numel()
        spare = self.unused[size]
        buffer = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.buffers.append(buffer)
        return len(self.buffers) - 1, self._copy(self.out, buffer, source, self.written)

    def read(self, place: int, target: Tensor) -> Future[None]:
        buffer = self.buffers[place]
        assert buffer is not None
        return self._copy(self.back, target, buffer, self.got)

    def _copy(
        self, stream: torch.cuda.Stream, to: Tensor, source: Tensor, meter: _Meter
    ) -> Future[None]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            done.record(stream)
        return self.waiter.submit(meter.timed, to.numel(), done.synchronize)

    def blank(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def free(self, place: int, size: int) -> None:
        buffer, self.buffers[place] = self.buffers[place], None
        if buffer is not None:
            self.unused[size].append(buffer)

    def rates(self) -> tuple[float, float]:
        return self.written.rate(), self.got.rate()

    def close(self) -> None:
        """Give the memory back."""
        self.waiter.shutdown(wait=True)
        self.buffers.clear()
        self.unused.clear()


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


__all__ = ["Disk", "Pinned", "Tier", "is_memory"]
