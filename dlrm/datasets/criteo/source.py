"""Raw Criteo files: what a file is (by its bytes, never by its name), and its text in chunks.

A file may be plain, gzip or zstd; separated by tabs or commas; with a header or without.
Plain files are cut into byte ranges that workers read for themselves; compressed ones are streams
that one process unpacks. Either way a chunk is a run of whole lines.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import xxhash
import zstandard

from dlrm.datasets.criteo.format import DENSE_NAMES, TABLE_NAMES, D, F
from dlrm.errors import InputError

try:  # about three times as fast as zlib
    from isal import igzip, isal_zlib

    _gzip_open: Any = igzip.IGzipFile
    _gzip_errors: Any = (gzip.BadGzipFile, zlib.error, isal_zlib.error)
except ImportError:
    _gzip_open = gzip.GzipFile
    _gzip_errors = (gzip.BadGzipFile, zlib.error)

CHUNK = 16 << 20  # bytes of text a worker takes at a time
MAX_LINE = 1 << 20  # a Criteo line has about 240 bytes; more than this is no line
OVERLAP = 4 << 10  # bytes read beyond a range, which mostly hold the end of its last line
HEAD = 256 << 10  # bytes of text that decide what a file is
PIECE = 1 << 20  # bytes of text unpacked at a time
ZSTD_STEP = 4 << 10  # compressed bytes unpacked at a time: at most about 128 MiB of text

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16)))
UNPACK = "Unpack it, or compress with gzip or zstd"
FOREIGN = (  # first bytes, what that is, the mend
    (b"\x89PNG", "a PNG image", ""),
    (b"\xff\xd8\xff", "a JPEG image", ""),
    (b"%PDF", "a PDF document", ""),
    (b"PAR1", "a Parquet file", "Write it as text: polars.read_parquet(FILE).write_csv(OUT)"),
    (b"ARROW1", "an Arrow file", "Write it as text: polars.read_ipc(FILE).write_csv(OUT)"),
    (b"\x89HDF", "an HDF5 file", ""),
    (b"\x93NUMPY", "a NumPy array", ""),
    (b"SQLite format 3", "an SQLite database", ""),
    (b"\x7fELF", "a program", ""),
    (b"PK\x03\x04", "a zip archive (as .npz, .pt and .xlsx are)", UNPACK),
    (b"BZh", "a bzip2 file", UNPACK),
    (b"\xfd7zXZ\x00", "an xz file", UNPACK),
    (b"7z\xbc\xaf", "a 7-Zip archive", UNPACK),
    (b"\x04\x22\x4d\x18", "an lz4 file", UNPACK),
    (b"\x1f\x9d", "a .Z file", UNPACK),
    (b"\xff\xfe", "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > OUT"),
    (b"\xfe\xff", "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > OUT"),
)
BOM = b"\xef\xbb\xbf"
WANTED = (
    f"{D + F + 1} columns (label, {DENSE_NAMES[0]} to {DENSE_NAMES[-1]}, {TABLE_NAMES[0]} to "
    f"{TABLE_NAMES[-1]}) separated by tabs or commas"
)


@dataclass(frozen=True)
class Form:
    """How the lines of a file are written."""

    separator: bytes
    labelled: bool = True

    @property
    def columns(self) -> int:
        return D + F + self.labelled


@dataclass(frozen=True)
class Source:
    """One raw file, as found by `inspect`."""

    path: str  # as given
    bytes: int
    mtime_ns: int
    compression: str  # plain, gzip, zstd
    bom: bool
    header: bool
    form: Form
    line_bytes: float  # mean length of the lines looked at

    def facts(self) -> dict[str, Any]:
        """What a killed run checks before it goes on."""
        return {
            "path": os.path.abspath(self.path),
            "bytes": self.bytes,
            "mtime_ns": self.mtime_ns,
            "compression": self.compression,
            "separator": "tab" if self.form.separator == b"\t" else "comma",
            "header": self.header,
        }

    def check_unchanged(self) -> None:
        """Raise InputError if the file was written to since `inspect`."""
        state = os.stat(self.path)
        if (state.st_size, state.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise InputError(f"{self.path}: changed while it was read. Start again")


def inspect_inputs(paths: Sequence[str]) -> list[Source]:
    """`inspect` each file, and refuse one that is given twice."""
    if not paths:
        raise InputError("input: no file was named")
    sources = [inspect(path) for path in paths]
    seen: dict[tuple[int, int], str] = {}
    for source in sources:
        state = os.stat(source.path)
        first = seen.setdefault((state.st_dev, state.st_ino), source.path)
        if first != source.path or paths.count(source.path) > 1:
            raise InputError(f"input: {source.path} is given twice (the same file as {first})")
        if not source.form.labelled:
            raise InputError(
                f"{source.path}: has no label column ({D + F} columns). Training needs labels; "
                "python -m dlrm.predict scores a file without labels"
            )
    return sources


def inspect(path: str) -> Source:
    """What the file is. Raises InputError if it isn't Criteo text, plain, gzip or zstd."""
    try:
        state = os.stat(path)
        if stat.S_ISDIR(state.st_mode):
            raise InputError(f"{path}: is a directory. Name its files, such as {path}/day_*")
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path}: is not a regular file. Write the data to a file first")
        with open(path, "rb") as file:
            magic = file.read(512)
    except FileNotFoundError:
        near = [path + end for end in (".gz", ".zst", ".txt", ".csv") if os.path.isfile(path + end)]
        raise InputError(
            f"{path}: no such file" + (f". There is {near[0]}" if near else "")
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not magic:
        raise InputError(f"{path}: is empty")
    compression = "plain"
    if magic.startswith(GZIP_MAGIC):
        compression = "gzip"
    elif magic.startswith(ZSTD_MAGICS):
        compression = "zstd"
    head = b""
    for piece in unpack(path, compression):
        head += piece
        if len(head) >= HEAD:
            break
    if not head:
        raise InputError(f"{path}: is empty once unpacked")
    _refuse_foreign(path, head, compression)
    bom = head.startswith(BOM)
    text = head[len(BOM) :] if bom else head
    form, header, line_bytes = _form(path, text, whole=len(head) < HEAD)
    return Source(
        path, state.st_size, state.st_mtime_ns, compression, bom, header, form, line_bytes
    )


def _refuse_foreign(path: str, head: bytes, compression: str) -> None:
    where = "" if compression == "plain" else f"{compression} data that unpacks to "
    for magic, kind, mend in FOREIGN:
        if head.startswith(magic):
            raise InputError(f"{path}: is {where}{kind}, not Criteo text. {mend}".rstrip(". "))
    if head[257:262] == b"ustar":
        raise InputError(f"{path}: is {where}a tar archive. Unpack it: tar xf {path}")
    if head.startswith((GZIP_MAGIC, *ZSTD_MAGICS)) and compression != "plain":
        raise InputError(f"{path}: is compressed twice. Unpack it once")


def _form(path: str, text: bytes, whole: bool) -> tuple[Form, bool, float]:
    """(form, has a header, mean bytes of a line) of a text from its first part."""
    lines = text.split(b"\n")
    if len(lines) == 1 and not whole:
        raise InputError(f"{path}: has no line end in its first {HEAD} bytes. Not Criteo text")
    if len(lines) > 1:
        lines.pop()  # empty, or cut off by the end of the head
    forms = [Form(sep, labelled) for sep in (b"\t", b",") for labelled in (True, False)]
    fits = [sum(line.count(f.separator) == f.columns - 1 for line in lines) for f in forms]
    if not any(fits):
        if b"\0" in text:
            raise InputError(f"{path}: is binary data of an unknown kind, not Criteo text")
        count = max(lines[0].count(b"\t"), lines[0].count(b",")) + 1
        raise InputError(
            f"{path}: is not a Criteo file: its line 1 has {count} column{'s' * (count > 1)}; "
            f"needed are {WANTED}"
        )
    form = forms[fits.index(max(fits))]
    header = _is_header(path, lines[0].rstrip(b"\r"), form)
    if header and len(lines) == 1:
        raise InputError(f"{path}: has a header, but no rows")
    return form, header, sum(map(len, lines)) / len(lines) + 1


NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _is_header(path: str, line: bytes, form: Form) -> bool:
    """A header names every dense column: none of these fields is empty or a number."""
    names = line.split(form.separator)
    dense = names[form.labelled : form.labelled + D]
    if len(names) != form.columns or any(not n or NUMBER.fullmatch(n) for n in dense):
        return False
    known = [*DENSE_NAMES, *TABLE_NAMES]
    given = [name.decode("utf-8", "replace").strip('"').lower() for name in names]
    for place, name in enumerate(given[form.labelled :]):
        if name != known[place].lower() and name in [k.lower() for k in known]:
            raise InputError(
                f"{path}:1: the header has {name.upper()} where {known[place]} belongs. "
                f"Reorder the columns: {'label, ' * form.labelled}I1 to I13, C1 to C26"
            )
    return True


class _Tap(io.RawIOBase):
    """A raw file that tells `listen` every piece of bytes that was read."""

    def __init__(self, path: str, listen: Callable[[bytes], None] | None) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.listen = listen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.file.read(len(buffer))
        buffer[: len(piece)] = piece
        if self.listen and piece:
            self.listen(piece)
        return len(piece)

    def close(self) -> None:
        self.file.close()
        super().close()


def unpack(
    path: str,
    compression: str,
    listen: Callable[[bytes], None] | None = None,
    size: int = PIECE,
) -> Iterator[bytes]:
    """The text of a file in pieces of about `size` bytes or less. `listen` is told the raw bytes.

    Raises InputError for truncated or corrupted gzip and zstd data.
    """
    with io.BufferedReader(_Tap(path, listen), 256 << 10) as raw:
        if compression == "zstd":
            yield from _unzstd(path, cast(IO[bytes], raw))
            return
        text = _gzip_open(fileobj=raw, mode="rb") if compression == "gzip" else raw
        try:
            while piece := text.read(size):
                yield piece
        except EOFError:
            raise InputError(_truncated(path, "gzip")) from None
        except _gzip_errors as error:
            raise InputError(_corrupted(path, "gzip", error)) from None


def _unzstd(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    frame = None  # the frame being unpacked; a file may hold several
    rest = b""
    try:
        while piece := rest or raw.read(ZSTD_STEP):
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            text = frame.decompress(piece)
            rest = b""
            if frame.eof:
                rest, frame = frame.unused_data, None
            if text:
                yield text
    except zstandard.ZstdError as error:
        raise InputError(_corrupted(path, "zstd", error)) from None
    if frame is not None:
        raise InputError(_truncated(path, "zstd"))


def _truncated(path: str, kind: str) -> str:
    return f"{path}: is truncated: its {kind} data stops before its end. Fetch or copy it again"


def _corrupted(path: str, kind: str, error: Exception) -> str:
    return f"{path}: is corrupted: its {kind} data cannot be unpacked ({error}). Fetch it again"


def stream_chunks(
    source: Source, size: int, listen: Callable[[bytes], None] | None = None
) -> Iterator[bytes]:
    """The text of a compressed file, in runs of whole lines of about `size` bytes."""
    held: list[bytes] = []
    have = 0
    for piece in unpack(source.path, source.compression, listen, min(size, PIECE)):
        held.append(piece)
        have += len(piece)
        if have < size:
            continue
        text = b"".join(held)
        cut = text.rfind(b"\n") + 1
        if cut == 0 and have > MAX_LINE:
            raise InputError(_endless(source.path))
        held, have = [text[cut:]], len(text) - cut
        if cut:
            yield text[:cut]
    if have:
        yield b"".join(held)


def read_range(path: str, start: int, stop: int) -> tuple[bytes, bytes]:
    """(the lines that begin in [start, stop), the digest of these bytes) of a plain file."""
    lead = min(start, 1)  # a line begins at `start` if the byte before ends one
    with open(path, "rb", buffering=0) as file:
        file.seek(start - lead)
        data = _read_full(file, lead + stop - start + OVERLAP)
        digest = xxhash.xxh3_128_digest(memoryview(data)[lead : lead + stop - start])
        begin = 0
        if lead:
            begin = data.find(b"\n", 0, stop - start) + 1
            if begin == 0:  # no line begins here
                return b"", digest
        end = data.find(b"\n", lead + stop - start - 1) + 1
        while end == 0 and (more := file.read(MAX_LINE)):
            end = more.find(b"\n") + 1
            if end == 0 and len(more) == MAX_LINE:
                raise InputError(_endless(path))
            end += len(data) if end else 0
            data += more
    return data[begin : end or len(data)], digest


def _read_full(file: io.FileIO, size: int) -> bytes:
    pieces = []
    while size > 0 and (piece := file.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _endless(path: str) -> str:
    return f"{path}: has a line longer than {MAX_LINE} bytes. Not Criteo text"
