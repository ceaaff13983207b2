"""The embedding bag of a disk table: it holds the rows of the batch at hand, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm.embeddings import PlainRows

CHUNK = 1 << 18  # numbers drawn at a time


class DiskRows(PlainRows):
    """A table of ``rows`` rows whose weight is a window of a few; its ids are ranks in the window.

    Making it moves PyTorch's random numbers on just as ``PlainRows`` does, so that all else in the
    model starts with the same values; ``drawn`` gives those of the table again.
    """

    def __init__(self, rows: int, dim: int, pooling: str, sparse: bool) -> None:
        self.rows = rows
        super().__init__(1, dim, pooling, sparse)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.random = torch.get_rng_state()
        for _ in self.drawn(torch.default_generator):
            pass

    def drawn(self, generator: torch.Generator | None = None) -> Any:
        """The initial rows, in pieces (n, dim) f32."""
        if generator is None:
            generator = torch.Generator()
            generator.set_state(self.random)
        bound, dim = self.rows**-0.5, self.embedding_dim
        step = max(1, CHUNK // dim)
        for start in range(0, self.rows, step):
            piece = torch.empty(min(step, self.rows - start), dim)
            yield piece.uniform_(-bound, bound, generator=generator)

    def grow(self, count: int) -> bool:
        """Make room for ``count`` rows, if there is too little; whether the weight is a new one."""
        if count <= self.weight.shape[0]:
            return False
        size = min(self.rows, 1 << (count - 1).bit_length())
        with torch.inference_mode(False):  # it is trained later, wherever it grows
            self.weight.data = torch.zeros(size, self.embedding_dim)
        self.num_embeddings = size
        return True

    # a checkpoint refers to the files; what is in the window is in them too

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return


class ViewRows(DiskRows):
    """The same for reading alone: it needs no initial values."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def windows(model: nn.Module) -> list[DiskRows]:
    """The disk tables of a model, in order."""
    return [m for m in model.modules() if isinstance(m, DiskRows)]


def ranked(ids: Tensor) -> tuple[np.ndarray, Tensor]:
    """The different ids (U,) ascending, and each id's rank among them (N,)."""
    unique, ranks = np.unique(ids.numpy(), return_inverse=True)
    return unique, torch.from_numpy(ranks.astype(np.int64).reshape(-1))


__all__ = ["DiskRows", "ViewRows", "ranked", "windows"]
