"""The train command: flags, files and presets, refusals that leave nothing behind, and mishaps."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlrm import checkpoint, cli
from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.train import main, make_config, show, train
from dlrm.trainer import pick_device

QUICK = ["--data", "synthetic", "--samples", "2000", "--rows", "50*4", "--dense-in", "3", "--quiet"]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def test_a_run_leaves_what_it_says(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*QUICK, "--out", str(out), "--epochs", "2", "--batch-size", "128"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    names = "auc logloss ne calibration samples_per_s peak_rss_mb steps seed config_hash".split()
    assert set(names) <= summary.keys() and {"val_auc", "val_ne"} <= summary.keys()
    assert f"{summary['auc']:.4f}" in printed and str(out / "best") in printed
    assert 0.4 < summary["auc"] < 1 and summary["steps"] == 2 * 16 and summary["peak_rss_mb"] > 50
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log if e["event"] == "step"] == list(range(1, 33))
    assert [e["step"] for e in log if e["event"] == "val"] == [16, 32]
    again = tmp_path / "again"  # the saved configuration makes the same run
    assert main(["--config", str(out / "config.toml"), "--out", str(again)]) == 0
    assert json.loads((again / "summary.json").read_text())["auc"] == summary["auc"]


def test_two_runs_cannot_share_a_folder(tmp_path, capsys):
    import fcntl

    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is in use by another run" in refused(
            [*QUICK, "--out", str(tmp_path / "run")], capsys
        )
    assert main([*QUICK, "--out", str(tmp_path / "run")]) == 0


def test_a_run_that_saved_nothing_does_not_block_its_folder(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    wild = ["--dense-optimizer", "sgd", "--dense-lr", "1e30"]
    assert "loss is" in refused([*QUICK, *out, *wild, "--epochs", "9"], capsys)
    assert main([*QUICK, *out]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--data: name the data set"),
        (["--data", "random"], "'random' is none of criteo, movielens, synthetic"),
        ([*QUICK], "--out: name the folder"),
        ([*QUICK, "--out", "OUT", "--preset", "big"], "no 'big'; there are tiny"),
        ([*QUICK, "--out", "OUT", "--batch-size", "0"], "--batch-size: 0 must be at least 1"),
        (
            [*QUICK, "--out", "OUT", "--dense-lr", "nan"],
            "--dense-lr: nan must be 0 or more",
        ),
        ([*QUICK, "--out", "OUT", "--compile", "jit"], "'jit'"),
        ([*QUICK, "--out", "OUT", "--device", "tpu"], "--device"),
        ([*QUICK, "--out", "OUT", "--device", "cuda:99"], "GPUs"),
        ([*QUICK, "--out", "OUT", "--pooling", "max"], "pooling: 'max' is none of sum, mean"),
        ([*QUICK, "--out", "OUT", "--interaction", "dto"], "interaction: 'dto' is none of"),
        ([*QUICK, "--out", "OUT", "--epochs", "0"], "--epochs and --steps are both 0"),
        ([*QUICK, "--out", "OUT", "--resume", "missing"], "missing: there is no such"),
        ([*QUICK, "--out", "OUT", "--resume", "auto", "--overwrite"], "contradict"),
        ([*QUICK, "--out", "OUT", "--seed", "9" * 30], "--seed: 999"),
        ([*QUICK, "--out", "OUT", "--md-temperature", "nan"], "md_temperature: nan"),
        ([*QUICK, "--out", "OUT", "--window", "0"], "--window: 0 must be at least 1"),
        ([*QUICK, "--out", "OUT", "--threads", "1000000"], "this machine has"),
        ([*QUICK, "--out", "OUT", "--input", "x"], "are made, not read"),
        ([*QUICK, "--out", "OUT", "--profile", "/nowhere/x"], "--profile: /nowhere/x must be"),
        ([*QUICK, "--out", "OUT", "--tensorboard", "OUT-b", "--device", "tpu"], "--device"),
        ([*QUICK, "--out", "OUT\udcff"], "bytes that are not UTF-8"),
        ([*QUICK, "--out", "OUT", "--pooling-factor", "1e15"], "at most 10,000 ids a bag"),
        ([*QUICK, "--out", "OUT", "--preset", "terabyte", "--rows", "99999999*26"], "GB; use"),
        ([*QUICK, "--out", "OUT", "--top", "999999999999"], "GB; use smaller"),
        (["--data", "criteo", "--out", "OUT"], "--input: name the folder"),
        (["--data", "criteo", "--out", "OUT", "--input", "nowhere"], "nowhere"),
        (["--data", "movielens", "--out", "OUT", "--input", "nowhere"], "nowhere"),
        ([*QUICK, "--out", "OUT", "--config", "nowhere.toml"], "there is no file nowhere.toml"),
    ],
)
def test_refusals_name_the_argument_and_leave_nothing(flags, says, tmp_path, capsys):
    out = tmp_path / "run"
    assert says in refused([f.replace("OUT", str(out)) for f in flags], capsys)
    assert list(tmp_path.iterdir()) == []


def test_flags_that_do_not_parse_exit_with_two(tmp_path, capsys):
    for flags in (["--steps", "many"], ["--quiet", "False"], ["--lr", "1"], ["--rows", "9,9*-3"]):
        with pytest.raises(SystemExit) as stop:
            main([*QUICK, "--out", str(tmp_path / "run"), *flags])
        assert stop.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_touched(tmp_path, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for more in ([], ["--overwrite"], ["--resume", "auto"]):
        assert "has other files" in refused([*QUICK, "--out", str(out), *more], capsys)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    run = tmp_path / "run"
    assert main([*QUICK, "--out", str(run)]) == 0
    (run / "notes.txt").write_text("mine")
    assert "--resume auto goes on with it" in refused([*QUICK, "--out", str(run)], capsys)
    assert main([*QUICK, "--out", str(run), "--overwrite", "--seed", "1"]) == 0
    assert (run / "notes.txt").read_text() == "mine"


def test_config_file_precedence_and_mistakes(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('preset = "kaggle"\n[model]\ndim = 4\n[optim]\ndense_lr = 1\n')
    config = make_config(toml=str(file), dim=8)
    assert (config.preset, config.model.dim, config.optim.dense_lr) == ("kaggle", 8, 1.0)
    assert config.model.top == (512, 256) and config.data.batch_size == 2048
    for text, says in (
        ("[optim]\ndense_ir = 1\n", "unknown setting 'dense_ir'; did you mean 'dense_lr'?"),
        ("[optim]\ndense_lr = 'x'\n", "dense_lr: 'x' is not float"),
        ("[run]\nquiet = 1\n", "quiet: 1 is not bool"),
        ("[model]\nrows = [1, true]\n", "is not a list of integers"),
        ("[models]\ndim = 1\n", "unknown entry 'models'"),
        ("[model\n", "not a TOML file"),
    ):
        file.write_text(text)
        assert says in refused(
            [*QUICK, "--config", str(file), "--out", str(tmp_path / "o")], capsys
        )


def test_toml_round_trip():
    config = make_config("movielens", data="movielens", out='a "b"\\c\nd', rows=(), clip=0.5)
    import tomllib

    tables = tomllib.loads(cli.toml(config.as_dict()))
    assert tables["run"]["out"] == 'a "b"\\c\nd' and tables["model"]["rows"] == []
    assert tables["optim"]["clip"] == 0.5 and "asked" not in tables


class Rows:
    """Ten batches in memory; ``nan_at`` spoils a dense value, ``label`` is that of all rows."""

    block = 64

    def __init__(
        self, size: int = 640, nan_at: int = -1, high: int = 5, label: int | None = None
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self.dense = torch.randn(size, 2, generator=g)
        if nan_at >= 0:
            self.dense[nan_at, 1] = float("nan")
        self.ids = torch.randint(0, high, (size, 1), generator=g)
        self.label = (torch.rand(size, generator=g) < 0.5).float()
        if label is not None:
            self.label.fill_(label)

    def __len__(self) -> int:
        return len(self.label)

    def read(self, start: int, stop: int) -> Batch:
        part = slice(start, stop)
        return Batch.one_hot(self.dense[part], self.ids[part], self.label[part])


def in_memory(train_rows: Rows, rows: int = 5) -> Dataset:
    splits = {"train": train_rows, "val": Rows(), "test": Rows()}
    return Dataset("memory", ("x", "y"), ("a",), (rows,), splits, "0")


def test_a_loss_that_is_not_finite_names_step_batch_and_cause(tmp_path):
    from dlrm.diagnose import TrainingDiverged

    config = make_config(data="synthetic", out=str(tmp_path / "a"), quiet=True, batch_size=64)
    with pytest.raises(TrainingDiverged, match=r"loss is nan at step \d+ \(batch \d+ of epoch 0\)"):
        train(config, in_memory(Rows(nan_at=100)))
    config = make_config(data="synthetic", out=str(tmp_path / "b"), quiet=True, batch_size=64)
    with pytest.raises(TrainingDiverged, match="dense feature 1 of sample"):
        train(config, in_memory(Rows(nan_at=100)))
    assert not list((tmp_path / "b").glob("checkpoints/*"))  # broken weights are not saved
    with pytest.raises(
        TrainingDiverged, match=r"are not finite after \d+ updates: lower --dense-lr"
    ):
        train(
            make_config(
                data="synthetic", out=str(tmp_path / "c"), quiet=True, batch_size=64,
                dense_optimizer="sgd", dense_lr=1e30, epochs=3,
            ),
            in_memory(Rows()),
        )  # fmt: skip


def test_weights_that_the_last_step_broke_are_named_at_the_validation(tmp_path, capsys):
    wild = ["--steps", "1", "--dense-lr", "1e30"]
    error = refused([*QUICK, "--out", str(tmp_path / "run"), *wild], capsys)
    assert "outputs on the val part are not finite after step 1: lower --dense-lr" in error


@pytest.mark.parametrize(("part", "label"), [("train", 1), ("val", 0), ("test", 0), ("test", 1)])
def test_a_part_with_one_class_is_named_with_its_rows(part, label, tmp_path, capsys):
    out = tmp_path / "run"
    config = make_config(data="synthetic", out=str(out), quiet=True, batch_size=64, epochs=3)
    data = in_memory(Rows())
    data.splits[part] = Rows(label=label)  # type: ignore[index]
    train(config, data)
    said = [line for line in capsys.readouterr().err.splitlines() if "one class" in line]
    assert len(said) == 1 and said[0].startswith(f"warning: the {part} part has one class only")
    assert f"label {label} in all 640 rows" in said[0]
    valid = {"parse_constant": lambda name: pytest.fail(f"{name} is no JSON")}
    summary = json.loads((out / "summary.json").read_text(), **valid)
    assert (summary["auc"] is None) == (part == "test")
    assert (summary["val_auc"] is None) == (part == "val")
    for line in (out / "log.jsonl").read_text().splitlines():
        json.loads(line, **valid)


def test_parts_with_both_classes_get_no_warning(tmp_path, capsys):
    config = make_config(data="synthetic", out=str(tmp_path / "a"), quiet=True, batch_size=64)
    train(config, in_memory(Rows()))
    assert "warning" not in capsys.readouterr().err


def test_ids_outside_their_table_are_refused(tmp_path):
    from dlrm.errors import InputError

    config = make_config(data="synthetic", out=str(tmp_path / "a"), quiet=True)
    for part in ("train", "val", "test"):
        data = in_memory(Rows())
        data.splits[part] = Rows(high=50)  # type: ignore[index]
        with pytest.raises(InputError, match=r"feature 'a' has id \d+, but its table has 5 rows"):
            train(config, data)
        assert list(tmp_path.iterdir()) == []


def test_an_id_outside_its_table_late_in_the_data_leaves_nothing_behind(tmp_path):
    from dlrm.errors import InputError

    late = Rows()
    late.ids[600] = 5
    config = make_config(
        data="synthetic", out=str(tmp_path / "a/b"), quiet=True, save_every=5, batch_size=64
    )
    with pytest.raises(InputError, match="row 600: feature 'a' has id 5"):
        train(config, in_memory(late))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_part_without_rows_is_refused_before_training(part, tmp_path):
    from dlrm.errors import InputError

    out = tmp_path / "a"
    data = in_memory(Rows())
    train(make_config(data="synthetic", out=str(out), quiet=True), data)
    kept = sorted(p.name for p in out.rglob("*"))
    data.splits[part] = Rows(size=0)  # type: ignore[index]
    with pytest.raises(InputError, match="split has no rows"):
        train(make_config(data="synthetic", out=str(out), quiet=True, overwrite=True), data)
    assert sorted(p.name for p in out.rglob("*")) == kept


def test_early_stop_and_best_weights(tmp_path):
    config = make_config(
        data="synthetic", out=str(tmp_path / "run"), quiet=True, batch_size=64, epochs=50,
        early_stop="auc", patience=2, sparse_lr=0.5,
    )  # fmt: skip
    summary = train(config, in_memory(Rows()))
    log = [json.loads(x) for x in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    aucs = {e["step"]: e["auc"] for e in log if e["event"] == "val"}
    assert summary["steps"] < 500
    assert aucs[summary["best_step"]] == max(aucs.values()) == summary["val_auc"]
    assert list(aucs).index(summary["best_step"]) == len(aucs) - 3


def test_chance_level_gets_a_hint():
    summary = dict.fromkeys(
        "auc logloss ne calibration val_auc val_logloss val_ne val_calibration samples_per_s "
        "peak_rss_mb best_step".split(),
        0.501,
    )
    assert "is chance" in show({**summary, "best_step": 1, "checkpoint": "x"})
    assert "is chance" not in show({**summary, "auc": 0.7, "best_step": 1, "checkpoint": "x"})


def test_a_full_disk_is_survived_with_a_clear_error(tmp_path):
    """File sizes are limited to 100 KB, which stands for a disk that has no more room."""
    out = tmp_path / "run"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)); "
        "from dlrm.train import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = [*QUICK, "--out", str(out), "--rows", "5000*4", "--save-every", "5", "--steps", "8"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "checkpoint not saved, training goes on" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    assert "partial" not in done.stderr and "free some space" in done.stderr
    assert not list(out.rglob("*partial*")) and not (out / "summary.json").exists()


def test_after_a_full_disk_the_run_goes_on_from_the_last_checkpoint(tmp_path, capsys, monkeypatch):
    flags = [*QUICK, "--out", str(tmp_path / "run"), "--save-every", "5", "--steps", "18"]
    save = checkpoint.save

    def full_after_step_5(path: Path, *more: object) -> None:
        if path.name not in ("best", "step-000000005"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save", full_after_step_5)
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert "step 10: checkpoint not saved, training goes on" in error
    assert "step-000000005; --resume auto goes on from it\nerror: " in error
    monkeypatch.undo()
    assert main([*flags, "--resume", "auto"]) == 0


def test_other_ways_to_run(tmp_path):
    for name, flags in {
        "bf16": ["--dtype", "bf16"],
        "deterministic": ["--deterministic"],
        "adam": ["--sparse-optimizer", "adam", "--dense-optimizer", "adagrad"],
        "profile": ["--profile", str(tmp_path / "trace.json")],
    }.items():
        out = tmp_path / name
        assert main([*QUICK, "--out", str(out), *flags, "--steps", "20"]) == 0, name
        assert 0 < json.loads((out / "summary.json").read_text())["logloss"] < 1, name
    torch.use_deterministic_algorithms(False)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_run_too_short_for_a_trace_says_so(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    flags = [*QUICK, "--out", str(tmp_path / "run"), "--profile", str(trace)]
    assert main([*flags, "--steps", "4"]) == 0
    assert "trace.json: not written" in capsys.readouterr().err and not trace.exists()
    assert main([*flags, "--steps", "6", "--overwrite"]) == 0
    assert "not written" not in capsys.readouterr().err and trace.exists()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
    board = tmp_path / "board"
    assert main([*QUICK, "--out", str(tmp_path / "run"), "--tensorboard", str(board)]) == 0
    assert any(p.stat().st_size > 100 for p in board.iterdir())


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("dlrm", []),
        ("dlrm", ["--clip", "0.5"]),
        pytest.param(
            "dlrm",
            ["--interaction", "cross", "--sparse-optimizer", "adam"],
            marks=pytest.mark.slow,
        ),
        pytest.param("inductor", [], marks=pytest.mark.slow),
    ],
)
def test_compilers_give_the_same_losses(tmp_path, how, more):
    losses = []
    for name in ("none", how):
        out = tmp_path / name
        flags = ["--compile", name, "--steps", "30", "--eval-every", "15", *more]
        assert main([*QUICK, "--out", str(out), *flags]) == 0
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses.append([e["loss"] for e in log if e["event"] == "step"])
    torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-5, rtol=1e-5)


def test_device_names():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_module_runs_as_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dlrm.train", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0
    for group in ("model:", "data:", "optimizers:", "run:"):
        assert group in done.stdout
