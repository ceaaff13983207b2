"""Training a table set larger than the memory that the process may have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# 260 MB of rows with their state; the process may take 200 MB beside what PyTorch itself takes
SCRIPT = """
import re, resource, sys
from pathlib import Path
import dlrm.train, dlrm.tables
text = Path("/proc/self/status").read_text()
used = int(re.search(r"VmData:\\s+(\\d+)", text)[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 200_000_000,) * 2)
sys.exit(dlrm.train.main(sys.argv[1:]))
"""
FLAGS = [
    *("--data", "synthetic", "--samples", "3000", "--zipf", "1.05", "--batch-size", "128"),
    *("--rows", "1000000,300", "--dim", "64", "--dense-in", "3", "--bottom", "8", "--top", "8"),
    *("--steps", "20", "--eval-every", "10", "--save-every", "10", "--window", "1024"),
    *("--limit-val-batches", "1", "--limit-test-batches", "1", "--quiet", "--threads", "1"),
    *("--sparse-optimizer", "rowwise_adagrad"),
]


def run(out: Path, storage: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", SCRIPT, *FLAGS, "--out", str(out), "--table-storage", storage]
    return subprocess.run(
        [*command, "--table-cache", "8MiB"], env=env, capture_output=True, text=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux counts it")
def test_on_disk_it_trains_where_in_memory_it_cannot(tmp_path):
    failed = run(tmp_path / "memory", "memory")
    assert failed.returncode != 0
    assert "can't allocate memory" in failed.stderr or "not enough memory" in failed.stderr
    done = run(tmp_path / "disk", "disk")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rows found in the cache" in done.stdout
    summary = json.loads((tmp_path / "disk/summary.json").read_text())
    assert summary["table_disk_mb"] > 240 and summary["table_cache_mb"] == 8
    assert 0 < summary["table_cache_hit_rate"] < 1


def test_progress_shows_the_hit_rate(tmp_path, capsys, monkeypatch):
    from dlrm import report
    from dlrm.train import main

    class Always(report.tqdm):  # a bar that does not wait before it shows what is new
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "mininterval": 0, "miniters": 1})

    monkeypatch.setattr(report, "tqdm", Always)
    flags = [f for f in FLAGS if f != "--quiet"]
    flags[flags.index("1000000,300")] = "500,300"
    disk = ["--table-storage", "disk", "--table-cache", "100KiB", "--out", str(tmp_path / "run")]
    assert main([*flags, *disk]) == 0
    shown = capsys.readouterr()
    assert "% of rows cached" in shown.err
    assert "MiB of rows in" in shown.out and "a cache of 100KiB before them" in shown.out
