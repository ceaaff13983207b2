"""Several processes make the run that one makes: real ones, over the loopback interface."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm import checkpoint
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.evaluate import evaluate
from dlrm.model import DLRM
from dlrm.scale import checkpoint as sharded
from dlrm.scale import plan
from dlrm.scale.convert import convert
from dlrm.scale.model import ShardableDLRM, plain_name, scaled_name
from dlrm.train import make_config, train

pytest.importorskip("torchrec", reason="needs the extra: pip install -e '.[scale]', then torchrec")

WORKER = Path(__file__).with_name("worker.py")
DATA = {
    "data": "synthetic", "samples": 16_000, "batch_size": 64, "seed": 3, "quiet": True,
    "sparse_optimizer": "rowwise_adagrad", "sparse_lr": 0.05, "limit_test_batches": 2,
    "pooling_factor": 2.0, "pooling_kind": "poisson", "threads": 1,
}  # fmt: skip


def torchrun(processes: int, *args: str, more: tuple[str, ...] = ()) -> list[str]:
    # standalone: a port of its own, beside other jobs
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(processes)]
    return [*launch, *more, *args]


ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}


def together(processes: int, folder: Path, cases: dict) -> None:
    command = torchrun(processes, str(WORKER), str(folder), json.dumps(cases))
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def losses(out: Path) -> dict[int, float]:
    events = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}


def apart(a: Path, b: Path) -> float:
    """The largest difference of two runs' losses, over the steps of the second."""
    one, other = losses(a), losses(b)
    assert other
    return max(abs(one[step] - loss) for step, loss in other.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One run of a single process, and others of 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    train(make_config("tiny", out=str(folder / "alone"), steps=200, save_every=100, **DATA))
    train(make_config("tiny", out=str(folder / "alone-adagrad"), steps=40, **DATA
                      | {"sparse_optimizer": "adagrad", "dim": 16}))  # fmt: skip
    two = {
        kind: DATA | {"steps": 200, "save_every": 100, "sharding": kind}
        for kind in ("table_wise", "row_wise", "table_row_wise", "data_parallel")
    }
    two["mixed"] = DATA | {"steps": 100, "sharding": "row_wise,1=table_wise,C5=data_parallel"}
    two["fsdp"] = DATA | {"steps": 100, "sharding": "auto", "dense_layers": "fsdp"}
    two["compiled"] = DATA | {"steps": 20, "sharding": "table_wise", "compile": "dlrm"}
    two["column_wise"] = DATA | {
        "steps": 40, "sharding": "column_wise", "sparse_optimizer": "adagrad", "dim": 16,
    }  # fmt: skip
    together(2, folder, two)
    four = {"four": DATA | {"steps": 200, "sharding": "row_wise,0=table_wise", "save_every": 100}}
    together(4, folder, four)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["table_wise", "row_wise", "table_row_wise", "data_parallel", "mixed", "fsdp", "compiled",
     "four"],
)  # fmt: skip
def test_losses_are_those_of_one_process(runs, name):
    assert apart(runs / "alone", runs / name) < 1e-5


@pytest.mark.slow
def test_columns_apart_with_an_optimizer_of_each_number(runs):
    assert apart(runs / "alone-adagrad", runs / "column_wise") < 1e-5


@pytest.mark.slow
def test_scores_are_global(runs):
    alone = json.loads((runs / "alone" / "summary.json").read_text())
    for name in ("row_wise", "four"):
        found = json.loads((runs / name / "summary.json").read_text())
        assert found["test_rows"] == alone["test_rows"]
        assert found["auc"] == pytest.approx(alone["auc"], abs=2e-4)
        assert found["logloss"] == pytest.approx(alone["logloss"], abs=1e-5)


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_one_process(runs, tmp_path):
    middle = runs / "row_wise" / "checkpoints" / "step-000000100"
    with pytest.raises(checkpoint.CheckpointError, match=r"python -m dlrm\.scale\.convert"):
        checkpoint.read_state(middle)
    assert convert(middle, tmp_path / "plain") == "one process"
    train(make_config("tiny", out=str(tmp_path / "on"), resume=str(tmp_path / "plain"),
                      steps=200, **DATA))  # fmt: skip
    assert min(losses(tmp_path / "on")) == 101
    assert apart(runs / "alone", tmp_path / "on") < 1e-5
    convert(runs / "four", tmp_path / "best")
    scored = evaluate(str(tmp_path / "best"), str(tmp_path / "scored"), part="val", limit=1)
    assert 0.5 < scored["auc"] < 1


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(runs, tmp_path):
    middle = runs / "alone" / "checkpoints" / "step-000000100"
    assert convert(middle, tmp_path / "spread") == "several processes"
    case = DATA | {"steps": 200, "resume": str(tmp_path / "spread"), "sharding": "table_wise"}
    together(2, tmp_path, {"on": case})
    assert min(losses(tmp_path / "on")) == 101
    assert apart(runs / "alone", tmp_path / "on") < 1e-5


@pytest.mark.slow
def test_four_go_on_where_two_stopped(runs, tmp_path):
    middle = runs / "table_wise" / "checkpoints" / "step-000000100"
    case = DATA | {"steps": 140, "resume": str(middle), "sharding": "row_wise"}
    together(4, tmp_path, {"on": case})
    assert min(losses(tmp_path / "on")) == 101
    assert apart(runs / "alone", tmp_path / "on") < 1e-5


def command(out: Path, *more: str) -> tuple[str, ...]:
    return (
        "-m", "dlrm.train", "--preset", "tiny", "--data", "synthetic", "--samples", "16000",
        "--batch-size", "64", "--sparse-optimizer", "rowwise_adagrad", "--sparse-lr", "0.05",
        "--pooling-factor", "2", "--pooling-kind", "poisson", "--limit-test-batches", "2",
        "--seed", "3", "--quiet", "--threads", "1", "--out", str(out), *more,
    )  # fmt: skip


def kill_one(out: Path, launched: subprocess.Popen, at: int) -> None:
    """SIGKILL for a worker of the job once its checkpoint of step ``at`` is there."""
    due = time.monotonic() + 120
    while not (out / "checkpoints" / f"step-{at:09d}").exists():
        assert launched.poll() is None, launched.communicate()[1][-3000:]
        assert time.monotonic() < due
        time.sleep(0.05)
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_ends_the_job_and_a_restart_goes_on(runs, tmp_path):
    more = ("--steps", "200", "--save-every", "20", "--resume", "auto")
    args = command(tmp_path / "a", *more)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(torchrun(2, *args), env=ENV, **pipes)
    kill_one(tmp_path / "a", job, 20)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "another process of this job is gone" in err
    assert not (tmp_path / "a" / "summary.json").exists()
    args = command(tmp_path / "b", *more)
    job = subprocess.Popen(torchrun(2, *args, more=("--max-restarts", "2")), env=ENV, **pipes)
    kill_one(tmp_path / "b", job, 40)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err[-3000:]
    assert sorted(losses(tmp_path / "b")) == list(range(1, 201))
    assert apart(runs / "alone", tmp_path / "b") < 1e-5
    assert "AUC" in out


@pytest.mark.slow
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path):
    for given, message in (
        (("--sharding", "diagonal"), "--sharding: 'diagonal' is none of auto, table_wise"),
        (("--sharding", "X=row_wise"), "--sharding: no table 'X'"),
        (("--clip", "1"), "--clip over several processes"),
    ):
        args = command(tmp_path / "out", *given)
        done = subprocess.run(torchrun(2, *args), env=ENV, capture_output=True, text=True)
        assert done.returncode != 0
        told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert len(told) == 1 and message in told[0], done.stderr[-2000:]
        assert not (tmp_path / "out").exists()


def test_two_processes_make_the_run_of_one(tmp_path):
    short = DATA | {"samples": 2000, "steps": 6, "limit_val_batches": 1}
    train(make_config("tiny", out=str(tmp_path / "alone"), **short))
    together(2, tmp_path, {"two": short | {"sharding": "row_wise,0=table_wise"}})
    assert apart(tmp_path / "alone", tmp_path / "two") < 1e-6
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["steps"] == 6


# Without other processes


def test_an_edited_checkpoint_of_several_processes_is_named(tmp_path):
    short = DATA | {"samples": 2000, "steps": 2, "limit_val_batches": 1}
    train(make_config("tiny", out=str(tmp_path / "run"), **short))
    convert(tmp_path / "run", tmp_path / "spread")
    state = sharded.read_state(tmp_path / "spread")
    assert state["step"] == 2 and state["processes"] == 1
    text = (tmp_path / "spread" / "state.json").read_text()
    (tmp_path / "spread" / "state.json").write_text(text.replace('"step": 2', '"step": 3'))
    with pytest.raises(checkpoint.CheckpointError, match="damaged or edited"):
        sharded.read_state(tmp_path / "spread")


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_unsharded_it_is_the_plain_model(pooling, temperature):
    config = DLRMConfig(
        rows=(40, 900, 7), dim=16, dense_in=3, bottom=(8,), top=(8,), pooling=pooling,
        md_temperature=temperature, sparse=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DLRM(config)
    scaled = ShardableDLRM(config, "cpu")
    weights = model.state_dict()
    names = {name: plain_name(name) for name in scaled.state_dict()}
    assert sorted(names.values()) == sorted(weights)
    assert all(scaled_name(plain) == name for name, plain in names.items())
    scaled.load_state_dict({name: weights[plain] for name, plain in names.items()})
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, (3, 20))
    ids = np.concatenate(
        [rng.integers(0, n, k.sum()) for n, k in zip(config.rows, lengths, strict=False)]
    )
    batch = Batch.from_bags(torch.randn(20, 3), lengths, ids, np.zeros(20))
    want, found = model(*batch.inputs()), scaled(*batch.inputs())
    torch.testing.assert_close(found, want)
    want.sum().backward()
    found.sum().backward()
    for name, parameter in scaled.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(names[name]).grad)


def test_a_plan_obeys_its_constraints_and_tells_the_cost():
    model = ShardableDLRM(DLRMConfig(rows=(1000, 2000, 30), dim=16))
    kinds = {0: "row_wise", 1: "table_wise"}
    found, report = plan.make(model, kinds, processes=4, device="cpu", batch=64)
    (placed,) = found.plan.values()
    assert placed["t0"].sharding_type == "row_wise" and placed["t1"].sharding_type == "table_wise"
    assert "t0  row_wise" in report and report.count("MiB") == 4
    with pytest.raises(InputError, match="column_wise with --sparse-optimizer rowwise_adagrad"):
        plan.make(model, {2: "column_wise"}, 4, "cpu", 64, rowwise=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qr_collisions": 4}, "--qr-collisions"),
        ({"wide": True}, "--wide"),
        ({"weighted_pooling": "learned"}, "--weighted-pooling learned"),
        ({"dim": 6}, "multiples of 4"),
    ],
)
def test_tables_that_cannot_be_sharded_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        ShardableDLRM(DLRMConfig(rows=(1000, 20), **changes))
