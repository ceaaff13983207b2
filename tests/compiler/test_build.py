"""The build cache: many processes at once, damaged files, no room, no compiler, bad sources."""

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compiler.runtime import build

SOURCE = """
extern "C" __attribute__((visibility("default"))) int answer() { return %d; }
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no libraries remembered from other tests."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DLRM_COMPILER_CACHE", str(folder))
    forget()
    yield folder
    forget()


def forget():
    for cached in (build._load, build._find, build.compiler_version, build.tune_flags):
        cached.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_built_once_then_found(cache, monkeypatch):
    assert build.load(SOURCE % 41).answer() == 41
    assert len(libraries(cache)) == 1
    forget()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.load(SOURCE % 41).answer() == 41


def test_source_and_flags_make_the_key(cache):
    assert build.load(SOURCE % 1).answer() == 1
    assert build.load(SOURCE % 2).answer() == 2
    source = SOURCE.replace("%d", "NUMBER")
    assert build.load(source, ("-DNUMBER=5",)).answer() == 5
    assert build.load(source, ("-DNUMBER=6",)).answer() == 6
    assert len(libraries(cache)) == 4


def test_many_processes_and_threads_at_once(cache):
    code = f"from compiler.runtime import build\nprint(build.load({SOURCE % 77!r}).answer())\n"

    def run(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.stdout + done.stderr

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, range(6))) == ["77\n"] * 6
        loaded = list(pool.map(lambda _: build.load(SOURCE % 78).answer(), range(6)))
    assert loaded == [78] * 6
    assert len(libraries(cache)) == 2
    assert not list(cache.glob("*.partial"))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "no checksum", "no library"])
def test_damaged_library_is_built_again(cache, damage):
    build.load(SOURCE % 7)
    # The library that this process has mapped must not change under it: damage a copy.
    (library,) = libraries(cache)
    checksum = library.with_suffix(".sha256")
    good = library.read_bytes()
    library.unlink()
    if damage == "no checksum":
        library.write_bytes(good)
        checksum.unlink()
    elif damage != "no library":
        library.write_bytes({"cut": good[:3000], "garbage": b"x" * 500, "empty": b""}[damage])
    forget()
    assert build.load(SOURCE % 7).answer() == 7
    assert build._intact(library)


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")  # root may write everywhere: block it otherwise
    monkeypatch.setenv("DLRM_COMPILER_CACHE", str(tmp_path / "file" / "cache"))
    forget()
    with pytest.warns(UserWarning, match=r"cannot be written.*DLRM_COMPILER_CACHE"):
        assert build.load(SOURCE % 9).answer() == 9
    with warnings.catch_warnings():  # the second time it is loaded already
        warnings.simplefilter("error")
        assert build.load(SOURCE % 9).answer() == 9


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(build.NoCompiler, match=r"install g\+\+.*DLRM_COMPILER_CXX"):
        build.load(SOURCE % 1)
    monkeypatch.setenv("DLRM_COMPILER_CXX", "no-such-compiler")
    with pytest.raises(build.NoCompiler, match="no-such-compiler"):
        build.load(SOURCE % 1)


def test_bad_source_shows_what_the_compiler_says(cache):
    with pytest.raises(build.BuildError, match=r"(?s)\.cpp failed.*nonsense"):
        build.load("int nonsense( {")
    assert not libraries(cache) and not list(cache.glob("*.partial"))


def test_bad_source_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DLRM_COMPILER_CACHE", str(tmp_path / "file" / "cache"))
    forget()
    with pytest.warns(UserWarning, match="cannot be written"), pytest.raises(build.BuildError):
        build.load("int nonsense( {")


def test_an_error_while_building_is_the_one_that_is_seen(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_build", full)
    with pytest.raises(OSError, match="No space left"):
        build.load(SOURCE % 3)


def test_source_is_printed_on_request(cache, monkeypatch, capsys):
    monkeypatch.setenv("DLRM_COMPILER_PRINT", "1")
    build.load(SOURCE % 12)
    assert "return 12;" in capsys.readouterr().err
