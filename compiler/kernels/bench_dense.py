"""Race the dense kernels against their peers, in turns, on the shapes of a Criteo Kaggle model.

``python -m compiler.kernels.bench_dense`` prints the best and the median time of each, in
microseconds, and GF/s for the matrix products. Peers: MKL (``F.linear``, what eager uses), oneDNN's
packed operator with bias and ReLU fused, and eager PyTorch for the interaction and the chain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels import interaction, linear, mlp

Race = dict[str, Callable[[], object]]
LAYERS = ((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (256, 1))  # inputs, outputs
BOTTOM, TOP = (13, 512, 256, 64, 16), (367, 512, 256, 1)
FEATURES, WIDTH = 27, 16


def race(contestants: Race, seconds: float) -> dict[str, tuple[float, float]]:
    """The best and the median time of each in seconds, run in turns for about ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 5 or (time.perf_counter() < end and turns < 2000):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        turns += 1
    return {name: (min(each), statistics.median(each)) for name, each in times.items()}


def packed_linear(weight: Tensor, bias: Tensor, batch: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's operator on a weight in its own layout, bias and ReLU fused."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, batch)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "relu", [], "")


def linear_races(batch: int, dtype: torch.dtype) -> dict[str, tuple[Race, float]]:
    """Each with the number of floating-point operations of one run."""
    races: dict[str, tuple[Race, float]] = {}
    for inputs, outputs in LAYERS:
        x, g = torch.randn(batch, inputs, dtype=dtype), torch.randn(batch, outputs, dtype=dtype)
        weight = torch.randn(outputs, inputs, dtype=dtype)
        bias = torch.randn(outputs, dtype=dtype)
        packed, turned = linear.pack(weight), linear.pack(weight.t())
        peer = packed_linear(weight, bias, batch)
        work = 2.0 * batch * inputs * outputs
        shape = f"{batch} x {inputs} x {outputs}"
        forward: Race = {
            "MKL": lambda x=x, w=weight, b=bias: F.linear(x, w, b).relu_(),  # type: ignore[misc]
            "oneDNN": lambda x=x, peer=peer: peer(x),  # type: ignore[misc]
            "ours": lambda x=x, p=packed, b=bias: linear.linear(x, p, b, "relu"),  # type: ignore[misc]
            "ours+pack": lambda x=x, w=weight, b=bias: linear.linear(x, w, b, "relu"),  # type: ignore[misc]
        }
        races[f"forward {shape}"] = forward, work
        races[f"input gradient {shape}"] = (
            {
                "MKL": lambda g=g, w=weight: g @ w,  # type: ignore[misc]
                "ours": lambda g=g, t=turned: linear.input_gradient(g, t),  # type: ignore[misc]
            },
            work,
        )
        races[f"weight gradient {shape}"] = (
            {
                "MKL": lambda g=g, x=x: (g.t() @ x, g.sum(0)),  # type: ignore[misc]
                "ours": lambda g=g, x=x: linear.weight_gradient(g, x),  # type: ignore[misc]
            },
            work,
        )
    return races


def chain(widths: tuple[int, ...], dtype: torch.dtype) -> list[mlp.Layer]:
    """Linear layers with ReLU between them and none at the end."""
    layers = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        activation = "none" if outputs == widths[-1] else "relu"
        layers.append(mlp.Layer(weight, torch.zeros(outputs, dtype=dtype), activation))
    return layers


def mlp_races(batch: int, dtype: torch.dtype) -> dict[str, tuple[Race, float]]:
    """The bottom and the top MLP: forward, and forward with backward."""
    races: dict[str, tuple[Race, float]] = {}
    for name, widths in (("bottom", BOTTOM), ("top", TOP)):
        plain = chain(widths, dtype)
        packed = [mlp.Layer(linear.pack(a.weight), a.bias, a.activation) for a in plain]  # type: ignore[arg-type]
        peers = [packed_linear(a.weight, a.bias, batch) for a in plain]  # type: ignore[arg-type]
        x = torch.randn(batch, widths[0], dtype=dtype)
        g = torch.randn(batch, widths[-1], dtype=dtype)
        trained = [a.weight.requires_grad_() for a in plain]  # type: ignore[union-attr]
        given = x.clone().requires_grad_()

        def through(x: Tensor, peers: list[Callable[[Tensor], Tensor]]) -> Tensor:
            for layer in peers:
                x = layer(x)
            return x

        def eager_step(plain=plain, given=given, g=g, trained=trained) -> object:  # type: ignore[no-untyped-def]
            with torch.enable_grad():
                return torch.autograd.grad(mlp.reference(given, plain), [given, *trained], g)

        def own_step(plain=plain, x=x, g=g) -> object:  # type: ignore[no-untyped-def]
            return mlp.mlp_backward(g, x, mlp.mlp_forward(x, plain), plain)

        work = 2.0 * batch * sum(a * b for a, b in zip(widths[:-1], widths[1:], strict=True))
        forward: Race = {
            "eager": lambda x=x, plain=plain: mlp.reference(x, plain),  # type: ignore[misc]
            "oneDNN": lambda x=x, peers=peers: through(x, peers),  # type: ignore[misc]
            "ours": lambda x=x, packed=packed: mlp.mlp(x, packed),  # type: ignore[misc]
            "ours+pack": lambda x=x, plain=plain: mlp.mlp(x, plain),  # type: ignore[misc]
        }
        races[f"{name} MLP {batch}"] = forward, work
        races[f"{name} MLP {batch} step"] = {"eager": eager_step, "ours+pack": own_step}, 3 * work
    return races


def interaction_races(batch: int, dtype: torch.dtype) -> dict[str, tuple[Race, float]]:
    """Of 27 vectors of 16: forward and backward, from one buffer."""
    x = torch.randn(batch, FEATURES, WIDTH, dtype=dtype)
    g = torch.randn(batch, interaction.out_features(FEATURES, WIDTH), dtype=dtype)
    given = x.clone().requires_grad_()
    with torch.enable_grad():
        y = interaction.reference(given)
    work = 2.0 * batch * WIDTH * FEATURES * (FEATURES - 1) / 2
    shape = f"{batch} x {FEATURES} x {WIDTH}"
    return {
        f"interaction {shape}": (
            {
                "eager": lambda: interaction.reference(x),
                "ours": lambda: interaction.interaction(x),
            },
            work,
        ),
        f"interaction backward {shape}": (
            {
                "eager": lambda: torch.autograd.grad(y, given, g, retain_graph=True),
                "ours": lambda: interaction.interaction_backward(g, x),
            },
            2 * work,
        ),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128, 2048])
    parser.add_argument("--dtype", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    for dtype in args.dtype:
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        for batch in args.batch:
            races = (
                interaction_races(batch, kind) | mlp_races(batch, kind) | linear_races(batch, kind)
            )
            for name, (contestants, work) in races.items():
                if args.only in name:
                    times = race(contestants, args.seconds)
                    cells = [
                        f"{who} {best * 1e6:.0f}/{median * 1e6:.0f} us {work / best / 1e9:.0f} GF/s"
                        for who, (best, median) in times.items()
                    ]
                    print(f"{dtype:5}{name:36}", " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
