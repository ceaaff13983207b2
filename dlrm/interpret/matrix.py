"""Which method takes which form of input, and what had to be mended for it.

Three verdicts: *works* (Captum does it, on the head as elsewhere), *repaired* (Captum by itself
raises, or gives something else without a word, and ours is right), *refused* (with the mend in the
message, as no answer would be right). ``captum`` says what Captum's own call on the whole model
does, where there is one. A test runs every cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm.interpret.explain import METHODS

FORMS = {
    "one id a bag": "Batch.one_hot",
    "bags": "bags of any length",
    "empty bags": "bags without an id",
    "weighted ids": "a weight for each id",
    "no dense features": "a model with dense_in=0",
    "missing values": "NaN among the dense features",
    "compiled model": "what compiler.compile(model) returns",
    "float ids": "ids of a float type",
    "ids without a Batch": "dense, ids and offsets as a tuple, as for additional_forward_args",
}


@dataclass(frozen=True)
class Cell:
    """A verdict, what Captum does by itself, and how it was mended or why it is refused."""

    verdict: str  # works, repaired or refused
    how: str
    captum: str = "none"  # one of raw.OUTCOMES


HEAD = "the model is cut at its tables, and the method sees pooled vectors"
MASK = "Captum on the head, one mask a table"
TAP = "a tap in the graph instead of hooks"
LINES = "straight lines through each operation's two values instead of hooks, products included"

# one id a bag, and bags: (verdict, Captum by itself, how)
OWN: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "integrated_gradients": (
        ("repaired", "raises", f"{HEAD}: ids cannot be scaled, and as floats have no gradient"),
        ("repaired", "zeros", f"{HEAD}: ids as extra arguments are the same in the baseline"),
    ),
    "deeplift": (
        ("repaired", "raises", f"{HEAD}; {LINES}"),
        ("repaired", "raises", f"{HEAD}; {LINES}"),
    ),
    "layer_conductance": (
        ("repaired", "wrong", f"{HEAD}: a path through scaled ids meets other ids' rows; {TAP}"),
        ("repaired", "raises", f"{HEAD}: the batch of a path has steps times the bags; {TAP}"),
    ),
    "neuron_conductance": (
        ("repaired", "wrong", f"{HEAD}: with ids as extra arguments tables get nothing; {TAP}"),
        ("repaired", "raises", f"{HEAD}: the batch of a path has steps times the bags; {TAP}"),
    ),
    "feature_ablation": (
        ("works", "right", f"{MASK}; by itself Captum has only ids for baselines, such as id 0"),
        ("repaired", "wrong", f"{MASK}: ids of all samples in one tensor were taken for samples"),
    ),
    "feature_permutation": (
        ("works", "right", f"{MASK}; a batch of one is refused, as its result would be zeros"),
        ("repaired", "raises", f"{MASK}: permuted ids end in other tables, beyond their rows"),
    ),
    "shapley": (
        ("works", "right", f"{MASK}; by_id=True for ids as players"),
        ("repaired", "wrong", f"{MASK}: ids of all samples in one tensor were taken for samples"),
    ),
    "kernel_shap": (
        ("works", "right", "a fit of all samples at once, where Captum fits them one by one"),
        ("repaired", "raises", "a fit of all samples at once: Captum cuts the batch, not the bags"),
    ),
    "tracin": (
        ("repaired", "wrong", "gradients of looked-up rows: Captum's fast form leaves tables out"),
        ("repaired", "none", "gradients of looked-up rows, an id's weight in its bag included"),
    ),
    "tcav": (
        ("repaired", "none", "concepts and samples are batches, of bags as the model takes them"),
        ("repaired", "none", "concepts and samples are batches, of bags as the model takes them"),
    ),
}  # fmt: skip

# the other forms, for all methods alike: (verdict, how)
ALIKE: dict[str, tuple[str, str]] = {
    "empty bags": ("repaired", "a bag's place is kept; what an empty bag adds belongs to no id"),
    "weighted ids": ("repaired", "weights are part of each id's share of the pooled vector"),
    "no dense features": (
        "repaired",
        "the empty tensor of dense features is left out of Captum's inputs",
    ),
    "missing values": ("repaired", "filled with missing=NUMBER and marked; NaN is refused without"),
    "compiled model": ("repaired", "the head is compiled, in pieces of fixed size, weights frozen"),
    "float ids": ("refused", "ids are names: give them as int64"),
    "ids without a Batch": ("refused", "make a Batch: ids outside a bag belong to no sample"),
}
OTHERWISE: dict[tuple[str, str], tuple[str, str]] = {
    ("tracin", "compiled model"): ("works", "the model inside is used, for its layers' inputs"),
    ("tracin", "empty bags"): ("works", "a table that a sample has no id for has no gradient"),
    ("tracin", "weighted ids"): ("repaired", "weights scale the rows' gradients"),
    ("tracin", "no dense features"): ("works", "nothing is special about it"),
}  # fmt: skip


def _row(method: str) -> dict[str, Cell]:
    single, bags = OWN[method]
    row = {
        "one id a bag": Cell(single[0], single[2], single[1]),
        "bags": Cell(bags[0], bags[2], bags[1]),
    }
    for form, alike in ALIKE.items():
        row[form] = Cell(*OTHERWISE.get((method, form), alike))
    return row


MATRIX: dict[str, dict[str, Cell]] = {method: _row(method) for method in METHODS}


def show() -> str:
    """The matrix as text: a table of verdicts, and then how."""
    width = max(map(len, METHODS))
    wide = max(map(len, FORMS)) + 2
    lines = ["".ljust(width) + "  " + "".join(form.ljust(wide) for form in FORMS)]
    for method, row in MATRIX.items():
        lines.append(
            method.ljust(width) + "  " + "".join(row[f].verdict.ljust(wide) for f in FORMS)
        )
    lines += ["", "forms: " + "; ".join(f"{form}: {about}" for form, about in FORMS.items()), ""]
    for method in MATRIX:
        lines.append(f"{method}: {METHODS[method].about}")
        for form in ("one id a bag", "bags"):
            cell = MATRIX[method][form]
            by_itself = f" (Captum by itself: {cell.captum})" if cell.captum != "none" else ""
            lines.append(f"  {form}: {cell.verdict}, {cell.how}{by_itself}")
        for (name, form), (verdict, how) in OTHERWISE.items():
            if name == method:
                lines.append(f"  {form}: {verdict}, {how}")
    lines += ["", "all others:"]
    lines += [f"  {form}: {verdict}, {how}" for form, (verdict, how) in ALIKE.items()]
    return "\n".join(lines)
