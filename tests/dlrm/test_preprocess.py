"""Preprocessing end to end: against plain Python, in all forms of a file, killed, refused."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from dlrm.batch import Batch
from dlrm.datasets.base import load
from dlrm.datasets.criteo import chunk, prepare
from dlrm.datasets.criteo.encode import encode_file, encode_lines
from dlrm.datasets.criteo.format import CriteoSettings
from dlrm.datasets.criteo.load import load_criteo
from dlrm.datasets.criteo.rate import make_file, measure, tree_rss
from dlrm.datasets.criteo.report import BadRows
from dlrm.datasets.criteo.split import permute
from dlrm.errors import InputError
from dlrm.preprocess import main, preprocess_criteo
from tests.dlrm.criteo_reference import Reference, make_rows, preprocess, text_of

ROWS = make_rows(400)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def data(folder: Path) -> dict[str, bytes]:
    """The files of a preprocessed directory that do not name their source."""
    return {name: b for name, b in content(folder).items() if name != "meta.json"}


def check(folder: Path, reference: Reference, order: list[int]) -> None:
    """All parts together hold the reference's rows in this order, and its vocabularies."""
    dataset = load_criteo(folder, verify=True)
    batches = [s.read(0, len(s)) for s in dataset.splits.values() if len(s)]
    label = np.concatenate([b.label.numpy() for b in batches])
    dense = np.concatenate([b.dense.numpy() for b in batches])
    ids = np.concatenate([b.ids.view(26, -1).numpy() for b in batches], axis=1)
    np.testing.assert_array_equal(label, reference.label[order])
    np.testing.assert_allclose(dense, reference.dense[order], rtol=2e-7)
    np.testing.assert_array_equal(ids.T, reference.ids[order])
    assert list(dataset.rows) == [len(v) + 1 for v in reference.vocabularies]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(text_of(ROWS))
    return path


@pytest.mark.parametrize("threshold", [1, 2, 10])
@pytest.mark.parametrize("rows", ["train", "all"])
def test_ids_dense_and_labels_are_those_of_plain_python(
    raw: Path, tmp_path: Path, threshold: int, rows: str
) -> None:
    preprocess_criteo(
        raw, tmp_path / "out", CriteoSettings(vocab_threshold=threshold, vocab_rows=rows)
    )
    counted = [rows == "all" or i < 400 - 400 // 7 for i in range(400)]
    check(tmp_path / "out", preprocess(ROWS, counted, threshold), list(range(400)))


def test_random_split_draws_rows_and_counts_only_training_rows(raw: Path, tmp_path: Path) -> None:
    settings = CriteoSettings(split="random", split_seed=5, fractions=(0.7, 0.2, 0.1))
    preprocess_criteo(raw, tmp_path / "out", settings, chunk_bytes=5000)
    rank = permute(np.arange(400, dtype=np.uint64), 400, 5).astype(int)
    part = (rank >= 280).astype(int) + (rank >= 360)
    order = np.argsort(part, kind="stable").tolist()
    check(tmp_path / "out", preprocess(ROWS, (part == 0).tolist(), 2), order)
    dataset = load_criteo(tmp_path / "out")
    assert [len(s) for s in dataset.splits.values()] == [280, 80, 40]


def test_all_forms_of_a_file_and_all_ways_to_work_give_the_same_bytes(tmp_path: Path) -> None:
    tab, comma = text_of(ROWS), text_of(ROWS, ",", header=True)
    forms = {
        "tsv": tab,
        "csv": comma,
        "csv without header": text_of(ROWS, ","),
        "tsv with header": text_of(ROWS, "\t", header=True),
        "tsv with bom": b"\xef\xbb\xbf" + tab,
        "tsv.gz": gzip.compress(tab),
        "csv.gz": gzip.compress(comma),
        "tsv.zst": zstandard.compress(tab),
        "csv.zst": zstandard.compress(comma[:3000]) + zstandard.compress(comma[3000:]),
    }
    found = {}
    for number, (name, text) in enumerate(forms.items()):
        (tmp_path / name).write_bytes(text)
        out = tmp_path / f"out{number}"
        # other chunks for each, and two processes for some
        size = [16 << 20, 1000, 2500, 7777][number % 4]
        workers = 2 if name in ("csv", "csv.zst") else 1
        preprocess_criteo(tmp_path / name, out, workers=workers, chunk_bytes=size)
        found[name] = data(out)
    assert len(found["tsv"]) == 1 + 2 * 26
    for name, files in found.items():
        assert files == found["tsv"], name


def test_the_real_sample(tmp_path: Path) -> None:
    folder = os.environ.get("DLRM_DATA_DIR")
    if not folder or not Path(folder, "criteo_sample.csv").exists():
        pytest.skip("DLRM_DATA_DIR has no criteo_sample.csv")
    for kind in ("csv", "tsv"):
        source = f"{folder}/criteo_sample.{kind}"
        assert main(["--input", source, "--out", str(tmp_path / kind), "--quiet"]) == 0
    assert data(tmp_path / "csv") == data(tmp_path / "tsv")
    lines = Path(folder, "criteo_sample.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    counted = [i < len(rows) - len(rows) // 7 for i in range(len(rows))]
    check(tmp_path / "csv", preprocess(rows, counted, 2), list(range(len(rows))))


def test_days_are_put_in_order_and_the_last_one_is_halved(tmp_path: Path) -> None:
    for day in range(11):
        (tmp_path / f"day_{day}").write_bytes(text_of(ROWS[day * 20 : day * 20 + 20]))
    paths = sorted(str(p) for p in tmp_path.glob("day_*"))  # as a shell gives them: day_10 third
    preprocess_criteo(paths, tmp_path / "out")
    counted = [i < 200 for i in range(220)]
    check(tmp_path / "out", preprocess(ROWS[:220], counted, 2), list(range(220)))
    assert [len(s) for s in load_criteo(tmp_path / "out").splits.values()] == [200, 10, 10]


def test_hashing(raw: Path, tmp_path: Path) -> None:
    preprocess_criteo(raw, tmp_path / "out", CriteoSettings(hash_rows=50))
    dataset = load_criteo(tmp_path / "out", verify=True)
    assert dataset.rows == (50,) * 26
    batch = dataset.splits["train"].read(0, 300)
    ids = batch.ids.view(26, 300).T.numpy()
    assert ids.max() == 49
    missing = np.array([[token == "" for token in row[14:]] for row in ROWS[:300]])
    np.testing.assert_array_equal(ids == 0, missing)
    (encoded,) = encode_file(raw, tmp_path / "out")
    np.testing.assert_array_equal(encoded.ids.view(26, 400).T[:300].numpy(), ids)
    settings = CriteoSettings(vocab_from=str(tmp_path / "out"), split="day")
    preprocess_criteo(raw, tmp_path / "again", settings)
    assert data(tmp_path / "again") == data(tmp_path / "out")
    assert load_criteo(tmp_path / "again").rows == (50,) * 26


def test_vocabulary_from_another_directory(raw: Path, tmp_path: Path) -> None:
    preprocess_criteo(raw, tmp_path / "base", CriteoSettings(split="train"))
    others = make_rows(150, seed=9)
    (tmp_path / "other.txt").write_bytes(text_of(others))
    settings = CriteoSettings(vocab_from=str(tmp_path / "base"))
    preprocess_criteo(tmp_path / "other.txt", tmp_path / "out", settings, chunk_bytes=9000)
    reference = preprocess(ROWS + others, [True] * 400 + [False] * 150, 2)
    check(tmp_path / "out", reference, list(range(400, 550)))
    dataset = load_criteo(tmp_path / "out")
    assert [len(s) for s in dataset.splits.values()] == [0, 0, 150]
    with pytest.raises(InputError, match=r"identity was asked for, but .*base was made with log1p"):
        preprocess_criteo(
            raw,
            tmp_path / "no",
            CriteoSettings(vocab_from=str(tmp_path / "base"), dense_transform="identity"),
        )


def test_encode_file_gives_the_same_batches(raw: Path, tmp_path: Path) -> None:
    preprocess_criteo(raw, tmp_path / "out", CriteoSettings(split="train"))
    whole = load_criteo(tmp_path / "out").splits["train"].read(0, 400)
    unlabelled = tmp_path / "test.csv.gz"
    unlabelled.write_bytes(gzip.compress(text_of([row[1:] for row in ROWS], ",")))
    for path, size in ((raw, 64), (raw, 400), (raw, 1000), (unlabelled, 399)):
        batches = list(encode_file(path, tmp_path / "out", batch_size=size))
        assert [len(b) for b in batches] == [size] * (400 // size) + [400 % size] * bool(400 % size)
        together = batches[0].concat(batches)
        assert together.ids.equal(whole.ids) and together.dense.equal(whole.dense)
        assert together.offsets.equal(whole.offsets)
        if path == raw:
            assert together.label.equal(whole.label)
        else:
            assert together.label.isnan().all()
    with pytest.raises(InputError, match="has no label column"):
        encode_file(unlabelled, tmp_path / "out", labelled=True)
    spoilt = text_of(ROWS[:10]) + b"1\t2\n" + text_of(ROWS[10:20])
    (tmp_path / "spoilt").write_bytes(spoilt)
    given = encode_lines(tmp_path / "spoilt", tmp_path / "out", batch_size=4)
    for first in (1, 5):
        assert next(given)[1].tolist() == list(range(first, first + 4))
    with pytest.raises(InputError, match="spoilt:11: column count: 2 columns, expected 40"):
        list(given)
    report = BadRows(["spoilt"])
    pairs = list(
        encode_lines(tmp_path / "spoilt", tmp_path / "out", bad_rows="skip", report=report)
    )
    assert pairs[0][1].tolist() == [*range(1, 11), *range(12, 22)]
    assert report.kinds == {"column count": 1}


def test_reads_are_rows_of_the_split_from_any_thread(raw: Path, tmp_path: Path) -> None:
    preprocess_criteo(raw, tmp_path / "out")
    split = load_criteo(tmp_path / "out").splits["val"]
    assert split.block == 256
    whole = split.read(0, len(split))
    np.testing.assert_array_equal(split.records["label"], whole.label.numpy())  # type: ignore[attr-defined]
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            start = int(rng.integers(len(split)))
            if not split.read(start, start + 1).dense.equal(whole.dense[start : start + 1]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(split.read(3, 3)) == 0
    with pytest.raises(IndexError):
        split.read(0, len(split) + 1)


def test_gathered_rows_are_those_read_in_another_order(raw: Path, tmp_path: Path) -> None:
    preprocess_criteo(raw, tmp_path / "out")
    split = load_criteo(tmp_path / "out").splits["train"]
    ranges, order = [(40, 90), (0, 7), (100, 101)], np.random.default_rng(0).permutation(58)[:50]
    want = Batch.concat([split.read(a, b) for a, b in ranges]).take(order)
    found = load(split, ranges).take(order)
    for name in ("dense", "ids", "offsets", "label"):
        assert getattr(found, name).equal(getattr(want, name))


# bad rows


def spoil(row: list[str], column: int, field: str) -> bytes:
    return "\t".join([*row[:column], field, *row[column + 1 :]]).encode() + b"\n"


PLAIN = make_rows(12, odd=False)
BAD = {
    "column count": "\t".join(PLAIN[0][:-1]).encode() + b"\n",
    "not a number": spoil(PLAIN[0], 3, "many"),
    "label": spoil(PLAIN[0], 0, "2"),
    "not UTF-8": text_of(PLAIN[:1])[:-3] + b"\xe9\n",
    "NUL byte": spoil(PLAIN[0], 20, "ab\0c"),
    "Windows line end": text_of(PLAIN[:1])[:-1] + b"\r\n",
    "number out of range": spoil(PLAIN[0], 1, "nan"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_row_is_an_error_with_file_line_and_mend(
    tmp_path: Path, kind: str, compressed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    good = text_of(PLAIN)
    path = tmp_path / "day 0"
    text = good + good + BAD[kind] + good + BAD["label"]
    path.write_bytes(gzip.compress(text) if compressed else text)
    before = set(tmp_path.rglob("*"))
    out = tmp_path / "new" / "out"
    with pytest.raises(InputError, match=f"day 0:25: {kind}: .*--bad-rows skip"):
        preprocess_criteo(path, out, chunk_bytes=1500, workers=1)
    assert main(["--input", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"day 0:25: {kind}" in error and "Traceback" not in error
    assert set(tmp_path.rglob("*")) == before  # nothing is left behind


def test_skipped_rows_are_counted_and_listed(tmp_path: Path) -> None:
    good = text_of(PLAIN)
    header = text_of([], "\t", header=True)
    (tmp_path / "a").write_bytes(header + good + b"".join(BAD.values()) + good)
    (tmp_path / "b").write_bytes(good + BAD["label"] + good + good[:-30])
    settings = CriteoSettings(bad_rows="skip", split="train")
    for number, size in enumerate((1 << 20, 900)):
        out = tmp_path / f"out{number}"
        meta = preprocess_criteo(
            [tmp_path / "a", tmp_path / "b"], out, settings, chunk_bytes=size
        ).meta
        lines = (out / "bad_rows.txt").read_text().splitlines()
        assert lines[0].startswith("9 bad rows: 1 NUL byte, ")
        assert f"{tmp_path}/b: 1 label" in lines and f"{tmp_path}/a: 1 label" in lines
        for place, kind in enumerate(BAD):
            assert any(line.startswith(f"{tmp_path}/a:{14 + place}: {kind}: ") for line in lines)
        assert any(line.startswith(f"{tmp_path}/b:13: label: the label is '2'") for line in lines)
        assert any(line.startswith(f"{tmp_path}/b:37: truncated last line") for line in lines)
        assert meta["bad_rows"]["total"] == 9
        assert meta["bad_rows"]["kinds"] == {k: 1 + (k == "label") for k in BAD} | {
            "truncated last line": 1
        }
        rows = PLAIN * 4 + PLAIN[:-1]
        check(out, preprocess(rows, [True] * len(rows), 2), list(range(len(rows))))
    assert data(tmp_path / "out0") == data(tmp_path / "out1")


def test_last_line_without_an_end(tmp_path: Path) -> None:
    last = list(PLAIN[-1])
    out = tmp_path / "out"
    path = tmp_path / "a"
    settings = CriteoSettings(split="train")
    for field in ("", "0123abcd"):  # nothing can be missing: taken, and noted
        path.write_bytes(text_of([*PLAIN[:-1], [*last[:-1], field]])[:-1])
        meta = preprocess_criteo(path, out, settings, force=True).meta
        assert meta["rows"] == 12 and meta["sources"][0]["last_line_without_end"]
    for cut in ("0123a", "0123abcde"):
        path.write_bytes(text_of([*PLAIN[:-1], [*last[:-1], cut]])[:-1])
        with pytest.raises(InputError, match=f"a:12: truncated last line: .*'{cut}', may be cut"):
            preprocess_criteo(path, out, settings, force=True)
    assert load_criteo(out)  # what was there is still there


def test_a_file_of_bad_rows_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text_of(PLAIN).replace(b"\n", b"\r\n"))
    with pytest.raises(InputError, match=r"a:1: Windows line end.*sed -i"):
        preprocess_criteo(tmp_path / "a", tmp_path / "out")
    with pytest.raises(InputError, match=r"no good row.*12 bad rows: 12 Windows line end"):
        preprocess_criteo(tmp_path / "a", tmp_path / "out", CriteoSettings(bad_rows="skip"))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# what is there already


def test_up_to_date_stale_and_forced(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(raw.read_bytes())
    out = tmp_path / "out"
    run = ["--input", str(path), "--out", str(out)]
    assert main(run) == 0
    assert "400 rows" in capsys.readouterr().out
    first = content(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "hash_file", None)  # found out without reading the input
        assert main(run) == 0
    assert "up to date" in capsys.readouterr().out
    os.utime(path, (1, 1))  # touched, but the same: the content decides
    assert main(run) == 0
    assert "up to date" in capsys.readouterr().out
    assert main([*run, "--vocab-threshold", "3", "--split", "random"]) == 2
    error = capsys.readouterr().err
    assert "vocab-threshold: recorded 2, asked 3" in error
    assert "split: recorded day, asked random" in error and "--force" in error
    text = raw.read_bytes()
    path.write_bytes(text[:-2] + (b"0" if text[-2:-1] != b"0" else b"1") + b"\n")
    assert main(run) == 2
    assert "recorded xxh3 " in capsys.readouterr().err
    path.write_bytes(raw.read_bytes()[: raw.read_bytes().rfind(b"\n", 0, -1) + 1])
    assert main(run) == 2
    assert f"recorded {len(raw.read_bytes())} bytes, has {path.stat().st_size}" in (
        capsys.readouterr().err
    )
    assert content(out) == first
    (out / "meta.json").write_text("{")
    assert main(run) == 2
    assert "recorded unreadable" in capsys.readouterr().err
    assert main([*run, "--force"]) == 0
    assert load_criteo(out).info["rows"] == {"train": 342, "val": 29, "test": 28}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "train.txt"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "meta.json").unlink(), "is not a preprocessed directory"),
        (lambda d: (d / "meta.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "meta.json").write_text("[1]"), "is not the meta.json of preprocessed"),
        (lambda d: edit(d, version=99), "has format version 99, this code reads version 1"),
        (lambda d: edit(d, fingerprint="0"), "records fingerprint 0, but"),
        (lambda d: edit(d, splits=None), "is damaged"),
        (lambda d: edit(d, table_rows=[3]), "damaged"),
        (lambda d: os.truncate(d / "rows.bin", 1000), "rows.bin: has 1000 bytes, but .* 64000"),
        (lambda d: (d / "vocab" / "C7.keys").unlink(), "C7.keys: is missing"),
    ],
)
def test_loading_refuses_a_damaged_directory(
    raw: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    out = tmp_path / "out"
    preprocess_criteo(raw, out)
    damage(out)
    with pytest.raises(InputError, match=message):
        load_criteo(out)


def edit(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))


def test_loading_refuses_files_and_finds_flipped_bits(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a file, not a preprocessed directory"):
        load_criteo(raw)
    with pytest.raises(InputError, match="no such directory"):
        load_criteo(tmp_path / "nothing")
    preprocess_criteo(raw, tmp_path / "out")
    split = load_criteo(tmp_path / "out").splits["train"]
    with open(tmp_path / "out" / "rows.bin", "r+b") as file:
        file.seek(333)
        file.write(b"\xff")
    load_criteo(tmp_path / "out")
    with pytest.raises(InputError, match=r"rows\.bin: its content has xxh3"):
        load_criteo(tmp_path / "out", verify=True)
    os.truncate(tmp_path / "out" / "rows.bin", 1000)
    with pytest.raises(InputError, match="was cut short while in use"):
        split.read(0, 100)


def test_outputs_that_are_refused(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*out: str) -> str:
        assert main(["--input", str(raw), "--out", *out]) == 2
        return capsys.readouterr().err

    assert "is an input file" in error(str(raw))
    assert "holds the input" in error(str(raw.parent))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "did not make" in error(str(tmp_path / "mine"), "--force")
    (tmp_path / "file").touch()
    assert "is a file" in error(str(tmp_path / "file"))
    assert "cannot write in" in error(str(tmp_path / "file" / "out"))
    assert "cannot write in" in error("/proc/nothing/out")
    assert "exclude each other" in error(
        str(tmp_path / "o"), "--hash-rows", "9", "--vocab-from", "x"
    )
    assert "no effect with --hash-rows" in error(
        str(tmp_path / "o"), "--hash-rows", "9", "--vocab-threshold", "3"
    )
    assert "no such directory" in error(str(tmp_path / "o"), "--vocab-from", str(tmp_path / "x"))
    assert "workers: 0" in error(str(tmp_path / "o"), "--workers", "0")
    assert "machine has" in error(str(tmp_path / "o"), "--workers", "1000000")
    assert "below 2**63" in error(str(tmp_path / "o"), "--vocab-threshold", "9" * 20)
    usage = prepare.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: usage._replace(free=9999))
    assert "the rows need about 0 MB" in error(str(tmp_path / "o"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]
    with pytest.raises(SystemExit, match="2"):
        main(["--input", str(raw)])


def test_an_empty_directory_and_odd_names_are_fine(raw: Path, tmp_path: Path) -> None:
    path = tmp_path / "день 0 [x].tsv"
    path.write_bytes(raw.read_bytes())
    (tmp_path / "sortie é ü" / "deep").mkdir(parents=True)
    out = tmp_path / "link"
    out.symlink_to(tmp_path / "sortie é ü" / "deep")
    assert main(["--input", str(path), "--out", f"{out}/", "--quiet", "--workers", "2"]) == 0
    assert len(load_criteo(out).splits["train"]) == 343


def test_disk_full_says_so_and_goes_on_later(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    written: list[Path] = []
    real = chunk._write_chunk

    def full(path: Path, *rest: object) -> None:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(chunk, "_write_chunk", full)
    with pytest.raises(InputError, match=r"disk of .* is full.*goes on where it stopped"):
        preprocess_criteo(raw, out, chunk_bytes=9000)
    assert not out.exists() and len(list(tmp_path.rglob("*.chunk"))) == 3
    monkeypatch.setattr(chunk, "_write_chunk", real)
    preprocess_criteo(raw, out, chunk_bytes=9000)
    preprocess_criteo(raw, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


# killed


KILLED = """
import os, signal, sys
from dlrm.datasets.criteo import build, prepare, report
from dlrm.preprocess import CriteoSettings, preprocess_criteo

path, out, stage, left = *sys.argv[1:4], int(sys.argv[4])

def count(name):
    global left
    left -= name == stage
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Bar(report._NoBar):
    def update(self, amount):
        count(self.name)

def bar(self, name, total, unit):
    made = Bar()
    made.name = name
    return made

def take(self, *arguments, real=build.Build._take):
    real(self, *arguments)
    count("chunk")

report.Progress.bar = bar
build.Build._take = take
settings = CriteoSettings(split="random")
preprocess_criteo(path, out, settings, workers=2, chunk_bytes=30000, quiet=False)
"""


@pytest.mark.parametrize("compressed", [False, True])
def test_a_run_killed_in_every_pass_goes_on_to_the_same_bytes(
    tmp_path: Path, compressed: bool
) -> None:
    path, out, work = tmp_path / "big", tmp_path / "out", tmp_path / ".out.preprocess"
    make_file(path, 4000)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    kept: dict[Path, int] = {}
    stages = [("chunk", 11), ("count", 9), ("vocabulary", 4), ("write", 13), ("checksums", 5)]
    if compressed:  # the difference is in the first pass
        stages = [("chunk", 11), ("write", 13)]
    for stage, after in stages:
        command = [sys.executable, "-c", KILLED, str(path), str(out), stage, str(after)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert ("going on with the run that was stopped" in process.stderr) == bool(kept)
        time.sleep(0.1)  # its workers see that it is gone
        # no chunk that an earlier run finished was made again
        assert all(p.stat().st_mtime_ns == t for p, t in kept.items() if p.exists())
        kept = {p: p.stat().st_mtime_ns for p in [*work.glob("*.chunk"), *work.glob("*.done")]}
        assert len(kept) >= 11 and not out.exists()
    preprocess_criteo(path, out, CriteoSettings(split="random"), chunk_bytes=30000)
    preprocess_criteo(path, tmp_path / "whole", CriteoSettings(split="random"))
    assert content(out) == content(tmp_path / "whole")
    assert not work.exists()


def test_a_killed_run_with_other_settings_is_not_continued(raw: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.preprocess"
    work.mkdir()
    (work / "plan.json").write_text(json.dumps({"settings": "others"}))
    (work / "00000_0000000.chunk").write_bytes(b"of another run")
    preprocess_criteo(raw, tmp_path / "out")
    preprocess_criteo(raw, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_runs_at_a_time_are_refused(raw: Path, tmp_path: Path) -> None:
    import fcntl

    work = tmp_path / ".out.preprocess"
    work.mkdir()
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing here"):
            preprocess_criteo(raw, tmp_path / "out")
        assert work.exists()
    preprocess_criteo(raw, tmp_path / "out")


def test_an_input_that_changes_meanwhile_is_refused(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(raw.read_bytes())
    real = chunk._write_chunk

    def touch(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        os.utime(path, (1, 1))

    monkeypatch.setattr(chunk, "_write_chunk", touch)
    with pytest.raises(InputError, match="a: changed while it was read"):
        preprocess_criteo(path, tmp_path / "out")


# memory and speed


def test_memory_is_bounded_with_all_values_distinct(tmp_path: Path) -> None:
    """50 MB of text in which no value repeats: 5 million distinct keys in all."""
    path, rows = tmp_path / "distinct", 200_000
    block = 10_000
    shifts = np.arange(28, -1, -4, dtype=np.uint64)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    with open(path, "wb") as file:
        for first in range(0, rows, block):
            key = np.arange(first, first + block, dtype=np.uint64) * np.uint64(2654435761)
            token = digits[(key[:, None] >> shifts & np.uint64(15)).astype(int)]
            line = np.full((block, 1 + 13 + 26 * 9 + 1), 9, np.uint8)
            line[:, 0], line[:, -1] = 48, 10
            for column in range(26):
                line[:, 15 + column * 9 : 23 + column * 9] = token
            file.write(line.tobytes())
    command = [sys.executable, "-m", "dlrm.preprocess", "--input", str(path)]
    command += [
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "2",
        "--quiet",
        "--vocab-threshold",
        "1",
    ]
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_rss(process.pid))
        time.sleep(0.01)
    assert process.returncode == 0
    assert peak < 700e6
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["table_distinct"] == [rows] * 26


def test_measure_prints_both_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_file(tmp_path / "a", 2000)
    (tmp_path / "csv").write_bytes(text_of(make_rows(99, odd=False), ",", header=True))
    for name, rows in (("a", 2000), ("csv", 99)):
        ours, theirs = measure(tmp_path / name, workers=1)
        assert ours.rows == theirs.rows == rows
    assert "polars.read_csv" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "csv"]
    make_file(tmp_path / "b", 2000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
