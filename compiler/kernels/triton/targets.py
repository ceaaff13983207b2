"""What kernels take of a GPU, found without one: they are compiled for it, and the result is read.

NVIDIA's binaries are read by ``cuobjdump``, which comes with Triton; for AMD the notes in the
assembly say it. A spill is a register moved to memory: a kernel that spills is slow. Kernels have
no other use for a thread's own memory (its stack), so all of that counts.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# name: what Triton calls it, and the shared memory that a program may have, in bytes (CUDA C++
# Programming Guide, compute capabilities 8.0, 9.0 and 10.0; CDNA 3 ISA, section 3)
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True)
class Use:
    """Of one thread: ``registers`` and ``spills`` (bytes); of a program: ``shared`` bytes."""

    registers: int
    spills: int
    shared: int
    binary: bytes


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: str,
    multiples: Sequence[str] = (), **options: Any,
) -> Use:  # fmt: skip
    """Compile for one of ``TARGETS``, and read what the binary takes.

    ``signature`` has Triton's type of each argument in order, "constexpr" for constants. Pointers
    are taken to be multiples of 16 bytes, and the arguments ``multiples`` to be such of 16, as a
    launch finds them to be.
    """
    gpu, _ = TARGETS[target]
    attributes = {
        (k,): [["tt.divisibility", 16]] for k, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name in multiples and kind != "constexpr")
    }  # fmt: skip
    source = ASTSource(kernel, dict(signature), constexprs=dict(constants), attrs=attributes)
    made = triton.compile(source, target=gpu, options=options)
    if gpu.backend == "hip":
        return _of_amd(made)
    return _of_nvidia(made)


def _of_nvidia(made: Any) -> Use:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    spills = int(found["STACK"]) + int(found["LOCAL"])
    return Use(int(found["REG"]), spills, made.metadata.shared, made.asm["cubin"])


def _of_amd(made: Any) -> Use:
    text = made.asm["amdgcn"]

    def number(name: str) -> int:
        (found,) = re.findall(rf"\.{name}:\s+(\d+)", text)
        return int(found)

    spills = number("private_segment_fixed_size")  # scalars spill to vector registers, at no cost
    return Use(number("vgpr_count"), spills, made.metadata.shared, made.asm["hsaco"])
