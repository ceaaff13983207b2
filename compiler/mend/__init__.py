"""Mending: graph breaks removed in the source, before anything is captured.

Read ``rewrite`` first: a function's syntax tree goes through the passes in order (trap, defer,
where), each of which replaces what would break the graph by calls into ``runtime``.

* ``trap`` and ``defer`` share ``walking`` (the walk), ``guards``, ``shapes``, ``calls`` (which
  calls have effects), ``splitting`` and ``formatting`` (what is computed at once, what later).
* ``runtime``, ``effects`` (the operators), ``sites`` (how values travel) and ``places`` run them.
* ``live``, ``calltree``, ``source``, ``swaps`` and ``report`` mend what is alive:
  ``compiler.compile(model, mend=True)``.
* ``written``, ``relevant`` and ``__main__`` mend files: ``python -m compiler.mend``.
"""
