"""Frames of ours that warnings and logging pass over when they count callers.

``warnings.warn(..., stacklevel=2)`` names the caller's line, and ``logging`` does so too. Both pass
over frames of files whose names contain "importlib" and "_bootstrap" (``_is_internal_frame`` in
CPython's Lib/warnings.py and Lib/logging), as those stand between a module and its import. What
stands between a captured function and its caller bears such a name for the same reason.
"""

from __future__ import annotations

from typing import Any

MARK = "compiler.capture, as importlib._bootstrap"


def unseen(function: Any) -> Any:
    """The function, whose frames are passed over."""
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"<{code.co_name} of {MARK}>")
    return function
