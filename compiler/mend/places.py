"""Warnings that name a caller's line, as ``warnings.warn(..., stacklevel=2)`` does."""

from __future__ import annotations

import os
import sys
import types
import warnings
from typing import Any

import torch

from compiler.mend import asking

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OPERATORS = os.path.join(_OURS, "mend", "effects.py")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DYNAMO = os.path.join(_TORCH, "_dynamo") + os.sep
_GENERATED = ("<call of ", "<dispatch of ")  # by our capture, between a function and its caller


def place(level: int) -> str:
    """Where a warning with ``stacklevel=level``, given where this is called, points to.

    File, line and module. In a capture that is looked up among the functions that are captured; a
    number instead says how far above the outermost of them it is.
    """
    if not torch.compiler.is_compiling():
        return _of(sys._getframe(level))
    frames = asking.calling().split("\n")[:-2]  # without ``calling`` and this
    if not frames:  # a front end that does not tell: from the first function that is not ours
        return f"\t{level - 1}\t"
    if level > len(frames):
        outermost = frames[0].split("\t")[0]
        return f"\t{level - len(frames)}\t{outermost}"
    return frames[-level]


def warn_at(where: str, message: Any, category: type[Warning] | None = None) -> None:
    """``warnings.warn(message, category)`` at a place that ``place`` has told."""
    file, number, name = where.split("\t")
    line = int(number)
    if not file:
        file, line, module, registry = _seen(_above(line, outermost=name))
    else:
        owner = sys.modules.get(name) or _module(file)
        registry = vars(owner).setdefault("__warningregistry__", {}) if owner else {}
        module = owner.__name__ if owner else name
    if isinstance(message, Warning):
        category = type(message)
    warnings.warn_explicit(message, category or UserWarning, file, line, module, registry)


def _of(frame: types.FrameType) -> str:
    name = frame.f_globals.get("__name__", "<string>")
    return f"{frame.f_code.co_filename}\t{frame.f_lineno}\t{name}"


def _seen(frame: types.FrameType) -> tuple[str, int, str, dict[Any, Any]]:
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<string>"), registry


def _above(count: int, outermost: str) -> types.FrameType:
    """The frame that stands ``count`` above the outermost captured function, of a known file."""
    frame: types.FrameType = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename != _OPERATORS:
        frame = frame.f_back
    while frame.f_back and (frame.f_code.co_filename != outermost if outermost else _inner(frame)):
        frame = frame.f_back
    for _ in range(count):
        while frame.f_back:
            frame = frame.f_back
            if not frame.f_code.co_filename.startswith((_OURS, _DYNAMO, *_GENERATED)):
                break
    return frame


def _inner(frame: types.FrameType) -> bool:
    """Whether a frame is of this compiler, of PyTorch, or of code that one of them has made."""
    file = frame.f_code.co_filename
    return file.startswith((_OURS, _TORCH, "<"))


def _module(file: str) -> types.ModuleType | None:
    found = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file)
    return next(found, None)
