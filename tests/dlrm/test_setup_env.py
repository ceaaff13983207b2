"""The set-up's decisions, with pip and the making of the environment replaced by records."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm import setup_env


class Machine:
    """A checkout in a temporary folder whose environment is made by `touch`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.venv = root, root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.installed: list[list[str]] = []
        self.fail_at = ""
        (root / "dlrm").mkdir(parents=True)
        for name in setup_env.INPUTS:
            (root / name).write_text(name)
        for name, value in {
            "ROOT": root,
            "VENV": self.venv,
            "PYTHON": self.python,
            "STAMP": self.venv / ".setup-complete",
            "OWNED": self.venv / ".made-by-setup",
            "LOG": self.venv / "install.log",
            "run_logged": self.run_logged,
            "verify": lambda device: f"torch for {device}",
            "driver_version": lambda: None,
        }.items():
            monkeypatch.setattr(setup_env, name, value)
        monkeypatch.delenv("DLRM_DEVICE", raising=False)

    def run_logged(self, command: list[str], progress: setup_env.Progress, lock: object) -> object:
        progress.close()
        if command[1:3] == ["-m", "venv"]:
            self.python.parent.mkdir()
            self.python.symlink_to(sys.executable)
            self.installed.clear()
            return 0, ""
        if self.fail_at and self.fail_at in command[-1]:
            raise KeyboardInterrupt
        self.installed.append(command)
        return 0, ""

    def wanted(self) -> list[str]:
        """The last argument of each pip call since the environment was last made."""
        return [command[-1] for command in self.installed]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "a folder", monkeypatch)


CPU = [f"torch=={setup_env.TORCH}+cpu", ".[all]", f"torchrec=={setup_env.TORCHREC}"]


def test_set_up_then_nothing_to_do(made: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    setup_env.set_up()
    said = capsys.readouterr().out
    assert "no NVIDIA GPU found: installing for cpu" in said
    assert "ready in" in said
    assert made.wanted() == (CPU if sys.platform == "linux" else ["torch==2.13.0", *CPU[1:]])
    made.installed.clear()
    setup_env.set_up()
    assert capsys.readouterr().out == "set-up: .venv is ready, for cpu (no NVIDIA GPU found)\n"
    assert made.installed == []


def test_cut_short_is_made_again(made: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    made.fail_at = "torchrec"
    with pytest.raises(KeyboardInterrupt):
        setup_env.set_up()
    made.fail_at = ""
    (made.venv / "half").touch()
    setup_env.set_up()
    assert "cut short" in capsys.readouterr().out
    assert not (made.venv / "half").exists()
    assert len(made.wanted()) == 3


def test_changed_pins_update_in_place(made: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    setup_env.set_up()
    (made.venv / "kept").touch()
    (made.root / "constraints.txt").write_text("torch==2.13.1")
    made.fail_at = ".[all]"
    with pytest.raises(KeyboardInterrupt):
        setup_env.set_up()
    assert "updating .venv" in capsys.readouterr().out
    assert (made.venv / "kept").exists()
    made.fail_at = ""
    setup_env.set_up()  # an update cut short may have left a package in pieces
    assert "cut short" in capsys.readouterr().out
    assert not (made.venv / "kept").exists()


def test_another_device_makes_it_again(made: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    setup_env.set_up()
    (made.venv / "cpu forms").touch()
    monkeypatch.setenv("DLRM_DEVICE", "cuda")
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")
    setup_env.set_up()
    assert not (made.venv / "cpu forms").exists()
    assert made.wanted() == ["torch==2.13.0,!=2.13.0+cpu", ".[all-cuda]"]


def test_moved_checkout_is_made_again(made: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    setup_env.set_up()
    stamp = made.venv / ".setup-complete"
    stamp.write_text(stamp.read_text().replace(str(made.root), "/elsewhere"))
    setup_env.set_up()
    assert "the folder or the Python of .venv changed" in capsys.readouterr().out


def test_a_venv_made_by_hand_is_kept(made: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    (made.venv / "bin").mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    (made.venv / "mine").touch()
    setup_env.set_up()
    assert "made by hand" in capsys.readouterr().out
    assert (made.venv / "mine").exists()


def test_a_foreign_folder_is_not_touched(made: Machine) -> None:
    made.venv.mkdir()
    (made.venv / "thesis.txt").touch()
    with pytest.raises(setup_env.SetupError, match="move it away"):
        setup_env.set_up()
    assert (made.venv / "thesis.txt").exists()


def test_no_venv_module_names_the_package(made: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"apt-get install python3\.\d+-venv"):
        setup_env.set_up()
    assert not made.venv.exists()


@pytest.mark.parametrize(
    ("driver", "device", "why"),
    [
        (None, "cpu", "no NVIDIA GPU"),
        (535, "cpu", "needs 580"),
        (580, "cuda", "driver 580"),
        (0, "cuda", "unknown version"),
    ],
)
def test_device_follows_the_driver(
    driver: int | None, device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DLRM_DEVICE", raising=False)
    monkeypatch.setattr(setup_env, "driver_version", lambda: driver)
    chosen, reason = setup_env.choose_device()
    assert chosen == device
    assert why in reason


def test_device_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_DEVICE", "CUDA")
    assert setup_env.choose_device() == ("cuda", "DLRM_DEVICE=cuda")
    monkeypatch.setenv("DLRM_DEVICE", "tpu")
    with pytest.raises(setup_env.SetupError, match="DLRM_DEVICE=tpu: give cpu, cuda or auto"):
        setup_env.choose_device()


class Pip:
    """pip that fails with each of the given outputs in turn, then works."""

    def __init__(self, *outputs: str) -> None:
        self.outputs, self.asked = list(outputs), list[str]()

    def __call__(self, command: list[str], progress: setup_env.Progress, lock: object) -> object:
        progress.close()
        self.asked.append(command[-1])
        return (1, self.outputs.pop(0)) if self.outputs else (0, "")


REFUSED = "WARNING: Retrying ... NewConnectionError: connection refused\nERROR: from versions: none"


def pip_of(monkeypatch: pytest.MonkeyPatch, *outputs: str) -> Pip:
    pip = Pip(*outputs)
    monkeypatch.setattr(setup_env, "run_logged", pip)
    monkeypatch.setattr(setup_env.time, "sleep", lambda seconds: None)
    return pip


def test_a_network_failure_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = pip_of(monkeypatch, REFUSED, "ReadTimeoutError: Read timed out.")
    setup_env.pip_install("torch", ["torch==1+cpu"], ["torch==1"], None)
    assert pip.asked == ["torch==1+cpu"] * 3


def test_no_network_says_so_and_takes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = pip_of(monkeypatch, *[REFUSED] * 3)
    with pytest.raises(setup_env.SetupError, match="no package registry could be reached"):
        setup_env.pip_install("torch", ["torch==1+cpu"], ["torch==1"], None)
    assert pip.asked == ["torch==1+cpu"] * 3


def test_no_cpu_build_takes_the_standard_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = pip_of(monkeypatch, "ERROR: No matching distribution found for torch==1+cpu")
    setup_env.pip_install("torch", ["torch==1+cpu"], ["torch==1"], None)
    assert pip.asked == ["torch==1+cpu", "torch==1"]
    assert "takes gigabytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "mend"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("one\ntwo\nERROR: conflict", "two\n    ERROR: conflict\nmend what it says"),
    ],
)
def test_a_failure_shows_the_end_of_the_log(
    output: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_of(monkeypatch, output)
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.pip_install("the rest", ["."], None, None)
    assert mend in str(caught.value)


def test_an_unsuitable_python_hands_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 1, "final", 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup_env.SetupError, match=r"outside 3\.11 to 3\.14"):
        setup_env.require_python()
    broken, good = tmp_path / "python3.13", tmp_path / "python3.12"
    for path, code in ((broken, 127), (good, 0)):
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
    monkeypatch.setattr(os, "execv", lambda path, arguments: sys.exit(path))
    with pytest.raises(SystemExit, match=f"^{good}$"):
        setup_env.require_python()


def test_main_prints_errors_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, setup_env.__file__],
        env={**os.environ, "DLRM_DEVICE": "tpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "error: DLRM_DEVICE=tpu: give cpu, cuda or auto\n"
