"""What CUDA graphs do with a compiled graph: capture it or not, what to copy, when to drop it.

Decisions alone, on what ``compiler.runtime.trace`` says of graphs and their calls; the device calls
are in ``compiler.runtime.cudagraph``. As PyGraph does (Ghosh et al., "PyGraph: Robust Compiler
Support for CUDA Graphs in PyTorch", 2025): numbers from the host do not block a capture, inputs
that keep their address or can be pointed to are not copied, and a graph that does not pay is
launched instead.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiler.runtime.trace import Call, Facts, Value

WARM = 2  # calls that are launched before a capture: autotuning, lazy set-up, addresses to compare
UNASKED = 16  # the same where nobody asked for graphs: only what is called often is captured
MOST = 16  # captured sizes of one graph
FAILURES = 2  # captures that may fail before no more are tried
SAMPLES = 7  # timed calls of each side before a graph is kept or dropped
GAIN = 0.98  # a replay must take less than this share of a launch
NO_GPU = "no tensor is on a GPU"
BUCKETS = (1, 2, 4, 8)  # rows of a bucket; above, eight to each power of two


class Role(enum.Enum):
    """How an input reaches a captured graph."""

    IN_PLACE = "used where it lies"
    POINTED = "pointed to anew when it moves"
    COPIED = "copied into the graph's own memory"
    MOVED = "a number from the host, written to the device before a replay"
    FIXED = "a number that is part of the graph; another one is another graph"
    ABSENT = "not a tensor or number"


@dataclass(frozen=True)
class Plan:
    """A graph's capture for one form of inputs: the role of each, and what is copied per replay."""

    roles: tuple[Role, ...]
    bucket: int | None = None  # rows that are filled up to

    def of(self, role: Role) -> list[int]:
        """The inputs in that role."""
        return [k for k, own in enumerate(self.roles) if own is role]

    def __str__(self) -> str:
        parts = [f"{len(found)} {role.value}" for role in Role if (found := self.of(role))]
        filled = "" if self.bucket is None else f", rows filled up to {self.bucket}"
        return "; ".join(parts) + filled


def why_never(facts: Facts) -> str:
    """Why a graph must not be captured whatever it is called with; empty if it may."""
    if facts.host:
        return f"the host takes part: {', '.join(facts.host)}"
    return ""


def why_not(facts: Facts, call: Call) -> str:
    """Why a graph must not be captured for such a call; empty if it may."""
    if reason := why_never(facts):
        return reason
    devices = sorted({v.device for v in call.inputs if v.on_gpu})
    if not devices:
        return NO_GPU
    if len(devices) > 1:
        return f"tensors are on {' and '.join(devices)}: a graph is of one device"
    for k, value in enumerate(call.inputs):
        if value.kind == "tensor" and not value.on_gpu and value.value is None:
            return f"input {k}, {_shape(value)}, is in host memory: replays would read it too late"
        if k in facts.mutated and value.on_gpu and k not in facts.parameters:
            return f"input {k} is written, and is no parameter: a replay would write a copy"
    return ""


def roles(facts: Facts, calls: Sequence[Call]) -> tuple[Role, ...]:
    """The role of each input, from calls of one graph, the last one of the form to be captured."""
    return tuple(_role(facts, k, [call.inputs[k] for call in calls]) for k in range(_arity(calls)))


def _arity(calls: Sequence[Call]) -> int:
    return len(calls[-1].inputs)


def _role(facts: Facts, k: int, seen: Sequence[Value]) -> Role:
    now = seen[-1]
    if now.kind == "other":
        return Role.ABSENT
    if now.kind == "number":
        return Role.FIXED
    if not now.on_gpu:  # one number in a tensor on the host
        return Role.FIXED if len({v.value for v in seen}) == 1 else Role.MOVED
    same = [v for v in seen if v.form == now.form]
    stays = len({v.address for v in same}) == 1
    if k in facts.parameters:
        if stays:
            return Role.IN_PLACE
        return Role.COPIED if k in facts.by_address else Role.POINTED
    # an input that never moves is written in place by its maker, such as another graph
    return Role.IN_PLACE if stays and len(same) > WARM else Role.COPIED


def key(facts: Facts, call: Call, fixed: Sequence[int] = ()) -> tuple[object, ...]:
    """What a capture is good for: forms of inputs, rows by their bucket, and fixed numbers."""
    rows = rows_of(facts, call)
    found: list[object] = []
    for k, value in enumerate(call.inputs):
        form = value.form
        if rows is not None and k not in facts.parameters and _has_rows(value, rows):
            form = (*form[:2], (bucket(rows), *value.shape[1:]), form[3], form[4])
        number = value.kind == "number" or k in fixed
        found.append((*form, value.value if number and not _is_rows(value, rows) else None))
    return tuple(found)


def rows_of(facts: Facts, call: Call) -> int | None:
    """The rows of a call whose graph works row by row, or None where rows cannot be added.

    They are the size that is given as a number and that a tensor on the GPU begins with.
    """
    if not facts.rows:
        return None
    numbers = [v.value for v in call.inputs if v.kind == "number" and v.dtype == "int"]
    sizes = {v.shape[0] for v in call.inputs if v.on_gpu and v.shape}
    found = [int(n) for n in numbers if n is not None and int(n) in sizes]
    return found[0] if len(set(found)) == 1 else None


def _has_rows(value: Value, rows: int) -> bool:
    return value.on_gpu and bool(value.shape) and value.shape[0] == rows


def _is_rows(value: Value, rows: int | None) -> bool:
    return value.kind == "number" and rows is not None and value.value == rows


def bucket(rows: int) -> int:
    """The rows that a call of ``rows`` is filled up to: at most an eighth is wasted above 8.

    >>> [bucket(n) for n in (1, 3, 8, 9, 17, 100, 130)]
    [1, 4, 8, 9, 18, 104, 144]
    """
    if rows <= BUCKETS[-1]:
        return next(size for size in BUCKETS if size >= rows)
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step


@dataclass
class Timing:
    """Seconds of calls of one captured form, launched and replayed (copies included)."""

    launched: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)

    def next(self) -> str:
        """What the next call should be: launched or replayed, until enough of both is known."""
        if len(self.replayed) < SAMPLES and len(self.replayed) <= len(self.launched):
            return "replayed"
        return "launched" if len(self.launched) < SAMPLES else "replayed"

    @property
    def known(self) -> bool:
        """Whether enough is known to decide."""
        return min(len(self.launched), len(self.replayed)) >= SAMPLES

    def pays(self) -> bool:
        """Whether a replay is faster than launching, by medians; True while it is not known."""
        if not self.known:
            return True
        return statistics.median(self.replayed) < GAIN * statistics.median(self.launched)

    def __str__(self) -> str:
        if not self.known:
            return "not yet measured"
        launched, replayed = (statistics.median(s) * 1e6 for s in (self.launched, self.replayed))
        return f"{replayed:.1f} us replayed, {launched:.1f} us launched"


@dataclass
class State:
    """What is known of one form of a graph's inputs."""

    calls: int = 0
    plan: Plan | None = None  # captured
    timing: Timing = field(default_factory=Timing)
    dropped: str = ""  # why it is launched for good
    copies_out: bool = False  # results were still held at the next replay
    moves: int = 0  # captures that ended because an input moved
    used: int = 0  # when it was used last, in calls of the graph


class Policy:
    """Decides for one compiled graph, call by call. Numbered inputs are those of the graph.

    ``wanted``: graphs were asked for (mode reduce-overhead); otherwise a form must be called often.
    """

    def __init__(self, facts: Facts, wanted: bool = True) -> None:
        self.facts = facts
        self.warm = WARM if wanted else UNASKED
        self.never = why_never(facts)
        self.forms: dict[tuple[object, ...], State] = {}
        self.history: list[Call] = []
        self.wandering: set[int] = set()  # inputs that were taken to stay, and moved
        self.moving: set[int] = set()  # host tensors whose number was seen to change
        self.failures = 0
        self.calls = 0
        self.last_reason = self.never

    def state(self, call: Call) -> State | None:
        """Where a call stands; None for one that is only launched."""
        self.calls += 1
        self._watch_numbers(call)
        if reason := self.never or why_not(self.facts, call):
            self.last_reason = reason
            return None
        fixed = [k for k, v in enumerate(call.inputs) if _on_host(v) and k not in self.moving]
        state = self.forms.setdefault(key(self.facts, call, fixed), State())
        state.calls += 1
        state.used = self.calls
        self.history = [*self.history[-4 * WARM :], call]
        return state

    def _watch_numbers(self, call: Call) -> None:
        """Host numbers that differ from the call before are moved from now on, not fixed."""
        if not self.history or len(self.history[-1].inputs) != len(call.inputs):
            return
        for k, (old, new) in enumerate(zip(self.history[-1].inputs, call.inputs, strict=True)):
            if _on_host(new) and old.value != new.value and k not in self.moving:
                self.moving.add(k)
                self.forms.clear()  # captures had the old number in them

    def decide(self, call: Call, state: State) -> str:
        """``launch``, ``capture`` or ``replay`` for this call."""
        if state.dropped:
            self.last_reason = state.dropped
            return "launch"
        if state.plan is not None:
            return "launch" if state.timing.next() == "launched" else "replay"
        if state.calls <= self.warm:
            self.last_reason = f"its first {self.warm} calls of a form are launched"
            return "launch"
        if self.failures >= FAILURES:
            self.last_reason = f"{self.failures} captures failed"
            return "launch"
        return "capture"

    def plan(self, call: Call) -> Plan:
        """How to capture this call."""
        found = list(roles(self.facts, self.history))
        for k in self.moving:
            found[k] = Role.MOVED
        for k in self.wandering:
            found[k] = Role.COPIED
        rows = rows_of(self.facts, call)
        filled = None if rows is None else bucket(rows)
        if filled is not None:  # rows are added in the graph's own memory
            for k, value in enumerate(call.inputs):
                if rows is not None and _has_rows(value, rows) and k not in self.facts.parameters:
                    found[k] = Role.COPIED
        return Plan(tuple(found), filled)

    def evicted(self) -> tuple[object, ...] | None:
        """The captured form to give up when there are too many: the least recently used."""
        captured = {k: s for k, s in self.forms.items() if s.plan is not None}
        if len(captured) <= MOST:
            return None
        return min(captured, key=lambda k: captured[k].used)

    def timed(self, state: State, replayed: bool, seconds: float) -> None:
        """Take in a measurement; a form that does not pay is launched for good."""
        (state.timing.replayed if replayed else state.timing.launched).append(seconds)
        if state.plan is not None and state.timing.known and not state.timing.pays():
            state.plan = None
            state.dropped = f"a replay does not pay: {state.timing}"

    def moved(self, state: State, wandering: Sequence[int], all_moved: Sequence[int]) -> None:
        """Inputs that were used in place have moved: copy those that wander, capture again.

        Parameters are captured again at their new addresses, a few times; then they are copied.
        """
        self.wandering |= set(wandering)
        state.moves += 1
        if state.moves > FAILURES:
            self.wandering |= set(all_moved)
        state.plan = None
        state.timing = Timing()

    def outlived(self, state: State) -> None:
        """Results were held at the next replay: capture again, and copy them out from then on."""
        state.copies_out = True
        state.plan = None
        state.timing = Timing()

    def failed(self, state: State, error: str) -> None:
        """A capture failed: this form is launched, and after some more nothing is tried."""
        self.failures += 1
        state.dropped = f"its capture failed: {error}"

    def __str__(self) -> str:
        lines = []
        for state in self.forms.values():
            if state.dropped:
                lines.append(f"{self.facts.name}: not captured: {state.dropped}")
            elif state.plan is not None:
                out = "; results copied out, as they outlive a replay" if state.copies_out else ""
                lines.append(f"{self.facts.name}: captured: {state.plan}{out}; {state.timing}")
        if not lines:
            lines = [f"{self.facts.name}: not captured: {self.last_reason or 'not called yet'}"]
        return "\n".join(lines)


def _on_host(value: Value) -> bool:
    """Whether it is a number that lies in a tensor on the host."""
    return value.kind == "tensor" and not value.on_gpu and value.value is not None


def _shape(value: Value) -> str:
    return f"{value.dtype} {list(value.shape)}"
