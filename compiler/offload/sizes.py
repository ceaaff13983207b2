"""Amounts of memory in words, and how much of it this process may still take."""

from __future__ import annotations

import re
import resource
from pathlib import Path

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{unit}i": 2 ** (10 * k) for k, unit in enumerate("kmgt", 1)}
SHARE = 0.8  # of the free memory: what "auto" takes, leaving room for what a step needs beside it


def parse_bytes(text: str | int) -> int:
    """A number of bytes: an int, "1500000", "64MB" (decimal) or "4GiB" (binary).

    >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(7)
    (4294967296, 1500000, 7)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(text), re.IGNORECASE)
        if found is None:
            raise ValueError(f"{text!r} is no amount of memory: write it as 4GiB, 512MB or 65536")
        value = int(float(found[1]) * UNITS[found[2].lower()])
    if value < 1:
        raise ValueError(f"{text!r}: an amount of memory must be at least 1 byte")
    return value


def show_bytes(count: float) -> str:
    """The same in words.

    >>> show_bytes(3 * 2**20)
    '3.0 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has free, within its own limits.

    The limits are those of ``setrlimit`` (RLIMIT_AS, RLIMIT_DATA) and of the control group. 0 where
    the system does not tell.
    """
    found = [_meminfo("MemAvailable"), *_group(), *_limits()]
    known = [n for n in found if n is not None]
    return max(0, min(known)) if known else 0


def _meminfo(name: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _group() -> list[int]:
    """What the control group leaves. Its pages of files count as free: they can be dropped."""
    base = Path("/sys/fs/cgroup")
    try:
        limit = int((base / "memory.max").read_text())
        used = int((base / "memory.current").read_text())
        stat = dict(line.split() for line in (base / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or "max": no limit
        return []
    return [limit - used + int(stat.get("inactive_file", 0))]


def _limits() -> list[int]:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return []
    left = []
    for which, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(which)[0]
        used = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        if limit != resource.RLIM_INFINITY and used:
            left.append(limit - int(used[1]) * 1024)
    return left


__all__ = ["free_memory", "parse_bytes", "show_bytes"]
