"""Embedding tables larger than memory: rows in files, a cache of hot rows before them.

``disk.DiskTables`` is what training uses; ``store`` has the files and how they go back to what a
checkpoint saw; ``view.View`` reads them as of a checkpoint; ``rows.cpp`` moves the rows.
"""

from dlrm.tables.disk import DiskTables
from dlrm.tables.view import View

__all__ = ["DiskTables", "View"]
