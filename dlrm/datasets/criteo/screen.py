"""Which lines of a Criteo text are bad, and why: the slow, exact path, taken only where needed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from dlrm.datasets.criteo.format import DENSE_NAMES, D, F
from dlrm.datasets.criteo.source import NUMBER, Form

LISTED = 1000  # bad rows listed; all are counted
MAX_F32 = 3.4028235677973366e38  # from here on a value rounds to infinity in f32

# Kind of bad row: the mend.
MENDS = {
    "Windows line end": "Convert the file: sed -i 's/\\r$//' FILE, or dos2unix FILE",
    "NUL byte": "The file was damaged or isn't text: fetch it again",
    "not UTF-8": "Convert the file: iconv -f ISO-8859-1 -t UTF-8 FILE > OUT",
    "quotation mark": "Write the file without quotes",
    "column count": f"A row has a label, {D} numbers and {F} categories, missing ones left empty",
    "label": "The label must be 0 or 1",
    "not a number": "Dense values must be numbers, or empty where missing",
    "number out of range": "Dense values must be finite in 32-bit floating point",
    "truncated last line": "Copy the file again, or end the line if it is whole: echo >> FILE",
}


class Bad(NamedTuple):
    """A bad line: its number from 0, a kind of MENDS, and what was found."""

    line: int
    kind: str
    detail: str


def screen(text: bytes, form: Form) -> tuple[bytes, list[Bad], int]:
    """(the good lines of `text`, the bad ones, the number of lines). Lines end with a newline."""
    lines = text.split(b"\n")
    lines.pop()
    plain = _plain_line(form)
    good, bad = [], []
    for number, line in enumerate(lines):
        found = None if plain.fullmatch(line) else diagnose(line, form)
        if found is None:
            good.append(line)
        else:
            bad.append(Bad(number, *found))
    good.append(b"")
    return b"\n".join(good), bad, len(lines)


@cache
def _plain_line(form: Form) -> re.Pattern[bytes]:
    """Matches good lines of the usual kind. Others may be good too: `diagnose` decides."""
    sep = re.escape(form.separator)
    label = rb"[01]" + sep if form.labelled else b""
    numbers = sep.join([rb"(?:-?\d{1,15}(?:\.\d{1,15})?)?"] * D)
    return re.compile(label + numbers + (sep + rb"[ !#-+\--~]*") * F)


def diagnose(line: bytes, form: Form) -> tuple[str, str] | None:
    """(kind, what was found) if the line is bad, else None."""
    if b"\0" in line:
        return "NUL byte", "the line holds a NUL byte"
    if b"\r" in line:
        where = "ends with" if line.endswith(b"\r") else "holds"
        return "Windows line end", f"the line {where} a carriage return (CRLF)"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return "not UTF-8", f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
    if form.separator == b"," and b'"' in line:
        return "quotation mark", 'the line holds a "'
    fields = line.split(form.separator)
    if len(fields) != form.columns:
        found = f"{len(fields)} column{'s' * (len(fields) != 1)}" if line else "an empty line"
        return "column count", f"{found}, expected {form.columns}"
    if form.labelled and fields[0] not in (b"0", b"1"):
        return "label", f"the label is {show(fields[0])}"
    for name, token in zip(DENSE_NAMES, fields[form.labelled :], strict=False):
        number = to_number(token) if token else 0.0
        if isinstance(number, str):
            return number, f"{name} is {show(token)}"
    return None


def to_number(token: bytes) -> float | str:
    """The value of a dense field, or the kind of bad row that it makes."""
    if not NUMBER.fullmatch(token):
        if token.lower().lstrip(b"+-") in (b"nan", b"inf", b"infinity"):
            return "number out of range"
        return "not a number"
    value = float(token)
    return value if abs(value) < MAX_F32 else "number out of range"


def show(token: bytes) -> str:
    """A field for a message: quoted, and cut to a readable length."""
    text = token.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:37] + "...")


def cut_short(line: bytes, form: Form) -> tuple[str, str] | None:
    """Whether a last line without a line end is cut short: (kind, what was found) or None.

    It is taken as whole if it has all columns, and the last one is empty or has the 8 digits of the
    published data: then nothing can be missing from it but the line end.
    """
    fields = line.split(form.separator)
    if len(fields) != form.columns:
        return "truncated last line", f"no line end, and {len(fields)} of {form.columns} columns"
    if not re.fullmatch(rb"([0-9a-f]{8})?", fields[-1]):
        return (
            "truncated last line",
            f"no line end; the last column, {show(fields[-1])}, may be cut",
        )
    return None


def count_kinds(bad: Iterable[Bad]) -> dict[str, int]:
    """How many lines there are of each kind of bad row."""
    counts: dict[str, int] = {}
    for item in bad:
        counts[item.kind] = counts.get(item.kind, 0) + 1
    return counts
