"""Patterns: parts of Dynamo's graph that a fused operation computes, found and replaced.

They run before autograd is traced, so that each fused operation brings its own backward. Three:
groups of embedding bags (``bags``), the pairwise-dot interaction (``interaction``) and chains of
linear layers (``mlp``). A pattern matches what the graph computes, not one spelling of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

import compiler.ops  # noqa: F401  # defines torch.ops.dlrm
from compiler.patterns import bags, interaction, mlp
from compiler.patterns.match import Rewrite

__all__ = ["Rewrite", "apply"]


def apply(
    gm: fx.GraphModule, inputs: Sequence[Any], constants: bool = True, autotune: bool = False,
    target: str = "", longest: int = 0,
) -> Rewrite:  # fmt: skip
    """Replace what is found in ``gm``, in place.

    ``inputs`` are example inputs, one for each placeholder. With ``constants``, index tensors among
    them may be taken as they are now; the result's ``checks`` say which. ``autotune`` measures
    whether a chain of layers is faster fused. ``target`` is cpp or triton, or that of the tensors'
    device. ``longest``: layers of a chain at most, 0 for any number.
    """
    rewrite = Rewrite(gm, list(inputs), constants, autotune)
    if len(devices := rewrite.devices()) > 1 or any(d.type not in ("cpu", "cuda") for d in devices):
        return rewrite
    on_gpu = any(device.type == "cuda" for device in devices)
    rewrite.target = target or ("triton" if on_gpu else "cpp")
    rewrite.drop_identities()
    bags.replace(rewrite)
    interaction.replace(rewrite)
    mlp.replace(rewrite, longest)
    rewrite.finish()
    return rewrite
