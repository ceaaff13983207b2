"""Choices by measurement: the fastest of some ways to compute the same, remembered between runs.

``mode="max-autotune"`` asks here which way to take for each shape. Times are minima over
alternating rounds on random data. The choice is kept in the cache folder, by what was asked, the
CPU and the number of threads, in a file that is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from compiler.runtime import build

ROUNDS = 7


CPU = torch.device("cpu")


def choose(
    question: str, ways: Mapping[str, Callable[[], object]], device: torch.device = CPU
) -> str:
    """The name of the fastest way; ``question`` says what is computed, with shapes and types."""
    if device.type == "cuda":
        key = f"{question} on {torch.cuda.get_device_name(device)}"
    else:
        key = f"{question} on {build.cpu_name()} with {torch.get_num_threads()} threads"
    file = _file(key)
    known = _read(file)
    if known in ways:
        return known
    once = _once_on_gpu if device.type == "cuda" else _once
    times = {name: once(way) for name, way in ways.items()}  # warms up, too
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name] = min(times[name], once(way))
    best = min(times, key=lambda name: times[name])
    _write(file, {"question": key, "best": best, "seconds": times})
    return best


def _once(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def _once_on_gpu(way: Callable[[], object]) -> float:
    """By the device's own clock, as a launch returns before its kernel has run."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _file(key: str) -> Path:
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return build.cache_folder() / f"choice-{name}.json"


def _read(file: Path) -> str:
    try:
        found = json.loads(file.read_text())["best"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(found)


def _write(file: Path, content: object) -> None:
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, file)
    except OSError:  # no cache: the next run measures again
        partial.unlink(missing_ok=True)
