"""Merging dictionaries by key ranges, splits, and the worker pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dlrm.datasets.criteo import vocab
from dlrm.datasets.criteo.format import CriteoSettings
from dlrm.datasets.criteo.pool import Pool, WorkerDied
from dlrm.datasets.criteo.split import Cut, permute
from dlrm.datasets.criteo.vocab import (
    CHUNK_COUNTS,
    NO_COUNTS,
    MergeTask,
    map_path,
    run_merge,
    vocab_path,
)
from dlrm.errors import InputError


def merge_task(
    folder: Path, chunks: list[np.ndarray], entries: int, monkeypatch: pytest.MonkeyPatch
) -> MergeTask:
    """A task over chunk files that hold nothing but keys, then counts; the last is not counted."""
    monkeypatch.setattr(vocab, "MIN_SLICE", 3)
    (folder / "vocab").mkdir(parents=True)
    names = []
    for number, keys in enumerate(chunks):
        distinct, counts = np.unique(keys, return_counts=True)
        content = distinct.tobytes() + counts.astype(np.uint32).tobytes()
        names.append(f"chunk{number}")
        (folder / f"chunk{number}.chunk").write_bytes(content)
    sizes = np.array([np.unique(keys).size for keys in chunks], np.int64)
    source = np.full(len(chunks), CHUNK_COUNTS, np.uint8)
    source[-1] = NO_COUNTS
    return MergeTask(
        str(folder), str(folder), 4, names, sizes, sizes * 0, sizes * 8, source, 2, entries=entries
    )


@pytest.mark.parametrize("entries", [1, 40, 10**6])
def test_merge_counts_keeps_and_numbers_keys(
    tmp_path: Path, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    chunks = [
        (rng.zipf(1.5, 200).astype(np.uint64) % np.uint64(97)) << np.uint64(57) for _ in range(5)
    ]
    chunks.insert(2, np.array([], np.uint64))
    chunks.append(np.array([5, 2**64 - 1], np.uint64))
    task = merge_task(tmp_path, chunks, entries, monkeypatch)
    result = run_merge(task)
    counts = Counter(k for keys in chunks[:-1] for k in keys.tolist())
    kept = sorted(k for k, n in counts.items() if n >= 2)
    keys = np.fromfile(vocab_path(tmp_path, 4, "keys"), np.uint64)
    assert keys.tolist() == kept
    times = np.fromfile(vocab_path(tmp_path, 4, "counts"), np.uint64)
    assert times.tolist() == [counts[k] for k in kept]
    assert result == {"rows": len(kept) + 1, "distinct": len(counts) + 2}
    ids = {k: i + 1 for i, k in enumerate(kept)}
    expected = [ids.get(k, 0) for keys in chunks for k in np.unique(keys).tolist()]
    assert np.fromfile(map_path(tmp_path, 4), np.int32).tolist() == expected
    # looking up in that vocabulary gives the same ids, and so does a second call (nothing to do)
    for again in (tmp_path / "again", tmp_path / "again2"):
        task = merge_task(again, chunks, entries, monkeypatch)
        task = MergeTask(**{**vars(task), "base": str(tmp_path)})
        assert run_merge(task) == run_merge(task) == result
        assert np.fromfile(map_path(again, 4), np.int32).tolist() == expected


@pytest.mark.parametrize("total", [1, 2, 3, 10, 97, 1000])
def test_permute_is_a_permutation(total: int) -> None:
    index = np.arange(total, dtype=np.uint64)
    ranks = permute(index, total, 7)
    assert sorted(ranks.tolist()) == list(range(total))
    assert index.tolist() == list(range(total))  # its argument is left alone
    one_by_one = [int(permute(index[i : i + 1], total, 7)[0]) for i in range(total)]
    assert one_by_one == ranks.tolist()


def test_permute_looks_random() -> None:
    total = 20_000
    ranks = permute(np.arange(total, dtype=np.uint64), total, 0).astype(np.float64)
    assert abs(np.corrcoef(ranks, np.arange(total))[0, 1]) < 0.03
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.03
    other = permute(np.arange(total, dtype=np.uint64), total, 1).astype(np.float64)
    assert abs(np.corrcoef(ranks, other)[0, 1]) < 0.03
    tests = ranks.reshape(20, -1) >= 0.9 * total  # about 100 of 1000 rows in every stretch
    assert (abs(tests.sum(axis=1) - 100) < 45).all()


@pytest.mark.parametrize(
    ("split", "file_rows", "edges"),
    [
        ("day", [100, 50, 21], (150, 161, 171)),  # the last file halved, val gets the odd row
        ("day", [72], (62, 67, 72)),  # the last seventh, 72 // 7 = 10
        ("time", [50, 50], (80, 90, 100)),
        ("random", [100], (80, 90, 100)),
        ("train", [10], (10, 10, 10)),
        ("test", [10], (0, 0, 10)),
    ],
)
def test_cuts(split: str, file_rows: list[int], edges: tuple[int, int, int]) -> None:
    base = {"settings": {"dense_transform": "log1p", "hash_rows": None}, "fingerprint": "x"}
    settings = CriteoSettings(split=split, vocab_from="x").resolved(base)
    cut = Cut.of(settings, file_rows)
    assert (cut.val, cut.test, cut.total) == edges
    parts = cut.parts(0, cut.total)
    assert np.bincount(parts, minlength=3).tolist() == [b - a for a, b in cut.edges().values()]
    if split != "random":
        assert parts.tolist() == sorted(parts.tolist())
    for start in (0, 7):
        rows = cut.total - start - 1
        assert cut.counts(start, rows) == np.bincount(cut.parts(start, rows), minlength=3).tolist()


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(InputError, match="split: day leaves no val rows of 6 in 1 file"):
        Cut.of(CriteoSettings().resolved(None), [6])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_threshold": 0}, "vocab-threshold: 0"),
        ({"hash_rows": 1}, "hash-rows: 1"),
        ({"hash_rows": 5, "vocab_from": "x"}, "exclude each other"),
        ({"fractions": (0.5, 0.4, 0.2)}, "add up to 1.1"),
        ({"fractions": (0.0, 0.5, 0.5)}, "fractions"),
        ({"fractions": (1.2, -0.1, -0.1)}, "fractions"),
        ({"split": "weekly"}, "split: 'weekly' is not one of day, time"),
        ({"dense_transform": "sqrt"}, "dense-transform: 'sqrt'"),
        ({"bad_rows": "fix"}, "bad-rows: 'fix'"),
        ({"split_seed": -1}, "split-seed"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CriteoSettings(**wrong)


def square(value: int) -> int:
    if value == 13:
        raise InputError("thirteen")
    if value == 14:
        raise KeyError(value)
    if value == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    if value < 3:
        time.sleep(0.05)
    print("noise on standard output")
    return value * value


def test_pool_keeps_order_and_passes_errors_on() -> None:
    with Pool(2) as pool:
        assert list(pool.imap(square, range(10))) == [i * i for i in range(10)]
        assert list(pool.imap(square, range(10), ahead=10)) == [i * i for i in range(10)]
        with pytest.raises(InputError, match="thirteen"):
            list(pool.imap(square, [1, 13, 2]))
        with pytest.raises(RuntimeError, match="KeyError: 14"):
            list(pool.imap(square, [14]))
        with pytest.raises(WorkerDied, match="lack of memory"):
            list(pool.imap(square, [15]))


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import os, signal, time\n"
        "from dlrm.datasets.criteo.pool import Pool\n"
        "pool = Pool(2); list(pool.imap(abs, range(9)))\n"
        "print(*(w.pid for w in pool._all), flush=True)\n"
        "list(pool.imap(time.sleep, [60, 60]))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    parent.kill()
    parent.communicate()
    deadline = time.time() + 5
    while time.time() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    gone = [not Path(f"/proc/{p}").exists() or "Z" in _state(p) for p in pids]
    assert all(gone)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
