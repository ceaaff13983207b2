"""The language, without tensors: on this interpreter, and on others that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.capture import anywhere, broken, pure

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("function", "args"), [pytest.param(*c, id=c[0].__name__) for c in pure.CASES]
)
def test_whole(function: Any, args: tuple[Any, ...]) -> None:
    """Captured without a break, and nothing is different."""
    pure.check(function, args)


@pytest.mark.parametrize(
    ("function", "args", "eager"), [pytest.param(*c, id=c[0].__name__) for c in broken.CASES]
)
def test_broken(function: Any, args: tuple[Any, ...], eager: bool) -> None:
    """Broken and resumed, and nothing is different: results, errors, changes and their order."""
    broken.check(function, args, eager)


@pytest.mark.parametrize(
    ("function", "args"), [pytest.param(*c, id=c[0].__name__) for c in pure.CASES]
)
def test_broken_anywhere(function: Any, args: tuple[Any, ...]) -> None:
    """With a break behind any statement, in loops, branches and try blocks too."""
    assert anywhere.check(function, args) >= 0


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("script", ["pure.py", "broken.py", "anywhere.py"])
def test_other_versions(version: str, script: str) -> None:
    """The same on each CPython whose bytecode we read; they need not have torch."""
    python = shutil.which(f"python{version}")
    if python is None or f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        pytest.skip(f"no other Python {version} here")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PYENV_VERSION": version}
    if subprocess.run([python, "-c", ""], env=environment, capture_output=True).returncode:
        pytest.skip(f"python{version} does not start")
    done = subprocess.run(
        [python, HERE / script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
