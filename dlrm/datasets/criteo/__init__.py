"""Criteo click logs: raw files to memory-mapped binary (`prepare`), and back as data (`load`).

The passes over a raw file, in order: `source` recognises and cuts it, `parse` (with `screen` for
odd rows) reads a chunk, `chunk` and `vocab` count, `split` and `write` lay the rows out; `build`
runs them on the workers of `pool`. `encode` turns raw rows into batches with a known vocabulary.

Nothing is imported here: the worker processes of `pool` do without torch.
"""
