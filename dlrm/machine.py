"""What this machine has: processor, memory, compilers, GPUs. Standard library only."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

# What /proc/cpuinfo or sysctl calls it, and what we call it
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "sve": "SVE",
}
OPENMP_PROGRAM = """#include <cstdio>
#include <omp.h>
int main() {
  int threads = 0;
  #pragma omp parallel reduction(+ : threads)
  threads += 1;
  std::printf("%d\\n", threads);
}
"""


def output_of(command: list[str], seconds: float = 20) -> tuple[int, str]:
    """(exit status, output and errors together); 127 when it cannot be started at all."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout


def cpu_name() -> str:
    """The processor's name as the system gives it, or its architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    if found:
        return found.group(1).strip()
    if platform.system() == "Darwin":
        return output_of(["sysctl", "-n", "machdep.cpu.brand_string"])[1].strip()
    return platform.machine()


def cpu_instructions() -> list[str]:
    """The vector instruction sets of `INSTRUCTIONS` that the processor has."""
    if platform.system() == "Darwin":
        if platform.machine() == "arm64":
            return ["NEON"]
        flags = output_of(["sysctl", "-n", "machdep.cpu.leaf7_features"])[1].lower().split()
    else:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            return []
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
        flags = found.group(1).split() if found else []
    return [shown for name, shown in INSTRUCTIONS.items() if name in flags]


def cores() -> int:
    """Cores this process may use: its affinity, less what a container's quota leaves."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(usable or 1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max": no quota
        return usable or 1


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory, a container's limit counted in; zeros if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        names = os.sysconf_names
        if "SC_PHYS_PAGES" not in names:
            return 0, 0
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    total = kilobytes["MemTotal"] * 1024
    available = kilobytes.get("MemAvailable", kilobytes["MemFree"]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(total, limit), min(available, max(0, limit - used))
    except (OSError, ValueError):
        return total, available


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and what a small OpenMP program did with it."""

    path: str
    version: str
    threads: int = 0  # OpenMP threads the program ran with; 0: it did not build or run
    problem: str = ""


def find_compiler() -> Compiler | None:
    """The compiler of $CXX, g++, c++ or clang++, tried on a program; None where there is none."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        return None
    status, text = output_of([path, "--version"])
    version = text.splitlines()[0] if status == 0 and text else "unknown version"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "openmp.cpp"), Path(folder, "openmp")
        source.write_text(OPENMP_PROGRAM)
        status, text = output_of([path, "-O1", "-fopenmp", str(source), "-o", str(program)], 60)
        if status != 0:
            return Compiler(path, version, problem=f"does not build an OpenMP program: {text}")
        status, text = output_of([str(program)])
    if status != 0 or not text.strip().isdigit():
        return Compiler(path, version, problem=f"the OpenMP program it built failed: {text}")
    return Compiler(path, version, threads=int(text))


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs as nvidia-smi lists them: "name, memory, driver" each."""

    lines: list[str] = field(default_factory=list)
    problem: str = ""


def nvidia_gpus() -> Gpus:
    """Ask nvidia-smi; no lines and no problem where there is no such command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Gpus()
    query = "--query-gpu=name,memory.total,driver_version"
    status, text = output_of([command, query, "--format=csv,noheader"])
    if status != 0:
        return Gpus(problem=text.strip())
    return Gpus(lines=[line.strip() for line in text.splitlines() if line.strip()])
