"""What a recorded call rests on beside its inputs: a graph of TorchDynamo, guards, modules."""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compiler import compat
from compiler.runtime.record import Unrecordable

# what TorchDynamo's bytecode calls beside the graph: its own notes, and sizes that the graph wants
HARMLESS = ("record_pregraph_bytecode", "call_size", "call_stride", "call_storage_offset")
Resident = tuple[dict[Any, Any], Any]  # a dictionary that holds a tensor, and its key
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


def _has_effects(lines: list[dis.Instruction]) -> bool:
    """Whether TorchDynamo's bytecode does more than run a graph and pack its results."""
    stores = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")
    for one, after in zip(lines, [*lines[1:], lines[-1]], strict=True):
        if one.opname in stores or one.opname == "LOAD_METHOD" or "NULL|self" in one.argrepr:
            return True
        if one.opname != "LOAD_GLOBAL":
            continue
        if str(one.argval).endswith("_dynamo_dot_utils"):
            harmless = str(after.argval).startswith(HARMLESS)
        else:  # a function to be called, or a value
            harmless = "NULL" not in one.argrepr or str(one.argval).startswith("__compiled_fn")
        if not harmless:
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
