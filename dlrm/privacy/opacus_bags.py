"""Opacus with embedding bags that are right: our grad and norm samplers in its registries.

Opacus 1.6 counts an id that a bag repeats once in the gradient of its sample, though the update has
it as often as it occurs: in ghost mode the clipping bound is then broken. It also takes offsets by
position only, and knows neither ``include_last_offset`` nor weights nor padding.

Its samplers return B x V x d numbers by design; `dlrm.privacy.ghost` does not use them for tables.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from dlrm.embeddings import PlainRows
from dlrm.errors import InputError
from dlrm.privacy import bags

TYPES = (nn.EmbeddingBag, PlainRows)


def opacus() -> ModuleType:
    """The module, or an InputError that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in ("accountants", "grad_sample", "optimizers", "validators"):
                importlib.import_module(f"opacus.{part}")
            return importlib.import_module("opacus")
    except ImportError:
        raise InputError(
            "private training needs Opacus: pip install -e '.[privacy]' (or opacus>=1.6,<1.7)"
        ) from None


def grad_sampler(
    layer: nn.EmbeddingBag, inputs: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Gradients of the samples, (B, V, d), as Opacus's registry wants them."""
    call = bags.call_of(layer, tuple(inputs))
    return {layer.weight: bags.per_sample(call, layer.weight, backprops)}


def norm_sampler(
    layer: nn.EmbeddingBag, inputs: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Norms of the samples' gradients, (B,), in O(ids)."""
    call = bags.call_of(layer, tuple(inputs))
    return {layer.weight: bags.squared_norms(call, layer.num_embeddings, backprops).sqrt()}


@contextmanager
def right_bags(model: nn.Module) -> Iterator[None]:
    """Within, Opacus trains ``model`` with our samplers, whichever way its bags are called.

    Use ``loss_reduction="sum"``: for "mean" Opacus takes the batch size from the last argument of a
    layer, which ``include_last_offset`` makes one too many.
    """
    library = opacus().grad_sample
    plain = library.GradSampleModule.GRAD_SAMPLERS
    ghost = library.GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    before = [(registry, kind, registry.get(kind)) for registry in (plain, ghost) for kind in TYPES]
    for kind in TYPES:
        plain[kind], ghost[kind] = grad_sampler, norm_sampler

    def by_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return bags.positional(args, kwargs), {}

    handles = [
        m.register_forward_pre_hook(by_position, with_kwargs=True)
        for m in model.modules()
        if isinstance(m, nn.EmbeddingBag)
    ]
    try:
        yield
    finally:
        for registry, kind, old in before:
            if old is None:
                registry.pop(kind, None)
            else:
                registry[kind] = old
        for handle in handles:
            handle.remove()
