"""What this machine has and what is missing: `python -m dlrm.check`.

One line an item, with the mend under one that is not right. A warning limits something (a GPU, an
extra, compiled kernels); a failure stops the main job, which is to train a model, and only that
makes the exit code 1. Runs wherever Python does: whatever is imported is imported where it is
checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm import machine, packages
from dlrm.cli import run

SETUP = "make setup, or without make: pip install -c constraints.txt -e ."
CXX_MEND = "Debian, Ubuntu: apt-get install g++; macOS: xcode-select --install, brew install libomp"
OLDEST = (3, 11)
SAMPLE = Path("data", "criteo_sample.tsv")
GB = 1e9


@dataclass(frozen=True)
class Item:
    """One thing that was looked at: status is ok, warning or failed."""

    name: str
    status: str
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Item:
    return Item(name, "ok", found)


def warning(name: str, found: str, mend: str) -> Item:
    return Item(name, "warning", found, mend)


def failed(name: str, found: str, mend: str) -> Item:
    return Item(name, "failed", found, mend)


def check_python() -> Iterator[Item]:
    found = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < OLDEST:
        yield failed(
            "Python", found, "Python 3.11 or later is needed: make PYTHON=python3.12 setup"
        )
    else:
        yield ok("Python", found)


# ------------------------------------------------------------------------------------ packages


def check_packages() -> Iterator[Item]:
    for extra, lines in packages.by_extra().items():
        try:
            group = packages.inspect(extra, lines)
        except ImportError:
            yield failed("packages", "the packages of this project are not installed", SETUP)
            return
        name, lacking = f"extra {extra}" if extra else "packages", ", ".join(group.lacking)
        if group.lacking and extra:
            yield warning(name, lacking, f"pip install -c constraints.txt -e '.[{extra}]'")
        elif group.lacking:
            yield failed(name, lacking, SETUP)
        elif group.present:
            yield ok(name, ", ".join(group.present))


def check_torch() -> Iterator[Item]:
    try:
        import torch
    except ImportError as error:
        yield failed("torch", f"cannot be imported: {error}", SETUP)
        return
    cuda = torch.version.cuda
    yield ok(
        "torch", f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "CPU build")
    )


def check_scale() -> Iterator[Item]:
    """fbgemm and torchrec: present, built for this torch (pip cannot see that), importable."""
    name = "extra scale"
    torch_version, torchrec = (
        packages.installed_version("torch"),
        packages.installed_version("torchrec"),
    )
    forms = {form: packages.installed_version(form) for form in ("fbgemm-gpu", "fbgemm-gpu-cpu")}
    here = {form: version for form, version in forms.items() if version}
    mend = "make setup, or on a CPU: pip install -c constraints.txt -e '.[scale]' and pip install "
    mend += (
        "--no-deps torchrec==1.8.0; with CUDA: pip install -c constraints.txt -e '.[scale-cuda]'"
    )
    if torch_version is None:
        return
    if torchrec is None or not here:
        missing = [*([] if here else ["fbgemm"]), *([] if torchrec else ["torchrec"])]
        yield warning(name, f"missing: {', '.join(missing)}", mend)
        return
    found = ", ".join(
        f"{form} {version}" for form, version in [("torchrec", torchrec), *here.items()]
    )
    if len(here) > 1:
        yield warning(name, f"{found}: two forms of one package", "pip uninstall one of them")
        return
    if not all(
        packages.pairs_with_torch(torch_version, version) for version in [torchrec, *here.values()]
    ):
        found += f" beside torch {torch_version}: 1.N belongs to torch 2.(N+5)"
        yield warning(name, found, mend)
        return
    try:
        importlib.import_module("fbgemm_gpu")
        importlib.import_module("torchrec")
    except (ImportError, OSError) as error:
        yield warning(name, f"{found}, but import fails: {error}", mend)
        return
    yield ok(name, f"{found}, built for torch {torch_version}")


# ------------------------------------------------------------------------------------- machine


def check_compiler() -> Iterator[Item]:
    name = "C++"
    compiler = machine.find_compiler()
    if compiler is None:
        yield warning(name, "no compiler: training works, compiled kernels do not", CXX_MEND)
    elif compiler.problem:
        found = f"{compiler.version}: {compiler.problem.strip()}"
        yield warning(name, found, f"{CXX_MEND}; or name another compiler in CXX")
    else:
        yield ok(name, f"{compiler.version}; an OpenMP program ran on {compiler.threads} threads")


def check_cpu() -> Iterator[Item]:
    sets = machine.cpu_instructions()
    found = f"{machine.cpu_name()}, {machine.cores()} cores; {', '.join(sets) or 'no vector sets'}"
    try:
        import torch

        found += f"; torch uses {torch.backends.cpu.get_cpu_capability()}"
    except ImportError:
        pass
    if sets:
        yield ok("CPU", found)
    else:
        yield warning("CPU", found, "nothing to install: training works, but slowly")


def check_memory() -> Iterator[Item]:
    total, free = machine.memory_bytes()
    found = f"{free / GB:.1f} of {total / GB:.1f} GB available"
    if total == 0:
        yield ok("memory", "unknown on this system")
    elif free < 1.5 * GB:
        yield warning("memory", found, "end other programs; the sample trains in about 1 GB")
    else:
        yield ok("memory", found)


def check_disk() -> Iterator[Item]:
    here = Path.cwd()
    found = f"{shutil.disk_usage(here).free / GB:.1f} GB free in {here}"
    if not os.access(here, os.W_OK):
        yield warning("disk", f"{here} is not writable", "give --out a folder that is")
    elif shutil.disk_usage(here).free < 0.5 * GB:
        yield warning("disk", found, "free some, or give --out a folder on another disk")
    else:
        yield ok("disk", found)


def check_gpu() -> Iterator[Item]:
    gpus = machine.nvidia_gpus()
    try:
        import torch
    except ImportError:
        torch_cuda, usable = None, False
    else:
        torch_cuda, usable = torch.version.cuda, torch.cuda.is_available()
    if usable:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield ok("GPU", ", ".join(gpus.lines or names))
    elif gpus.problem:
        yield warning("GPU", f"nvidia-smi fails: {gpus.problem}", "reinstall the NVIDIA driver")
    elif not gpus.lines:
        yield ok("GPU", "none; training runs on the CPU")
    elif torch_cuda is None:
        mend = "DLRM_DEVICE=cuda make setup"
        yield warning("GPU", f"{', '.join(gpus.lines)}, but torch is a CPU build", mend)
    else:
        mend = f"update the driver to one for CUDA {torch_cuda}; see also CUDA_VISIBLE_DEVICES"
        yield warning("GPU", f"{', '.join(gpus.lines)}, but torch cannot use it", mend)


# ---------------------------------------------------------------------------------------- data


def published_checksums(sample: Path) -> set[str]:
    """SHA-256 digests that data/README.md gives on a line naming the file."""
    readme = sample.parent / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    lines = [line for line in text.splitlines() if sample.name in line]
    return {digest for line in lines for digest in re.findall(r"\b[0-9a-f]{64}\b", line)}


def check_sample() -> Iterator[Item]:
    """The bundled sample against the checksum beside it."""
    name, sample = "sample data", packages.ROOT / SAMPLE
    if not (packages.ROOT / "pyproject.toml").is_file():
        yield ok(name, "not part of an installed package: name your own files with --input")
        return
    mend = "python -m dlrm.datasets.sample makes it again"
    if not sample.is_file():
        yield warning(name, f"{SAMPLE} is missing: make train wants it", mend)
        return
    digest = hashlib.sha256(sample.read_bytes()).hexdigest()
    published = published_checksums(sample)
    if published and digest not in published:
        yield warning(
            name, f"{SAMPLE} is not the file that data/README.md gives the checksum of", mend
        )
        return
    with sample.open("rb") as file:
        rows = sum(1 for _ in file)
    yield ok(name, f"{SAMPLE}, {rows} rows, checksum {digest[:12]}")


def data_sets(folder: Path) -> list[str]:
    """What a data folder holds, named as `dlrm.preprocess` and `dlrm.train` know it."""
    found = []
    movielens = folder / "ml-100k"
    if (movielens / "ml-100k.inter").is_file() or (movielens / "u.data").is_file():
        found.append("MovieLens 100K (ml-100k)")
    for pattern in ("train.txt*", "day_*", "criteo_sample.*"):
        found += [f"Criteo {path.name}" for path in sorted(folder.glob(pattern))]
    return found


def check_data_dir() -> Iterator[Item]:
    name, value = "DLRM_DATA_DIR", os.environ.get("DLRM_DATA_DIR", "")
    if not value:
        yield ok(name, "not set: only the bundled sample and synthetic data are at hand")
        return
    if not Path(value).is_dir():
        yield warning(name, f"{value} is not a folder", "name one that is, see data/README.md")
        return
    found = data_sets(Path(value))
    if found:
        yield ok(name, f"{value}: {', '.join(found)}")
    else:
        mend = "data/README.md says what belongs there: ml-100k/, train.txt, day_0 and so on"
        yield warning(name, f"{value} holds no data set that is known here", mend)


# ------------------------------------------------------------------------------------ main job


def check_main_job() -> Iterator[Item]:
    """Build the tiny model, compute a loss and its gradients."""
    name = "main job"
    try:
        import torch

        from dlrm.batch import Batch
        from dlrm.config import DLRMConfig
        from dlrm.model import DLRM
    except ImportError as error:
        yield failed(name, f"cannot be imported: {error}", SETUP)
        return
    config = DLRMConfig.preset("tiny")
    generator = torch.Generator().manual_seed(0)
    samples, rows = 64, min(config.rows)
    ids = torch.randint(rows, (samples, len(config.rows)), generator=generator)
    dense = torch.rand(samples, config.dense_in, generator=generator)
    batch = Batch.one_hot(dense, ids, torch.arange(samples) % 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DLRM(config)
    logit = model(*batch.inputs())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, batch.label)
    loss.backward()
    lacking = [n for n, p in model.named_parameters() if p.grad is None]
    if not bool(loss.isfinite()) or lacking:
        found = f"loss {float(loss):.3f}, no gradient for {', '.join(lacking) or 'nothing'}"
        yield failed(name, found, f"the installation is broken; {SETUP}")
        return
    parameters = sum(p.numel() for p in model.parameters())
    yield ok(name, f"a model of {parameters} parameters trains: loss {float(loss.detach()):.3f}")


CHECKS: dict[str, Callable[[], Iterator[Item]]] = {
    "Python": check_python,
    "torch": check_torch,
    "packages": check_packages,
    "extra scale": check_scale,
    "C++": check_compiler,
    "CPU": check_cpu,
    "memory": check_memory,
    "disk": check_disk,
    "GPU": check_gpu,
    "sample data": check_sample,
    "DLRM_DATA_DIR": check_data_dir,
    "main job": check_main_job,
}
VITAL = ("Python", "torch", "packages", "main job")


def run_checks() -> Iterator[Item]:
    """Every item in order. A check that itself goes wrong is an item like any other."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:
            found = f"the check stopped: {type(error).__name__}: {error}"
            yield Item(name, "failed" if name in VITAL else "warning", found, SETUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Print every item; 0 if the main job can run, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrm.check", description="Say what this machine has and what is missing."
    )
    parser.add_argument("--json", action="store_true", help="print the items as one JSON object")
    return run(lambda: _check(parser.parse_args(argv).json))


def _check(as_json: bool) -> int:
    items = []
    for item in run_checks():
        items.append(item)
        if not as_json:
            print(f"{item.status:8} {item.name:18} {item.found}", flush=True)
            if item.mend:
                print(f"{'':8} {'':18} mend: {item.mend}", flush=True)
    runs = all(item.status != "failed" for item in items)
    warnings = sum(item.status == "warning" for item in items)
    if as_json:
        print(json.dumps({"ok": runs, "items": [dataclasses.asdict(i) for i in items]}, indent=2))
    elif runs:
        print(f"The main job can run ({warnings} warnings).")
    else:
        print("The main job cannot run: mend what failed above.")
    return 0 if runs else 1


if __name__ == "__main__":
    sys.exit(main())
