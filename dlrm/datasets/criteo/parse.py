"""Criteo text to numbers, many rows at a time: the strict fast path.

Everything is array arithmetic on the bytes of a block of lines. A field of up to 8 characters is
one 64-bit word (loaded from the 8 bytes before the field's end), and 8 hexadecimal or decimal
digits are converted at once inside that word ("SIMD within a register": Lamport, "Multiple byte
processing with full-word instructions", 1975). Any block in which anything is odd goes through
`screen`, which finds the bad lines; the good ones come back here, so that there is one
conversion.

A categorical value becomes a 64-bit key: a token of 1 to 8 hexadecimal digits (in lower case, as
published) its value, below 2^32, as ``int(token, 16)`` in the published preprocessing; a missing
value 2^32; any other token its xxh3 hash with the top bit set, so that it meets no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrm.datasets.criteo.format import D, F
from dlrm.datasets.criteo.screen import Bad, screen, to_number
from dlrm.datasets.criteo.source import Form

Words = NDArray[np.uint64]

MISSING = 1 << 32  # the key of a missing value
HASHED = 1 << 63  # the bit that keys of tokens other than hexadecimal digits have
BLOCK = 2 << 20  # bytes of text converted at a time: the arrays of a column stay in the cache
PAD = 16  # bytes around a block, so that the word before any field's end can be loaded

TAB, NEWLINE, MINUS, DOT, ZERO, ONE = (np.uint8(c) for c in b"\t\n-.01")


def _each(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


LOW, HIGH, ONES, SIXES, SIXTEENS, ZEROS = (_each(b) for b in (0x0F, 0xF0, 1, 6, 0x10, 0x30))
BYTES_4, BYTES_2, BYTES_1 = (np.uint64(m) for m in (0x00FF00FF00FF00FF, 0xFFFF0000FFFF, 0xFFFFFFFF))
U4, U8, U16, U32, U27, U30, U31 = (np.uint64(n) for n in (4, 8, 16, 32, 27, 30, 31))
U6, U9, U10, U100, U10000, U48 = (np.uint64(n) for n in (6, 9, 10, 100, 10000, 0x30))
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# For a field of L bytes: the bytes of the word that are its own, and "0" in the others.
OWN = np.array([(2**64 - 1) ^ (2 ** (8 * (8 - n)) - 1) for n in range(9)], np.uint64)
FILL = ~OWN & ZEROS


@dataclass
class Parsed:
    """R rows of text. Lines are counted from 0 in that text."""

    label: NDArray[np.uint8]  # (R,)
    dense: NDArray[np.float32]  # (D, R), transformed
    keys: Words  # (F, R)
    lines: int = 0
    bad: list[Bad] = field(default_factory=list)
    negatives: NDArray[np.int64] = field(default_factory=lambda: np.zeros(D, np.int64))
    missing: NDArray[np.int64] = field(default_factory=lambda: np.zeros(D + F, np.int64))

    def cut(self, rows: int) -> None:
        self.label, self.dense, self.keys = (
            self.label[:rows],
            self.dense[:, :rows],
            self.keys[:, :rows],
        )


def parse(text: bytes, form: Form, transform: str, stop_at_bad: bool) -> Parsed:
    """Convert whole lines, each with its line end.

    With `stop_at_bad`, conversion stops in the block that has the first bad line, and only
    ``bad`` and ``lines`` of the result mean anything; without, bad lines are left out and listed.
    """
    room = text.count(b"\n")
    out = Parsed(
        np.zeros(room, np.uint8), np.zeros((D, room), np.float32), np.empty((F, room), "u8")
    )
    row = 0
    for block in _blocks(text):
        rows = _convert(block, form, transform, out, row)
        if rows is None:
            good, bad, lines = screen(block, form)
            out.bad += [Bad(out.lines + b.line, b.kind, b.detail) for b in bad]
            if bad and stop_at_bad:
                return out
            rows = _convert(good, form, transform, out, row) if good else 0
            if rows is None:
                raise AssertionError("screen let a line through that cannot be converted")
        else:
            lines = rows
        row += rows
        out.lines += lines
    out.cut(row)
    return out


def _blocks(text: bytes) -> Iterator[bytes]:
    """`text` in runs of whole lines of about BLOCK bytes."""
    start = 0
    while start < len(text):
        stop = len(text)
        if stop - start > BLOCK:
            cut = text.rfind(b"\n", start, start + BLOCK) + 1
            stop = cut or text.index(b"\n", start) + 1
        yield text[start:stop]
        start = stop


def _convert(block: bytes, form: Form, transform: str, out: Parsed, row: int) -> int | None:
    """Write the rows of `block` into `out` from `row` on. None if anything in it is odd."""
    if b"\r" in block or b"\0" in block or (form.separator == b"," and b'"' in block):
        return None
    if not block.isascii():
        try:
            block.decode()
        except UnicodeDecodeError:
            return None
    text = np.zeros(len(block) + 2 * PAD, np.uint8)
    text[PAD:-PAD] = np.frombuffer(block, np.uint8)
    newline = text == NEWLINE
    ends = np.flatnonzero(newline | (text == form.separator[0]))
    rows, rest = divmod(ends.size, form.columns)
    if rest or np.count_nonzero(newline) != rows:
        return None
    end = np.ascontiguousarray(ends.reshape(rows, form.columns).T)  # (columns, R)
    if not newline[end[-1]].all():
        return None
    words = np.ndarray((text.size - 7,), "<u8", text.data, strides=(1,))  # one from every byte on
    here = slice(row, row + rows)
    before = np.empty(rows, np.int64)  # where the field before ends
    before[:1], before[1:] = PAD - 1, end[-1, :-1]
    if form.labelled:
        label = text[end[0] - 1] - ZERO
        if (label > 1).any() or (end[0] - before != 2).any():
            return None
        out.label[here] = label
        before = end[0]
    dotted = b"." in block
    for column in range(D):
        stop = end[form.labelled + column]
        value = _dense(text, words, before, stop, dotted)
        if value is None:
            return None
        before = stop
        numbers, missing = value
        negatives = int(np.count_nonzero(numbers < 0))
        out.dense[column, here] = _transform(numbers, transform, negatives)
        out.negatives[column] += negatives
        out.missing[column] += missing
    for column in range(F):
        stop = end[form.labelled + D + column]
        out.missing[D + column] += _keys(block, words, before, stop, out.keys[column, here])
        before = stop
    return rows


def _dense(
    text: NDArray[np.uint8],
    words: Words,
    before: NDArray[np.int64],
    end: NDArray[np.int64],
    dotted: bool,
) -> tuple[NDArray[np.float64], int] | None:
    """(values (R,) f64 with 0 where missing, missing values), or None if one is not a number."""
    length = end - before - 1
    whole = length
    if dotted:  # 260.0 is what a data frame makes of 260 in a column with missing values
        tail = (text[end - 2] == DOT) & (text[end - 1] == ZERO) & (length > 2)
        end, length = end - 2 * tail, length - 2 * tail
    minus = text[before + 1] == MINUS
    length = length - minus
    digits = words[end - 8]
    short = np.minimum(length, 8)
    np.maximum(short, 0, out=short)
    digits = (digits & OWN[short] | FILL[short]) ^ ZEROS
    strange = (digits | (digits + SIXES)) & HIGH
    strange |= length > 8
    strange |= (length < 1) & (whole > 0)
    # neighbours join: 8 digits to 4 numbers below 100, to 2 below 10^4, to 1 below 10^8
    digits = (digits * U10 + (digits >> U8)) & BYTES_4
    digits = (digits * U100 + (digits >> U16)) & BYTES_2
    digits = (digits * U10000 + (digits >> U32)) & BYTES_1
    values = digits.astype(np.float64)
    np.negative(values, out=values, where=minus)
    values += 0.0  # -0 is 0
    for place in np.flatnonzero(strange).tolist() if strange.any() else ():
        start = int(before[place]) + 1
        number = to_number(text[start : start + int(whole[place])].tobytes())
        if isinstance(number, str):
            return None
        values[place] = number
    return values, int(np.count_nonzero(whole == 0))


def _keys(
    block: bytes, words: Words, before: NDArray[np.int64], end: NDArray[np.int64], out: Words
) -> int:
    """Write the keys of one column (R,) to `out`; return how many values are missing."""
    length = end - before - 1
    token = words[end - 8]
    short = np.minimum(length, 8)
    token = token & OWN[short] | FILL[short]
    letter = (token >> U6) & ONES  # 1 in the bytes of a to f, 0 in those of 0 to 9
    digit = (token & LOW) + letter * U9
    strange = (token & HIGH) ^ (ZEROS + letter * U48)
    strange |= ((digit + SIXES) & SIXTEENS) ^ (letter << U4)
    strange |= digit & HIGH
    strange |= length > 8
    digit = ((digit << U4) + (digit >> U8)) & BYTES_4
    digit = ((digit << U8) + (digit >> U16)) & BYTES_2
    np.bitwise_and((digit << U16) + (digit >> U32), BYTES_1, out=out)
    absent = length == 0
    out[absent] = MISSING
    if strange.any():
        others = np.flatnonzero(strange)
        starts, stops = before[others] + (1 - PAD), end[others] - PAD
        hashes = map(
            xxhash.xxh3_64_intdigest,
            (block[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)),
        )
        out[others] = np.fromiter(hashes, np.uint64, others.size) | np.uint64(HASHED)
    return int(np.count_nonzero(absent))


def _transform(values: NDArray[np.float64], transform: str, negatives: int) -> NDArray[np.float64]:
    if transform == "identity":
        return values
    if negatives == 0:
        return np.log1p(values)
    if transform == "log1p":
        return np.log1p(np.maximum(values, 0))
    return np.copysign(np.log1p(np.abs(values)), values)


def mix(keys: Words) -> Words:
    """A well-spread bijection of 64-bit keys (the finalizer of splitmix64)."""
    keys = (keys ^ (keys >> U30)) * MIX[0]
    keys = (keys ^ (keys >> U27)) * MIX[1]
    return keys ^ (keys >> U31)


def hash_ids(keys: Words, rows: int) -> NDArray[np.int32]:
    """Ids by hashing into `rows` rows: 0 for a missing value, else 1 to rows - 1."""
    ids = (mix(keys) % np.uint64(rows - 1) + np.uint64(1)).astype(np.int32)
    ids[keys == MISSING] = 0
    return ids
