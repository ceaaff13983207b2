"""``python -m compiler.mend``: what it prints, writes and exits with."""

from __future__ import annotations

import ast
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.mend import rewrite
from compiler.mend.__main__ import main
from compiler.mend.function import Function
from tests.compiler.mend.observing import observed

SOURCE = '''\
#!/usr/bin/env python
"""A file to mend."""
from __future__ import annotations

import logging
import warnings

import torch
from torch import nn  # kept

logger = logging.getLogger(__name__)


def check(x: torch.Tensor) -> torch.Tensor:  # a comment that stays
    y = x  +  1   # so do two spaces
    if torch.isnan(y).any():
        raise ValueError(f"NaN: {y.sum().item():.2f}\\\\n")

    # between
    print("mean", y.mean().item())
    # and after
    assert (y > -100).all(), "too low"
    return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.logger = logging.getLogger("net")

    @torch.no_grad()
    def forward(self, x: torch.Tensor):
        """Docs."""
        out = check(x)
        self.logger.info("out %s", out)
        if out.sum() > 10:
            warnings.warn("large")
        return out * (
            2  # kept as it is
        )
'''


def written(folder: Path, text: str = SOURCE, name: str = "given.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def test_findings_are_printed_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    assert main([str(file)]) == 0
    assert file.read_text() == SOURCE
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:17:9: raise on a tensor: mended (trap)",
        f"{file}:20:5: print: mended (defer)",
        f"{file}:22:5: assert on a tensor: mended (trap)",
        f"{file}:35:9: logging: mended (defer)",
        f"{file}:37:13: warning: mended (defer)",
        "1 file: 5 would break a graph, 5 can be mended, 0 cannot",
    ]


def test_check_exits_with_1_while_something_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    assert main([str(file), "--check"]) == 1
    assert main([str(file), "--write"]) == 0
    capsys.readouterr()
    assert main([str(file), "--check"]) == 0
    assert capsys.readouterr().out == "1 file: nothing breaks a graph\n"
    left = written(tmp_path, "def forward(self, x):\n    y = print(x) or x\n    return y\n")
    assert main([str(left), "--check", "--all"]) == 1
    assert "not mended: is no statement of its own" in capsys.readouterr().out


def test_written_source_keeps_what_it_does_not_change(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.chmod(0o751)
    assert main([str(file), "--write"]) == 0
    text = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o751
    for kept in (
        "#!/usr/bin/env python\n",
        "from torch import nn  # kept\nfrom compiler.mend import runtime as _mend\n",
        "def check(x: torch.Tensor) -> torch.Tensor:  # a comment that stays\n",
        "    y = x  +  1   # so do two spaces\n",
        "\n    # between\n",
        "    # and after\n",
        "        return out * (\n            2  # kept as it is\n        )\n",
    ):
        assert kept in text, text
    assert os.listdir(tmp_path) == ["given.py"]


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path)
    main([str(file), "--write"])
    once = file.read_text()
    main([str(file), "--write"])
    assert file.read_text() == once
    assert once.count("from compiler.mend import runtime as _mend") == 1


def test_written_source_behaves_as_before_and_is_one_graph(tmp_path: Path) -> None:
    before = loaded(written(tmp_path, name="before_mending.py")).Net()
    file = written(tmp_path, name="after_mending.py")
    main([str(file), "--write"])
    after = loaded(file).Net()
    torch._dynamo.reset()
    compiled = torch.compile(after, backend="aot_eager", fullgraph=True)
    for x in (
        torch.zeros(2),
        torch.full((2,), 50.0),
        -torch.full((2,), 500.0),
        torch.tensor([torch.nan]),
    ):
        expected = [_without_place(e) for e in observed(before, x)]
        assert [_without_place(e) for e in observed(after, x)] == expected
        assert [_without_place(e) for e in observed(compiled, x)] == expected


def _without_place(event: tuple[Any, ...]) -> tuple[Any, ...]:
    """A warning or record without its file and line, which are the site's in written source."""
    return event[: {"warning": 3, "log": 3}.get(event[0], len(event))]


def test_diff_shows_what_write_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    main([str(file), "--diff"])
    diff = capsys.readouterr().out
    assert file.read_text() == SOURCE
    main([str(file), "--write"])
    added = [x[1:] for x in diff.splitlines() if x.startswith("+") and not x.startswith("+++")]
    text = file.read_text().splitlines()
    assert added and all(x in text for x in added)
    assert '-    print("mean", y.mean().item())' in diff.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "def f(x): print(x); return x\n",
        "import torch\ndef f(x):\n    y = x; print(y)\n    return y\n",
        "def f(x):\n\tprint(x)\n\treturn x\n",
        "def f(x):\n    print(x)",
        'def f(x):\n    print(f"""{x.sum()}\n  two""")\n    return x\n',
        "class A:\n    class B:\n        def f(self, x):\n            print(x)\n",
        "if True:\n    def f(x):\n        print(x)\n",
        "def f(x):\n    print(x)\n\ndef f(x):\n    print(x, 2)\n",
        "_site_f = 3\ndef f(x):\n    print(x, _site_f)\n",
        "x = '\\u00e9'\ndef f(x):\n    print('\\u00e9', x)  # \\u00e9\n",
        "def f(x):\r\n    print(x)\r\n    return x\r\n",
        "",
    ],
)
def test_odd_layouts_stay_valid_and_mean_the_same(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.py"
    file.write_bytes(text.encode())
    assert main([str(file), "--write", "--all"]) == 0
    new = file.read_bytes().decode()
    ast.parse(new)
    assert main([str(file), "--write", "--all"]) == 0
    assert file.read_bytes().decode() == new
    if "class" in text or not text:
        return
    spaces: list[dict[str, Any]] = [{}, {}]
    for source, names in zip((text, new), spaces, strict=True):
        exec(compile(source, "odd", "exec"), names)
    if "f" in spaces[0]:
        x = torch.ones(2)
        assert observed(spaces[0]["f"], x) == observed(spaces[1]["f"], x)


def test_a_folder_and_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    written(tmp_path, "x = 1\n", "one.py")
    written(tmp_path / "deep", "def forward(self, x):\n    print(x)\n", "two.py")
    assert main([str(tmp_path), "--all"]) == 0
    out = capsys.readouterr().out
    assert "deep/two.py:2:5: print: mended (defer)" in out and "2 files: 1 would break" in out
    assert main(["compiler.options"]) == 0
    assert "1 file: nothing breaks a graph" in capsys.readouterr().out


def bad_inputs() -> list[tuple[str, str, str]]:
    return [
        ("missing.py", "", "missing.py: no such file"),
        ("not_a_module_of_anyone", "", "not_a_module_of_anyone: no such file or module"),
        ("not_a_package_of_anyone.part", "", "no module named 'not_a_package_of_anyone'"),
        ("sys", "", "sys: has no Python source"),
        ("wrong.py", "def f(:\n", "wrong.py:1: syntax error"),
        ("later.py", "x = 1\ny = (\n", "later.py:2: syntax error"),
        ("null.py", "x = 1\0\n", "null.py"),
        ("text.txt", "hello", "text.txt: not a Python file"),
        ("latin.py", "x = '\\udce9'\n", "latin.py: not Python text"),
        ("a b", "", "a b: no such file, and not a module's name"),
    ]


@pytest.mark.parametrize(("name", "text", "message"), bad_inputs())
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str,
    text: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text:
        text = text.encode().decode("unicode_escape") if "udce9" in text else text
        Path(name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main([name, "--write"]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no *.py files" in capsys.readouterr().err


def test_as_a_process(tmp_path: Path) -> None:
    file = written(tmp_path, "import torch\ndef f(x: torch.Tensor):\n    print(x)\n")
    command = [sys.executable, "-m", "compiler.mend", str(file), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "print: mended (defer)" in done.stdout


def test_an_error_of_mending_leaves_that_function_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(function: Function) -> None:
        if function.qualname == "first":
            function.node.body.clear()
            raise LookupError("no such luck")

    steps = rewrite.passes()
    monkeypatch.setattr(rewrite, "passes", lambda: (*steps, broken))
    file = tmp_path / "two.py"
    one = 'def {0}(x: torch.Tensor) -> None:\n    print("{0}", x.sum())\n'
    file.write_text("import torch\n\n\n" + one.format("first") + "\n\n" + one.format("second"))
    with pytest.raises(LookupError, match="no such luck"):
        main([str(file), "--write"])
    monkeypatch.setenv("DLRM_MEND_STRICT", "0")
    assert main([str(file), "--write"]) == 0
    said = capsys.readouterr().out
    assert (
        f"{file}:4:1: function: not mended: could not be mended: LookupError: no such luck" in said
    )
    new = file.read_text()
    assert one.format("first") in new
    assert one.format("second") not in new
    assert "_mend.emit(" in new
