"""The parts of the packaging agree: settings, pins, the set-up, make's targets, the built wheel."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dlrm import setup_env
from dlrm.packages import pairs_with_torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        name, version = line.split("==")
        assert canonicalize_name(name) not in found, f"{name} is pinned twice"
        assert "+" not in version, f"{line}: a local build is not to be had everywhere"
        found[canonicalize_name(name)] = version
    return found


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_has_a_pin_in_its_range(extra: str) -> None:
    pinned = pins()
    for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        wanted = Requirement(line)
        if wanted.name == "dlrm":
            assert wanted.extras <= EXTRAS.keys()
            continue
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), line


def test_all_holds_every_extra() -> None:
    # the survey's models are packages of others, which nothing else here needs
    single = EXTRAS.keys() - {"all", "all-cuda", "scale", "scale-cuda", "survey"}
    assert Requirement(EXTRAS["all"][0]).extras == single | {"scale"}
    assert Requirement(EXTRAS["all-cuda"][0]).extras == single | {"scale-cuda"}


def test_torch_fbgemm_and_torchrec_belong_together() -> None:
    pinned = pins()
    assert pinned["torch"] == setup_env.TORCH
    assert pinned["torchrec"] == setup_env.TORCHREC
    for name in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        assert pairs_with_torch(pinned["torch"], pinned[name]), name
    assert pinned["triton"] == "3.7.1"  # what torch 2.13.0 with CUDA requires
    assert pinned["torchmetrics"] == "1.0.3"  # what torchrec 1.8.0 requires


def make(*arguments: str) -> str:
    """What make prints. The tests may run under `make test` themselves: it must not notice."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env.pop("MFLAGS", None)
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_make_alone_lists_the_targets() -> None:
    shown = make()
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.M)
    assert phony is not None
    for target in set(phony.group(1).split()) - {"help"}:
        assert re.search(rf"\bmake {target}\b|\b{target}:", shown), target


@pytest.mark.parametrize("target", ["train", "test", "lab", "lint", "check"])
def test_targets_set_up_first_and_use_the_environment(target: str) -> None:
    plan = make("-n", target).splitlines()
    assert plan[0] == "python3 dlrm/setup_env.py"
    assert len(plan) > 1
    assert all(line.startswith(".venv/bin/python -m ") for line in plan[1:])


def test_train_uses_flags_that_exist() -> None:
    for module in ("preprocess", "train"):
        line = re.search(rf"-m dlrm\.{module} (.+)$", MAKEFILE, re.M)
        assert line is not None
        usage = subprocess.run(
            [sys.executable, "-m", f"dlrm.{module}", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in re.findall(r"--[\w-]+", line.group(1)):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", usage), f"{module} has no {flag}"


def test_ci_runs_under_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, dlrm.check; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_set_up_is_understood_by_old_pythons() -> None:
    """So that they can say they are too old: their grammar, and only the standard library."""
    tree = ast.parse((ROOT / "dlrm" / "setup_env.py").read_text(), feature_version=(3, 7))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names


def test_the_wheel_holds_every_module_and_kernel_source(tmp_path: Path) -> None:
    packages = [name for name in ("dlrm", "compiler") if (ROOT / name).is_dir()]
    copy = tmp_path / "copy"
    for name in packages:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=copy, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("dlrm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in packages:
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".cpp", ".h", ".toml", ".json"):
                assert str(path.relative_to(ROOT)) in names
    assert "dlrm/py.typed" in names


def test_lab_is_that_of_the_environment() -> None:
    """`python -m jupyter lab` takes the first jupyter-lab of PATH, which may be another's."""
    assert "-m jupyterlab $(ARGS) tutorials" in MAKEFILE and "-m jupyter " not in MAKEFILE


def test_the_pages_name_files_that_exist() -> None:
    for page in ("README.md", "data/README.md"):
        named = set(
            re.findall(r"\b(?:dlrm|compiler|tests|data)/[\w/]+\.\w+", (ROOT / page).read_text())
        )
        assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
