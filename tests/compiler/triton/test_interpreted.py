"""Numerics of all Triton kernels, by its interpreter, on CPU tensors.

The interpreter is chosen by a variable that must be set before Triton is imported, and then nothing
can be compiled: so the tests in ``interpreted/`` run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[3]
pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.7.1,<4'")


SLOW = ("check_benchmark.py",)
NAMES = [
    pytest.param(f.name, marks=pytest.mark.slow) if f.name in SLOW else f.name
    for f in sorted(FOLDER.glob("check_*.py"))
]


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(name: str) -> None:
    run(FOLDER / name)


@pytest.mark.slow
def test_operations_on_the_samples_of_pytorch() -> None:
    """The sweep of all lowerings that the C++ path has, through Triton."""
    run(ROOT / "tests" / "compiler" / "test_opinfo.py", DLRM_TEST_TARGET="triton")


def run(file: Path, **env: str) -> None:
    """A file of tests in a process of its own; all must pass, none be skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--show-capture=no",
         "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **env},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]
