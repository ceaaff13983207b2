"""Which models can be trained privately, and why another can't."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlrm.errors import InputError
from dlrm.privacy.layers import layer_for


def check_model(model: nn.Module) -> None:
    """Raise InputError for a layer that mixes samples, or whose clipping nobody knows."""
    from dlrm.privacy.opacus_bags import opacus

    found = []
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, _BatchNorm):
            found.append(
                f"{where}: batch norm mixes the samples of a batch, so a sample's gradient depends "
                "on the others and no clipping bounds what it does; use nn.LayerNorm or "
                "nn.GroupNorm"
            )
            continue
        if isinstance(module, nn.EmbeddingBag | nn.Embedding):
            if module.max_norm is not None:
                found.append(f"{where}: max_norm rescales looked-up rows without noise; leave it")
            if module.scale_grad_by_freq:
                found.append(
                    f"{where}: scale_grad_by_freq divides by how often the whole batch has an id, "
                    "which mixes samples; leave it"
                )
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            layer_for(module, name or "the model")
    if not found:
        errors = opacus().validators.ModuleValidator.validate(model, strict=False)
        found += [str(error) for error in errors]
    if found:
        raise InputError("private training: " + "; ".join(found))


def check_separate(model: nn.Module, batch: object) -> None:
    """Raise InputError if a sample's logit changes with the others of its batch.

    ``batch`` is a ``Batch`` of at least two samples; dropout is off while it is asked.
    """
    from dlrm.batch import Batch

    assert isinstance(batch, Batch) and len(batch) > 1
    training = model.training
    model.eval()  # dropout off; layers that mix samples in training only are refused by type
    try:
        with torch.no_grad():
            together = model(*batch.inputs())
            for i in (0, len(batch) - 1):
                alone = model(*batch.slice(i, i + 1).inputs())
                if not torch.allclose(together[i], alone[0], rtol=1e-3, atol=1e-5):
                    raise InputError(
                        "private training: the model's answer for a sample changes with the other "
                        "samples of its batch, so clipping bounds nothing; find the layer that "
                        "mixes them"
                    )
    finally:
        model.train(training)
