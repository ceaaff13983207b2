"""What must happen before torch is imported: a quiet Ctrl-C, and threads that spin briefly."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def prepare() -> None:
    """Called as the package is imported; a no-op the second time."""
    # GNU OpenMP, which torch's CPU builds bring, lets a thread that waits for the others spin. When
    # another program takes a core, all spin for the thread that it displaced: two threads then are
    # many times slower than one. Samples/s of the tiny preset on two cores (medians; the machine
    # idle, beside a busy loop, beside another program that computes):
    #   spin count 300,000 (the default)   33,400    9,400      900
    #   10,000                             33,000    8,400    6,500
    #   3,000                              31,400   13,100
    #   0 (OMP_WAIT_POLICY=PASSIVE)        21,800   22,800   24,800
    # So this many costs an idle machine nothing that shows. It is read once, as torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
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
