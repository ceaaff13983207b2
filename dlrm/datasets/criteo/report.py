"""What a preprocessing run tells: progress bars, and the bad rows with file, line and mend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from dlrm.datasets.criteo.screen import LISTED, MENDS, Bad, count_kinds
from dlrm.errors import InputError


class BadRows:
    """All bad rows counted by file and kind; the first 1000 listed by file and line."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self.kinds: dict[str, int] = {}
        self.of_file: list[dict[str, int]] = [{} for _ in paths]
        self.listed: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def error(self, place: int, lines: int, bad: Bad) -> InputError:
        """The error for a bad row, `lines` being the lines of its file before its chunk."""
        return InputError(
            f"{self._where(place, lines, bad)}. {MENDS[bad.kind]}; "
            "or leave bad rows out with --bad-rows skip"
        )

    def add(
        self, place: int, lines: int, bad: Sequence[Bad], counts: dict[str, int] | None = None
    ) -> None:
        """Count the bad rows of a chunk, and list them while there is room.

        counts: of all of them by kind, if `bad` has only the first.
        """
        for kind, count in (count_kinds(bad) if counts is None else counts).items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count
            self.of_file[place][kind] = self.of_file[place].get(kind, 0) + count
        room = LISTED - len(self.listed)
        self.listed += [self._where(place, lines, item) for item in bad[:room]]

    def _where(self, place: int, lines: int, bad: Bad) -> str:
        return f"{self.paths[place]}:{lines + bad.line + 1}: {bad.kind}: {bad.detail}"

    def summary(self) -> str:
        """Such as ``3 bad rows: 2 label, 1 column count``."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{self.total} bad row{'s' * (self.total != 1)}" + (f": {kinds}" if kinds else "")

    def report(self) -> str:
        """The content of ``bad_rows.txt``."""
        lines = [f"{self.summary()}, left out"]
        for path, kinds in zip(self.paths, self.of_file, strict=True):
            lines += [f"{path}: {count} {kind}" for kind, count in sorted(kinds.items())]
        if self.listed:
            more = "" if len(self.listed) == self.total else f" (the first {len(self.listed)})"
            lines += ["", f"file:line: kind: what was found{more}", *self.listed]
        return "\n".join(lines) + "\n"


class Progress:
    """tqdm bars, and notes, on standard error; nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def bar(self, name: str, total: int, unit: str) -> Any:
        """A context manager with ``update(n)``."""
        if self.quiet:
            return _NoBar()
        from tqdm import tqdm

        live = sys.stderr.isatty()
        return tqdm(
            total=total,
            desc=f"{name:>10}",
            unit=unit,
            unit_scale=total > 9999,
            mininterval=0.1 if live else 5.0,
            dynamic_ncols=live,
        )

    def note(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr)


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def update(self, count: int) -> None:
        pass
