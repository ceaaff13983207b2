"""The C++ kernels under the address and undefined-behaviour sanitizers, on hostile inputs.

Each program in ``hostile/`` is put behind its kernel's source and built with both sanitizers; its
buffers end exactly where the kernel may last read or write. Run with ``pytest -m slow``.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from compiler.kernels import source
from compiler.runtime import build

FOLDER = Path(__file__).parent / "hostile"
KERNELS = ("interaction", "linear", "mlp", "embedding_bag", "row_update")
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fopenmp", "-fno-math-errno", "-Wno-unknown-pragmas"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
)


def build_program(text: str, cxx: str, flags: tuple[str, ...], folder: Path) -> Path:
    (folder / "program.cpp").write_text(text)
    program = folder / "program"
    command = [cxx, *FLAGS, *flags, str(folder / "program.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def run(program: Path) -> subprocess.CompletedProcess[str]:
    # Leaks of the OpenMP runtime's threads are not the kernels'.
    settings = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run([program], capture_output=True, text=True, env=os.environ | settings)


def compilers() -> list[str]:
    return [name for name in ("g++", "clang++") if shutil.which(name)]


@pytest.fixture(params=compilers() or ["none"], scope="module")
def cxx(request, tmp_path_factory) -> str:
    """A compiler with both sanitizers' libraries."""
    if request.param == "none":
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text("int main() {}")
    command = [request.param, *FLAGS, str(folder / "probe.cpp"), "-o", str(folder / "probe")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or run(folder / "probe").returncode:
        pytest.skip(f"{request.param} has no sanitizer libraries here: {done.stderr[-200:]}")
    return request.param


def test_a_fault_is_found(cxx, tmp_path):
    """The programs' own buffers do catch a write past the end."""
    text = source("vector.h") + (FOLDER / "hostile.h").read_text()
    text += "int main(int n, char**) { Exact<float> x(n * 16); store(x.get() + n, Vec{}); }"
    done = run(build_program(text, cxx, build.tune_flags(cxx), tmp_path))
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True], ids=["native", "narrow"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel, narrow, cxx, tmp_path):
    text = source(f"{kernel}.cpp") + (FOLDER / "hostile.h").read_text()
    text += (FOLDER / f"{kernel}.cpp").read_text()
    flags = () if narrow else build.tune_flags(cxx)
    done = run(build_program(text, cxx, flags, tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
