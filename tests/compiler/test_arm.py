"""The C++ kernels on ARM: built for NEON, run by an emulator, held against this machine.

The programs in ``hostile/`` tell the sums of what they compute. Needs a cross compiler and QEMU
(Debian: g++-aarch64-linux-gnu, qemu-user).
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from compiler.kernels import source
from compiler.runtime import build

FOLDER = Path(__file__).parent / "hostile"
FLAGS = ("-std=c++17", "-O2", "-fopenmp", "-fno-math-errno", "-Wno-unknown-pragmas", "-static")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# a rounded bf16 differs by a unit in the last of 8 bits, and a sum has many of them
TOLERANCE = 2e-3


def told(kernel: str, cxx: str, flags: tuple[str, ...], run: list[str], folder: Path) -> np.ndarray:
    """What a program tells: lines of a count, a weighted sum, and the sum of magnitudes."""
    text = source(f"{kernel}.cpp") + (FOLDER / "hostile.h").read_text()
    text += (FOLDER / f"{kernel}.cpp").read_text()
    (folder / "program.cpp").write_text(text)
    command = [cxx, *FLAGS, *flags, str(folder / "program.cpp"), "-o", str(folder / "program")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    done = subprocess.run([*run, str(folder / "program")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return np.array([line.split() for line in done.stdout.splitlines()], dtype=np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["interaction", "linear", "mlp", "embedding_bag", "row_update"])
def test_neon_computes_what_this_machine_does(kernel, tmp_path):
    here = shutil.which("g++")
    for needed in ("g++", CROSS, EMULATOR):
        if not shutil.which(needed):
            pytest.skip(f"no {needed} here")
    (tmp_path / "here").mkdir()
    (tmp_path / "arm").mkdir()
    want = told(kernel, here, build.tune_flags(here), [], tmp_path / "here")
    found = told(kernel, CROSS, (), [EMULATOR], tmp_path / "arm")
    assert len(want) == len(found) > 100
    assert (want[:, 0] == found[:, 0]).all() and (want[:, 2] > 0).any()
    off = np.abs(want[:, 1:] - found[:, 1:]) / (want[:, 2:] + 1e-3)
    assert off.max() < TOLERANCE, (kernel, off.max())
