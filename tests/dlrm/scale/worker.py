"""What each process of test_scale.py runs: several trainings in one job, for one start-up."""

import dataclasses
import json
import sys
from pathlib import Path

from dlrm.scale import run, world
from dlrm.train import make_config


def main(folder: str, cases: str) -> None:
    run._hush()
    with world.joined("cpu") as here:
        for name, given in json.loads(cases).items():
            config = make_config("tiny", out=str(Path(folder) / name), **given)
            status = run._train(config, here)
            assert status == 0, (name, status)
            if here.first:
                written = dataclasses.asdict(config.scale)
                (Path(folder) / f"{name}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
