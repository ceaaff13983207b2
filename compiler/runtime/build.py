"""Build generated C++ into a shared library, once: a cache by content, safe among processes.

The key of a library is the hash of everything that made it: the source, the flags, the compiler's
version and the CPU it is tuned for. A library is built under a temporary name and renamed, with its
checksum beside it, so that a cut-off or damaged file is found and built again, never loaded.

``DLRM_COMPILER_CACHE`` names the folder (default: ``dlrm-compiler`` in the user's cache folder);
``DLRM_COMPILER_CXX`` names the compiler (default: g++, else clang++).
``DLRM_COMPILER_PRINT=1`` prints each source as it is built.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable"),
)


class BuildError(RuntimeError):
    """The compiler refused a source; the message has its output and where the source lies."""


class NoCompiler(RuntimeError):
    """There is no C++ compiler on this machine."""


def load(source: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of a C++ source, built unless the cache has it.

    ``flags`` are added to ``FLAGS``. Raises NoCompiler, or BuildError with the compiler's words.
    """
    return _load(source, flags, _cxx(), cache_folder())


@functools.cache
def _load(source: str, flags: tuple[str, ...], cxx: str, folder: Path) -> ctypes.CDLL:
    if os.environ.get("DLRM_COMPILER_PRINT"):
        print(source, file=sys.stderr)
    command = (cxx, *FLAGS, *tune_flags(cxx), *flags)
    key = hashlib.sha256(
        "\0".join((*command, compiler_version(cxx), cpu_name(), source)).encode()
    ).hexdigest()[:32]
    if _intact(folder / f"{key}.so"):  # needs no lock, and no right to write
        return ctypes.CDLL(str(folder / f"{key}.so"))
    with usable(folder) as place:
        library = place / f"{key}.so"
        with _locked(place / f"{key}.lock"):
            if not _intact(library):
                _build(source, command, library)
        return ctypes.CDLL(str(library))


def cache_folder() -> Path:
    """Where libraries are kept."""
    if named := os.environ.get("DLRM_COMPILER_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dlrm-compiler"


@functools.cache
def tune_flags(cxx: str) -> tuple[str, ...]:
    """The flag that tunes for this machine's CPU, where the compiler knows it."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [cxx, native, "-x", "c++", "-E", "-"]
    if subprocess.run(command, input="", capture_output=True, text=True).returncode:
        return ()
    return (native, "-mprefer-vector-width=512") if _avx512() else (native,)


def _avx512() -> bool:
    return "avx512f" in cpu_name()


@functools.cache
def cpu_name() -> str:
    """What identifies this CPU's instruction sets: its model and flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return " ".join(line.split(":", 1)[1].strip() for line in lines if line.startswith(kept))


@functools.cache
def _find(names: tuple[str, ...]) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    raise NoCompiler(
        f"no C++ compiler ({' or '.join(names)}) on PATH: install g++ "
        "(Debian: apt-get install g++), or set DLRM_COMPILER_CXX"
    )


def _cxx() -> str:
    named = os.environ.get("DLRM_COMPILER_CXX")
    return _find((named,) if named else ("g++", "clang++"))


@functools.cache
def compiler_version(cxx: str) -> str:
    """The first line of ``--version``."""
    done = subprocess.run([cxx, "--version"], capture_output=True, text=True)
    if done.returncode:
        raise NoCompiler(f"{cxx} --version failed: {done.stderr.strip()}")
    return done.stdout.splitlines()[0]


def _build(source: str, command: tuple[str, ...], library: Path) -> None:
    text = library.with_suffix(".cpp")
    partial = library.with_suffix(f".{os.getpid()}.partial")
    try:
        text.write_text(source)
        done = subprocess.run(
            [*command, str(text), "-o", str(partial)], capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"{' '.join(command)} {text} failed:\n{done.stderr[-8000:]}")
        library.with_suffix(".sha256").write_text(digest(partial))
        os.replace(partial, library)
    finally:
        partial.unlink(missing_ok=True)


def _intact(library: Path) -> bool:
    try:
        return library.with_suffix(".sha256").read_text() == digest(library)
    except (OSError, UnicodeDecodeError):
        return False


def digest(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # freed with the file, also when the process is killed
        yield


@contextmanager
def usable(folder: Path) -> Iterator[Path]:
    """The cache folder, or a temporary one for this process where it cannot be written."""
    reason = _why_not_writable(folder)
    if reason is None:
        yield folder
        return
    warnings.warn(
        f"compiler cache {folder} cannot be written ({reason}): building anew in this process; "
        "set DLRM_COMPILER_CACHE to a folder that can",
        stacklevel=2,
    )
    with tempfile.TemporaryDirectory(prefix="dlrm-compiler-") as place:
        yield Path(place)


def _why_not_writable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
