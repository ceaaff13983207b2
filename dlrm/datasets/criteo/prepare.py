"""`preprocess_criteo`: raw Criteo files to a preprocessed directory, or a refusal that says why.

Around the passes of `build`: what is at the output already, the working directory that lets
a killed run go on, and leaving nothing behind when the input is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dlrm.datasets.criteo.build import Build
from dlrm.datasets.criteo.format import (
    FORMAT,
    RECORD,
    VERSION,
    CriteoSettings,
    read_meta,
    write_json,
)
from dlrm.datasets.criteo.hash import hash_file
from dlrm.datasets.criteo.pool import Pool
from dlrm.datasets.criteo.report import Progress
from dlrm.datasets.criteo.source import CHUNK, Source, inspect_inputs
from dlrm.errors import InputError
from dlrm.files import named

MAX_WORKERS = 8  # by default: a worker takes up to about 150 MB
SMALL = 8 << 20  # bytes of input that one process has read before another has started
PLAN = "plan.json"
UNPACKED = 3  # at least how many times smaller gzip and zstd make such text, for the disk check


@dataclass(frozen=True)
class Prepared:
    """What `preprocess_criteo` made or found."""

    folder: Path
    meta: dict[str, Any]  # the content of meta.json
    up_to_date: bool  # it was there already
    seconds: float


def preprocess_criteo(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: CriteoSettings | None = None,
    *,
    workers: int | None = None,
    force: bool = False,
    quiet: bool = True,
    chunk_bytes: int = CHUNK,
) -> Prepared:
    """Preprocess raw Criteo files into the directory `out` (see `format`).

    inputs: one file or several, in the order of their days; plain, gzip or zstd, with tabs or
        commas, with or without a header. Files named day_0, day_1, ... are put in this order.
    workers: processes; default one per usable core, at most 8. It makes no difference to the bytes.
    force: replace a preprocessed directory, whatever it was made from.
    chunk_bytes: text per task. It makes no difference to the bytes.

    A directory made from the same inputs (the recorded content hash decides; a file that still has
    its path, size and time of change is not read again) with the same settings is left as it is. A
    run that was
    killed goes on where it stopped when the same call is made again. Raises InputError for bad
    input, and then leaves nothing behind; for a full disk, where the work so far is kept.
    """
    settings = settings or CriteoSettings()
    began = time.perf_counter()
    progress = Progress(quiet)
    named = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    paths = in_day_order([os.fspath(path) for path in named])
    if paths != [os.fspath(path) for path in named]:
        progress.note(f"inputs in the order of their days: {', '.join(paths)}")
    folder = Path(os.path.realpath(out))
    if workers is not None and workers < 1:
        raise InputError(f"workers: {workers} must be at least 1")
    if workers is not None and workers > 4 * usable_cores():
        raise InputError(f"workers: {workers}, but this machine has {usable_cores()} cores")
    base = read_meta(settings.vocab_from) if settings.vocab_from else None
    resolved = settings.resolved(base)
    sources = inspect_inputs(paths)
    _check_out(folder, sources, settings.vocab_from)
    if folder.is_dir() and any(folder.iterdir()):
        meta = _existing(folder)
        if not force:
            differences = _differences(meta, resolved, sources, progress)
            if not differences:
                return Prepared(folder, read_meta(folder), True, time.perf_counter() - began)
            raise InputError(
                f"{folder}: was made from other inputs or with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nIt was left as it is. Use --force to make it again, or another --out"
            )
    with _parent_of(folder) as parent, _refusing(parent, folder) as work:
        _check_disk(parent, sources)
        lock = _enter(work, resolved, sources, chunk_bytes, progress)
        with lock, Pool(workers or _workers(sources)) as pool:
            build = Build(sources, resolved, settings.vocab_from, work, pool, progress, chunk_bytes)
            meta = build.run()
        _publish(build.result, folder, work)
    return Prepared(folder, meta, False, time.perf_counter() - began)


def in_day_order(paths: list[str]) -> list[str]:
    """Files all named day_N (with any suffix) by N, since a shell lists day_10 before day_2."""
    days = [re.fullmatch(r"day_(\d+)(\..*)?", os.path.basename(path)) for path in paths]
    numbers = [int(day[1]) for day in days if day]
    if len(numbers) < len(paths):
        return paths
    return [path for _, path in sorted(zip(numbers, paths, strict=True), key=lambda pair: pair[0])]


def _workers(sources: list[Source]) -> int:
    if sum(source.bytes for source in sources) < SMALL:
        return 1
    return min(usable_cores(), MAX_WORKERS)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_out(folder: Path, sources: list[Source], vocab_from: str | None) -> None:
    for source in sources:
        if folder.exists() and os.path.samefile(folder, source.path):
            raise InputError(f"out: {folder} is an input file. Name a directory to make")
        if folder.is_dir() and Path(source.path).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"out: {folder} holds the input {source.path}. Name another directory")
    if vocab_from and folder.exists() and os.path.samefile(folder, vocab_from):
        raise InputError(f"out: {folder} is the directory of vocab-from. Name another")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: {folder} is a file. Name a directory to make")


def _existing(folder: Path) -> dict[str, Any]:
    """The meta of what is at `out`, with no regard to its state; refuses a foreign directory."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] == FORMAT:
            found: dict[str, Any] = meta
            return found
    except (OSError, ValueError, KeyError, TypeError):
        if (folder / "meta.json").is_file() and (folder / "rows.bin").is_file():
            return {"version": "unreadable"}
    raise InputError(
        f"out: {folder} is a directory that python -m dlrm.preprocess did not make. "
        "Name a new or an empty one"
    )


def _differences(
    meta: dict[str, Any], resolved: dict[str, Any], sources: list[Source], progress: Progress
) -> list[str]:
    """How what is recorded differs from what is asked for, one line a difference."""
    if meta.get("version") != VERSION:
        return [f"format version: recorded {meta.get('version')}, now {VERSION}"]
    try:
        lines = []
        for name, asked in resolved.items():
            recorded = meta["settings"].get(name)
            if recorded != asked:
                lines.append(f"{name.replace('_', '-')}: recorded {recorded}, asked {asked}")
        recorded_sources = meta["sources"]
        if len(recorded_sources) != len(sources):
            return [*lines, f"input files: recorded {len(recorded_sources)}, given {len(sources)}"]
        for recorded, source in zip(recorded_sources, sources, strict=True):
            if recorded["bytes"] != source.bytes:
                lines.append(
                    f"input {source.path}: recorded {recorded['bytes']} bytes, has {source.bytes}"
                )
            elif any(recorded[key] != source.facts()[key] for key in ("path", "mtime_ns")):
                # Moved or touched: only the content counts, so it must be read.
                with progress.bar("compare", source.bytes, "B") as bar:
                    found = hash_file(source.path, bar.update)
                if found != recorded["xxh3"]:
                    lines.append(
                        f"input {source.path}: recorded xxh3 {recorded['xxh3']}, has {found}"
                    )
    except (KeyError, TypeError, AttributeError):
        return ["meta.json: is damaged"]
    return lines


@contextmanager
def _parent_of(folder: Path) -> Iterator[Path]:
    """The directory that `folder` is made in; what is made of it is removed again on InputError."""
    parent = folder.absolute().parent
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(f"out: cannot write in {parent} ({error.strerror})") from None
    try:
        yield parent
    except InputError:
        for made in missing:
            if not any(made.iterdir()):
                made.rmdir()
        raise


@contextmanager
def _refusing(parent: Path, folder: Path) -> Iterator[Path]:
    """The working directory; removed on InputError, kept when interrupted or the disk is full."""
    work = parent / f".{folder.absolute().name}.preprocess"
    try:
        yield work
    except _Busy as error:
        raise InputError(str(error)) from None
    except InputError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            with named(folder, work):
                raise
        raise InputError(
            f"out: the disk of {parent} is full. Free some space, and the same command "
            f"goes on where it stopped; or remove {work}"
        ) from None


class _Busy(InputError):
    """Another run is at work."""


def _check_disk(parent: Path, sources: list[Source]) -> None:
    """Refuse early what cannot fit: rows.bin alone needs 160 bytes a row."""
    need = sum(
        source.bytes * (1 if source.compression == "plain" else UNPACKED) / source.line_bytes
        for source in sources
    )
    need = int(need * RECORD.itemsize)
    free = shutil.disk_usage(parent).free
    if need > free:
        raise InputError(
            f"out: the rows need about {need / 1e6:,.0f} MB, but {parent} has {free / 1e6:,.0f} MB "
            "free. Free some space, or name an --out on another disk"
        )


def _enter(
    work: Path,
    resolved: dict[str, Any],
    sources: list[Source],
    chunk_bytes: int,
    progress: Progress,
) -> IO[str]:
    """Take the working directory, with what a killed run of the same plan left in it."""
    work.mkdir(exist_ok=True)
    lock = open(work / "lock", "a", encoding="utf-8")  # noqa: SIM115 - closed by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise _Busy(f"out: another run is writing here (it holds {work}/lock)") from None
    plan = {
        "version": VERSION,
        "settings": resolved,
        "sources": [source.facts() for source in sources],
        "chunk_bytes": chunk_bytes,
        "boot": _boot(),  # what a power failure left on the disk is not to be trusted
    }
    old = work / PLAN
    try:
        same = json.loads(old.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        same = False
    if not same:
        if old.exists():
            progress.note(
                "a run was stopped here, but with other inputs or settings, or before the machine "
                "was started again: beginning anew"
            )
        for path in work.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(old, plan)
        return lock
    for path in work.rglob("*.tmp"):
        path.unlink()
    done = sum(1 for path in work.iterdir() if path.suffix in (".chunk", ".done"))
    if done:
        progress.note(f"going on with the run that was stopped ({done} chunks are done)")
    return lock


def _boot() -> str:
    """Names the present run of the machine (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _publish(result: Path, folder: Path, work: Path) -> None:
    """Put the result in its place, the old one (if any) aside first."""
    if folder.is_dir():
        if any(folder.iterdir()):
            os.replace(folder, work / "replaced")
        else:
            folder.rmdir()
    os.replace(result, folder)
    shutil.rmtree(work)
