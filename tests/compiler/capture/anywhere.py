"""Every function of ``pure`` with a break after every one of its statements, one at a time.

Run as a script, it checks all with the interpreter that runs it.
"""

from __future__ import annotations

import ast
import copy
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.compiler.capture import pure
from tests.compiler.capture.broken import outcome, tell


def variants(function: Any, names: dict[str, Any]) -> Iterator[Any]:
    """The function with ``tell`` behind its first statement, its second, and so on.

    ``names`` are the globals that it sees.
    """
    source = textwrap.dedent(inspect.getsource(function))
    k = 0
    while True:
        tree = ast.parse(source)
        (definition,) = tree.body
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        bodies = [
            (body, place)
            for node in ast.walk(definition)
            for name in ("body", "orelse", "finalbody")
            if isinstance(body := getattr(node, name, None), list)
            for place in range(len(body))
            if not isinstance(body[place], ast.Return | ast.Global | ast.Nonlocal)
        ]
        if k == len(bodies):
            return
        body, place = bodies[k]
        body.insert(place + 1, ast.parse(f"tell({k})").body[0])
        module = ast.fix_missing_locations(ast.Module([definition], []))
        scope = {**names, "tell": tell}
        exec(compile(module, f"<{function.__name__} {k}>", "exec"), scope)
        yield scope[function.__name__]
        k += 1


def check(function: Any, args: tuple[Any, ...]) -> int:
    """All variants; how many there are."""
    from compiler.capture import capture, explain

    count = 0
    for variant in variants(function, vars(pure)):
        variant.__globals__["COUNTER"] = 0
        want = outcome(variant, copy.deepcopy(args))
        captured = capture(variant, backend=lambda gm, inputs: gm)
        for _ in range(2):
            variant.__globals__["COUNTER"] = 0
            got = outcome(captured, copy.deepcopy(args))
            assert got == want, f"{variant.__code__.co_filename}: {got} is not {want}"
        found = explain(captured)
        bugs = [why for why in found.fallbacks if why.startswith("internal")]
        assert not bugs, f"{variant.__code__.co_filename}: {bugs}"
        count += 1
    return count


if __name__ == "__main__":
    os.environ["DLRM_CAPTURE_STRICT"] = "1"
    total = failed = 0
    for function, args in pure.CASES:
        try:
            total += check(function, args)
        except Exception as error:
            failed += 1
            print(f"{function.__name__}: {type(error).__name__}: {str(error)[:600]}")
    print(f"{total} variants, {failed} functions failed, on Python {sys.version.split()[0]}")
    sys.exit(bool(failed))
