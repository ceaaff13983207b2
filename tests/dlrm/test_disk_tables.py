"""Tables on disk train to the same bits as tables in memory, with a cache of any size."""

import json
from pathlib import Path

import pytest
import torch

from dlrm.checkpoint import load_model
from dlrm.tables.disk import shares
from dlrm.tables.store import Layout
from dlrm.train import main

SHAPE = [
    "--rows",
    "3000,700,40,5000",
    "--dim",
    "8",
    "--dense-in",
    "3",
    "--bottom",
    "8",
    "--top",
    "8",
]
FLAGS = [
    *("--data", "synthetic", "--samples", "4000", "--zipf", "1.05", "--batch-size", "64"),
    *("--steps", "40", "--eval-every", "15", "--save-every", "10", "--quiet", "--threads", "1"),
    *("--limit-val-batches", "2", "--seed", "5", *SHAPE),
]
DISK = ["--table-storage", "disk", "--table-cache"]


def run(out: Path, *more: str) -> dict:
    assert main([*FLAGS, *more, "--out", str(out)]) == 0
    return json.loads((out / "summary.json").read_text())


def same_model(a: Path, b: Path) -> None:
    """All weights alike, tables among them."""
    first, second = (load_model(p)[0].state_dict() for p in (a, b))
    assert first.keys() == second.keys() and "tables.0.bag.weight" in first
    for name in first:
        assert torch.equal(first[name], second[name]), name


def newest(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


@pytest.mark.parametrize(
    ("kind", "cache", "more"),
    [
        ("rowwise_adagrad", "64KiB", []),
        ("rowwise_adagrad", "1", []),  # smaller than a batch: nothing stays
        ("adagrad", "32KiB", ["--pooling-factor", "3", "--pooling-kind", "poisson"]),
        ("adam", "1GiB", ["--sparse-weight-decay", "0.01"]),
        ("sgd", "16KiB", ["--clip", "1"]),
    ],
)
def test_same_bits_as_in_memory(kind, cache, more, tmp_path):
    more = ["--sparse-optimizer", kind, *more]
    memory = run(tmp_path / "memory", *more)
    disk = run(tmp_path / "disk", *more, *DISK, cache)
    log = [(tmp_path / p / "log.jsonl").read_text() for p in ("memory", "disk")]
    assert log[0] == log[1]
    for name in ("auc", "logloss", "val_auc", "best_step"):
        assert memory[name] == disk[name]
    same_model(tmp_path / "memory", tmp_path / "disk")  # the best weights, at an older step
    same_model(newest(tmp_path / "memory"), newest(tmp_path / "disk"))
    # with a cache of nothing, what the batch before has just had is still found
    assert (disk["table_cache_hit_rate"] < 0.3) == (cache == "1")


def test_same_bits_when_compiled(tmp_path):
    more = ["--compile", "dlrm", "--steps", "12", "--eval-every", "6"]
    for name, storage in (("memory", ()), ("disk", (*DISK, "32KiB"))):
        torch._dynamo.reset()  # what was compiled before decides which sizes are kept open
        run(tmp_path / name, *more, *storage)
    assert (tmp_path / "memory/log.jsonl").read_text() == (tmp_path / "disk/log.jsonl").read_text()
    same_model(tmp_path / "memory", tmp_path / "disk")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """The same run with tables in memory and on disk; the latter has changed since its best."""
    place = tmp_path_factory.mktemp("trained")
    run(place / "memory")
    run(place / "disk", *DISK, "32KiB")
    return place / "memory", place / "disk"


def test_evaluate_predict_and_export_give_the_same(trained, tmp_path, capsys):
    from dlrm.evaluate import main as evaluate
    from dlrm.export import main as export
    from dlrm.predict import main as predict

    results = []
    for out in trained:
        name = tmp_path / out.name
        assert evaluate([str(out), "--out", str(name), "--quiet", "--bootstrap", "5"]) == 0
        scores = ["--out", f"{name}.csv", "--part", "val", "--quiet"]
        assert predict([str(out), *scores]) == 0
        small = ["--tables", "int8", "--out", f"{name}.pt2", "--quiet"]
        assert export([str(out), *small]) == 0
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auc")]
        numbers = json.loads((name / "evaluation.json").read_text())
        del numbers["checkpoint"]
        results.append((numbers, Path(f"{name}.csv").read_text(), table))
    assert results[0] == results[1] and len(results[0][2]) == 1


def test_what_does_not_fit_in_memory_is_refused_with_the_mend(
    trained, tmp_path, capsys, monkeypatch
):
    from dlrm.export import main as export
    from dlrm.tables import load

    monkeypatch.setattr(load, "memory_bytes", lambda: (10**6, 10**5))
    capsys.readouterr()
    assert export([str(trained[1]), "--out", str(tmp_path / "m.pt2"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "on a machine with more memory (evaluate and predict read the rows" in error
    assert not (tmp_path / "m.pt2").exists()


def test_a_checkpoint_away_from_its_run_is_refused(trained, tmp_path, capsys):
    import shutil

    from dlrm.evaluate import main as evaluate

    shutil.copytree(trained[1] / "best", tmp_path / "alone/best")
    assert evaluate([str(tmp_path / "alone"), "--out", str(tmp_path / "e"), "--quiet"]) == 2
    assert "a checkpoint of disk tables is no use without the run's folder" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ema", "0.9"], "use --ema 0"),
        (["--qr-collisions", "4"], "use --qr-collisions 0"),
        (["--weighted-pooling", "learned"], "use --weighted-pooling none"),
        (["--wide"], "use --no-wide"),
        (["--no-sparse"], "use --sparse"),
        (["--table-cache", "much"], "--table-cache: 'much' is no amount of memory"),
        (["--table-storage", "tape"], "--table-storage: 'tape' is none of memory, disk"),
    ],
)
def test_refusals_name_the_mend_and_leave_nothing(flags, says, tmp_path, capsys):
    assert main([*FLAGS, *DISK, "1MiB", *flags, "--out", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused(tmp_path, capsys):
    big = ["--rows", "4000000000,40,40,40", "--dim", "1024"]
    # the initial values of so many rows are not drawn: the room is looked at first
    assert main([*FLAGS, *DISK, "1MiB", *big, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "free some space, or name an --out on another disk" in error
    assert not (tmp_path / "run/tables").exists()


def test_shares_give_small_tables_a_place_for_each_row():
    layouts = [Layout(n, 4, 1) for n in (10, 100_000, 1000, 50_000)]
    slots = shares(layouts, 400_000)
    assert slots[0] == 10 and slots[2] == 1000
    assert sum(n * layout.bytes for n, layout in zip(slots, layouts, strict=True)) <= 400_000
    assert 1.9 < slots[1] / slots[3] < 2.1
    assert shares(layouts, 10**9) == [10, 100_000, 1000, 50_000]
