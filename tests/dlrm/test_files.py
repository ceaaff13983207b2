"""Files written whole or not at all, and errors that name what the user knows."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm import evaluate, export, predict, train
from dlrm.errors import InputError
from dlrm.files import explain, named, require_writable, written

QUICK = ["--data", "synthetic", "--samples", "2000", "--rows", "50*4", "--dense-in", "3", "--quiet"]
FULL = (  # files of more than 20 KB cannot be written: that stands for a disk without more room
    "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    "from dlrm.{module} import main; "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)); "
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("files") / "run"
    assert train.main([*QUICK, "--rows", "2000*4", "--out", str(out)]) == 0
    return out


def test_an_error_leaves_what_was_there_and_no_new_folder(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    def fail(where: Path) -> None:
        with written(where) as partial:
            partial.write_text("new")
            raise ValueError("stop")

    for where in (path, tmp_path / "b/c/d"):
        with pytest.raises(ValueError, match="stop"):
            fail(where)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]
    with written(tmp_path / "b/c/d") as partial:
        partial.write_text("new")
    assert (tmp_path / "b/c/d").read_text() == "new" and os.listdir(tmp_path / "b/c") == ["d"]


def test_errors_name_the_final_path_and_no_other(tmp_path):
    folder, partial = tmp_path / "out", tmp_path / ".partial-out"
    for inner in (None, str(partial), str(partial / "x/y")):
        with pytest.raises(OSError, match="out") as caught, named(folder, partial):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), inner)
        assert caught.value.filename == str(folder)
    with pytest.raises(OSError) as caught, named(folder, partial):
        raise OSError(errno.ENOENT, "No such file", "input.csv")
    assert explain(caught.value) == "input.csv: No such file; check the path"


def test_places_that_cannot_be_written_are_refused_with_the_flag(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out: .*/file is a file, so .*/file/x cannot be made"):
        require_writable(tmp_path / "file/x", "--out")
    require_writable(tmp_path / "new/x", "--out")
    # for root everything is writable
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InputError, match=rf"--out: no permission to write to {tmp_path}; change"):
        require_writable(tmp_path / "new/x", "--out")


@pytest.mark.parametrize(
    ("module", "flags", "says"),
    [
        (train, [*QUICK, "--out", "FILE/run"], "--out: FILE is a file, so FILE/run cannot be"),
        (evaluate, ["RUN", "--out", "FILE"], "--out: FILE is a file; name a folder"),
        (evaluate, ["RUN", "--out", "FILE/e"], "--out: FILE is a file, so FILE/e"),
        (predict, ["RUN", "--out", "FILE/s.csv"], "--out: FILE is a file, so FILE/s.csv"),
        (predict, ["RUN", "--out", "FOLDER"], "--out: FOLDER is not a regular file"),
        (export, ["RUN", "--out", "FOLDER.pt2"], "--out: FOLDER.pt2 is a folder; name a file"),
        (export, ["RUN", "--out", "FILE/m.pt2"], "--out: FILE is a file, so FILE/m.pt2"),
    ],
)
def test_what_is_in_the_way_is_named(module, flags, says, run, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.pt2").mkdir()

    def real(text: str) -> str:
        names = {"RUN": run, "FILE": tmp_path / "file", "FOLDER": tmp_path / "folder"}
        for name, path in names.items():
            text = text.replace(name, str(path))
        return text

    assert module.main([real(flag) for flag in flags]) == 2
    assert real(says) in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "folder.pt2"]


@pytest.mark.parametrize(
    ("module", "name"),
    [("export", "m.pt2"), ("export", "m.onnx"), ("predict", "s.csv"), ("evaluate", "e")],
)
def test_a_full_disk_is_named_with_the_path_that_was_asked_for(module, name, run, tmp_path):
    if name.endswith("onnx"):
        pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    out = tmp_path / "new" / name
    part = ["--part", "train"] if module in ("predict", "evaluate") else []
    done = subprocess.run(
        [sys.executable, "-c", FULL.format(module=module), str(run), "--out", str(out), *part],
        capture_output=True,
        text=True,
    )
    shown = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert shown.startswith(f"error: {out}") and "free some space" in shown
    assert "partial" not in done.stderr and os.listdir(tmp_path) == []
