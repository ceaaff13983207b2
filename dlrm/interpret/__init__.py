"""Why a DLRM says what it says: attributions that are right for embedding bags.

``explain_predictions(model, batch, method=...)`` is the one call; ``python -m dlrm.interpret``
writes a report on a trained model, scores the methods against planted truth, and measures them.
"""

from dlrm.interpret.explain import METHODS, Explanation, explain_predictions

__all__ = ["METHODS", "Explanation", "explain_predictions"]
