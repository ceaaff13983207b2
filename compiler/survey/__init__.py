"""The survey: what mending and capture make of many functions and models, beside TorchDynamo.

``python -m compiler.survey`` prints the tables. Read ``measure`` first: how one case is run in each
way and what is compared. ``corpus/`` holds small functions, ``models/`` real models from packages.
The package ``dlrm`` has cases of its own, and so may you: ``--cases MODULE``.
"""
