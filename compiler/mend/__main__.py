"""``python -m compiler.mend FILE_OR_MODULE...``: find what breaks graphs in source, and mend it.

Prints a line for each place, as linters do, and a summary. ``--diff`` shows what ``--write`` would
change; ``--check`` ends with 1 if anything breaks, for use in CI. Bad input ends with 2.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import stat
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from compiler.mend.findings import Finding


class BadInput(Exception):
    """What is wrong with an argument."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    options = _parser().parse_args(arguments)
    findings: list[Finding] = []
    changed = 0
    try:
        files = list(dict.fromkeys(f for given in options.what for f in _files(given)))
        for file in files:
            text, encoding = _read(file)
            new, found = _mended(text, file, options.all)
            findings += found
            for one in found:
                print(one)
            if new != text:
                changed += 1
                if options.diff:
                    _show(text, new, file)
                elif options.write:
                    _write(file, new, encoding)
    except BadInput as error:
        print(f"mend: {error}", file=sys.stderr)
        return 2
    print(_summary(findings, len(files), changed if options.write else None))
    return 1 if options.check and findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compiler.mend",
        description="Find and mend what breaks graphs.",
    )
    parser.add_argument("what", nargs="+", metavar="FILE_OR_MODULE",
                        help="a Python file, a folder, or a module's name")  # fmt: skip
    parser.add_argument("--all", action="store_true",
                        help="look into functions that show no sign of tensors, too")  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="show what --write would change")
    how.add_argument("--write", action="store_true", help="rewrite the files")
    how.add_argument("--check", action="store_true", help="exit with 1 if anything breaks")
    return parser


def _files(given: str) -> Iterator[Path]:
    """The files that an argument names. Raises BadInput."""
    path = Path(given)
    if path.is_dir():
        files = sorted(path.rglob("*.py"))
        if not files:
            raise BadInput(f"{given}: no *.py files in this folder")
        yield from files
    elif path.suffix == ".py":
        if not path.exists():
            raise BadInput(f"{given}: no such file")
        yield path
    elif path.exists():
        raise BadInput(f"{given}: not a Python file (want a name that ends in .py)")
    elif os.sep in given:
        raise BadInput(f"{given}: no such file")
    else:
        yield from _module(given)


def _module(name: str) -> Iterator[Path]:
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"{name}: no such file, and not a module's name")
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise BadInput(f"{name}: no module named {error.name!r}") from None
    except Exception as error:
        raise BadInput(f"{name}: cannot be found: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise BadInput(f"{name}: no such file or module")
    if spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            yield from sorted(Path(folder).rglob("*.py"))
    elif spec.origin and spec.origin.endswith(".py"):
        yield Path(spec.origin)
    else:
        raise BadInput(f"{name}: has no Python source ({spec.origin})")


def _read(file: Path) -> tuple[str, str]:
    try:
        with tokenize.open(file) as stream:
            return stream.read(), stream.encoding
    except (SyntaxError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not Python text: {error}") from None
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None


def _mended(text: str, file: Path, everything: bool) -> tuple[str, list[Finding]]:
    from compiler.mend.written import mend_text  # brings in PyTorch

    try:
        return mend_text(text, str(file), everything)
    except SyntaxError as error:
        raise BadInput(f"{file}:{error.lineno}: syntax error: {error.msg}") from None
    except ValueError as error:  # null bytes
        raise BadInput(f"{file}: not Python text: {error}") from None


def _show(old: str, new: str, file: Path) -> None:
    lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for line in difflib.unified_diff(*lines, str(file), f"{file} (mended)"):
        print(line, end="" if line.endswith("\n") else "\n\\ No newline at end of file\n")


def _write(file: Path, text: str, encoding: str) -> None:
    """Replace a file in one step, keeping its permissions."""
    real = file.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
        try:
            with open(handle, "w", encoding=encoding, newline="") as stream:
                stream.write(text)
            os.chmod(name, stat.S_IMODE(real.stat().st_mode))
            os.replace(name, real)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise BadInput(f"{file}: cannot be written: {error.strerror}") from None


def _summary(findings: Sequence[Finding], files: int, written: int | None) -> str:
    mended = sum(f.mended for f in findings)
    left = len(findings) - mended
    told = f"{files} file{'s' * (files != 1)}: "
    if not findings:
        return told + "nothing breaks a graph"
    if written is None:
        told += f"{len(findings)} would break a graph, {mended} can be mended, {left} cannot"
    else:
        told += f"{mended} mended, {left} not, {written} file{'s' * (written != 1)} rewritten"
    return told


if __name__ == "__main__":
    sys.exit(main())
