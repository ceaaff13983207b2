"""Predictions of jobs past this machine: by hand, beside published runs, and beside real ones."""

import dataclasses

import pytest

from dlrm.config import DLRMConfig
from dlrm.scale import memory, simulate
from dlrm.scale.cost import Job, Shard, dense_work, predict
from dlrm.scale.hardware import DEVICES
from dlrm.scale.model import Over
from dlrm.scale.published import balanced, compared

MODEL = DLRMConfig(rows=(1000, 2000), dim=16, dense_in=3, bottom=(8,), top=(4,))
WHERE = (Shard(0, 0, 1000, 16, "table_wise"), *(Shard(1, r, 1000, 16, "row_wise") for r in (0, 1)))
JOB = Job(MODEL, (1, 3), 64, "rowwise_adagrad", 1, 2, WHERE)


def test_dense_work_by_hand():
    # bottom 3-8-16, three features give 3 pairs beside the 16 dense numbers, top 19-4-1
    inputs, products = 3 * 8, 3 * 8 + 8 * 16 + 19 * 4 + 4
    flops, kept, weights = dense_work(MODEL)
    assert flops == 6 * products - 2 * inputs + 3 * 3 * 2 * 16
    assert kept == 8 + 16 + 4 + 1 + 3 * 16 + 19
    assert weights == sum(p.numel() for p in Over(MODEL).parameters())


def test_bytes_by_hand():
    rate = dataclasses.replace(
        DEVICES["a100"], lookup=1.0, update=1.0, links=1.0, latency=0.5, memory=1e9
    )
    found = predict(JOB, rate)
    read = (64 + 64 * 3 / 2) * 16  # process 0: all ids of table 0, and half of table 1's
    pooled = 64 * 2 * 16
    assert found.seconds["embedding forward"] == (read + pooled) * 4
    assert found.seconds["embedding update"] == 2 * (read + 64 + 96) * 4
    assert found.seconds["all-to-all of vectors"] == 2 * pooled * 4 / 2
    assert found.seconds["all-reduce"] == 2 * 1 / 2 * dense_work(MODEL)[2] * 4
    assert found.seconds["collectives' latency"] == 3.0
    assert found.memory["tables"] == (1000 + 1000) * 16 * 4
    assert found.memory["their optimizer state"] == 2000 * 4
    assert found.limit == "memory bandwidth"
    narrow = predict(JOB, dataclasses.replace(DEVICES["a100"], links=1.0))
    assert narrow.limit == "links of the host"
    spread = tuple(dataclasses.replace(s, kind="table_row_wise") for s in WHERE[1:])
    hosts = dataclasses.replace(JOB, hosts=2, shards=spread)
    slow = predict(hosts, dataclasses.replace(DEVICES["a100"], network=1.0))
    assert slow.seconds["all-to-all of vectors"] == 2 * 64 * 16 * 4 / 2 * 2 / 4  # summed by two
    wide = dataclasses.replace(JOB, hosts=2, per_host=1)
    slow = predict(wide, dataclasses.replace(DEVICES["a100"], network=1.0))
    assert slow.limit == "the network between hosts"
    assert predict(dataclasses.replace(JOB, batch=128), rate).step > found.step


def test_one_process_exchanges_nothing():
    alone = dataclasses.replace(JOB, per_host=1, shards=balanced(MODEL, 1))
    seconds = predict(alone, DEVICES["a100"]).seconds
    assert all(s == 0 for name, s in seconds.items() if name.startswith(("all-", "coll")))


def test_published_throughputs_in_their_order_and_near():
    found = compared()
    assert sum(not run.fitted for run, _ in found) == 2
    dot = [prediction.samples for run, prediction in found if run.interaction == "dot"]
    assert dot[0] < dot[1] < found[-1][1].samples == max(p.samples for _, p in found)
    for run, prediction in found:
        assert prediction.samples == pytest.approx(run.samples, rel=0.01 if run.fitted else 0.15)


def test_the_command_prints_all_parts(capsys):
    pytest.importorskip("torchrec", reason="needs the extra: pip install -e '.[scale]'")
    command = ["--preset", "tiny", "--hosts", "2", "--gpus", "2", "--batch", "64"]
    assert simulate.main([*command, "--sharding", "row_wise,0=table_wise"]) == 0
    out = capsys.readouterr().out
    for words in ("1 table_wise, 7 row_wise", "all-to-all of ids", "samples/s; the limit:",
                  "1,190,128", "fitted: launch"):  # fmt: skip
        assert words in out, out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--hosts", "0"), "--hosts: 0 must be at least 1"),
        (("--batch", "3"), "--batch: 3 samples for 8 devices"),
        (("--preset", "huge"), "preset: no 'huge'"),
        (("--preset", "movielens"), "its tables come from the data"),
        (("--preset", "tiny", "--sharding", "diagonal"), "--sharding: 'diagonal' is none of"),
    ],
)
def test_bad_input_is_one_line(given, message, capsys):
    assert simulate.main(list(given)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_memory_of_ddp_and_fsdp_is_the_formula():
    """Two real processes over loopback."""
    rows = memory.measure(256, 3, 8, processes=(2,), timed=False)
    assert [row.way for row in rows] == ["ddp", "fsdp", "fsdp_offload"]
    for row in rows:
        assert row.found["parameters"] == row.expected.parameters
        assert row.found["gradients"] == row.expected.gradients
        assert row.found["state"] == pytest.approx(row.expected.state, rel=0.001)  # and its steps
        assert row.found["resident"] > 0
    assert "of the fullest process" in memory.text(rows, 8)


@pytest.mark.slow
def test_real_runs_stand_beside_their_prediction():
    pytest.importorskip("torchrec", reason="needs the extra: pip install -e '.[scale]'")
    from dlrm.scale import here

    case = here.Case((500, 300), 16, (32,), (32,), 64, "row_wise", steps=5)
    (found,) = here.check((2,), [case])
    assert found.table_bytes == found.prediction.memory["tables"]
    assert found.seconds > 0 and found.prediction.step > 0
    assert "row_wise" in here.check_text([found])
