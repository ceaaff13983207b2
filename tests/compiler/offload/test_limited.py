"""A step that does not fit the memory this process may take runs with a budget, and has the bits
that it has without any limit.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("limited.py")
# malloc: large blocks come from the system and go back to it, as the limit counts them
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": "0"}


def run(*args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *args]
    root = SCRIPT.parents[3]
    return subprocess.run(
        command, env={**env, "PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def free_digest() -> str:
    done = run("eager")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_eager_dies_under_the_limit():
    done = run("eager", "--limited")
    assert done.returncode != 0
    assert "can't allocate memory" in done.stderr or "Cannot allocate memory" in done.stderr


@pytest.mark.parametrize("way", ["all", "dynamic"])
def test_within_a_budget_it_lives_and_has_the_same_bits(way, free_digest):
    done = run(way, "--limited")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == free_digest


def test_a_compiled_model_within_a_budget_too():
    free, limited = run("compiled"), run("compiled", "--limited")
    assert limited.returncode == 0, limited.stderr[-2000:]
    assert limited.stdout == free.stdout != ""
