"""Deep learning recommendation models: build, train, evaluate, explain, protect and scale.

Importing this package loads nothing heavy, so that `python -m dlrm.check` can speak even where
torch cannot be imported. Import what you need from its modules: `dlrm.config`, `dlrm.model`,
`dlrm.train`.
"""

__version__ = "0.1.0"

from dlrm.startup import prepare as _prepare

_prepare()
