"""Real models from packages, built from a small random configuration: nothing is downloaded.

Each has sizes as large as a laptop's core likes, and calls that take both sides of its branches
where a caller can choose. The packages are the extra ``survey``; what is missing is skipped.
"""

from __future__ import annotations

from compiler.survey.case import Case
from compiler.survey.models import recommenders, text, vision

CASES: tuple[Case, ...] = (*text.CASES, *vision.CASES, *recommenders.CASES)
