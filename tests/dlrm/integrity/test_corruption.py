"""Silent corruption: the guard of tables, checkpoints, and the score of all detectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrm import checkpoint
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.integrity import __main__ as command
from dlrm.integrity.corrupted import CORRUPTION
from dlrm.integrity.flips import flipped
from dlrm.integrity.guard import TableGuard, row_sums
from dlrm.integrity.planted import Detector, World
from dlrm.integrity.score import Score, run, score
from dlrm.model import DLRM


@pytest.fixture(scope="module")
def world():
    return World.of(7)


@pytest.mark.parametrize("detector", CORRUPTION, ids=lambda d: d.name)
def test_finds_flips_and_nothing_else(world, detector):
    truth, found = detector.trial(world, np.random.default_rng(1), True)
    assert len(truth & found) >= 0.96 * len(truth) and not found - truth
    truth, found = detector.trial(world, np.random.default_rng(2), False)
    assert not truth and not found


def guarded():
    torch.manual_seed(0)
    config = DLRMConfig(
        rows=(30, 20), dense_in=2, dim=8, bottom=(4,), top=(4,), qr_threshold=25, qr_collisions=4
    )
    return TableGuard(DLRM(config).eval())


def test_every_single_bit_of_a_row_counts():
    rows = torch.randn(1, 16)
    clean = row_sums(rows)
    for place in range(16):
        for bit in range(32):
            with flipped(rows, place, bit):
                assert row_sums(rows) != clean
    assert torch.equal(row_sums(rows), clean)


def test_sums_of_other_types():
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        rows = torch.arange(12).reshape(4, 3).to(dtype)
        want = [sum(r.contiguous().view(torch.uint8).tolist()) % 251 for r in rows]
        assert row_sums(rows).tolist() == want
    assert row_sums(torch.empty(0, 4)).shape == (0,)


def test_scrubbing_finds_rows_that_nobody_reads():
    guard = guarded()
    total = sum(len(s) for s in guard.sums.values())
    assert guard.scrub(total) == []
    name, weight = next(iter(guard.tables.items()))
    with flipped(weight, 3 * weight.shape[1] + 1, 5):
        found = [d for _ in range(total) for d in guard.scrub(1)]
        assert [(d.table, d.rows) for d in found] == [(name, [3])]
    assert guard.scrub(3 * total) == []


def test_changes_on_purpose_are_made_known():
    guard = guarded()
    name = "tables.1.bag"
    batch = Batch.one_hot(torch.zeros(3, 2), [[0, 4], [1, 5], [2, 4]], torch.zeros(3))
    with torch.no_grad():
        guard.tables[name][4] += 1
    assert [(d.table, d.rows) for d in guard.verify(batch)] == [(name, [4])]
    guard.update(name, torch.tensor([4]))
    assert guard.verify(batch) == []
    assert guard.bytes == sum(len(w) for w in guard.tables.values())


def test_every_byte_of_a_checkpoint_counts(tmp_path):
    model = DLRM(DLRMConfig(rows=(3,), dense_in=1, dim=2, bottom=(), top=()))
    state = {key: {} for key in ("model", "source", "dataset", "fate")} | {"step": 12}
    path = tmp_path / "c"
    checkpoint.save(path, model, state)
    assert checkpoint.read_state(path)["step"] == 12
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(len(content)):
            bent = bytearray(content)
            bent[place] ^= 1 << place % 8
            file.write_bytes(bent)
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.read_state(path)
        file.write_bytes(content)
    assert checkpoint.read_state(path)["step"] == 12


def test_scores_are_counted_right(world):
    def trial(world, rng, faulty):
        return ({1, 2, 3, 4}, {2, 3, 9}) if faulty else (set(), {5} if rng.random() < 2 else set())

    found = run(Detector("x", "thing", trial, 0.01), world, 5, 0)
    assert found == Score("x", "thing", 0.01, 5, 20, 15, 10, 5)
    assert found.precision == pytest.approx(2 / 3) and found.recall == 0.5
    assert found.false_alarms == 1 and found.chance() < 1e-9


def test_one_command_prints_the_scores(capsys, tmp_path):
    args = [
        "score",
        "--trials",
        "2",
        "--only",
        "dupl",
        "--quiet",
        "--html",
        str(tmp_path / "s.html"),
    ]
    assert command.main([*args, "--html", str(tmp_path / "s.html")]) == 0
    out = capsys.readouterr().out
    assert "duplicates" in out and "precision" in out and "false alarms" in out
    with pytest.raises(InputError, match="no detector has 'xyz'"):
        score(only="xyz")


def test_one_command_prints_the_cost(capsys):
    args = ["cost", "--preset", "tiny", "--table-rows", "100", "--batch", "64", "--turns", "10"]
    assert command.main([*args, "--quiet"]) == 0
    out = capsys.readouterr().out
    for name in ("guard", "embedding bags", "top MLP", "whole model"):
        assert name in out
    assert command.main(["cost", "--preset", "none"]) == 2
