"""The files of disk tables, and the way back to what a checkpoint saw.

``table-NNN.rows`` holds a table's records, row after row, and changes as training goes on. Before a
row changes for the first time after a checkpoint, its old record goes to an undo log: the state
that the checkpoint saw is that of the files with the old records put over them. A log segment
begins at each checkpoint, which has its number; the oldest record of a row from that segment on is
the one that counts. Records go to the log before the files change, so a killed process leaves no
row whose old record is lost. (After a power failure the last writes may be missing: a checkpoint
syncs the files, the log between checkpoints is left to the system.)

Going back is a change like any other: old records are written to the files, and what they replace
goes to a new segment. So later checkpoints stay valid too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dlrm.errors import InputError
from dlrm.files import write_text
from dlrm.tables import native

MAGIC = 0x31676F4C6F646E55
HEAD = 5  # i64 numbers of a log entry's header: magic, table, count, floats a record, checksum
BLOCK = 1 << 16  # rows handled at a time
VERSION = 1


class StoreError(InputError):
    """The files of the tables are missing, damaged, or not those that a checkpoint saw."""


@dataclass(frozen=True)
class Layout:
    """One table's records: ``dim`` numbers of the row, then ``state`` of the optimizer."""

    rows: int
    dim: int
    state: int

    @property
    def floats(self) -> int:
        return self.dim + self.state

    @property
    def bytes(self) -> int:
        return self.floats * 4


class Store:
    """The folder of one run's tables, locked for this process.

    ``shared`` is for reading beside other readers. Raises StoreError if the folder is no store, or
    is being trained.
    """

    def __init__(self, folder: Path, shared: bool = False) -> None:
        self.folder = folder
        try:
            described = json.loads((folder / "store.json").read_text())
            if described["version"] != VERSION:
                raise StoreError(f"{folder}: version {described['version']}, want {VERSION}")
            self.layouts = [Layout(**one) for one in described["tables"]]
        except FileNotFoundError:
            raise StoreError(
                f"{folder}: the tables of this run are not there (no store.json); a checkpoint of "
                "disk tables is no use without the run's folder: bring it back, or train anew"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{folder / 'store.json'}: cannot be read: {error}") from None
        mode = os.O_RDONLY if shared else os.O_RDWR
        self.lock = os.open(folder / "store.json", os.O_RDONLY)
        try:
            fcntl.flock(self.lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise StoreError(
                f"{folder}: these tables are in use by a training; wait for its end, or stop it "
                "(Ctrl-C saves)"
            ) from None
        self.fds = []
        for f, layout in enumerate(self.layouts):
            path = self.path(f)
            if not path.is_file() or path.stat().st_size != layout.rows * layout.bytes:
                self.close()
                raise StoreError(f"{path}: missing or truncated")
            self.fds.append(os.open(path, mode))
        self.log = -1
        self.segment = 0

    def path(self, f: int) -> Path:
        """The file of table ``f``."""
        return self.folder / f"table-{f:03d}.rows"

    def log_path(self, segment: int) -> Path:
        return self.folder / f"undo-{segment:08d}.log"

    def segments(self) -> list[int]:
        """Numbers of the log segments that are there, ascending."""
        return sorted(int(p.stem.split("-")[1]) for p in self.folder.glob("undo-*.log"))

    @staticmethod
    def create(folder: Path, layouts: list[Layout]) -> None:
        """Lay out the files, all of their space taken; ``finish`` makes them valid in the end.

        Raises InputError if the disk has no room.
        """
        needed = sum(layout.rows * layout.bytes for layout in layouts)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        require_room(folder, needed)
        for f, layout in enumerate(layouts):
            with open(folder / f"table-{f:03d}.rows", "wb") as file:
                if layout.rows:
                    os.posix_fallocate(file.fileno(), 0, layout.rows * layout.bytes)

    @staticmethod
    def finish(folder: Path, layouts: list[Layout]) -> None:
        """Make a created store valid, once its rows are written."""
        text = {"version": VERSION, "tables": [asdict(layout) for layout in layouts]}
        write_text(folder / "store.json", json.dumps(text, indent=1))

    # ---- records -------------------------------------------------------------------------------

    def read(self, f: int, ids: np.ndarray) -> np.ndarray:
        """Records (N, floats) f32 of the files as they are."""
        layout = self.layouts[f]
        raw = native.gather(self.fds[f], ids * layout.bytes, layout.bytes, self.path(f))
        return raw.view(np.float32)

    def write(self, f: int, ids: np.ndarray, records: np.ndarray) -> None:
        """Put records (N, floats) f32 into the file, without any log."""
        layout = self.layouts[f]
        data = np.ascontiguousarray(records, np.float32).view(np.uint8)
        native.scatter(self.fds[f], ids * layout.bytes, data, self.path(f))

    # ---- the undo log --------------------------------------------------------------------------

    def begin(self, segment: int) -> None:
        """Log to a new segment of that number from now on."""
        if self.log >= 0:
            os.close(self.log)
        self.segment = segment
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self.log = os.open(self.log_path(segment), flags, 0o644)

    def entries(self, segment: int) -> Iterator[tuple[int, np.ndarray, int]]:
        """Of each entry of a segment: table, ids (N,), and the place of its records in the file.

        An entry that a kill cut short is the last one, and is left out. Raises StoreError for
        damage elsewhere.
        """
        path = self.log_path(segment)
        size = path.stat().st_size
        with open(path, "rb") as file:
            at = 0
            while at + HEAD * 8 <= size:
                head = np.frombuffer(file.read(HEAD * 8), np.int64)
                f, count = int(head[1]), int(head[2])
                known = head[0] == MAGIC and 0 <= f < len(self.layouts) and count > 0
                if not known or head[3] != self.layouts[f].floats:
                    raise StoreError(f"{path}: damaged at byte {at}")
                body = count * (8 + self.layouts[f].bytes)
                if at + HEAD * 8 + body > size:
                    return
                text = file.read(body)
                if native.checksum(text) != head[4]:
                    if at + HEAD * 8 + body == size:
                        return
                    raise StoreError(f"{path}: damaged at byte {at}")
                yield f, np.frombuffer(text, np.int64, count), at + HEAD * 8 + count * 8
                at += HEAD * 8 + body

    def overlay(self, segment: int) -> list[Overlay]:
        """For each table, where the records lie that the files had when ``segment`` began.

        Raises StoreError if the log does not reach back so far.
        """
        there = self.segments()
        needed = list(range(segment, max([*there, segment]) + 1))
        if there and segment <= max(there) and (missing := sorted(set(needed) - set(there))):
            raise StoreError(
                f"{self.folder}: the log that leads back to this checkpoint is gone (segment "
                f"{missing[0]}); use a newer checkpoint"
            )
        ids: list[list[np.ndarray]] = [[] for _ in self.layouts]
        places: list[list[np.ndarray]] = [[] for _ in self.layouts]
        logs: list[list[np.ndarray]] = [[] for _ in self.layouts]
        for number in there:
            if number < segment:
                continue
            for f, own, start in self.entries(number):
                ids[f].append(own)
                places[f].append(start + np.arange(len(own)) * self.layouts[f].bytes)
                logs[f].append(np.full(len(own), number))
        return [Overlay.of(*one) for one in zip(ids, places, logs, strict=True)]

    def old_records(self, f: int, places: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Records (N, floats) f32 at ``places`` (N,) of the segments ``logs`` (N,)."""
        layout = self.layouts[f]
        out = np.empty((len(places), layout.floats), np.float32)
        for number in np.unique(logs):
            chosen = logs == number
            path = self.log_path(int(number))
            with open(path, "rb") as file:
                raw = native.gather(file.fileno(), places[chosen], layout.bytes, path)
            out[chosen] = raw.view(np.float32)
        return out

    def restore(self, segment: int) -> int:
        """Put the files back to what they were when ``segment`` began; how many rows changed.

        A new segment is begun, and logs what the files had.
        """
        overlay = self.overlay(segment)
        self.begin(max([*self.segments(), segment - 1]) + 1)
        changed = 0
        for f, one in enumerate(overlay):
            for start in range(0, len(one.ids), BLOCK):
                part = slice(start, start + BLOCK)
                ids = one.ids[part]
                self._note(f, ids, self.read(f, ids))
                self.write(f, ids, self.old_records(f, one.places[part], one.logs[part]))
                changed += len(ids)
        self.sync()
        return changed

    def _note(self, f: int, ids: np.ndarray, records: np.ndarray) -> None:
        text = ids.astype(np.int64).tobytes() + records.tobytes()
        head = [MAGIC, f, len(ids), self.layouts[f].floats, native.checksum(text)]
        data = np.array(head, np.int64).tobytes() + text
        if os.write(self.log, data) != len(data):
            raise OSError(28, os.strerror(28), str(self.log_path(self.segment)))

    def prune(self, oldest: int) -> None:
        """Remove the segments before ``oldest``: no checkpoint needs them."""
        for number in self.segments():
            if number < oldest and number != self.segment:
                self.log_path(number).unlink()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        for fd in [*self.fds, *([self.log] if self.log >= 0 else [])]:
            os.fdatasync(fd)

    def forget_pages(self) -> None:
        """Ask the system to drop its cache of these files."""
        self.sync()
        for fd in self.fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files; the lock goes with them."""
        for fd in [*getattr(self, "fds", []), self.lock, getattr(self, "log", -1)]:
            if fd >= 0:
                os.close(fd)
        self.fds, self.lock, self.log = [], -1, -1


def require_room(folder: Path, needed: int) -> None:
    """Raise InputError unless the disk of ``folder`` has so many bytes free."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"--table-storage disk: the tables take {needed:,} bytes, and {place} has {free:,} "
            "free; free some space, or name an --out on another disk"
        )


@dataclass(frozen=True)
class Overlay:
    """Rows whose records are in the log: ids (N,) ascending, their places, and which segment."""

    ids: np.ndarray
    places: np.ndarray
    logs: np.ndarray

    @staticmethod
    def of(ids: list[np.ndarray], places: list[np.ndarray], logs: list[np.ndarray]) -> Overlay:
        """The first entry of each row counts: it is the oldest."""
        if not ids:
            empty = np.empty(0, np.int64)
            return Overlay(empty, empty, empty)
        found, first = np.unique(np.concatenate(ids), return_index=True)
        return Overlay(found, np.concatenate(places)[first], np.concatenate(logs)[first])


__all__ = ["Layout", "Overlay", "Store", "StoreError"]
