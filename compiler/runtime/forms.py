"""The form of a recorded call: its inputs, to compare and copy, and its results, to make anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compiler import compat
from compiler.runtime.record import Recorder, Unrecordable
from compiler.saved import taken_apart


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
    """The results of a recorded call, in new memory for each replay: they outlive the next one."""

    def __init__(self, result: Any, recorder: Recorder) -> None:
        self.leaves, self.spec = pytree.tree_flatten(result)
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
            if start not in recorder.allocated and x.numel():
                raise Unrecordable("a result that is an input, a weight or made by PyTorch")
            if start not in numbers:
                numbers[start] = len(self.storages)
                self.storages.append(x)
            self.views.append((numbers[start], tuple(x.shape), x.stride(), int(x.storage_offset())))
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


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def kind_of(arguments: tuple[Any, ...]) -> Any:
    """What tells calls apart before their guards are asked."""
    leaves, _ = pytree.tree_flatten(arguments)
    looks = tuple(look_of(x) if isinstance(x, Tensor) else x for x in leaves)
    return looks, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
