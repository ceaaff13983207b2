"""What a raw file is, and its text in chunks."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from dlrm.datasets.criteo import hash, source
from dlrm.datasets.criteo.hash import HASH_BLOCK, BlockHash, hash_file, hash_of_blocks
from dlrm.datasets.criteo.source import (
    inspect,
    inspect_inputs,
    read_range,
    stream_chunks,
    unpack,
)
from dlrm.errors import InputError
from tests.dlrm.criteo_reference import make_rows, text_of

ROWS = make_rows(30)
TEXT = text_of(ROWS)


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_inspect_goes_by_the_content(
    tmp_path: Path, separator: str, header: bool, compression: str
) -> None:
    text = text_of(ROWS, separator, header)
    packed = {"plain": text, "gzip": gzip.compress(text), "zstd": zstandard.compress(text)}
    source = inspect(write(tmp_path / "misleading.parquet", packed[compression]))
    assert source.compression == compression
    assert source.form.separator == separator.encode()
    assert source.header is header
    assert source.form.labelled


def test_a_file_without_labels_is_known_by_its_39_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "test.txt", text_of([row[1:] for row in ROWS]))
    assert not inspect(path).form.labelled
    with pytest.raises(InputError, match=r"test\.txt: has no label column"):
        inspect_inputs([path])


def test_a_bad_first_row_is_no_header_and_hides_nothing(tmp_path: Path) -> None:
    source = inspect(write(tmp_path / "a", b"x" + TEXT))
    assert not source.header and source.form.separator == b"\t"


def test_a_header_in_another_order_is_refused(tmp_path: Path) -> None:
    text = text_of(ROWS, ",", True).replace(b"I1,I2,", b"I2,I1,", 1)
    with pytest.raises(InputError, match="a:1: the header has I2 where I1 belongs"):
        inspect(write(tmp_path / "a", text))


TAR = b"train.txt".ljust(257, b"\0") + b"ustar\x0000" + bytes(300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b""), "is empty once unpacked"),
        (zstandard.compress(b""), "is empty once unpacked"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is a PNG image"),
        (b"PAR1" + bytes(100), "is a Parquet file.*polars"),
        (b"PK\x03\x04" + bytes(100), "is a zip archive"),
        (b"\xff\xfe" + TEXT.decode().encode("utf-16-le"), "UTF-16.*iconv"),
        (gzip.compress(b"\x89PNG" + bytes(50)), "is gzip data that unpacks to a PNG image"),
        (gzip.compress(TAR), "tar archive.*tar xf"),
        (gzip.compress(gzip.compress(TEXT)), "compressed twice"),
        (bytes(range(256)) * 9, "is binary data of an unknown kind"),
        (b"a few words\nof prose\n", "line 1 has 1 column; needed are 40 columns"),
        (b"a,b,c\n1,2,3\n", "line 1 has 3 columns"),
        (b"x" * 300_000, "has no line end"),
        (text_of([], ",", True), "has a header, but no rows"),
    ],
)
def test_files_of_another_kind_each_get_their_own_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = write(tmp_path / "day_0", content)
    with pytest.raises(InputError, match=f"(?s)day_0: .*{message}"):
        inspect(path)


def test_missing_file_directory_and_twice_the_same(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing: no such file"):
        inspect(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="is a directory"):
        inspect(str(tmp_path))
    path = write(tmp_path / "train.txt.gz", gzip.compress(TEXT))
    with pytest.raises(InputError, match=r"no such file. There is .*train\.txt\.gz"):
        inspect(str(tmp_path / "train.txt"))
    (tmp_path / "link").symlink_to(path)
    for twice in ([path, path], [path, str(tmp_path / "link")]):
        with pytest.raises(InputError, match="given twice"):
            inspect_inputs(twice)


@pytest.mark.parametrize("compression", ["gzip", "zstd", "gzip without isal"])
def test_truncated_and_corrupted_archives(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compression == "gzip without isal":
        monkeypatch.setattr(source, "_gzip_open", gzip.GzipFile)
        monkeypatch.setattr(source, "_gzip_errors", (gzip.BadGzipFile, zlib.error))
    compression = compression.split()[0]
    text = text_of(make_rows(400))
    packed = (gzip.compress if compression == "gzip" else zstandard.compress)(text)
    path = write(tmp_path / "a", packed[: len(packed) * 3 // 4])
    with pytest.raises(InputError, match=f"a: is truncated: its {compression} data"):
        list(unpack(path, compression))
    middle = len(packed) // 2
    damaged = packed[:middle] + bytes(b ^ 0x55 for b in packed[middle : middle + 50])
    path = write(tmp_path / "b", damaged + packed[middle + 50 :])
    with pytest.raises(InputError, match=f"b: is corrupted: its {compression} data"):
        list(unpack(path, compression))
    path = write(tmp_path / "c", packed + b"trailing rubbish")
    with pytest.raises(InputError, match="c: is corrupted"):
        list(unpack(path, compression))


def test_archives_of_several_members(tmp_path: Path) -> None:
    half = len(TEXT) // 2
    pieces = TEXT[:half], TEXT[half:]
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    zst = skippable + b"".join(zstandard.compress(p) for p in pieces)
    assert b"".join(unpack(write(tmp_path / "z", zst), "zstd")) == TEXT
    gz = b"".join(gzip.compress(p) for p in pieces)
    assert b"".join(unpack(write(tmp_path / "g", gz), "gzip")) == TEXT
    assert inspect(str(tmp_path / "z")).compression == "zstd"


def test_a_zstd_file_of_one_repeated_line_unpacks_in_bounded_pieces(tmp_path: Path) -> None:
    path = write(tmp_path / "z", zstandard.compress(bytes(64 << 20)))
    assert max(map(len, unpack(path, "zstd"))) <= 128 << 20
    assert sum(map(len, unpack(path, "zstd"))) == 64 << 20


@pytest.mark.parametrize("text", [TEXT, TEXT[:-1], b"\n\n" + TEXT + b"\n"])
def test_byte_ranges_hold_each_line_once(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path / "a", text)
    for size in (1, 7, 100, len(TEXT) // 3, len(text), len(text) + 5):
        starts = range(0, len(text), size)
        chunks = [read_range(path, a, min(a + size, len(text)))[0] for a in starts]
        assert b"".join(chunks) == text
        assert all(c.endswith(b"\n") for c in chunks[:-1] if c and not text.endswith(c))


def test_streams_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect(write(tmp_path / "a", gzip.compress(TEXT[:-1])))
    for size in (1, 500, 10**6):
        chunks = list(stream_chunks(source, size))
        assert b"".join(chunks) == TEXT[:-1]
        assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])


def test_an_endless_line_is_refused_not_held(tmp_path: Path) -> None:
    text = TEXT + b"x" * (5 << 20)
    path = write(tmp_path / "a", text)
    with pytest.raises(InputError, match="a: has a line longer than"):
        read_range(path, 0, len(TEXT) + 10)
    source = inspect(write(tmp_path / "b", gzip.compress(text)))
    with pytest.raises(InputError, match="b: has a line longer than"):
        list(stream_chunks(source, 1000))


def test_content_hash_is_that_of_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HASH_BLOCK == source.CHUNK  # so that workers can hash what they read
    monkeypatch.setattr(hash, "HASH_BLOCK", 1000)
    data = np.random.default_rng(0).bytes(5500)
    path = write(tmp_path / "a", data)
    digests = [read_range(path, a, min(a + 1000, 5500))[1] for a in range(0, 5500, 1000)]
    blocks = BlockHash()
    for start in range(0, 5500, 77):
        blocks.update(data[start : start + 77])
    assert hash_of_blocks(digests) == hash_file(path) == blocks.hexdigest()
    assert hash_file(write(tmp_path / "b", data[:-1])) != hash_file(path)
