"""Compile time and peak memory, each measured in a Python process of its own.

``compile``: seconds of the first forward and backward pass, compilation included. Before the clock
starts the process has imported all that any peer needs, has run the eager model forward and
backward, and has traced a small function through Dynamo and AOTAutograd: all peers start from the
same state. Cold: TORCHINDUCTOR_CACHE_DIR and DLRM_COMPILER_CACHE name empty folders. Warm: another
process after that one, with the same folders.

``memory``: bytes that a training step, after four others, adds to the resident memory at its peak.
Linux only: the kernel's high-water mark is set back before the step (/proc/self/clear_refs), and
malloc is told to give freed memory back at once, or the step would use again what the others left.

``python -m dlrm.benchmark.probe SPEC`` is the child; SPEC is JSON, and so is its last line.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm.benchmark.shapes import Draws, Shape
from dlrm.config import DLRMConfig

ROWS = 1000  # of a table at most when compile time is measured: it does not depend on them
# malloc: allocations from 64 KB on come from the system and go back to it
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


class ProbeFailed(Exception):
    """The child did not come to an end; the message has its last words."""


def ask(
    what: str, peer: str, shape: Shape, batch: int, threads: int, optimizer: str,
    env: dict[str, str] | None = None,
) -> float:  # fmt: skip
    """The child's figure: seconds (``compile``) or bytes (``memory``)."""
    spec = {
        "what": what,
        "peer": peer,
        "shape": dataclasses.asdict(shape),
        "batch": batch,
        "threads": threads,
        "optimizer": optimizer,
    }
    return float(answer(__name__, spec, {"OMP_NUM_THREADS": str(threads), **(env or {})}))


def answer(module: str, spec: dict[str, Any], env: dict[str, str]) -> Any:
    """What the module, given ``spec``, prints last, as JSON. Raises ProbeFailed."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(spec)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        words = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ProbeFailed(words[-1][:300] if words else f"exit status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compile_seconds(
    peer: str, shape: Shape, batch: int, threads: int, optimizer: str
) -> tuple[float, float]:
    """(cold, warm): a first process with empty caches, and another one after it."""
    small = shape.scaled(ROWS)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as folder:
        env = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DLRM_COMPILER_CACHE": f"{folder}/ours",
        }
        cold = ask("compile", peer, small, batch, threads, optimizer, env)
        return cold, ask("compile", peer, small, batch, threads, optimizer, env)


def peak_bytes(peer: str, shape: Shape, batch: int, threads: int, optimizer: str) -> float:
    """What a training step adds at its peak."""
    return ask("memory", peer, shape, batch, threads, optimizer, MALLOC)


def can_measure_memory() -> bool:
    """Whether the high-water mark can be set back here."""
    return os.access("/proc/self/clear_refs", os.W_OK)


# ---- the child ---------------------------------------------------------------------------------


def _shape(given: dict[str, Any]) -> Shape:
    model: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in given["model"].items()
    }
    return Shape(
        given["name"], DLRMConfig(**model), tuple(given["pooling"]), tuple(given["batches"])
    )


def time_compile(shape: Shape, batch: int, peer: str) -> float:
    """Seconds of the first forward and backward pass of that peer's model."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import compiler.api  # noqa: F401
    from dlrm.benchmark import peers
    from dlrm.benchmark.tables import Tables, build

    draw = Draws(shape, batch)
    tables = Tables(shape, fbgemm=False)
    eager = build(shape, tables)
    eager(*draw().inputs()).sum().backward()
    traced = torch.compile(lambda x: (x * 2).relu(), backend="aot_eager")
    traced(torch.ones(3, requires_grad=True)).sum().backward()
    # TorchInductor takes the whole model with dense gradients of the tables, not with sparse ones
    model = build(shape, tables, sparse=peer != peers.INDUCTOR)
    inputs = draw().inputs()
    forward = peers.ours(model) if peer == peers.OURS else peers.inductor(model, "default")
    start = time.perf_counter()
    forward(*inputs).sum().backward()
    return time.perf_counter() - start


def measure_memory(shape: Shape, batch: int, peer: str, optimizer: str) -> float:
    """The median over five steps of the bytes that each adds at its peak."""
    from dlrm.benchmark import peers
    from dlrm.benchmark.tables import Tables

    draw = Draws(shape, batch)
    tables = Tables(shape, fbgemm=peer in (peers.TBE, peers.TBE_INDUCTOR))
    peers.reset()
    (one,) = peers.training(shape, tables, optimizer, [peer], ["default"])
    with one.first():
        one.call(draw())
    found = []
    for _ in range(8):
        given = one.prepare(draw())
        found.append(bytes_added(functools.partial(one.run, given)))
    return max(0.0, statistics.median(found[3:]))


def bytes_added(run: Callable[[], object]) -> int:
    """What ``run`` adds to the resident memory at its peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def main(argv: list[str]) -> int:
    """Print the figure that the specification asks for."""
    import torch

    spec = json.loads(argv[0])
    torch.set_num_threads(spec["threads"])
    shape = _shape(spec["shape"])
    if spec["what"] == "compile":
        print(json.dumps(time_compile(shape, spec["batch"], spec["peer"])))
    else:
        print(json.dumps(measure_memory(shape, spec["batch"], spec["peer"], spec["optimizer"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
