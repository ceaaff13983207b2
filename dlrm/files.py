"""Files written whole or not at all, and errors of the system in words of the user's own paths."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrm.errors import InputError

MENDS = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free some space, or name a path on another disk",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another path"
    ),
    errno.EISDIR: "a folder is in the way: name another path",
    errno.ENOTEMPTY: "a folder is in the way: name another path",
    errno.EEXIST: "a file is in the way: name another path",
    errno.ENOTDIR: "a part of the path is a file: name another path",
    errno.ENOENT: "check the path",
    errno.ENAMETOOLONG: "name a shorter path",
}


def explain(error: OSError) -> str:
    """The path, what the system says, and the mend."""
    where = f"{os.fspath(error.filename)}: " if error.filename else ""
    mend = MENDS.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {mend}" if mend else "")


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, for a file that is renamed to it in the end.

    After an error nothing is left of it, and what was at ``path`` stays. OSError names ``path``.

    >>> with written(Path("/tmp/doctest.txt")) as partial:
    ...     _ = partial.write_text("whole")
    >>> Path("/tmp/doctest.txt").read_text()
    'whole'
    """
    partial = path.with_name(f".partial-{path.name}")
    remove(partial)  # of a run that was killed
    with parents(path):
        try:
            with named(path, partial):
                yield partial
                os.replace(partial, path)
        finally:
            remove(partial)


@contextlib.contextmanager
def parents(path: Path) -> Iterator[None]:
    """Make the folders that ``path`` lies in; after an error those it made are gone again."""
    missing = [place for place in path.absolute().parents if not place.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for made in missing:
            with contextlib.suppress(OSError):  # somebody has put something there
                made.rmdir()
        raise


@contextlib.contextmanager
def named(path: Path, partial: Path) -> Iterator[None]:
    """Errors in writing ``partial`` name ``path``, which is the one the user knows."""
    try:
        yield
    except OSError as error:
        own = error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(partial)
        if not own or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, and wait until it is on the disk."""
    with written(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: object) -> None:
    """Write JSON. It has no word for NaN and infinity: null stands for them."""
    write_text(path, json.dumps(finite(content), indent=1) + "\n")


def finite(content: Any) -> Any:
    """The same nested dictionaries and lists, with None for numbers that are not finite.

    >>> finite({"auc": [float("nan"), 0.5]})
    {'auc': [None, 0.5]}
    """
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def require_writable(path: Path, flag: str) -> None:
    """Raise InputError, naming the flag, if a file or folder cannot be made at ``path``."""
    for place in (path, *path.absolute().parents):
        if not place.exists():
            continue
        if place != path and not place.is_dir():
            raise InputError(f"{flag}: {place} is a file, so {path} cannot be made; name another")
        if not os.access(place, os.W_OK | (os.X_OK if place.is_dir() else 0)):
            mend = "change its permissions, or name another path"
            raise InputError(f"{flag}: no permission to write to {place}; {mend}")
        if place.is_dir():
            return


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
