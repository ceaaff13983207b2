"""What must happen before torch is imported: a quiet Ctrl-C, and threads that wait in peace."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def prepare() -> None:
    """Called as the package is imported; a no-op the second time."""
    # GNU OpenMP, which torch's CPU builds bring, lets a thread that waits for the others spin. When
    # another program takes a core for a moment, all wait spinning for the thread it displaced: two
    # threads then train many times slower than one. It reads this once, as torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Only in `python -m dlrm.*` is "-m" what argv begins with while the package is imported.
    if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while modules are imported: nothing is begun, so nothing is to be tidied.

    Not a KeyboardInterrupt: torch and NumPy make an ImportError of it in places, or print it and go
    on.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)


def interruptible() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, as usual: a command has begun."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
