"""One private step: clip each sample's gradient, sum, add noise, average, and note the cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.batch import Batch
from dlrm.model import DLRM
from dlrm.privacy.accounting import Ledger
from dlrm.privacy.ghost import Clipped, Clipper
from dlrm.privacy.noise import Noise
from dlrm.privacy.rows import Mechanism, row_noise, streams


def summed_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the samples: a sample's gradient is then its own."""
    return F.binary_cross_entropy_with_logits(logits.float(), label, reduction="sum")


class PrivateStep:
    """Gradients of a model for DP-SGD; the optimizers are the caller's.

    ``step(batch, number)`` leaves in each ``.grad`` the sum of the clipped gradients of the batch
    plus noise, divided by the *expected* batch size: the size of this very batch is private.
    """

    def __init__(
        self,
        model: DLRM,
        mechanism: Mechanism,
        noise: Noise,
        ledger: Ledger,
        sample_rate: float,
        table_optimizer: str = "sgd",
        forward: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.mechanism, self.noise = model, mechanism, noise
        self.ledger, self.sample_rate = ledger, sample_rate
        self.forward = forward or model
        self.clipper = Clipper(model, mechanism.max_grad_norm)
        trained = list(self.clipper.names)
        sparse = [p for p in model.sparse_parameters() if p.requires_grad]
        tables = streams(model, sparse)
        self.dense = streams(model, [p for p in trained if p not in tables])
        self.rows = row_noise(tables, mechanism, noise, model, table_optimizer)

    def clip(self, batch: Batch) -> Clipped | None:
        """Clipped sums of a batch; None for an empty one."""
        if len(batch) == 0:
            return None
        with self.clipper.watch(len(batch)):
            loss = summed_loss(self.forward(*batch.inputs()), batch.label)
        return self.clipper.clipped(loss)

    def gradients(self, batch: Batch, number: int) -> Clipped | None:
        """Noisy gradients of step ``number`` (from 0), and what they were made of."""
        clipped = self.clip(batch)
        self.noised(clipped, number)
        self.ledger.step(self.mechanism.noise_multiplier, self.sample_rate)
        return clipped

    def noised(self, clipped: Clipped | None, number: int) -> None:
        """Noise on clipped sums, and the division, into each ``.grad``."""
        m = self.mechanism
        for parameter, stream in self.dense.items():
            total = torch.zeros_like(parameter)
            if clipped is not None and parameter in clipped.dense:
                total = clipped.dense[parameter].contiguous()
            elif clipped is not None and parameter in clipped.rows:  # a table with dense gradients
                found = clipped.rows[parameter]
                total.index_add_(0, found.rows, found.values)
            self.noise.add(total, m.deviation, stream, number)
            parameter.grad = total.div_(m.expected_batch)
        self.rows.gradients(clipped, number)
