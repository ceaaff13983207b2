"""The GPU table's whole path with the interpreter in the place of the device; no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler import compile as compiled
from dlrm import benchmark
from dlrm.benchmark import cuda, cuda_peers, peers
from dlrm.benchmark.tables import why_no_fbgemm


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuda, "milliseconds", lambda run, times=1: run() is None or 1.0)
    monkeypatch.setattr(cuda, "COPY_BYTES", 2**10)
    monkeypatch.setattr(cuda_peers, "OWN_MODES", ("default",))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "the interpreter")
    monkeypatch.setattr(
        cuda_peers, "inductor", lambda m, v: torch.compile(m, backend="eager", dynamic=False)
    )
    monkeypatch.setattr(peers, "ours", lambda m, freeze=False, mode="": own(m))
    monkeypatch.setattr("dlrm.benchmark.turns.TURN_SECONDS", 1e-4)
    file = tmp_path / "gpu.json"
    flags = ["--device", "cuda", "--shapes", "tiny", "--batch", "4", "--rounds", "1"]
    assert benchmark.main([*flags, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["machine"]["gpu"] == "the interpreter"
    rows = {row["task"]: row for row in found["rows"]}
    tbe = {"TBE", "TBE+Inductor"} if not why_no_fbgemm() else set()
    for task in ("train step f32", "inference f32"):
        assert {g for g, c in rows[task]["peers"].items() if c} == {
            "eager",
            "Inductor",
            "ours",
            *tbe,
        }
    for task in ("bags forward", "bags update"):
        assert {g for g, c in rows[task]["peers"].items() if c} == {
            "eager",
            "ours",
            *(tbe & {"TBE"}),
        }
        assert rows[task]["share_of_floor"] > 0
    assert "max-autotune" in str(rows["inference f32"]["peers"]["Inductor"])
    assert "inference bf16" in capsys.readouterr().out


def own(module: Any) -> Any:
    return compiled(module, dynamic=False, target="triton")


def test_what_does_not_fit_into_the_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_no_fbgemm", lambda: "")
    run = cuda.GpuSuite(
        cuda.Settings([cuda.chosen([], ["tiny"], [4])[0]], ["train"]),
        None,
        end=0.0,  # type: ignore[arg-type]
    )
    ((_, part),) = run._tasks()
    assert part() == [] and run.notes == [
        "train, tiny, batch 4 left out: the time was up (--seconds)"
    ]
