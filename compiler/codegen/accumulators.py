"""Reductions in C++: where a reduction starts, how it takes one value in, and how it ends."""

from __future__ import annotations

import torch

from compiler.codegen.types import register_type
from compiler.schedule import Member

_START = {"sum": "0", "prod": "1", "any": "0", "all": "1", "argmax": "-1", "argmin": "-1"}
_SIGN = {"sum": "+", "prod": "*", "any": "|", "all": "&"}
_BETTER = {"max": ">", "min": "<", "argmax": ">", "argmin": "<"}


def accumulator(member: Member) -> str:
    """The name of the variable that gathers a reduction."""
    return f"acc_{member.op.buffer.name}"


def ctype(member: Member) -> str:
    """Its type."""
    kind = member.op.reduce
    if kind in ("any", "all"):
        return "int"
    return "Int" if is_place(member) else register_type(member.body.dtype)


def is_place(member: Member) -> bool:
    """Whether the result is the place of a value, not a value: that takes one thread, in order."""
    return member.op.reduce in ("argmax", "argmin")


def start_value(member: Member) -> str:
    """The result of a reduction over nothing."""
    dtype, kind = member.body.dtype, member.op.reduce
    if kind not in ("max", "min"):
        return _START[kind]
    low = kind == "max"
    if dtype == torch.bool:
        return "false" if low else "true"
    if dtype.is_floating_point:
        return f"({register_type(dtype)}){'-' if low else ''}INFINITY"
    if dtype == torch.int64:
        return "INT64_MIN" if low else "INT64_MAX"
    info = torch.iinfo(dtype)
    return f"({register_type(dtype)}){info.min if low else info.max}"


def start(member: Member) -> list[str]:
    """Declare the accumulator."""
    name = accumulator(member)
    lines = [f"{ctype(member)} {name} = {start_value(member)};"]
    if is_place(member):
        lines.append(f"{register_type(member.body.dtype)} best_{name} = 0;")
    elif _may_be_nan(member):
        lines.append(f"int nan_{name} = 0;")
    return lines


def update(member: Member, value: str) -> list[str]:
    """Take a value in."""
    name, kind = accumulator(member), member.op.reduce
    if kind in ("max", "min"):
        lines = [f"{name} = {value} {_BETTER[kind]} {name} ? {value} : {name};"]
        if _may_be_nan(member):
            lines.append(f"nan_{name} |= {value} != {value};")
        return lines
    if is_place(member):  # the first of equals, and the first NaN before all others
        counter, best = member.inner[-1].symbol.name, f"best_{name}"
        better = f"{value} {_BETTER[kind]} {best} || ({value} != {value} && {best} == {best})"
        return [f"if ({name} < 0 || {better}) {best} = {value}, {name} = {counter};"]
    operand = f"({value} != 0)" if kind in ("any", "all") else value
    return [f"{name} {_SIGN[kind]}= {operand};"]


def clauses(member: Member) -> str:
    """What tells the C++ compiler that the lanes of a vector may gather apart."""
    name, kind = accumulator(member), member.op.reduce
    nan = f" reduction(|:nan_{name})" if _may_be_nan(member) else ""
    return f" reduction({_SIGN.get(kind, kind)}:{name}){nan}"


def end(member: Member) -> list[str]:
    """What is left to do behind the loop."""
    name = accumulator(member)
    return [f"if (nan_{name}) {name} = NAN;"] if _may_be_nan(member) else []


def _may_be_nan(member: Member) -> bool:
    return member.op.reduce in ("max", "min") and member.body.dtype.is_floating_point


def update_column(member: Member, place: str, value: str) -> str:
    """Take a value into the accumulator ``place`` of one column."""
    kind = member.op.reduce
    if kind in ("max", "min"):
        return f"{place} = {kind}imum({value}, {place});"
    operand = f"({value} != 0)" if kind in ("any", "all") else value
    return f"{place} {_SIGN[kind]}= {operand};"
