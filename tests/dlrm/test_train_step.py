"""``--compile dlrm-step``: the whole training step as one native call."""

import shutil
from pathlib import Path

import pytest
import torch

from dlrm.datasets.load import load_dataset
from dlrm.errors import InputError
from dlrm.report import Report
from dlrm.settings import TrainConfig
from dlrm.train import make_config, train
from dlrm.trainer import Trainer


def config(out: Path, compile: str = "dlrm-step", **more: object) -> TrainConfig:
    return make_config(
        "tiny", data="synthetic", samples=2000, steps=30, eval_every=30, out=str(out), quiet=True,
        device="cpu", compile=compile, **more,
    )  # fmt: skip


def test_it_replays_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = train(config(tmp_path / "a", save_every=15))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000000030")
    resumed = train(config(tmp_path / "b", save_every=15, resume="auto"))
    for name in ("auc", "logloss", "ne", "calibration", "val_auc"):
        assert straight[name] == resumed[name]


def test_it_trains_as_compiled_does(tmp_path: Path) -> None:
    one = train(config(tmp_path / "a"))
    two = train(config(tmp_path / "b", "dlrm"))
    assert one["auc"] == pytest.approx(two["auc"], abs=1e-3)
    assert one["logloss"] == pytest.approx(two["logloss"], rel=1e-3)


def test_steps_are_replays(tmp_path: Path) -> None:
    made = config(tmp_path / "a")
    trainer = Trainer(made, load_dataset(made.data, made.model), Report(tmp_path / "log.jsonl"))
    for batch in list(trainer.train_reader.epoch(0))[:6]:
        assert torch.isfinite(trainer.step(batch))
    assert trainer.whole_step.recordings.replays == 4, str(trainer.whole_step)


@pytest.mark.parametrize("more", [{"clip": 1.0}, {"dtype": "bf16"}])
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(InputError, match="--compile dlrm-step"):
        config(tmp_path / "a", **more).validate()
