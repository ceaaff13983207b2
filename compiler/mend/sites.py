"""Calls to run later, by number, and how the values that they need travel to them.

A graph can carry tensors, whole numbers and texts. ``pack`` takes Python values apart into those
and a layout, a short text that says how to put them together again; ``unpack`` does that. A layout
is ``+`` or ``-`` (whether gradients were enabled), then codes, one for each value, in order:

* ``t g p q``: a tensor; one that requires a gradient; a parameter, without and with a gradient
* ``i f b n``: an int; a float; a bool; None
* ``s d v l``: a str; a dtype; a device; a logger
* ``(k [k {k <k``: a tuple, list, dict (keys and values in turn) or Size of the next k values
* ``@``: a call to run later (see ``Later``): its site, then its values as a tuple
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiler.mend import asking

SITES: list[Callable[..., Any]] = []


def site(call: Callable[..., Any], name: str = "") -> int:
    """Register a call to run later; its number. ``name`` is what tracebacks call the function.

    It is kept for as long as the process runs: a graph that was made of it knows but the number,
    and may outlive the function that it was mended in.
    """
    if name and isinstance(call, types.FunctionType):
        call.__code__ = call.__code__.replace(co_name=name, co_qualname=name)
    SITES.append(call)
    return len(SITES) - 1


class Later(NamedTuple):
    """A value that is computed where it is used: ``SITES[site](*values)``."""

    site: int
    values: tuple[Any, ...]


class Packed(NamedTuple):
    """Values as a graph carries them."""

    tensors: list[Tensor]
    ints: list[int]
    texts: list[str]
    layout: str


def pack(values: Sequence[Any]) -> Packed | None:
    """Values taken apart; None if one of them cannot travel.

    This is traced by the front end that captures, so it is written for that: what depends on types
    is a constant then.
    """
    packed = Packed([], [], [], "")
    codes = ["+" if torch.is_grad_enabled() else "-"]
    for value in values:
        if not _pack(value, packed, codes):
            return None
    return Packed(packed.tensors, packed.ints, packed.texts, " ".join(codes))


def _pack(value: Any, packed: Packed, codes: list[str]) -> bool:
    if isinstance(value, Tensor):
        return _pack_tensor(value, packed, codes)
    if value is None:
        codes.append("n")
    elif type(value) is bool:
        codes.append("b")
        packed.texts.append("x" if value else "")
    elif type(value) is int:
        codes.append("i")
        packed.ints.append(value)
    elif type(value) is float:
        codes.append("f")
        packed.tensors.append(torch.full((), value, dtype=torch.float64))
    elif type(value) is str:
        codes.append("s")
        packed.texts.append(value)
    elif isinstance(value, torch.dtype):
        codes.append("d")
        packed.texts.append(str(value))
    elif isinstance(value, torch.device):
        codes.append("v")
        packed.texts.append(str(value))
    elif isinstance(value, logging.Logger):
        key = asking.kept(value)
        codes.append("l")
        packed.texts.append(key)
        return key != ""
    elif isinstance(value, Later):
        codes.append("@")
        packed.ints.append(value.site)
        return _pack(value.values, packed, codes)
    elif isinstance(value, torch.Size):
        return _pack_all("<", tuple(value), packed, codes)
    elif type(value) is tuple:
        return _pack_all("(", value, packed, codes)
    elif type(value) is list:
        return _pack_all("[", tuple(value), packed, codes)
    elif type(value) is dict:
        parts: list[Any] = []
        for key, part in value.items():
            parts.extend([key, part])
        return _pack_all("{", tuple(parts), packed, codes)
    else:
        return False
    return True


def _pack_all(code: str, parts: tuple[Any, ...], packed: Packed, codes: list[str]) -> bool:
    codes.append(f"{code}{len(parts)}")
    for part in parts:  # noqa: SIM110  # front ends trace a loop more surely
        if not _pack(part, packed, codes):
            return False
    return True


def _pack_tensor(value: Tensor, packed: Packed, codes: list[str]) -> bool:
    """A tensor, with what printing it shows of its gradient."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return False
    if isinstance(value, torch.nn.Parameter):
        codes.append("q" if value.requires_grad else "p")
    elif value.requires_grad:
        codes.append("g" + asking.grad_fn(value))
    else:
        codes.append("t")
    packed.tensors.append(value.detach())
    return True


def unpack(
    tensors: Sequence[Tensor], ints: Sequence[int], texts: Sequence[str], layout: str
) -> list[Any]:
    """The values that ``pack`` took apart."""
    reader = _Reader(iter(tensors), iter(ints), iter(texts), iter(layout.split()[1:]))
    return [reader.value(code) for code in reader.codes]


class _Reader:
    def __init__(self, tensors: Any, ints: Any, texts: Any, codes: Any) -> None:
        self.tensors, self.ints, self.texts, self.codes = tensors, ints, texts, codes

    def value(self, code: str) -> Any:
        kind, rest = code[0], code[1:]
        match kind:
            case "t":
                return next(self.tensors).detach()
            case "p" | "q":
                return torch.nn.Parameter(next(self.tensors), requires_grad=kind == "q")
            case "g":
                return _requiring_grad(next(self.tensors), rest)
            case "n":
                return None
            case "b":
                return bool(next(self.texts))
            case "i":
                return int(next(self.ints))
            case "f":
                return next(self.tensors).item()
            case "s":
                return next(self.texts)
            case "d":
                return getattr(torch, next(self.texts).removeprefix("torch."))
            case "v":
                return torch.device(next(self.texts))
            case "l":
                return asking.KEPT[next(self.texts)]
            case "@":
                number = next(self.ints)
                return SITES[number](*self.value(next(self.codes)))
        parts = [self.value(next(self.codes)) for _ in range(int(rest))]
        match kind:
            case "<":
                return torch.Size(parts)
            case "(":
                return tuple(parts)
            case "[":
                return parts
            case "{":
                return dict(zip(parts[::2], parts[1::2], strict=True))
        raise AssertionError(f"code {code!r} of a layout")


_NAMED: dict[str, Any] = {}


def _requiring_grad(value: Tensor, name: str) -> Tensor:
    """``value`` as it was printed in the source: requiring a gradient, made by ``name``."""
    with torch.enable_grad():
        leaf = value.detach().requires_grad_()
        return _named(name).apply(leaf) if name else leaf


def _named(name: str) -> Any:
    """An autograd function whose node bears the name of another's."""
    if name not in _NAMED:

        class Stand(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                raise RuntimeError("a tensor that only stands for another has no backward")

        Stand._backward_cls.__name__ = name
        _NAMED[name] = Stand
    return _NAMED[name]
