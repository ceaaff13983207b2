"""Backward of embedding bags on the looked-up rows, with the optimizer in it (row_update.cpp).

From the gradient of the pooled vectors straight to updated rows: no dense gradient of a table and
none per id is ever made. An id that occurs several times is summed first, in the order of the ids,
so that its row gets one exact update; results are the same bits for any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.kernels import source
from compiler.kernels.bags import MODES, BagError, Bags, Problem
from compiler.kernels.embedding_bag import BATCH, Pooled
from compiler.kernels.pages import use_huge_pages
from compiler.runtime import build
from compiler.runtime.launch import STEPS, UPDATE, Launch, heard, tell, words

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_WRITE = 0
_FIELDS = 29  # int64 members of struct Table, and the places of some among them
_COUNT, _WEIGHTS, _ROWS, _INDICES, _UNIQUE = 2, 8, 18, 23, 28
_POINTERS = (0, 3, 8, 13, 16, 18, 21, 22, 23, 24, 25, 26)
HYPERS = 7  # f64 members of struct Hyper; the last two are Adam's corrections
_SUM, _MAX = MODES.index("sum"), MODES.index("max")
_SIZES = {torch.float32: 4, torch.bfloat16: 2}  # bytes


@dataclass(frozen=True)
class Update:
    """An optimizer's step on looked-up rows; g is a row's summed gradient.

    * ``sgd``: w -= lr * g
    * ``adagrad``: s += g^2; w -= lr * g / (sqrt(s) + eps)
    * ``rowwise_adagrad``: the same with one s per row, s += mean(g^2)
      (FBGEMM's EXACT_ROWWISE_ADAGRAD)
    * ``adam``: moments of a row change only when it is looked up (as ``torch.optim.SparseAdam``);
      ``step`` counts from 1

    ``weight_decay`` adds ``weight_decay * w`` to g, on looked-up rows only.
    """

    kind: str
    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    step: int = 1

    def fields(self) -> tuple[float, ...]:
        """``struct Hyper`` of row_update.cpp."""
        first, second = self.betas
        return (
            *(self.lr, self.eps, self.weight_decay, first, second),
            *(1 - first**self.step, 1 - second**self.step),
        )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel."""
    native = build.load(source("row_update.cpp"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    native.group_rows.argtypes = [pointer, number, number, pointer]
    native.reduce_rows.argtypes = [pointer, pointer, number, number]
    native.update_rows.argtypes = [pointer, pointer, number, number, pointer]
    for call in (native.group_rows, native.reduce_rows, native.update_rows):
        call.restype = None
    return native


def new_state(kind: str, table: Tensor) -> dict[str, Tensor]:
    """The f32 state that an update of that kind keeps for a table (n, d), all zeros."""
    if kind == "sgd":
        return {}
    if kind == "rowwise_adagrad":
        state = {"squares": torch.zeros(table.shape[0], device=table.device)}
    else:
        state = {"moment": torch.zeros(table.shape, device=table.device)} if kind == "adam" else {}
        state["squares"] = torch.zeros(table.shape, device=table.device)
    use_huge_pages(state.values(), seconds=0)
    return state


@torch.no_grad()
def update_bags(
    tables: Sequence[Tensor],
    bags: Bags,
    grad: Tensor | Sequence[Tensor],
    update: Update | Sequence[Update],
    state: Sequence[Mapping[str, Tensor]],
    argmax: Sequence[Tensor] | None = None,
) -> None:
    """Update the rows of ``tables`` (n_f, d_f), f32 or bf16, in place, in one native call.

    ``grad``, of the pooled vectors, is (B, F, d) or F tensors (B_f, d_f), f32 or bf16, rows strided
    at will. ``state`` is of ``new_state``. ``argmax`` is what ``pool_into`` wrote (mode max).
    Raises BagError for an id or offset out of range, before anything is changed.
    """
    updates = [update] * len(tables) if isinstance(update, Update) else update
    _counted(bags, tables, updates, state)
    shapes = [table.shape for table in tables]
    work = _Work(bags, [shape[0] for shape in shapes], grad, argmax)
    hypers: list[float] = []
    before = None
    numbers: tuple[float, ...] = ()
    for f, (table, shape, own) in enumerate(zip(tables, shapes, updates, strict=True)):
        stride = table.stride()
        if len(shape) != 2 or (shape[1] > 1 and stride[1] != 1):
            raise BagError(f"{bags.name(f)}: rows must be (n, d), their numbers side by side")
        size = _SIZES.get(table.dtype, 0)
        if size == 0 or not table.is_cpu:
            raise BagError(
                f"{bags.name(f)}: {table.dtype} on {table.device}: want f32 or bf16, CPU"
            )
        kind = own.kind
        if kind not in KINDS:
            raise BagError(f"update: {kind!r} is none of {', '.join(KINDS)}")
        squares = moment = 0
        if kind != "sgd":
            count = shape[0] if kind == "rowwise_adagrad" else shape[0] * shape[1]
            squares = _state(state[f], "squares", count, bags, f)
        if kind == "adam":
            moment = _state(state[f], "moment", shape[0] * shape[1], bags, f)
        rows = (table.data_ptr(), stride[0] * size, int(size == 2))
        work.add(f, shape[1], 1 + KINDS.index(kind), rows, squares, moment)
        if own is not before:
            before, numbers = own, own.fields()
        hypers += numbers
    given = array("d", hypers)
    problem = Problem()
    library().update_rows(
        work.address(),
        given.buffer_info()[0],
        len(tables),
        torch.get_num_threads(),
        ctypes.byref(problem),
    )
    problem.check(bags, work.rows)
    if heard():
        _describe(tables, work, given, updates, state)


def _describe(
    tables: Sequence[Tensor], work: _Work, hypers: array[float], updates: Sequence[Update],
    state: Sequence[Mapping[str, Tensor]],
) -> None:  # fmt: skip
    """Tell the listener of an update; of Adam's count of steps before it, where one is kept."""
    count, threads = len(updates), torch.get_num_threads()
    start, numbers = work.address(), hypers.buffer_info()[0]
    if any(own.kind == "adam" for own in updates):
        if not all("steps" in own for own in state):
            return tell("an update of tables by Adam whose steps nobody counts")
        steps = array("q", [own["steps"].data_ptr() for own in state])
        at = steps.buffer_info()[0]
        tell(Launch(STEPS, 0, (at, numbers, count), words(at, count), None, (steps, hypers)))
    places = [start + 8 * (_FIELDS * f + k) for f in range(count) for k in _POINTERS]
    function = ctypes.cast(library().update_rows, ctypes.c_void_p).value or 0
    tell(Launch(
        UPDATE, function, (start, numbers, count, threads), places,
        lambda found: Problem(*found[:4]).check(work.bags, work.rows), (hypers, tables, work),
        [work.memory],
    ))  # fmt: skip


def sparse_gradients(
    rows: Sequence[int],
    bags: Bags,
    grad: Tensor | Sequence[Tensor],
    argmax: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Gradients of tables of ``rows`` rows as coalesced sparse tensors (n_f, d_f), f32."""
    tell("sparse gradients of tables: they are updated by something else than SparseRows")
    work = _Work(bags, rows, grad, argmax)
    widths = _widths(grad, len(bags))
    for f, width in enumerate(widths):
        work.add(f, width, _WRITE, (0, width * 4, 0))
    problem, threads = Problem(), torch.get_num_threads()
    library().group_rows(work.address(), len(bags), threads, ctypes.byref(problem))
    problem.check(bags, rows)
    found = []
    for f, width in enumerate(widths):
        unique = work.fields[f * _FIELDS + _UNIQUE]
        indices = torch.empty(1, unique, dtype=torch.int64)
        values = torch.empty(unique, width)
        work.write(f, values, indices)
        shape = (rows[f], width)
        found.append(
            torch.sparse_coo_tensor(
                indices, values, shape, is_coalesced=True, check_invariants=False
            )
        )
    library().reduce_rows(work.address(), work.no_hypers(), len(bags), threads)
    return found


def dense_gradients(
    rows: Sequence[int],
    bags: Bags,
    grad: Tensor | Sequence[Tensor],
    argmax: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The same as dense tensors, for tables of few rows."""
    work = _Work(bags, rows, grad, argmax)
    found = []
    for f, width in enumerate(_widths(grad, len(bags))):
        found.append(torch.zeros(rows[f], width))
        work.add(f, width, _WRITE, (found[f].data_ptr(), width * 4, 0))
    problem = Problem()
    library().update_rows(
        work.address(),
        work.no_hypers(),
        len(bags),
        torch.get_num_threads(),
        ctypes.byref(problem),
    )
    problem.check(bags, rows)
    return found


@torch.no_grad()
def reference(table: Tensor, grad: Tensor, update: Update, state: Mapping[str, Tensor]) -> None:
    """What ``update_bags`` does to one table given its sparse gradient, by PyTorch's operators."""
    grad = grad.coalesce()
    rows, g = grad.indices()[0], grad.values()
    g = g + update.weight_decay * table[rows]
    if update.kind == "sgd":
        step = g * update.lr
    elif update.kind == "adam":
        first, second = update.betas
        m = state["moment"][rows] * first + g * (1 - first)
        v = state["squares"][rows] * second + g * g * (1 - second)
        state["moment"][rows], state["squares"][rows] = m, v
        corrected = (v / (1 - second**update.step)).sqrt() + update.eps
        step = m * (update.lr / (1 - first**update.step)) / corrected
    else:
        by_row = update.kind == "rowwise_adagrad"
        now = state["squares"][rows] + (g.square().mean(dim=1) if by_row else g.square())
        state["squares"][rows] = now
        step = g * update.lr / ((now[:, None] if by_row else now).sqrt() + update.eps)
    table[rows] -= step.to(table.dtype)


class _Work:
    """``struct Table`` of row_update.cpp for each table, and the memory that it works in."""

    def __init__(
        self,
        bags: Bags,
        rows: Sequence[int],
        grad: Tensor | Sequence[Tensor],
        argmax: Sequence[Tensor] | None = None,
    ) -> None:
        _counted(bags, rows)
        self.bags, self.rows, self.argmax = bags, rows, argmax
        self.pooled = Pooled(grad, bags)
        self.given: list[int] = []
        self.bag_fields = bags.all_fields(rows)
        # Plain sums need a bag per id; weights, means and maxima look the bag up by position.
        self.sided = [
            mode != _SUM or own[_WEIGHTS] != 0
            for mode, own in zip(bags.modes, self.bag_fields, strict=True)
        ]
        sizes = [
            own[_COUNT] * (3 if s else 2)
            for own, s in zip(self.bag_fields, self.sided, strict=True)
        ]
        self.memory = torch.empty(sum(sizes), dtype=torch.int64)
        self.next = self.memory.data_ptr()

    def add(
        self,
        f: int,
        width: int,
        rule: int,
        rows: tuple[int, int, int],
        squares: int = 0,
        moment: int = 0,
    ) -> None:
        """Append table ``f``; ``rows`` is address, stride in bytes and whether bf16."""
        bags, argmax = self.bags, 0
        own = self.bag_fields[f]
        count, mode = own[_COUNT] * 8, bags.modes[f]
        gradient = self.pooled.fields(f, own[BATCH], width)
        if mode == _MAX:
            if self.argmax is None:
                raise BagError(f"{bags.name(f)}: mode max needs the argmax of the forward pass")
            won = self.argmax[f]
            if won.shape != (bags.batch(f), width) or won.dtype != torch.int32:
                raise BagError(f"{bags.name(f)}: argmax must be ({bags.batch(f)}, {width}) i32")
            argmax = won.data_ptr()
        sides = self.next + 2 * count if self.sided[f] else 0
        self.given += own
        self.given += (mode, width, *gradient, argmax, rule, *rows)
        self.given += (squares, moment, 0, self.next, self.next + count, sides, 0, 0)
        self.next += count * (3 if sides else 2)

    def write(self, f: int, values: Tensor, indices: Tensor) -> None:
        """Let the packed gradient of table ``f`` go to ``values`` and ``indices``."""
        self.fields[f * _FIELDS + _ROWS] = values.data_ptr()
        self.fields[f * _FIELDS + _INDICES] = indices.data_ptr()

    @functools.cached_property
    def fields(self) -> array[int]:
        """``struct Table`` of all tables, once all are added."""
        return array("q", self.given)

    def address(self) -> int:
        return self.fields.buffer_info()[0]

    def no_hypers(self) -> int:
        self.hypers = array("d", bytes(7 * 8 * len(self.bags)))
        return self.hypers.buffer_info()[0]


def _counted(bags: Bags, *lists: Sequence[object]) -> None:
    for given in lists:
        if len(given) != len(bags):
            raise BagError(f"{len(given)} tables, updates or states for the ids of {len(bags)}")


def _widths(grad: Tensor | Sequence[Tensor], count: int) -> list[int]:
    if isinstance(grad, Tensor):
        return [grad.shape[2]] * count
    return [g.shape[1] for g in grad]


def _state(state: Mapping[str, Tensor], name: str, size: int, bags: Bags, f: int) -> int:
    kept = state[name]
    if kept.numel() != size or kept.dtype != torch.float32 or not kept.is_contiguous():
        raise BagError(f"{bags.name(f)}: state {name} must be {size} contiguous f32")
    return kept.data_ptr()
