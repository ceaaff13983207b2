"""Recorded calls of a compiled function: which of them fits a call, and replaying it.

A recording is made of one call, on copies of its inputs so that each address means one thing. It
fits a later call if TorchDynamo's own guards hold, the inputs have the same types, sizes and strides,
and the tensors that are used where they lie (weights, buffers, optimizer state) are laid out as they
were. Where those lie may change: the native calls' arrays are written anew (see replay.cpp).
"""

from __future__ import annotations

import dis
import itertools
import threading
import types
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiler import compat
from compiler.runtime.launch import EQUAL, Launch
from compiler.runtime.record import Recorder, Unrecordable
from compiler.runtime.replay import Region, Tape, region, whole
from compiler.saved import taken_apart

MOST = 8  # recordings of one function; the one that was not used for longest goes
TRIES = 3  # kinds of inputs that may fail to be recorded before no more are tried
address_of = Tensor.data_ptr
# what TorchDynamo's bytecode calls beside the graph: its own notes, and sizes that the graph wants
HARMLESS = ("record_pregraph_bytecode", "call_size", "call_stride", "call_storage_offset")
Resident = tuple[dict[Any, Any], Any]  # a dictionary that holds a tensor, and its key


class Form:
    """The form of a call's inputs: their arrangement, types, sizes and strides."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.take = taken_apart(self.spec, [None] * len(leaves))
        self.places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.others = [(k, x) for k, x in enumerate(leaves) if not isinstance(x, Tensor)]
        tensors = [leaves[k] for k in self.places]
        for x in tensors:
            if not x.is_cpu or x.layout != torch.strided or x.requires_grad or not dense(x):
                raise Unrecordable(
                    f"an input {list(x.shape)} on {x.device} with strides {list(x.stride())}"
                    f"{', whose gradient is wanted' if x.requires_grad else ''}"
                )
        self.same = compat.same_tensors(tensors)
        self.all_tensors = not self.others
        sizes = [str(list(x.shape)) for x in tensors]
        self.text = ", ".join(
            f"{sizes.count(one)} x {one}" if sizes.count(one) > 1 else one
            for one in dict.fromkeys(sizes)
        )

    def tensors(self, arguments: tuple[Any, ...]) -> list[Tensor] | None:
        """The tensors of inputs of this form, or None for other inputs."""
        leaves = self.take(arguments)
        if leaves is None:
            leaves, spec = pytree.tree_flatten(arguments)
            if spec != self.spec:
                return None
        if not self.all_tensors:
            for k, x in self.others:
                if leaves[k] is not x and (type(leaves[k]) is not type(x) or leaves[k] != x):
                    return None
            leaves = [leaves[k] for k in self.places]
        return leaves if self.same(*leaves) else None

    def with_copies(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The same inputs in memory of their own."""
        leaves, spec = pytree.tree_flatten(arguments)
        copies = [
            torch.empty_strided(leaves[k].shape, leaves[k].stride(), dtype=leaves[k].dtype)
            for k in self.places
        ]
        for k, copy in zip(self.places, copies, strict=True):
            leaves[k] = copy.copy_(leaves[k])
        return pytree.tree_unflatten(leaves, spec), copies


def dense(x: Tensor) -> bool:
    """Whether each of a tensor's numbers has memory of its own, without gaps."""
    return x.numel() == 0 or bool(compat.is_dense(x))


class Results:
    """The results of a recorded call, made anew for each replay so that they outlive the next one."""

    def __init__(self, result: Any, recorder: Recorder) -> None:
        self.leaves, self.spec = pytree.tree_flatten(result)
        own = {t.untyped_storage().data_ptr() for t in recorder.kept if t.layout == torch.strided}
        self.storages: list[Tensor] = []
        self.views: list[tuple[int, tuple[int, ...], tuple[int, ...], int] | None] = []
        numbers: dict[int, int] = {}
        for x in self.leaves:
            if not isinstance(x, Tensor):
                self.views.append(None)
                continue
            if x.requires_grad:
                raise Unrecordable("a result whose gradient is wanted: no step is replayed here")
            start = x.untyped_storage().data_ptr()
            if start not in own and x.numel():
                raise Unrecordable("a result that is an input, a weight or made by PyTorch")
            if start not in numbers:
                numbers[start] = len(self.storages)
                self.storages.append(x)
            self.views.append((numbers[start], tuple(x.shape), x.stride(), x.storage_offset()))
        self.sizes = [t.untyped_storage().nbytes() // t.element_size() for t in self.storages]
        self.dtypes = [t.dtype for t in self.storages]
        for x in self.leaves:
            if isinstance(x, Tensor):
                k = numbers[x.untyped_storage().data_ptr()]
                if x.dtype != self.dtypes[k]:
                    raise Unrecordable("results of several types in one piece of memory")
        self.single = self.spec.is_leaf()
        used = [view[0] for view in self.views if view is not None]
        # memory that one result fills is allocated in its form
        self.forms: list[tuple[Any, Any]] = [((size,), (1,)) for size in self.sizes]
        self.whole = [
            view is not None and used.count(view[0]) == 1 and view[3] == 0
            and x.numel() == self.sizes[view[0]]
            for x, view in zip(self.leaves, self.views, strict=True)
        ]  # fmt: skip
        for view, fills in zip(self.views, self.whole, strict=True):
            if fills and view is not None:
                self.forms[view[0]] = view[1], view[2]

    def allocate(self) -> list[Tensor]:
        """New memory for each piece."""
        return [
            torch.empty_strided(*form, dtype=dtype)
            for form, dtype in zip(self.forms, self.dtypes, strict=True)
        ]

    def arranged(self, storages: list[Tensor]) -> Any:
        """The results in that memory, arranged as they were."""
        if self.single and self.whole[0]:
            return storages[0]
        leaves = [
            x if view is None else storages[view[0]] if fills
            else storages[view[0]].as_strided(*view[1:])
            for x, view, fills in zip(self.leaves, self.views, self.whole, strict=True)
        ]  # fmt: skip
        return leaves[0] if self.single else pytree.tree_unflatten(leaves, self.spec)


class Recording:
    """One recorded call."""

    def __init__(
        self, form: Form, copies: Sequence[Tensor], result: Any, recorder: Recorder,
        residents: Residents, guard: Callable[[dict[str, Any]], bool],
    ) -> None:  # fmt: skip
        recorder.check()
        self.form, self.guard, self.residents = form, guard, list(residents.tensors)
        self.links, self.modules = residents.links, [h[k] for h, k in residents.links]
        self.lock = threading.Lock()
        self.results = Results(result, recorder)
        moving = [*copies, *self.results.storages]
        owned = [holder[key] for holder, key in self.residents]
        regions = [region(t, k) for k, t in enumerate(copies)]
        regions += [_slot(whole(t), len(copies) + k) for k, t in enumerate(self.results.storages)]
        own = _distinct([region(t, len(moving) + k) for k, t in enumerate(owned)])
        kept = [whole(t) for t in recorder.kept if t.layout == torch.strided and t.numel()]
        self.equal = [(a, b.contiguous()) for a, b in recorder.equal]
        launches = [_equal(a, b) for a, b in self.equal] + recorder.launches
        self.tape = Tape(launches, [*regions, *own, *kept], len(moving) + len(owned))
        self.memory = recorder.kept
        self.looks = [_look(t) for t in owned]
        self.addresses = list(map(address_of, owned))
        self.owned = owned

    def fits(self, frame: dict[str, Any]) -> bool:
        """Whether a call in that frame would run the code that was recorded."""
        try:
            owned = [holder[key] for holder, key in self.residents]
            now = list(map(address_of, owned))
            modules = [holder[key] for holder, key in self.links]
        except (KeyError, TypeError):
            return False
        if not all(map(is_, modules, self.modules)):
            return False
        if now != self.addresses:
            if any(
                look != _look(t) for look, t in zip(self.looks, owned, strict=True)
            ):
                return False
            self.addresses = now
        self.owned = owned
        return self.guard(frame)

    def replay(self, tensors: list[Tensor]) -> Any:
        """Make the calls again on these inputs; raises ``replay.Stale``, or what a call reports."""
        storages = self.results.allocate()
        addresses = [*map(address_of, tensors), *map(address_of, storages), *self.addresses]
        self.tape.run(array("q", addresses))
        return self.results.arranged(storages)

    def bytes(self) -> int:
        """Memory that the recording keeps for itself."""
        starts = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                  for t in self.memory if t.layout == torch.strided}  # fmt: skip
        return sum(starts.values())


def _slot(found: Region, slot: int) -> Region:
    return Region(found.start, found.size, slot)


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _distinct(regions: list[Region]) -> list[Region]:
    """Regions of tensors that share no memory, or all of it; raises Unrecordable for others."""
    found: list[Region] = []
    for one in sorted(regions, key=lambda r: (r.start, r.size)):
        if found and one.size and one.start < found[-1].start + found[-1].size:
            if (one.start, one.size) != (found[-1].start, found[-1].size):
                raise Unrecordable("weights or buffers that overlap in memory")
            continue
        found.append(one)
    return found


def _equal(checked: Tensor, kept: Tensor) -> Launch:
    """The comparison of a tensor with the values that the code was generated for."""
    if not checked.is_contiguous():
        raise Unrecordable("an index tensor that is not contiguous")
    pair = array("q", [checked.data_ptr(), kept.data_ptr()])
    start = pair.buffer_info()[0]
    size = kept.numel() * kept.element_size()
    return Launch(EQUAL, 0, (start, size), [start], None, (pair, kept))


class Recordings:
    """The recordings of one function, the last used first, and why others were not made."""

    def __init__(self) -> None:
        self.all: list[Recording] = []
        self.seen: dict[Any, int] = {}
        self.reasons: dict[Any, str] = {}
        self.replays = 0

    def find(
        self, arguments: tuple[Any, ...], frame: dict[str, Any]
    ) -> tuple[Recording, list[Tensor]] | None:
        """The recording that fits a call, and the call's tensors."""
        for k, one in enumerate(self.all):
            tensors = one.form.tensors(arguments)
            if tensors is not None and one.fits(frame):
                if k:
                    self.all.insert(0, self.all.pop(k))
                return one, tensors
        return None

    def due(self, key: Any, calls: int) -> bool:
        """Whether a call of that kind is to be recorded: after ``calls`` plain ones."""
        if key in self.reasons or len(self.reasons) >= TRIES:
            return False
        if len(self.seen) > 1000:
            self.seen.clear()
        count = self.seen.get(key, 0)
        self.seen[key] = count + 1
        return count >= calls

    def add(self, recording: Recording) -> None:
        """Keep a recording."""
        self.all.insert(0, recording)
        del self.all[MOST:]

    def __str__(self) -> str:
        lines = [
            f"recorded: {len(one.tape.launches)} native calls as one, {one.bytes() / 1e6:.2f} MB "
            f"kept, for inputs {one.form.text}"
            for one in self.all
        ]
        lines += [f"not recorded: {why}" for why in dict.fromkeys(self.reasons.values())]
        lines.append(f"{self.replays} calls were replays")
        return "\n".join(lines)


_numbers = itertools.count()


def own_function(function: types.FunctionType, name: str) -> types.FunctionType:
    """The function with a code object of its own: TorchDynamo keeps what it compiles with the code,
    and what it learnt of sizes with the code's name."""
    code = function.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)


def guard_of(code: Any, frame: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """The guards of what TorchDynamo made of a function for that frame.

    Raises Unrecordable if it is more than one graph and the packing of its results: code between
    graphs, and what a function does to objects, would be missing in a replay.
    """
    found = compat.compiled_frame(code, frame)
    if found is None:
        raise Unrecordable("the guards of the compiled code hold for no call")
    guard, made = found
    graphs = [name for name in made.co_names if name.startswith("__compiled_fn")]
    if len(graphs) != 1 or any(name.startswith("__resume") for name in made.co_names):
        raise Unrecordable("the function is not one graph: see compiler.explain for its breaks")
    if _has_effects(list(dis.get_instructions(made))):
        raise Unrecordable("the function changes objects beside computing its results")
    return guard


def kind_of(arguments: tuple[Any, ...]) -> Any:
    """What tells calls apart before their guards are asked."""
    leaves, spec = pytree.tree_flatten(arguments)
    looks = tuple(_look(x) if isinstance(x, Tensor) else x for x in leaves)
    return looks, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _has_effects(lines: list[dis.Instruction]) -> bool:
    """Whether TorchDynamo's bytecode does more than to fetch inputs, run a graph and pack results."""
    stores = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")
    for one, after in zip(lines, [*lines[1:], lines[-1]], strict=True):
        if one.opname in stores or one.opname == "LOAD_METHOD" or "NULL|self" in one.argrepr:
            return True
        if one.opname == "LOAD_GLOBAL" and str(one.argval).endswith("_dynamo_dot_utils"):
            if not str(after.argval).startswith(HARMLESS):
                return True
        elif one.opname == "LOAD_GLOBAL" and "NULL" in one.argrepr:
            if not str(one.argval).startswith("__compiled_fn"):
                return True
    return False


@dataclass
class Residents:
    """Tensors that calls use where they lie, and the modules between them and what is called."""

    tensors: list[Resident]
    links: list[Resident]

    @staticmethod
    def of(*owners: Any) -> Residents:
        """The parameters and buffers of modules; what is no module has none."""
        found = Residents([], [])
        for owner in owners:
            if not isinstance(owner, torch.nn.Module):
                continue
            for module in owner.modules():
                for holder in (module._parameters, module._buffers):
                    found.tensors += [(holder, k) for k, t in holder.items() if t is not None]
                links = module._modules
                found.links += [(links, k) for k, child in links.items() if child is not None]
        return found
