"""A training step under a hard limit of memory, in a process of its own: ``python limited.py WAY``.

WAY is eager, all, dynamic or compiled. The limit is set once the model, its gradients, the inputs
and all that PyTorch keeps are there: what is left is for the step. Prints a digest of the loss and
of the gradients.
"""

import hashlib
import re
import resource
import sys
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 32, 64, 8192
LAYER = WIDTH * BATCH * 4  # 2 MiB: what a layer saves; all of them 64 MiB
LEFT = 36 << 20  # bytes for the step
BUDGET = 6 * LAYER


def step(call, model, x, label):
    model.zero_grad(set_to_none=False)
    loss = nn.functional.binary_cross_entropy_with_logits(call(x).squeeze(1), label)
    loss.backward()
    return loss.detach()


def main(way: str, limited: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, 1))
    x, label = torch.randn(BATCH, WIDTH), (torch.rand(BATCH) < 0.5).float()
    if way == "eager":
        call = model
    elif way == "compiled":
        import compiler

        call = compiler.compile(model, memory_budget=BUDGET, dynamic=False)
    else:
        from compiler.offload import Within

        call = Within(model, BUDGET, way)
    # threads, libraries, the gradients' memory; and nothing is to be compiled under the limit
    size = BATCH if way == "compiled" else 256
    step(call, model, x[:size], label[:size])
    if limited:
        text = Path("/proc/self/status").read_text()
        used = int(re.search(r"VmData:\s+(\d+)", text)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + LEFT,) * 2)
    digest = hashlib.sha256()
    for _ in range(4):
        loss = step(call, model, x, label)
        for tensor in (loss, *(p.grad for p in model.parameters())):
            digest.update(tensor.numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], "--limited" in sys.argv)
