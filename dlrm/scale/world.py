"""The processes of a job: found in torchrun's environment, joined, and left in the right order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.errors import InputError


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class PeerLost(Exception):
    """Another process of the job is gone, so that nothing can be exchanged any more."""


@dataclass(frozen=True)
class World:
    """This process among ``size``; rank 0 writes files and speaks."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, rows: int) -> tuple[int, int, int]:
        """[start, stop) of this process among ``rows``, and the size of the largest part.

        Collectives of row-wise shards want parts of one size: the last ones are filled up to it.
        """
        size = -(-rows // self.size)
        return min(self.rank * size, rows), min((self.rank + 1) * size, rows), size

    def total(self, *values: float) -> list[float]:
        """Each value summed over the processes, in f64."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _peers():
            dist.all_reduce(sums)
        return sums.tolist()

    def rows(self, mine: Tensor, rows: int) -> Tensor:
        """The filled parts (n,) of all processes, one after the other, without the filling."""
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with _peers():
            dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)[:rows]

    def told(self, value: Any) -> Any:
        """What rank 0 has for ``value``."""
        box = [value]
        with _peers():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Until all processes are here."""
        with _peers():
            dist.barrier()

    def agree(self, error: Exception | None) -> None:
        """Raise in every process the first error that one of them met."""
        found: list[Exception | None] = [None] * self.size
        with _peers():
            dist.all_gather_object(found, error)
        for one in found:
            if one is not None:
                raise one


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise lost(error) or error from None


def lost(error: BaseException) -> PeerLost | None:
    """The error as a lost peer, if that is what it says."""
    words = ("closed by peer", "reset by peer", "timed out", "Broken pipe", "recvValue", "NCCL")
    text = str(error)
    if not any(word.lower() in text.lower() for word in words):
        return None
    return PeerLost(
        "another process of this job is gone or does not answer, so this one stops too; its own "
        "message says why. Start the job again with --resume auto, or let torchrun do so with "
        f"--max-restarts (what was heard: {text.splitlines()[0][:120]})"
    )


@contextmanager
def joined(device: str = "auto", timeout_s: float = 300.0) -> Iterator[World]:
    """The process group, gloo for the CPU and NCCL for GPUs, and taken down at the end.

    What is sharded must be gone before the group is: the caller lets go of it inside.
    """
    from datetime import timedelta

    if not dist.is_available():
        raise InputError("torchrun: this build of PyTorch has no torch.distributed")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda and torch.cuda.device_count() <= local:
        raise InputError(
            f"--device {device}: process {local} of this machine has no GPU of its own, there are "
            f"{torch.cuda.device_count()}; give --nproc-per-node as many, or --device cpu"
        )
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()
