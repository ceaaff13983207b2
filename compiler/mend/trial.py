"""A trial within TorchDynamo's capture: trace a call, see whether that works, forget it.

Where ``torch.cond`` cannot be captured, TorchDynamo raises, though the plain branch would have
been right. So it is tried first, in a subgraph that is thrown away. This goes deep into
TorchDynamo, and is the only place that does.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.higher_order_ops import speculate_subgraph

_trying = [False]


def try_capture(context: Any) -> None:
    """Set ``answer`` in the frame that is being captured: can its local ``way`` be called?

    Inside of another trial the answer is yes: if it is wrong, the outer trial fails.
    """
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    tx.symbolic_locals["answer"] = ConstantVariable.create(_trying[0] or _works(tx))


def _works(tx: Any) -> bool:
    before = tx.output.side_effects
    tx.output.side_effects = before.clone()
    way = tx.symbolic_locals["way"]
    _trying[0] = True
    try:
        with tx.fake_mode.shape_env.ignore_fresh_unbacked_symbols():
            speculate_subgraph(tx, way, [], {}, "a trial", always_restore=True)
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception:
        tx.output.side_effects = before
        return False
    finally:
        _trying[0] = False
    return True
