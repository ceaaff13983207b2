"""Resume is exact: a run killed with SIGKILL and resumed ends with the bits of an unbroken one."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dlrm.train import main

FLAGS = [
    *("--preset", "tiny", "--data", "synthetic", "--samples", "20000", "--steps", "60"),
    *("--save-every", "7", "--eval-every", "25", "--seed", "3", "--quiet", "--dropout", "0.1"),
    *("--window", "2048", "--clip", "5", "--warmup-steps", "10", "--decay-start", "30"),
    *("--decay-steps", "60", "--limit-train-batches", "40", "--threads", "1", "--ema", "0.9"),
]


def start(out: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "dlrm.train", *FLAGS, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> bool:
    deadline = time.time() + 120
    while time.time() < deadline:
        if path.exists():
            return True
        if process.poll() is not None:
            return path.exists()
        time.sleep(0.002)
    raise AssertionError(f"{path} did not appear")


def same(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        first = load_file(a / "checkpoints/step-000000060" / name)
        second = load_file(b / "checkpoints/step-000000060" / name)
        assert first.keys() == second.keys()
        for key in first:
            assert first[key].numpy().tobytes() == second[key].numpy().tobytes(), key
    assert (a / "log.jsonl").read_text() == (b / "log.jsonl").read_text()
    skip = ("samples_per_s", "peak_rss_mb", "checkpoint")
    results = [json.loads((p / "summary.json").read_text()) for p in (a, b)]
    assert len({json.dumps({k: v for k, v in r.items() if k not in skip}) for r in results}) == 1


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert main([*FLAGS, "--out", str(out)]) == 0
    return out


def test_killed_twice_and_resumed(unbroken, tmp_path):
    out = tmp_path / "run"
    killed = 0
    for step in (14, 42):  # the second one lies in the second epoch
        process = start(out, "--resume", "auto")
        if wait_for(out / f"checkpoints/step-{step:09d}", process):
            process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 1
    process = start(out, "--resume", "auto")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "AUC" in printed
    same(unbroken, out)


def test_interrupt_saves_and_resume_goes_on(unbroken, tmp_path):
    out = tmp_path / "run"
    process = start(out)
    wait_for(out / "checkpoints/step-000000007", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "--resume auto goes on" in errors, errors
    assert "Traceback" not in errors
    assert main([*FLAGS, "--out", str(out), "--resume", "auto"]) == 0
    same(unbroken, out)


def test_damaged_newest_checkpoint_is_named_and_the_previous_used(unbroken, tmp_path, capsys):
    out = tmp_path / "run"
    steps = [*FLAGS, "--out", str(out), "--resume", "auto"]
    assert main([*steps, "--steps", "35"]) == 0
    newest = out / "checkpoints/step-000000035/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert main(steps) == 0
    errors = capsys.readouterr().err
    assert "step-000000035" in errors and "truncated" in errors
    same(unbroken, out)


def test_a_complete_run_resumed_says_the_same_again(unbroken, capsys):
    before = json.loads((unbroken / "summary.json").read_text())
    assert main([*FLAGS, "--out", str(unbroken), "--resume", "auto"]) == 0
    assert f"{before['auc']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [60, 30])
def test_a_resume_with_nothing_left_says_so_and_what_to_give(steps, unbroken, capsys):
    again = [*FLAGS, "--out", str(unbroken), "--resume", "auto", "--steps", str(steps)]
    assert main(again) == 0
    error = capsys.readouterr().err
    assert "warning: nothing is left to train" in error
    assert f"is at step 60, and --steps {steps} ends at step {steps}" in error
    assert "give --steps above 60 to train on" in error
    # an epoch has 40 batches
    assert main([*again, "--steps", "0", "--epochs", "1"]) == 0
    assert "--epochs 1 ends at step 40; give --epochs above 1" in capsys.readouterr().err


def test_a_run_that_stopped_early_is_not_trained_on(tmp_path, capsys):
    out = tmp_path / "run"
    flags = [*FLAGS, "--out", str(out), "--steps", "2000", "--early-stop", "auc", "--patience", "1"]
    flags += ["--eval-every", "5", "--dense-lr", "0", "--sparse-lr", "0", "--samples", "2000"]
    assert main(flags) == 0
    before = json.loads((out / "summary.json").read_text())
    assert before["steps"] == 10  # nothing is learnt: the second validation is no better
    capsys.readouterr()
    assert main([*flags, "--resume", "auto"]) == 0
    after = json.loads((out / "summary.json").read_text())
    assert (after["steps"], after["auc"]) == (before["steps"], before["auc"])
    assert "where an early stop ended the run, at step 10" in capsys.readouterr().err


def test_other_settings_or_data_are_refused_with_both_values(unbroken, capsys):
    again = [*FLAGS, "--out", str(unbroken), "--resume", "auto"]
    assert main([*again, "--dense-lr", "0.5"]) == 2
    assert "dense_lr: it has 0.001, now 0.5" in capsys.readouterr().err
    assert main([*again, "--data-seed", "9"]) == 2
    assert "data_seed: it has 0, now 9" in capsys.readouterr().err


BEST_FIRST = [
    *("--preset", "tiny", "--data", "synthetic", "--samples", "1000", "--quiet"),
    *("--eval-every", "2", "--save-every", "2", "--dense-lr", "0", "--sparse-lr", "0"),
]


def test_another_runs_checkpoint_brings_its_best_weights(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*BEST_FIRST, "--out", str(first), "--steps", "4"]) == 0
    for resume in (first / "checkpoints/step-000000004", first):
        more = ["--resume", str(resume), "--steps", "6", "--out", str(second)]
        assert main([*BEST_FIRST, *more]) == 0
        assert json.loads((second / "summary.json").read_text())["best_step"] == 2
        shutil.rmtree(second)


def test_lost_best_weights_are_named_and_the_run_goes_on(tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*BEST_FIRST, "--out", str(run)]
    assert main([*flags, "--steps", "4"]) == 0
    (run / "best/model.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert main([*flags, "--steps", "4", "--resume", "auto"]) == 0
    error = capsys.readouterr().err
    assert "best validation, at step 2, are lost" in error and "truncated" in error
    assert json.loads((run / "summary.json").read_text())["best_step"] == 4


def test_lines_of_a_log_that_are_not_ours_end_what_is_kept_of_it(tmp_path):
    run = tmp_path / "run"
    flags = [*BEST_FIRST, "--out", str(run)]
    assert main([*flags, "--steps", "4"]) == 0
    whole = (run / "log.jsonl").read_bytes()
    for foreign in (b"1\n", b'{"step": "x"}\n', b"\xff\n"):
        (run / "log.jsonl").write_bytes(whole + foreign)
        assert main([*flags, "--steps", "4", "--resume", "auto"]) == 0
        assert foreign not in (run / "log.jsonl").read_bytes()
