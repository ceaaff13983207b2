"""Exported models give the same logits at any batch size; quantized rows stay within a step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm import export
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.export import export_model, read_onnx, read_pt2
from dlrm.model import DLRM
from dlrm.quantize import QuantizedTable, bytes_of, dequantize_rows, quantize_rows, quantize_tables
from tests.dlrm.drawing import draw

CONFIGS = {
    "plain": DLRMConfig(rows=(50, 60, 7), dim=8, dense_in=4),
    "no dense, mean": DLRMConfig(rows=(50, 60, 7), dim=8, dense_in=0, pooling="mean"),
    "cross": DLRMConfig(rows=(50, 60), dim=4, dense_in=4, interaction="cross", cross_rank=4),
    "qr, mixed, weights": DLRMConfig(
        rows=(500, 60), dim=8, qr_collisions=4, md_temperature=0.3, weighted_pooling="learned"
    ),
}


@pytest.mark.parametrize(
    ("name", "bits"),
    [("plain", 32), ("plain", 8), ("no dense, mean", 4), ("cross", 32), ("qr, mixed, weights", 8)],
)
def test_pt2_gives_the_same_logits(name, bits, tmp_path):
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = DLRM(config).eval()
    model = model if bits == 32 else quantize_tables(model, bits)
    export_model(model, tmp_path / "m.pt2")
    run = read_pt2(tmp_path / "m.pt2")
    for size in (1, 2, 33, 0):
        inputs = draw(config, size, seed=size).inputs()
        torch.testing.assert_close(run(inputs), model(*inputs).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "bits"), [("plain", 32), ("no dense, mean", 4)])
def test_onnx_gives_the_same_logits(name, bits, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = DLRM(config).eval()
    model = model if bits == 32 else quantize_tables(model, bits)
    export_model(model, tmp_path / "m.onnx")
    run = read_onnx(tmp_path / "m.onnx")
    for size in (1, 2, 33):
        inputs = draw(config, size, seed=size).inputs()
        torch.testing.assert_close(run(inputs), model(*inputs).detach(), atol=1e-5, rtol=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@settings(max_examples=50, deadline=None)
@given(
    bits=st.sampled_from([4, 8]), rows=st.integers(1, 20), dim=st.integers(1, 17),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_quantized_rows_are_off_by_half_a_step_at_most(bits, rows, dim, scale, seed):
    table = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) * scale + 0.5
    codes, steps, low = quantize_rows(table, bits)
    assert codes.dtype == torch.uint8 and codes.shape == (rows, -(-dim * bits // 8))
    back = dequantize_rows(codes, steps, low, bits, dim)
    assert bool(((back - table).abs() <= steps[:, None] * 0.5001 + 1e-6 * (1 + scale)).all())
    ids = torch.tensor([0, rows - 1, 0])
    torch.testing.assert_close(QuantizedTable(table, bits)(ids), back[ids])


def test_smaller_tables_are_smaller_and_close():
    torch.manual_seed(0)
    config = DLRMConfig(rows=(1000, 2000), dim=64, dense_in=4)
    model = DLRM(config).eval()
    inputs = draw(config, 20).inputs()
    full, exact = bytes_of(model.tables), model(*inputs)
    for bits, most, error in ((8, 0.29, 1e-3), (4, 0.16, 2e-2)):
        small = quantize_tables(model, bits)
        assert bytes_of(small.tables) < full * most
        difference = float((small(*inputs) - exact).detach().abs().max())
        assert 0 < difference < error
    assert bytes_of(model.tables) == full  # the model itself is not changed


def test_a_wrong_export_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "read_pt2", lambda path: lambda inputs: torch.zeros(5))
    with pytest.raises(RuntimeError, match="differs by"):
        export_model(DLRM(CONFIGS["plain"]), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"must end in \.pt2 or \.onnx"):
        export_model(DLRM(CONFIGS["plain"]), tmp_path / "m.bin")
