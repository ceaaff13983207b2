"""The slower memories: what comes back is what went, wherever it was, and places are used again."""

import random

import pytest
import torch
from torch import nn

from compiler.offload import Within
from compiler.offload.ledger import Ledger
from compiler.runtime import offload
from compiler.runtime.offload import CudaCopies, Disk, Pinned


class HostCopies:
    """Copies of a device that is the host itself: the tier's own work, without a GPU."""

    def __init__(self) -> None:
        self.made = 0

    def host(self, size: int) -> torch.Tensor:
        self.made += 1
        return torch.empty(size, dtype=torch.uint8)

    def device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def start(self, to: torch.Tensor, source: torch.Tensor):
        return lambda: to.copy_(source)


def tiers() -> dict:
    return {
        "disk": Disk(),
        "pinned": Pinned(HostCopies(), 10**9, Disk()),
        "both": Pinned(HostCopies(), 100_000, Disk()),
        "below": Pinned(HostCopies(), 0, Disk()),
    }


@pytest.mark.parametrize("name", list(tiers()))
def test_bytes_come_back(name):
    tier, rng = tiers()[name], random.Random(0)
    there = {}
    for _ in range(200):
        if there and rng.random() < 0.5:
            place = rng.choice(list(there))
            want, written = there[place]
            written.result()
            got = tier.blank(want.numel())
            tier.read(place, got).result()
            assert torch.equal(got, want)
            if rng.random() < 0.5:
                tier.free(place, want.numel())
                del there[place]
        else:
            data = torch.randint(256, (rng.choice([1, 5000, 40_000]),), dtype=torch.uint8)
            place, written = tier.write(data)
            assert place not in there
            there[place] = (data.clone(), written)
    write, read = tier.rates()
    assert write > 0 and read > 0
    tier.close()


def test_places_and_buffers_are_used_again():
    disk, copies = Disk(), HostCopies()
    pinned = Pinned(copies, 10**9, Disk())
    data = torch.zeros(10_000, dtype=torch.uint8)
    for tier in (disk, pinned):
        for _ in range(20):
            place, written = tier.write(data)
            written.result()
            tier.free(place, data.numel())
    assert disk.end <= 12_288 and copies.made == 1 and pinned.used == 0


def test_a_model_over_two_tiers():
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.ReLU())])
    x = torch.randn(256, 64)
    within = Within(model, 200_000, "all")
    within.ledger = Ledger(200_000, Pinned(HostCopies(), 150_000, Disk()))
    for _ in range(3):
        got = torch.autograd.grad(within(x).square().sum(), list(model.parameters()))
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert within.ledger.peak <= 200_000 and within.ledger.resident == 0
    assert within.ledger.tier.used == 0


def test_a_folder_in_memory_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "is_memory", lambda folder: True)
    with pytest.warns(UserWarning, match="lies in memory.*DLRM_OFFLOAD_DIR"):
        Disk(tmp_path).close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.ReLU())]).to(device)
    x = torch.randn(256, 64, device=device)
    within = Within(model, 200_000)
    within.ledger = Ledger(200_000, Pinned(CudaCopies(device), 150_000, Disk()))
    for _ in range(4):
        got = torch.autograd.grad(within(x).square().sum(), list(model.parameters()))
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert within.ledger.peak <= 200_000
