"""Mending: graph breaks removed in the source, before anything is captured.

Read ``rewrite`` first: a function's syntax tree goes through the passes in order (trap, defer,
where, loops), each of which replaces what would break the graph by calls into ``runtime``.
"""
