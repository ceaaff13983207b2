"""A kill at any moment loses nothing that a checkpoint had, with tables on disk."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm import checkpoint
from dlrm.checkpoint import load_model
from dlrm.tables import native
from dlrm.tables.store import Layout, Store, StoreError
from dlrm.tables.view import View
from dlrm.train import main

FLAGS = [
    *("--data", "synthetic", "--samples", "20000", "--zipf", "1.05", "--batch-size", "64"),
    *("--steps", "120", "--eval-every", "50", "--save-every", "9", "--quiet", "--threads", "1"),
    *("--limit-val-batches", "2", "--limit-test-batches", "2", "--seed", "5", "--keep", "3"),
    *("--rows", "9000,700,40,5000", "--dim", "8", "--dense-in", "3", "--bottom", "8", "--top", "8"),
    *("--sparse-optimizer", "adam", "--table-storage", "disk", "--table-cache", "100KiB"),
]


def start(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "dlrm.train", *FLAGS, "--out", str(out), "--resume", "auto"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def tables_of(path: Path) -> dict[str, torch.Tensor]:
    return load_model(path)[0].state_dict()


def same(a: Path, b: Path) -> None:
    """All checkpoints of two runs have the same tables, layers and optimizer states."""
    assert (a / "log.jsonl").read_text() == (b / "log.jsonl").read_text()
    names = [p.name for p in checkpoint.steps(a)]
    assert names == [p.name for p in checkpoint.steps(b)] and len(names) == 3
    for name in [*(f"checkpoints/{n}" for n in names), "best"]:
        first, second = tables_of(a / name), tables_of(b / name)
        assert all(torch.equal(first[k], second[k]) for k in first)
        records = []
        for out in (a, b):
            store = Store(out / "tables", shared=True)
            state = json.loads((out / name / "state.json").read_text())
            view = View(store, state["tables"]["segment"])
            every = [view.rows(f, np.arange(n.rows)) for f, n in enumerate(store.layouts)]
            records.append(b"".join(one.tobytes() for one in every))
            store.close()
        assert records[0] == records[1]  # the optimizer's state of each row too


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert main([*FLAGS, "--out", str(out)]) == 0
    return out


def test_killed_at_random_moments_and_resumed(unbroken, tmp_path):
    out, rng, killed = tmp_path / "run", random.Random(1), 0
    for step in (9, 45, 99):
        process = start(out)
        deadline = time.time() + 120
        while not (out / f"checkpoints/step-{step:09d}").exists():
            assert time.time() < deadline
            if process.poll() is not None:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)  # somewhere in a step, or in a checkpoint
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        kept = checkpoint.steps(out)
        for path in kept:  # all that is there can be read, whatever the files had become
            assert tables_of(path)["tables.0.bag.weight"].isfinite().all()
    assert killed >= 2
    process = start(out)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    same(unbroken, out)


def test_a_damaged_newest_checkpoint_goes_back_further(unbroken, tmp_path, capsys):
    out = tmp_path / "run"
    flags = [*FLAGS, "--out", str(out), "--resume", "auto"]
    assert main([*flags, "--steps", "40"]) == 0
    newest = checkpoint.steps(out)[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    assert main(flags) == 0
    assert "truncated" in capsys.readouterr().err
    same(unbroken, out)


def test_a_checkpoint_of_another_run_is_refused(unbroken, tmp_path, capsys):
    path = checkpoint.steps(unbroken)[-1]
    assert main([*FLAGS, "--out", str(tmp_path / "run"), "--resume", str(path)]) == 2
    assert f"go on in that run: --out {unbroken} --resume auto" in capsys.readouterr().err


def test_tables_in_training_cannot_be_read(unbroken, capsys):
    from dlrm.evaluate import main as evaluate

    store = Store(unbroken / "tables")
    try:
        assert evaluate([str(unbroken), "--out", str(unbroken / "e"), "--quiet"]) == 2
    finally:
        store.close()
    assert "in use by a training; wait for its end" in capsys.readouterr().err


def test_a_cache_of_another_size_may_go_on(unbroken, tmp_path):
    out = tmp_path / "run"
    flags = [*FLAGS, "--out", str(out), "--resume", "auto"]
    assert main([*flags, "--steps", "50", "--table-cache", "1"]) == 0
    assert main([*flags, "--table-cache", "1GiB"]) == 0
    same_rows = [tables_of(p)["tables.0.bag.weight"] for p in (unbroken / "best", out / "best")]
    assert torch.equal(*same_rows)


# ---- the files by themselves ---------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> Store:
    layouts = [Layout(50, 3, 1), Layout(7, 2, 0)]
    Store.create(tmp_path / "tables", layouts)
    Store.finish(tmp_path / "tables", layouts)
    made = Store(tmp_path / "tables")
    made.begin(1)
    return made


def change(store: Store, rng: np.random.Generator) -> None:
    """Change some rows, logging as training does: the old records of rows new to the segment."""
    for f, layout in enumerate(store.layouts):
        ids = np.unique(rng.integers(layout.rows, size=4))
        store._note(f, ids, store.read(f, ids))
        store.write(f, ids, rng.standard_normal((len(ids), layout.floats)).astype(np.float32))


def everything(store: Store) -> bytes:
    return b"".join(store.read(f, np.arange(n.rows)).tobytes() for f, n in enumerate(store.layouts))


def test_every_segment_can_be_gone_back_to_in_any_order(store):
    rng, seen = np.random.default_rng(0), {}
    for segment in range(1, 9):
        store.begin(segment)
        seen[segment] = everything(store)
        for _ in range(segment % 3):  # some have no change at all
            change(store, rng)
    for segment in rng.permutation(list(seen)).tolist():
        view = View(store, segment)
        rows = [view.rows(f, np.arange(n.rows)).tobytes() for f, n in enumerate(store.layouts)]
        assert b"".join(rows) == seen[segment]
        store.restore(segment)
        assert everything(store) == seen[segment]
    store.prune(5)
    store.restore(6)
    assert everything(store) == seen[6]
    with pytest.raises(StoreError, match=r"segment 2.*use a newer checkpoint"):
        store.restore(2)


def test_an_entry_cut_short_is_left_out_and_damage_is_named(store):
    rng = np.random.default_rng(0)
    before = everything(store)
    change(store, rng)
    path = store.log_path(1)
    whole = path.read_bytes()
    # the kill came while the next entry was written, before the rows that it is about changed
    for cut in (3, 45, 60):
        path.write_bytes(whole + whole[:cut])
        store.restore(1)
        assert everything(store) == before
    path.write_bytes(whole[:50] + b"X" + whole[51:])
    with pytest.raises(StoreError, match=r"undo-00000001\.log: damaged at byte 0"):
        store.overlay(1)


def test_what_is_missing_is_named(store, tmp_path):
    store.close()
    (tmp_path / "tables/table-001.rows").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"table-001\.rows: missing or truncated"):
        Store(tmp_path / "tables")
    (tmp_path / "tables/store.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        Store(tmp_path / "tables")


def test_without_a_compiler_the_error_says_so(monkeypatch, tmp_path):
    native.library.cache_clear()
    monkeypatch.setenv("DLRM_COMPILER_CXX", str(tmp_path / "none"))
    from dlrm.errors import InputError

    try:
        with pytest.raises(InputError, match="--table-storage disk: no C\\+\\+ compiler"):
            native.library()
    finally:
        native.library.cache_clear()
    assert os.environ["DLRM_COMPILER_CXX"]
