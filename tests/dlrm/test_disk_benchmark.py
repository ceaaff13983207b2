"""The benchmarks of training in little memory: they run, hold their sides to the same bits, and
refuse what cannot be measured.
"""

import json

import pytest

from dlrm.benchmark import main


def test_tables_on_disk_beside_tables_in_memory(tmp_path, capsys):
    out = tmp_path / "figures.json"
    small = ["--rows", "400*3", "--dim", "4", "--batch", "32", "--steps", "100", "--rounds", "2"]
    assert (
        main(["disk", *small, "--folder", str(tmp_path), "--json", str(out), "--drop-cache"]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.count("same bits") == 2 and "rows a step found in the cache" in printed
    figures = json.loads(out.read_text())
    assert figures["cache"] == figures["bytes"] // 10
    for one in figures["figures"]:
        assert one["same_bits"] and 0 < one["hit_rate"] < 1 and one["disk_ms"] > 0
    assert list(tmp_path.iterdir()) == [out]  # the files of the tables are gone


def test_a_budget_beside_eager(tmp_path, capsys):
    out = tmp_path / "figures.json"
    small = ["--layers", "24", "--width", "64", "--batch", "512", "--rounds", "1"]
    ways = ["--ways", "offload all", "--threads", "1"]
    assert main(["memory", *small, *ways, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert list(figures["rows"]) == ["eager", "offload all"]
    row = figures["rows"]["offload all"]
    assert row["same_bits"] and 0 < row["memory"]["saved"] <= figures["budget"]
    assert "same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["memory", "--ways", "magic"], "--ways: 'magic' is none of eager, checkpoint 2"),
        (["memory", "--budget", "little"], "--budget: 'little' is no amount of memory"),
        (["memory", "--layers", "0"], "must be at least 1"),
        (["disk", "--cache", "little"], "--cache: 'little' is no amount of memory"),
        (["disk", "--steps", "0"], "--steps: 0 must be at least 1"),
    ],
)
def test_refusals(flags, says, capsys):
    assert main(flags) == 2
    assert says in capsys.readouterr().err
