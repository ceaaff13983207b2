"""Makes the traces that the policy's tests read: ``python -m tests.compiler.runtime.make_traces``.

Each is noted by the recorder while a compiled model runs on the CPU.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiler
from compiler.runtime import trace

FOLDER = Path(__file__).parent / "traces"


class Tower(nn.Module):
    """Ids looked up, pooled and run through layers, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.table(ids).flatten(1))


def inference() -> None:
    """Batches of three sizes with dynamic sizes, in new memory each time."""
    model = Tower().eval()
    run = compiler.compile(model, dynamic=True, patterns=False)
    with torch.no_grad():
        run(torch.randint(50, (6, 3)))
        with trace.recording(FOLDER / "inference.jsonl"):
            for size in (8, 8, 8, 8, 5, 7, 8, 30):
                run(torch.randint(50, (size, 3)))


def training() -> None:
    """Forward and backward, the weights moved once."""
    model = Tower()
    run = compiler.compile(model, dynamic=False, patterns=False)
    label = torch.randn(8, 2)
    F.mse_loss(run(torch.randint(50, (8, 3))), label).backward()
    with trace.recording(FOLDER / "training.jsonl"):
        for step in range(8):
            model.zero_grad()
            F.mse_loss(run(torch.randint(50, (8, 3))), label).backward()
            if step == 4:
                model.layers[0].weight.data = model.layers[0].weight.data.clone()


def numbers() -> None:
    """A number in a host tensor that stays for some calls and then changes, and one that stays."""

    def scaled(x: Tensor, rate: Tensor, offset: Tensor) -> Tensor:
        return torch.relu(x) * rate + offset

    run = compiler.compile(scaled, dynamic=False)
    x, offset = torch.randn(4, 4), torch.tensor(1.0)
    run(x, torch.tensor(0.5), offset)
    with trace.recording(FOLDER / "numbers.jsonl"):
        for step in range(9):
            run(x, torch.tensor(0.5 if step < 5 else 0.1 * step), offset)


def main() -> None:
    """Write all."""
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    for make in (inference, training, numbers):
        make()


if __name__ == "__main__":
    main()
