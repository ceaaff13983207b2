"""How fast preprocessing is, side by side with polars reading the same file.

``python -m dlrm.datasets.criteo.rate [FILE]``; without a file, 2 million rows like Criteo's are
made in a temporary directory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm import cli
from dlrm.datasets.criteo.format import D, F, read_meta
from dlrm.datasets.criteo.parse import mix
from dlrm.datasets.criteo.prepare import usable_cores
from dlrm.datasets.criteo.source import inspect

# Sizes of the Kaggle tables, as published with the DLRM.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
# Missing shares and typical values of the kind found in that data.
DENSE_MISSING = (0.45, 0, 0.21, 0.21, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.21)
DENSE_TYPICAL = (1, 3, 6, 5, 3000, 40, 4, 8, 40, 1, 2, 1, 5)
TABLE_MISSING = (
    0, 0, 0.034, 0.034, 0, 0.12, 0, 0, 0, 0, 0, 0.034, 0,
    0, 0, 0.034, 0, 0, 0.44, 0.44, 0.034, 0.76, 0, 0.034, 0.44, 0.44,
)  # fmt: skip

_POLARS = """
import sys, time, polars
kinds = [polars.Int64] + [polars.Float64] * 13 + [polars.String] * 26
start = time.perf_counter()
frame = polars.read_csv(sys.argv[1], separator=sys.argv[2], has_header=False,
                        skip_rows=int(sys.argv[3]),
                        schema={f"column_{i + 1}": kind for i, kind in enumerate(kinds)})
print(frame.height, time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Rate:
    """One measurement, of a fresh process that does all its work."""

    name: str
    rows: int
    seconds: float
    cpu_seconds: float  # of the process and its children together
    peak_rss_mb: float  # of the process and its children together, sampled every 20 ms

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def measure(path: str | os.PathLike[str], workers: int | None = None) -> tuple[Rate, Rate]:
    """Time ``python -m dlrm.preprocess`` on a file, and ``polars.read_csv``; print and return both.

    The first is the whole command, from its start to the finished directory (made beside the file,
    and removed). The second is the call of `read_csv` alone, in a process that has imported polars;
    its memory is that of its process.
    """
    path = os.fspath(path)
    source = inspect(path)
    read_through(path)  # both find the file in the page cache
    with tempfile.TemporaryDirectory(dir=Path(path).absolute().parent) as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "dlrm.preprocess", "--input", path, "--out", str(out)]
        command += ["--quiet"] + ([] if workers is None else ["--workers", str(workers)])
        seconds, cpu, peak, _ = _watch(command)
        rows = read_meta(out)["rows"]
    ours = Rate("python -m dlrm.preprocess, the whole command", rows, seconds, cpu, peak)
    separator = source.form.separator.decode()
    command = [sys.executable, "-c", _POLARS, path, separator, str(int(source.header))]
    _, cpu, peak, output = _watch(command)
    height, seconds_read = output.split()
    theirs = Rate("polars.read_csv, reading alone", int(height), float(seconds_read), cpu, peak)
    megabytes = os.stat(path).st_size / 1e6
    print(f"{path}: {rows:,} rows, {megabytes:,.0f} MB, {usable_cores()} cores")
    for rate in (ours, theirs):
        print(
            f"  {rate.name:44} {rate.rows_per_s:>11,.0f} rows/s  {rate.seconds:6.2f} s  "
            f"{rate.cpu_seconds:6.2f} s of CPU  {rate.peak_rss_mb:>7,.0f} MB"
        )
    return ours, theirs


def read_through(path: str) -> None:
    """Read the file once."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def _watch(command: list[str]) -> tuple[float, float, float, str]:
    """(seconds, CPU seconds, peak resident MB of the whole process tree, output) of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    root = str(Path(__file__).parents[2])  # the package is found from any directory
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, tree_rss(process.pid))
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, peak / 1e6, output


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and of all its descendants (Linux)."""
    total, todo = 0, [pid]
    while todo:
        pid = todo.pop()
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                todo += map(int, children.split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def make_file(path: str | os.PathLike[str], rows: int, seed: int = 0, block: int = 1 << 15) -> None:
    """Write `rows` rows like those of the Kaggle file, in its format (about 220 bytes each).

    Log-uniform ids over the published table sizes (Zipf with exponent 1), heavy-tailed dense
    values, some of them negative, missing values in the shares of that data. For speed tests: the
    label depends on nothing. The same bytes from the same arguments.
    """
    rng = np.random.default_rng(seed)
    with open(path, "wb") as file:
        for start in range(0, rows, block):
            file.write(_lines(rng, min(block, rows - start)))


def _lines(rng: np.random.Generator, rows: int) -> bytes:
    """Some lines: all fields at fixed width side by side, then the used bytes taken out."""
    fields: list[NDArray[np.uint8]] = []  # (rows, width), 0 for bytes not used
    fields.append(48 + (rng.random((rows, 1)) < 0.256).astype(np.uint8))
    tab = np.full((rows, 1), 9, np.uint8)
    for missing, typical in zip(DENSE_MISSING, DENSE_TYPICAL, strict=True):
        value = np.minimum(typical * np.exp(1.5 * rng.standard_normal(rows)), 9e6).astype(np.int64)
        minus = (rng.random(rows) < 0.05) & (value < 4) & (value > 0)
        digits = value[:, None] // 10 ** np.arange(6, -1, -1) % 10
        leading = np.cumsum(digits, axis=1) == 0
        leading[:, -1] = False
        text = np.where(leading, 0, digits + 48).astype(np.uint8)
        text = np.concatenate([np.where(minus, 45, 0).astype(np.uint8)[:, None], text], axis=1)
        text[rng.random(rows) < missing] = 0
        fields += [tab, text]
    shifts = np.arange(28, -1, -4).astype(np.uint64)
    for column, (missing, size) in enumerate(zip(TABLE_MISSING, KAGGLE_ROWS, strict=True)):
        rank = np.exp(rng.random(rows) * np.log(size + 1)).astype(np.uint64)
        nibbles = (mix(rank + np.uint64(column << 40))[:, None] >> shifts) & np.uint64(15)
        text = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.astype(np.int64)]
        text[rng.random(rows) < missing] = 0
        fields += [tab, text]
    fields.append(np.full((rows, 1), 10, np.uint8))
    assert len(fields) == 2 * (D + F) + 2
    matrix = np.concatenate(fields, axis=1)
    return matrix[matrix > 0].tobytes()


def main() -> int:
    """Measure the file named on the command line, or a made one."""

    def command() -> int:
        if len(sys.argv) > 1:
            measure(sys.argv[1])
            return 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "criteo_like.tsv"
            make_file(path, 2_000_000)
            measure(path)
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
