"""A compiled model saved to a folder and loaded in a new process without compiling."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import compiler
from compiler.saved import PackageError
from tests.compiler.test_backend import BASE, batch, model_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "model"
    model = model_of().eval()
    compiler.save(model, batch(BASE, 24).inputs(), place)
    return model, place


def test_loads_in_a_new_process_with_no_compiler_and_no_dynamo(saved, tmp_path):
    model, place = saved
    inputs = [batch(BASE, size).inputs() for size in (2, 9, 64, 1)]
    with torch.no_grad():
        outputs = [model(*data) for data in inputs]
    torch.save((inputs, outputs), tmp_path / "data.pt")
    script = f"""
import sys, torch, compiler
run = compiler.load({str(place)!r})
inputs, outputs = torch.load({str(tmp_path / "data.pt")!r})
for data, expected in zip(inputs, outputs):
    torch.testing.assert_close(run(*data), expected, rtol=1e-5, atol=1e-5)
assert not [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))]
"""
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {
        "PATH": str(empty),
        "DLRM_COMPILER_CXX": "/nowhere",
        "DLRM_COMPILER_CACHE": str(empty),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_inputs_of_another_form_are_refused(saved):
    _, place = saved
    run = compiler.load(place)
    dense, ids, offsets, weights = batch(BASE, 9).inputs()
    with pytest.raises(ValueError, match=r"input 0 is torch.float64"):
        run(dense.double(), ids, offsets, weights)
    with pytest.raises(ValueError, match="arranged"):
        run(dense, ids, offsets)
    with pytest.raises(ValueError, match=r"input 0 is torch.float32 \[9, 2\]"):
        run(dense[:, :2], ids, offsets, weights)


def test_frozen_and_with_operations_that_aten_computes(tmp_path):
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            values, places = torch.sort(self.layers(x), dim=1)
            return {"values": values, "places": places}

    torch.manual_seed(0)
    model = Sorted()
    run = compiler.load(compiler.save(model, (torch.randn(5, 4),), tmp_path / "m", freeze=True))
    for size in (5, 33):
        x = torch.randn(size, 4)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


def test_control_flow_is_refused(tmp_path):
    class Either(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    with pytest.raises(PackageError, match=r"control flow on tensors"):
        compiler.save(Either(), (torch.ones(3),), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_an_unknown_operation_is_named(saved, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(saved[1], place)
    _edit(place, targets={"f": "nobody.knows.default"})
    with pytest.raises(PackageError, match=r"nobody.knows.default is unknown"):
        compiler.load(place)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "manifest.json").unlink(), "no saved model"),
        (lambda p: (p / "manifest.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "graph.so").write_bytes(b"x"), "graph.so: missing or damaged"),
        (lambda p: (p / "weights.safetensors").unlink(), "weights.safetensors: missing"),
        (lambda p: _edit(p, cpu="another"), "another CPU"),
        (lambda p: _edit(p, version=99), "version 99"),
    ],
)
def test_damage_is_named(saved, tmp_path, damage, says):
    place = tmp_path / "model"
    shutil.copytree(saved[1], place)
    damage(place)
    with pytest.raises(PackageError, match=says):
        compiler.load(place)


def _edit(place, **changes):
    file = place / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_is_there_is_not_overwritten(saved):
    model, place = saved
    with pytest.raises(FileExistsError, match="there is something already"):
        compiler.save(model, batch(BASE, 24).inputs(), place)
