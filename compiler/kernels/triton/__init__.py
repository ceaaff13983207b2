"""The hand-written kernels for GPUs, in Triton: each beside the C++ one of the same name.

Eager references and the meaning of arguments are those of ``compiler.kernels``. The Python faces
here take tensors on a GPU, allocate nothing but scratch, launch on the current stream and never
wait for the device. Under ``TRITON_INTERPRET=1``, set before Triton is imported, they take CPU
tensors instead, for tests.
"""

from __future__ import annotations

import importlib.util
import os

INSTALL = "pip install 'triton>=3.7.1,<4' (on Linux; the CUDA build of torch brings it)"


class NoTriton(ImportError):
    """Triton is not installed; the message says how to get it."""


def require() -> None:
    """Raise NoTriton, with the command that installs it, where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise NoTriton(f"compiling for a GPU needs Triton: {INSTALL}")


def interpreted() -> bool:
    """Whether kernels run on CPU tensors, by Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"
