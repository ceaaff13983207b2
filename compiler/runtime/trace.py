"""Traces: what compiled graphs were called with, and how long they took.

``recording(file)`` notes every call of every compiled graph: types, sizes, strides, devices and
addresses of its inputs and results, plain numbers as they are, and seconds. The policy of CUDA
graphs (``compiler.runtime.cudagraph_policy``) decides on such calls, live or read from a file:

    with recording("calls.jsonl"):
        ...  # run a model that was compiled
    graphs, calls = read("calls.jsonl")

A file has a JSON object a line: a graph's facts before its first call, then calls as they came.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

SMALL = 1  # elements of a CPU tensor whose value is noted


@dataclass(frozen=True)
class Value:
    """An input or result of a call.

    ``kind``: tensor, number (Python's), or other. ``value``: of a number, or of a CPU tensor with
    one element.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    device: str = ""
    address: int = 0
    bytes: int = 0
    value: float | int | bool | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether it is a tensor on a GPU."""
        return self.kind == "tensor" and self.device.startswith("cuda")

    @property
    def form(self) -> tuple[Any, ...]:
        """What a captured graph fixes of it, its address and value apart."""
        return self.kind, self.dtype, self.shape, self.stride, self.device


@dataclass(frozen=True)
class Facts:
    """What is known of a compiled graph before it runs.

    * ``parameters``: inputs that are a model's parameters or buffers, or what forward saved.
    * ``mutated``: inputs that it writes.
    * ``host``: operations that wait for the GPU or compute on the host.
    * ``random``: operations that draw random numbers.
    * ``rows``: whether each row of its results depends on the same row of its inputs alone, for all
      inputs whose first size is symbolic: then rows may be added to fill a bucket.
    * ``by_address``: inputs whose addresses kernels read from the device's memory (see
      ``compiler.graph.KernelOp``): a captured launch cannot be pointed to others.
    """

    name: str
    parameters: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    host: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    rows: bool = False
    by_address: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a graph."""

    graph: str
    inputs: tuple[Value, ...]
    results: tuple[Value, ...] = ()
    seconds: float = 0.0


class Writer:
    """Who notes calls: in ``calls``, and in a file if there is one."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file
        self.graphs: dict[str, Facts] = {}
        self.calls: list[Call] = []

    def note(self, facts: Facts, call: Call) -> None:
        """A call has been made."""
        if facts.name not in self.graphs:
            self.graphs[facts.name] = facts
            self._write({"graph": dataclasses.asdict(facts)})
        self.calls.append(call)
        self._write({"call": dataclasses.asdict(call)})

    def _write(self, line: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")


_writer: Writer | None = None


@contextmanager
def recording(file: str | Path | None = None) -> Iterator[Writer]:
    """Note the calls of compiled graphs meanwhile; also into ``file``, if it is named."""
    global _writer
    before = _writer
    opened = open(file, "w") if file is not None else None  # noqa: SIM115  # closed below
    _writer = Writer(opened)
    try:
        yield _writer
    finally:
        _writer = before
        if opened is not None:
            opened.close()


def watched(call: Callable[[list[Any]], Any], facts: Facts) -> Callable[[list[Any]], Any]:
    """A compiled graph, its inputs in a list that it clears, whose calls are noted when asked."""

    def run(inputs: list[Any]) -> Any:
        if _writer is None:
            return call(inputs)
        values = tuple(map(value_of, inputs))
        started = time.perf_counter()
        results = call(inputs)
        seconds = time.perf_counter() - started
        given = tuple(map(value_of, results))
        _writer.note(facts, Call(facts.name, values, given, seconds))
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def value_of(x: Any) -> Value:
    """What a trace says of an input or result."""
    if isinstance(x, bool | int | float):
        return Value("number", type(x).__name__, value=x)
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return Value("other", type(x).__name__)
    known = x.item() if x.is_cpu and x.numel() == SMALL and not x.is_complex() else None
    return Value(
        "tensor", str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride(), str(x.device),
        x.data_ptr(), x.numel() * x.element_size(), known,
    )  # fmt: skip


def read(file: str | Path) -> tuple[dict[str, Facts], list[Call]]:
    """The graphs and calls of a file; raises ValueError naming a line that cannot be read."""
    graphs: dict[str, Facts] = {}
    calls: list[Call] = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        try:
            found = json.loads(line)
            if "graph" in found:
                facts = Facts(**{k: _plain(v) for k, v in found["graph"].items()})
                graphs[facts.name] = facts
            else:
                calls.append(_call(found["call"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: no trace of calls: {error}") from None
    return graphs, calls


def _call(found: dict[str, Any]) -> Call:
    inputs, results = (
        tuple(Value(**{k: _plain(v) for k, v in one.items()}) for one in found[name])
        for name in ("inputs", "results")
    )
    return Call(found["graph"], inputs, results, found["seconds"])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def of_graph(calls: Sequence[Call], name: str) -> list[Call]:
    """The calls of one graph."""
    return [call for call in calls if call.graph == name]
