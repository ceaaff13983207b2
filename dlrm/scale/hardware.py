"""What a device and its links do, as published or as measured here: what predictions stand on.

Shares of a published peak that real kernels reach are assumptions, named as such in ``ASSUMED``;
``FITTED`` names the only figures that were chosen so that a published run comes out right.
"""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED = {
    "matrix": 0.85,  # large matrix products, of the peak
    "stream": 0.80,  # memory read and written in order, of the bandwidth
    "rows": 0.60,  # rows of some hundred bytes at random places, of the bandwidth
    "links": 0.70,  # large collectives, of a link's bandwidth in one direction
    "latency": 20e-6,  # seconds that a collective takes for no bytes at all, within a host
    "latency_hosts": 40e-6,  # the same between hosts
}
FITTED = {
    "launch": 8.9e-3,  # seconds of Python, launches and waiting in a step for no samples
    "input": 4.3e-6,  # seconds that the host spends on each sample of a process
}
FITTED_TO = (
    "launch and input: the line through the two published runs of the dot interaction (8 x A100, "
    "256 and 2048 samples a GPU)"
)


@dataclass(frozen=True)
class Hardware:
    """Rates of one process's device in bytes, operations and samples per second, and its links."""

    name: str
    matrix: float  # f32 operations per second of large matrix products
    stream: float  # bytes per second, read and written in order
    lookup: float  # bytes per second of rows read at random places
    update: float  # bytes per second of rows read and written at random places
    memory: float  # bytes
    links: float  # bytes per second of a process to the others of its host, one direction
    network: float  # bytes per second of a process to other hosts, one direction
    latency: float  # seconds of a collective without bytes within a host
    latency_hosts: float  # the same between hosts
    launch: float  # host seconds in each step
    input: float  # host seconds for each sample of a process
    overlapped: bool  # the device computes while the host launches, and links work beside it
    source: str


def _gpu(name: str, tera: float, gb_s: float, gb: float, link: float, net: float, source: str):
    return Hardware(
        name, tera * 1e12 * ASSUMED["matrix"], gb_s * 1e9 * ASSUMED["stream"],
        gb_s * 1e9 * ASSUMED["rows"], gb_s * 1e9 * ASSUMED["rows"], gb * 1e9,
        link * 1e9 * ASSUMED["links"], net * 1e9 * ASSUMED["links"], ASSUMED["latency"],
        ASSUMED["latency_hosts"], FITTED["launch"], FITTED["input"], True, source,
    )  # fmt: skip


DEVICES = {
    "a100": _gpu(
        "a100", 19.5, 1555, 40, 300, 6.25,
        "NVIDIA A100 datasheet, 40 GB SXM: 19.5 TF/s f32, 1555 GB/s, NVLink 600 GB/s both ways; "
        "AWS p4d.24xlarge: 400 Gb/s for 8 GPUs",
    ),
    "h100": _gpu(
        "h100", 67, 3350, 80, 450, 50,
        "NVIDIA H100 datasheet, SXM: 67 TF/s f32, 3.35 TB/s, NVLink 900 GB/s both ways; "
        "AWS p5.48xlarge: 3200 Gb/s for 8 GPUs",
    ),
}  # fmt: skip
