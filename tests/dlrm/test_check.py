"""dlrm.check on this machine, and on machines that lack something."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm import check, machine, packages

ROOT = Path(check.__file__).resolve().parent.parent


def item_of(found: Iterator[check.Item]) -> check.Item:
    (item,) = found
    return item


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_this_machine_can_run_the_main_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("The main job can run")
    for name in check.CHECKS:
        assert any(line[9:].startswith(name) for line in lines), name


def test_json_names_every_item(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[check.Item]:
        yield check.ok("one", "fine")
        raise OSError("no such thing")

    monkeypatch.setattr(check, "CHECKS", {"one": broken, "main job": broken})
    assert check.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [item["status"] for item in report["items"]] == ["ok", "warning", "ok", "failed"]
    assert "no such thing" in report["items"][1]["found"]


def test_without_torch_it_fails_in_words(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')")
    done = subprocess.run(
        [sys.executable, "-m", "dlrm.check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert len(failed) == 2  # torch and the main job
    assert all("libtorch.so: cannot open" in line for line in failed)
    assert "mend: make setup" in done.stdout


@pytest.mark.parametrize(
    ("torch", "fbgemm", "fits"),
    [
        ("2.13.0+cpu", "1.8.0", True),
        ("2.13.1", "1.8.2", True),
        ("2.14.0", "1.8.0", False),
        ("2.13.0", "1.7.0", False),
        ("3.13.0", "1.8.0", False),
        ("2.13.0", "2.8.0", False),
    ],
)
def test_pairs(torch: str, fbgemm: str, fits: bool) -> None:
    assert packages.pairs_with_torch(torch, fbgemm) is fits


def with_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(packages, "installed_version", versions.get)


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"torch": "2.13.0"}, "missing: fbgemm, torchrec"),
        ({"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0"}, "missing: torchrec"),
        ({"torch": "2.12.0", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}, "belongs to torch"),
        ({"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "torchrec": "1.7.0"}, "belongs to torch"),
        (
            {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1"},
            "two forms",
        ),
    ],
)
def test_torchrec_that_does_not_fit_is_a_warning(
    versions: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_versions(monkeypatch, versions)
    item = item_of(check.check_scale())
    assert item.status == "warning"
    assert words in item.found
    assert item.mend


def test_packages_missing_or_outside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"": ["numpy>=2.3", "tqdm>=4"], "privacy": ["opacus>=1.6; extra == 'privacy'"]}
    monkeypatch.setattr(packages, "by_extra", lambda: lines)
    with_versions(monkeypatch, {"numpy": "1.26.0", "tqdm": "4.70"})
    core, extra = check.check_packages()
    assert (core.status, core.found) == ("failed", "numpy 1.26.0 is not >=2.3")
    assert (extra.status, extra.found) == ("warning", "opacus is missing")
    assert extra.mend == "pip install -c constraints.txt -e '.[privacy]'"


def test_every_extra_is_looked_at() -> None:
    assert {"", "dev", "interpret", "privacy", "triton"} <= packages.by_extra().keys()
    assert all(lines for lines in packages.by_extra().values())


def test_compiler_that_is_missing_or_lacks_openmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    item = item_of(check.check_compiler())
    assert (item.status, item.found[:11]) == ("warning", "no compiler")
    assert "apt-get install g++" in item.mend
    body = '[ "$1" = --version ] && echo "g++ 1.0" && exit; echo "unknown option -fopenmp"; exit 1'
    script(tmp_path, "g++", body)
    item = item_of(check.check_compiler())
    assert item.status == "warning"
    assert "g++ 1.0" in item.found
    assert "unknown option -fopenmp" in item.found


def test_compiler_at_hand_runs_openmp_threads() -> None:
    compiler = machine.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    assert compiler.problem == ""
    assert compiler.threads >= 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 580.65'", "warning", "NVIDIA H100, 81559 MiB, 580.65, but"),
        ("echo 'driver mismatch'; exit 9", "warning", "nvidia-smi fails: driver mismatch"),
        (None, "ok", "none"),
    ],
)
def test_gpu_that_torch_does_not_use(
    body: str | None, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    if body:
        script(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", str(tmp_path))
    item = item_of(check.check_gpu())
    assert (item.status, item.found[: len(words)]) == (status, words)
    if "H100" in words:
        assert item.mend == "DLRM_DEVICE=cuda make setup"


def test_sample_against_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert item_of(check.check_sample()).status == "ok"  # an installed package has none
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "data").mkdir()
    assert item_of(check.check_sample()).status == "warning"
    sample = tmp_path / check.SAMPLE
    sample.write_bytes(b"1\t2\n0\t3\n")
    digest = "2c5d7fe2fd9b1c3e0f4f3f7d8d0c9a61b2a8e7f35d1c1c1f0a2b3c4d5e6f7a8b"
    readme = tmp_path / "data" / "README.md"
    readme.write_text(f"| {sample.name} | {digest} |\n")
    item = item_of(check.check_sample())
    assert item.status == "warning"
    assert "checksum" in item.found
    readme.write_text(f"| other | {digest} |\n")
    assert "2 rows" in item_of(check.check_sample()).found


def test_data_folder_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_DATA_DIR", raising=False)
    assert item_of(check.check_data_dir()).status == "ok"
    monkeypatch.setenv("DLRM_DATA_DIR", str(tmp_path / "absent"))
    assert item_of(check.check_data_dir()).status == "warning"
    monkeypatch.setenv("DLRM_DATA_DIR", str(tmp_path))
    assert "no data set" in item_of(check.check_data_dir()).found
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").touch()
    (tmp_path / "day_0.gz").touch()
    item = item_of(check.check_data_dir())
    assert item.found.endswith("MovieLens 100K (ml-100k), Criteo day_0.gz")


def test_machine_facts_are_plausible() -> None:
    total, available = machine.memory_bytes()
    assert total == 0 or 0 <= available <= total
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)
    assert machine.cpu_name()
    assert set(machine.cpu_instructions()) <= set(machine.INSTRUCTIONS.values())
