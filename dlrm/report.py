"""What a run tells: a progress bar, a JSON log, TensorBoard, lines on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from dlrm.errors import InputError
from dlrm.files import finite, named, write_text
from dlrm.metrics import Scores


class Report:
    """Progress of a run. ``quiet`` silences the bar and the lines, not the files."""

    def __init__(self, log: Path | None, tensorboard: str = "", quiet: bool = False) -> None:
        self.log_path, self.quiet = log, quiet
        self.file: TextIO | None = None
        self.bar: tqdm | None = None
        self.warned: set[str] = set()
        self.note: Callable[[], str] = lambda: ""  # more to say beside the loss
        self.board: Any = None
        self.board_path, self.board_kind = tensorboard, None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError(
                    "--tensorboard needs the tensorboard package: pip install tensorboard"
                ) from None
            self.board_kind = SummaryWriter

    def open_log(self, keep_to_step: int) -> None:
        """Open the log; of an earlier run keep what happened up to the step it goes on from."""
        if self.board_kind is not None:
            self.board = self.board_kind(self.board_path)
        if self.log_path is None:
            return
        kept = []
        if keep_to_step > 0 and self.log_path.exists():
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                try:
                    event = json.loads(line)
                    known, step = event.get("event"), int(event.get("step", 0))
                except (ValueError, AttributeError, TypeError):
                    break  # the line that a kill cut short: all after it is newer
                if step <= keep_to_step and known != "test":
                    kept.append(line + "\n")
        write_text(self.log_path, "".join(kept))
        self.file = open(self.log_path, "a")  # noqa: SIM115

    def say(self, line: str) -> None:
        """A line on the terminal, above the bar."""
        if not self.quiet:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """A line on stderr, also when quiet."""
        tqdm.write(f"warning: {line}", file=sys.stderr)

    def warn_once(self, topic: str, line: str) -> None:
        """A line on stderr, unless there was one on this topic before; "" says nothing."""
        if line and topic not in self.warned:
            self.warned.add(topic)
            self.warn(line)

    def start(self, total: int, done: int, batch_size: int) -> None:
        """Show the bar of a training of ``total`` steps."""
        self.batch_size = batch_size
        self.bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=self.quiet,
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def step(self, step: int, loss: float | None, lr: float) -> None:
        """One training step is done; ``loss`` is None where it must not be told."""
        if self.file is not None:
            told = "null" if loss is None else repr(loss)
            self._write(f'{{"event": "step", "step": {step}, "loss": {told}, "lr": {lr!r}}}\n')
        if self.board is not None and loss is not None:
            self.board.add_scalar("train/loss", loss, step)
        if self.bar is not None and self.bar.update(1):
            rate = self.bar.format_dict["rate"] or 0.0
            shown = "" if loss is None else f"loss {loss:.4f}, "
            self.bar.set_postfix_str(
                f"{shown}{rate * self.batch_size:,.0f} samples/s{self.note()}", refresh=False
            )

    def scores(self, split: str, step: int, scores: Scores) -> None:
        """A validation or test is done."""
        self.say(f"step {step:,} {split}: {scores}")
        self.warn_once(split, scores.one_class(split))
        self.event(split, step=step, **scores.as_dict())
        if self.board is not None:
            for name in ("auc", "logloss", "ne", "calibration"):
                self.board.add_scalar(f"{split}/{name}", getattr(scores, name), step)

    def event(self, event: str, **values: object) -> None:
        """A line in the log."""
        if self.file is not None:
            self._write(json.dumps(finite({"event": event, **values})) + "\n")

    def _write(self, line: str) -> None:
        assert self.file is not None
        with self._log_named():
            self.file.write(line)

    def _log_named(self) -> AbstractContextManager[None]:
        """A full disk is reported with the name of the log."""
        assert self.log_path is not None
        return named(self.log_path, self.log_path)

    def flush(self) -> None:
        """Put the log on disk, as a checkpoint does with the weights."""
        if self.file is not None:
            with self._log_named():
                self.file.flush()
        if self.board is not None:
            self.board.flush()

    def stop(self) -> None:
        """Take the bar away: training has ended."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        """Close the bar and the files."""
        self.stop()
        if self.file is not None:
            file, self.file = self.file, None
            with self._log_named():
                file.close()
        if self.board is not None:
            self.board.close()
            self.board = None
