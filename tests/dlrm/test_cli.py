"""What all commands share: Ctrl-C at any time, errors of the system."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrm import benchmark, check, cli, evaluate, export, predict, preprocess, train

ROOT = Path(__file__).parents[2]
HOSTILE = """
import pathlib, time
pathlib.Path({flag!r}).touch()
try:
    time.sleep(60)
except BaseException:
    raise ImportError("as torch says it when its own import is interrupted") from None
"""


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        *((name, "torch") for name in ("train", "evaluate", "predict", "export", "benchmark")),
        *((name, "numpy") for name in ("preprocess", "datasets.sample", "datasets.trace")),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_one_line(module, slow, tmp_path):
    flag = tmp_path / "importing"
    (tmp_path / f"{slow}.py").write_text(HOSTILE.format(flag=str(flag)))
    process = subprocess.Popen(
        [sys.executable, "-m", f"dlrm.{module}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "interrupted\n")
    assert process.returncode == 130


def stop(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "where", "flags"),
    [
        (train, "load_dataset", ["--data", "synthetic", "--out", "OUT"]),
        (evaluate, "resolve", ["RUN"]),
        (predict, "load_model", ["RUN", "--out", "OUT"]),
        (export, "load_model", ["RUN", "--out", "m.pt2"]),
        (benchmark, "loop_table", ["loop"]),
        (preprocess, "preprocess_criteo", ["--input", "x", "--out", "OUT"]),
        (check, "run_checks", []),
    ],
)
def test_an_interrupt_of_a_command_is_one_line(module, where, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, where, stop)
    assert module.main([str(tmp_path / f) if f == "OUT" else f for f in flags]) == 130
    error = capsys.readouterr().err
    assert error.startswith("interrupted") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "dlrm.check", "--json"], cwd=ROOT, stdout=write, stderr=-1, env=env
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dlrm.datasets.sample", "--check"], cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: No space left on device")
    assert done.stderr.count("\n") == 1


def test_importing_the_package_elsewhere_leaves_ctrl_c_alone():
    code = (
        "import signal, dlrm.train; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_threads_spin_for_a_while_unless_the_user_wants_otherwise(given, count):
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    env = {**{k: v for k, v in os.environ.items() if k not in ours}, **given}
    # set before torch is there, which reads it once
    code = "import dlrm, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.split() == [count, "False"]


def test_a_name_that_cannot_be_printed_is_one_line(capsys):
    assert cli.run(lambda: len("a\udcff".encode())) == 2
    assert capsys.readouterr().err.startswith("error: a name has bytes that are not UTF-8")
