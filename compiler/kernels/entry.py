"""The kernels' C entry points, for generated code: where they are, and how C declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiler.kernels import checked, embedding_bag, interaction, linear, mlp
from compiler.kernels.bags import BagError

_LIBRARIES: dict[str, Any] = {
    "linear": linear,
    "mlp": mlp,
    "interaction": interaction,
    "bags": embedding_bag,
    "checked_mlp": checked.MLP,
    "checked_bags": checked.BAGS,
}
_LINEAR = {
    "packed_size": "Int(Int outputs, Int inputs)",
    "pack": "void(const void* weight, Int output_stride, Int input_stride, Int outputs, "
    "Int inputs, void* packed, Int threads)",
    "linear": "void(const void* x, Int x_row, Int batch, const void* weight, Int weight_row, "
    "Int inputs, Int outputs, void* out, Int out_row, const void* bias, const void* saved, "
    "Int saved_row, Int activation, Int threads)",
    "weight_gradient": "void(const void* g, Int g_row, const void* x, Int x_row, Int batch, "
    "Int outputs, Int inputs, float* weight, Int weight_row, float* bias, Int threads)",
}
_MLP = {
    "mlp_forward": "void(const void* x, Int x_row, Int batch, const Int* layers, Int count, "
    "Int threads)",
    "mlp_backward": "void(const void* x, Int x_row, const void* g, Int g_row, void* x_gradient, "
    "Int x_gradient_row, Int batch, const Int* layers, Int count, Int threads)",
}
_INTERACTION = {
    "interaction": "void(const Int* features, const Int* shape, void* out, Int threads)",
    "interaction_backward": "void(const Int* features, const Int* shape, const void* g, "
    "const Int* gradients, Int threads)",
}
ENTRIES: dict[str, tuple[str, str]] = {  # name: (library, signature)
    f"{name}_{suffix}": (library, signature)
    for library, group in (("linear", _LINEAR), ("mlp", _MLP), ("interaction", _INTERACTION))
    for name, signature in group.items()
    for suffix in ("f32", "bf16")
}
ENTRIES["embedding_bags"] = (
    "bags",
    "void(const Int* tables, Int count, Int threads, Int* problem)",
)
ENTRIES["embedding_bags_checked"] = (
    "checked_bags",
    "void(const Int* tables, const Int* sums, Int count, Int threads, Int* problem)",
)
for _suffix in ("f32", "bf16"):
    ENTRIES[f"mlp_checked_{_suffix}"] = (
        "checked_mlp",
        "void(const void* x, Int x_row, Int batch, const Int* layers, const Int* sums, Int count, "
        "Int threads, Int* problem)",
    )


def address(name: str, folder: Path | None = None) -> int:
    """The address of an entry point; its library is built if need be, or taken from ``folder``."""
    library = library_of(name)
    native = ctypes.CDLL(str(folder / f"{library}.so")) if folder else _native(library)
    found = ctypes.cast(getattr(native, name), ctypes.c_void_p).value
    assert found is not None
    return found


def library_of(name: str) -> str:
    """The name of the library that an entry point is in."""
    return ENTRIES[name][0]


def path(library: str) -> Path:
    """Where a library lies."""
    return Path(_native(library)._name)


def _native(library: str) -> ctypes.CDLL:
    return _LIBRARIES[library].library()


def declarations(names: Sequence[str]) -> str:
    """C++ that declares entry points as pointers, and ``link``, which sets them."""
    if not names:
        return ""
    lines = []
    for name in names:
        result, arguments = ENTRIES[name][1].split("(", 1)
        lines.append(f"static {result} (*{name})({arguments};")
    sets = " ".join(f"{name} = (decltype({name}))entries[{k}];" for k, name in enumerate(names))
    return "\n".join([*lines, f"\nEXPORT void link(void** entries) {{ {sets} }}\n"])


def raise_problem(note: str, kind: int, table: int, position: int, value: int) -> None:
    """Raise what native code reported: BagError and Corruption as in bags.h, IndexError for kind 0.

    ``note`` names the tables of a group of bags, joined by commas, or the node of the graph.
    """
    if kind == 0:
        raise IndexError(f"{note or 'the graph'}: an index is outside its dimension")
    if kind == checked.PRODUCT:
        raise checked.corruption(note, kind, table, position, value)
    name = note.split(",")[table]
    if kind >= checked.ROW:
        raise checked.corruption(name, kind, table, position, value)
    where = f"table {table} ({name})"
    if kind == 1:
        raise BagError(f"{where}: id {value} at position {position} is outside its rows")
    raise BagError(
        f"{where}: offsets[{position}] is {value}: offsets start at 0, do not fall, and end within "
        "the ids"
    )
