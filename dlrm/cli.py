"""Command lines made from dataclasses: one flag a field, grouped, with the defaults shown.

Precedence: the preset, then a TOML file, then flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm import startup
from dlrm.errors import InputError
from dlrm.files import explain


def integers(text: str) -> tuple[int, ...]:
    """A list of integers: "512,256", with repeats as "1000*26"; "" is empty.

    >>> integers("7,1000*3")
    (7, 1000, 1000, 1000)
    """
    values: list[int] = []
    for item in filter(None, text.split(",")):
        number, star, times = item.partition("*")
        if star and not 0 < int(times) <= 1 << 20:
            raise ValueError(f"{times} is no number of times")
        values += [int(number)] * (int(times) if star else 1)
    return tuple(values)


def _parser_of(annotation: Any) -> Callable[[str], Any]:
    if annotation == tuple[int, ...]:
        return integers
    return typing.cast(Callable[[str], Any], annotation)


def add_flags(parser: argparse.ArgumentParser, config: type, title: str) -> None:
    """Add a flag for each field of the dataclass; one that is not given stays out of the result."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for f in dataclasses.fields(config):
        flag = "--" + f.name.replace("_", "-")
        text = f.metadata.get("help", "")
        if hints[f.name] is bool:
            group.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
            continue
        shown = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        group.add_argument(
            flag,
            type=_parser_of(hints[f.name]),
            default=argparse.SUPPRESS,
            metavar=getattr(hints[f.name], "__name__", "").upper().replace("TUPLE", "N,N,..."),
            help=f"{text} ({shown})" if shown != "" else text,
        )


def read_toml(path: str) -> dict[str, Any]:
    """The file's tables; InputError for a missing or malformed file."""
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InputError(f"--config: there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise InputError(f"--config: {path}: {error.strerror}") from None


def override(config: Any, values: dict[str, Any], source: str) -> Any:
    """The dataclass with ``values`` put in, each checked against its field's name and type."""
    hints = typing.get_type_hints(type(config))
    checked = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            mend = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(hints)}"
            raise InputError(f"{source}: unknown setting {name!r}{mend}")
        checked[name] = _checked(value, hints[name], f"{source}: {name}")
    return dataclasses.replace(config, **checked)


def _checked(value: Any, kind: Any, where: str) -> Any:
    if kind == tuple[int, ...] and isinstance(value, list | tuple):
        if all(type(v) is int for v in value):
            return tuple(value)
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    wanted = "a list of integers" if kind == tuple[int, ...] else kind.__name__
    raise InputError(f"{where}: {value!r} is not {wanted}")


def toml(tables: dict[str, Any]) -> str:
    """Nested plain values as TOML text."""
    lines = [f"{k} = {_value(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"] + [f"{k} = {_value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)


def run(command: Callable[[], int]) -> int:
    """Run a command: bad input is one line on stderr and status 2, never a traceback.

    Ctrl-C is one line too, and status 130.
    """
    try:
        startup.interruptible()
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: not enough memory: {error}; ask for less at a time", file=sys.stderr)
        return 2
    except UnicodeEncodeError as error:
        bad = ascii(error.object[error.start : error.end])
        print(f"error: a name has bytes that are not UTF-8 ({bad}): rename it", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        return 141
    except OSError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    finally:
        _flush()


def _flush() -> None:
    """Write out what was printed; where that fails, nothing more, so that Python's end is quiet."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
