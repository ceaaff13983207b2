"""Training within a memory budget: saved tensors wait in a slower memory, or are computed again.

``Within(model, memory_budget="512MiB")`` is called as the model; ``compiler.compile(model,
memory_budget="512MiB")`` does the same for compiled graphs. Read ``plan`` first (what to do with
each saved tensor), then ``ledger`` (how the budget is held to), then ``eager`` and ``compiled``.
"""

from compiler.offload.eager import Within, within
from compiler.offload.plan import DoesNotFit
from compiler.offload.sizes import parse_bytes

__all__ = ["DoesNotFit", "Within", "parse_bytes", "within"]
