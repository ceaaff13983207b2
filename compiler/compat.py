"""Every import from PyTorch that is not public, in one place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.effects import _get_effect, with_effects
from torch._library.effects import EffectType
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch.export._trace import _export_to_torch_ir
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as real_tensors
from torch.utils._sympy.functions import FloorDiv

__all__ = [
    "FloorDiv",
    "ORDERED",
    "StorageWeakRef",
    "above_operators",
    "aot_autograd",
    "copy_module",
    "decompositions",
    "has_effect",
    "is_control_flow",
    "is_dense",
    "keep_order_in_inductor",
    "min_cut_rematerialization_partition",
    "real_tensors",
    "static_inputs",
    "with_effects",
]

aten = torch.ops.aten
ORDERED = EffectType.ORDERED
_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor, torch._C.DispatchKey.ADInplaceOrView,
)  # fmt: skip

# computed by PyTorch itself: the same random numbers as in eager mode, or better kernels than loops
_KEPT = (
    *("bernoulli", "embedding_dense_backward", "_embedding_bag", "native_dropout"),
    *("index_add", "index_put", "_unsafe_index_put", "index_copy", "scatter", "scatter_add"),
    *("nll_loss_forward", "nll_loss_backward"),
    "_scaled_dot_product_flash_attention_for_cpu",  # its decomposition fits inference alone
)
_MORE = (
    aten.native_layer_norm_backward, aten.native_group_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten.native_batch_norm, aten.addcmul, aten.addcdiv,
    aten.tril, aten.triu, aten.sigmoid_backward, aten.tanh_backward, aten.threshold_backward,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.gelu_backward,
    aten.split_with_sizes, aten.select_backward, aten.slice_backward, aten.log_sigmoid_forward,
    aten.linalg_vector_norm, aten.isneginf, aten.isposinf,
)  # fmt: skip


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """How operations are made of simpler ones before lowering."""
    table = {**core_aten_decompositions(), **get_decompositions(_MORE)}
    return {
        op: made
        for op, made in table.items()
        if op.name().split("::")[1].split(".")[0] not in _KEPT
    }


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph from Dynamo to edit: Dynamo itself reads the first one again."""
    new = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for name in ("_param_name_to_source",):
        if hasattr(gm, name):
            setattr(new, name, getattr(gm, name))
    for old, node in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source
    return new


def has_effect(op: Any) -> bool:
    """Whether an operation does something beside its results: it keeps its place in the program."""
    return isinstance(op, torch._ops.OpOverload) and _get_effect(op) is not None


def is_control_flow(op: Any) -> bool:
    """Whether an operation has branches or a body, graphs of their own."""
    return op in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)


def static_inputs(gm: fx.GraphModule) -> list[int]:
    """Which inputs of Dynamo's graph are parameters and buffers of a model."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        k
        for k, node in enumerate(placeholders)
        if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    ]


def export_to_torch(
    model: torch.nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any
) -> fx.GraphModule:
    """Dynamo's whole graph of a model, before autograd and decompositions."""
    return _export_to_torch_ir(
        model, inputs, dynamic_shapes=dynamic_shapes, restore_fqn=False, _log_export_usage=False
    )


def outputs_of_forward() -> int | None:
    """How many outputs of the forward graph that is being compiled are not for backward.

    None where that cannot be told.
    """
    context = torch._guards.TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    return None if meta is None or meta.tokens else int(meta.num_forward)


def output_spec(gm: fx.GraphModule) -> Any:
    """How an exported graph's results are arranged."""
    return gm._out_spec


def trace(gm: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """The ATen graph of a module on fake inputs, without in-place operations."""
    run = torch.func.functionalize(gm, remove="mutations")
    return make_fx(run, decomposition_table=decompositions())(*fakes)


def example_size(n: int | torch.SymInt) -> int:
    """A size, or for a symbolic one the size that it was traced with."""
    return n if isinstance(n, int) else int(n.node.hint)


def has_onednn() -> bool:
    """Whether this PyTorch has oneDNN, and oneDNN is on."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def keep_order_in_inductor(operator: Any) -> None:
    """Let TorchInductor run an effect after the one before it.

    Its own lowering of effects in torch 2.13 files the dependency under the buffer's name, but its
    scheduler looks for the operation's, so effects that need different values change places.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    if operator in lowerings:
        return

    def lower(*args: Any, **kwargs: Any) -> None:
        before = V.graph.effectful_ops.get(ORDERED)
        count = len(V.graph.operations)
        ir.FallbackKernel.create(operator, *args, **kwargs)
        for made in V.graph.operations[count:]:
            if before is not None:
                name = made.get_operation_name()
                V.graph.additional_star_deps[name].add(before.get_name())

    lowerings[operator] = lower


def above_operators() -> Any:
    """Within an operator, a context where autograd is about again, as outside of operators."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    return torch._C._ForceDispatchKeyGuard(include, exclude)


Guard = Callable[[dict[str, Any]], bool]


def compiled_frame(code: Any, frame: dict[str, Any]) -> tuple[Guard, Any] | None:
    """The guards under which TorchDynamo compiled a function for ``frame``, and its bytecode.

    ``frame``: the function's locals, those of its closure among them. None if no guards hold.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for entry in _debug_get_cache_entry_list(code):
        check: Guard = entry.guard_manager.check
        if check(frame):
            return check, entry.code
    return None


def same_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A fast test whether tensors have the types, sizes, strides and devices of these."""
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def on_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor on the memory of another, with a storage of its own that does not keep it."""
    storage = tensor.untyped_storage()
    made = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(made, tensor.storage_offset(), tensor.shape, tensor.stride())
