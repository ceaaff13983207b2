"""Reductions in Triton: a block of partial results, taken in block by block, and its end.

Where the whole length is one block, ``finish`` reduces the values themselves; in a loop, ``start``
and ``update`` keep a block of accumulators, and ``finish`` reduces these. The order of a sum
depends on nothing but the block sizes.
"""

from __future__ import annotations

import torch

from compiler.codegen.triton_expressions import TYPES
from compiler.codegen.types import computed
from compiler.schedule import Member

FAR = 2**31 - 1  # no place: larger than any


def _type(member: Member) -> torch.dtype:
    if member.op.reduce in ("any", "all"):
        return torch.int32
    return torch.int32 if member.body.dtype == torch.bool else computed(member.body.dtype)


def identity(member: Member) -> str:
    """The result of a reduction over nothing."""
    dtype, kind = _type(member), member.op.reduce
    if kind in ("sum", "any"):
        return "0"
    if kind in ("prod", "all"):
        return "1"
    low = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return f"float('{'-' if low else ''}inf')"
    if member.body.dtype == torch.bool:
        return "0" if low else "1"
    info = torch.iinfo(dtype)
    return str(info.min if low else info.max)


def _value(member: Member, value: str) -> str:
    """A value as the accumulator has it."""
    if member.op.reduce in ("any", "all"):
        return f"(({value}) != 0).to(tl.int32)"
    return f"({value}).to(tl.int32)" if member.body.dtype == torch.bool else value


def _is_float(member: Member) -> bool:
    return member.body.dtype.is_floating_point


def _is_place(member: Member) -> bool:
    return member.op.reduce.startswith("arg")


def start(member: Member, name: str, shape: str) -> list[str]:
    """Accumulators for a block."""
    kind = TYPES[_type(member)]
    lines = [f"{name} = tl.full({shape}, {identity(member)}, {kind})"]
    if _is_place(member):
        lines.append(f"at_{name} = tl.full({shape}, {FAR}, tl.int32)")
    elif member.op.reduce in ("max", "min") and _is_float(member):
        lines.append(f"nan_{name} = tl.full({shape}, 0, tl.int32)")
    return lines


def update(member: Member, name: str, value: str, mask: str) -> list[str]:
    """Take a block of values in."""
    kind = member.op.reduce
    value = _value(member, value)
    if _is_place(member):  # the first of equals, and the first NaN before all others
        sign = ">" if kind == "argmax" else "<"
        better = f"({value} {sign} {name}) | (at_{name} == {FAR})"
        if _is_float(member):
            better = (
                f"(({better}) & ({name} == {name})) | (({value} != {value}) & ({name} == {name}))"
            )
        return [
            f"better = {mask} & ({better})",
            f"at_{name} = tl.where(better, r.to(tl.int32), at_{name})",
            f"{name} = tl.where(better, {value}, {name})",
        ]
    taken = f"tl.where({mask}, {value}, {identity(member)})"
    if kind in ("sum", "prod"):
        return [f"{name} = {name} {'+' if kind == 'sum' else '*'} {taken}"]
    if kind in ("any", "all"):
        return [f"{name} = {name} {'|' if kind == 'any' else '&'} {taken}"]
    lines = [f"taken = {taken}"]
    sign = ">" if kind == "max" else "<"
    if _is_float(member):
        lines.append(f"nan_{name} = nan_{name} | (taken != taken).to(tl.int32)")
    return [*lines, f"{name} = tl.where(taken {sign} {name}, taken, {name})"]


def finish(member: Member, name: str, value: str, mask: str) -> list[str]:
    """``name`` (XBLOCK, 1) from a block of values, or of accumulators where there is no mask."""
    kind = member.op.reduce
    if _is_place(member):
        return _finish_place(member, name, value, mask)
    if mask:
        lines = [f"{name} = tl.where({mask}, {_value(member, value)}, {identity(member)})"]
        nan = f"({name} != {name}).to(tl.int32)"
    else:
        lines, nan = [], f"nan_{name}"
    if kind == "prod":
        return [*lines, f"{name} = tl.reduce({name}, 1, scalar.product)[:, None]"]
    call = {"sum": "sum", "any": "max", "all": "min"}.get(kind, kind)
    if kind in ("max", "min") and _is_float(member):
        lines += [f"nan_{name} = tl.max({nan}, 1)[:, None]"]
        if mask:  # the reduction itself may do anything with a NaN
            lines += [f"{name} = tl.where({name} != {name}, {identity(member)}, {name})"]
        lines += [
            f"{name} = tl.{call}({name}, 1)[:, None]",
            f"{name} = tl.where(nan_{name} != 0, float('nan'), {name})",
        ]
    else:
        lines.append(f"{name} = tl.{call}({name}, 1)[:, None]")
    if kind in ("any", "all") or member.op.buffer.dtype == torch.bool:
        lines.append(f"{name} = {name} != 0")
    return lines


def _finish_place(member: Member, name: str, value: str, mask: str) -> list[str]:
    """The least place among the best values; NaN, where there is one, is the best."""
    call = "max" if member.op.reduce == "argmax" else "min"
    lines = []
    if mask:
        lines = [
            f"{name} = tl.where({mask}, {_value(member, value)}, {identity(member)})",
            f"at_{name} = tl.where({mask}, r.to(tl.int32), {FAR})",
        ]
    if _is_float(member):
        lines += [
            f"nan_{name} = {name} != {name}",
            f"number_{name} = tl.where(nan_{name}, {identity(member)}, {name})",
            f"best = tl.{call}(number_{name}, 1)[:, None]",
            f"some_nan = tl.max(nan_{name}.to(tl.int32), 1)[:, None] != 0",
            f"winner = tl.where(some_nan, nan_{name}, number_{name} == best)",
        ]
    else:
        lines += [f"best = tl.{call}({name}, 1)[:, None]", f"winner = {name} == best"]
    return [
        *lines, f"{name} = tl.min(tl.where(winner, at_{name}, {FAR}), 1)[:, None].to(tl.int64)"
    ]  # fmt: skip
