"""Functions that break: (function, arguments, breaks) to capture and compare, without torch.

``tell`` is what is not understood: it writes down what it is given, at the time. Run as a script,
it checks all with the interpreter that runs it.
"""

# ruff: noqa

from __future__ import annotations

import copy
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.compiler.capture.pure import Base, Config, Manager, shown  # noqa

CASES: list[tuple[Any, tuple[Any, ...], bool]] = []
TOLD: list[str] = []


def tell(*values: Any, **named: Any) -> Any:
    os.getpid()  # a function that nobody looks into
    TOLD.append(shown([values, named]))
    return values[0] if values else None


def case(*args: Any, eager: bool = False) -> Any:
    """``eager``: the rest runs in Python."""

    def add(function: Any) -> Any:
        CASES.append((function, args, eager))
        return function

    return add


@case(3)
def once(n):
    a = n + 1
    tell(a)
    return a * 2


@case(3)
def result_used(n):
    return tell(n) + tell(n + 1) * 2


@case(3)
def last(n):
    return tell(n)


@case([1, 2, 3])
def in_loop(items):
    total = 0
    for item in items:
        total += item
        tell(total)
    return total


@case(6)
def in_long_loop(n):
    total = 0
    for k in range(n * 10):
        total += tell(k)
    return total


@case(400)
def in_while(n):
    total = 0
    while total < n:
        total += tell(1)
    return total


@case([1, 2], [3, 4])
def in_zip(a, b):
    out = []
    for k, (x, y) in enumerate(zip(a, b)):
        out.append(tell(x + y + k))
    return out


@case([1, 2, 3])
def named_iterator(items):
    it = iter(items)
    tell(next(it))
    return list(it)


@case([3, 4])
def shared_iterator(items):
    it = iter(items)
    for x in it:
        tell(x)
        for y in it:
            tell(y)
    return x


@case([1, 2, 3])
def in_comprehension(items):
    return [tell(i) * 2 for i in items]


@case([1, 2, 3])
def in_map(items):
    return list(map(tell, items)), sorted(items, key=lambda i: tell(-i))


@case([1, 2, 3])
def mutation_before(items):
    items.append(4)
    made = [items]
    tell(items, made)
    made.append(5)
    items.append(6)
    tell(items, k=made)
    return made, made[0] is items


@case({"a": 1})
def dictionary_between(d):
    d["b"] = tell(2)
    e = d
    e["c"] = 3
    tell(d)
    del d["a"]
    return d is e


@case(2)
def object_between(n):
    b = Base(n)
    b.extra = [n]
    tell(b)
    b.n += 1
    same = b
    tell(same.n)
    return same, b is same, b + 1


@case(Config(1))
def argument_object(c):
    c.width += 1
    tell(c.width)
    c.names.append(tell("x"))
    return c.double


@case(2)
def closure_between(n):
    count = 0

    def add(k):
        nonlocal count
        count += k
        return count

    add(n)
    tell(count)
    add(10)
    count += 1
    tell(add) if False else tell(add(1))
    return count, add(5)


@case(3)
def closure_breaks_inside(n):
    def inner(k):
        tell(k, n)
        return k + n

    return inner(1) + inner(2)


@case(3)
def recursive_closure(n):
    def down(k):
        return [] if k == 0 else [tell(k), *down(k - 1)]

    return down(n)


@case(5)
def nested_calls(n):
    return _outer(n) + _outer(n + 1)


def _outer(n):
    n += 1
    m = _inner(n)
    return m + n


def _inner(n):
    for _ in range(2):
        n += tell(n)
    return n


@case(1)
def method_breaks(n):
    return _Teller(n).run(2)


class _Teller:
    def __init__(self, n):
        self.n = n
        tell("made")

    def run(self, k):
        tell(self.n)
        self.n += k
        return self.n


@case(True)
def branches(flag):
    if tell(flag):
        x = 1
    else:
        x = 2
    return x


@case(0)
def truth_values(n):
    return tell(n) or tell(5), tell(n) and tell(6), not tell(n)


@case(2)
def conditional(n):
    y = tell("a") if tell(n) > 1 else tell("b")
    return y, 1 < tell(2) < tell(3)


@case([5, 1])
def operators(items):
    items[tell(0)] += tell(3)
    items[0] -= 1
    a, b = tell(items)
    return a, b, -tell(3), tell([1]) + [2], tell("x") in "xyz", tell(items)[0:1]


@case(4)
def arguments(n):
    def f(a, *rest, k=0, **more):
        return a, rest, k, more

    args, named = [tell(1), 2], {"k": tell(3), "z": 4}
    return f(*args, **named), tell(*args, **named), f(tell(0), k=tell(1))


@case(4)
def formatted(n):
    return f"{tell(n)!r:>5} and {tell(n + 1)}", "%d" % tell(3)


@case(3)
def unbound_later(n):
    if n > 5:
        late = 1
    tell(n)
    if n > 5:
        n += late
    return n


@case(3)
def unbound_error(n):
    tell(n)
    if n > 5:
        late = 1
    return late


@case(0)
def raises(n):
    tell(n)
    return 1 / n


@case(0)
def raises_own(n):
    if n == 0:
        raise ValueError(f"bad {n}")
    return n


@case(0)
def raises_inside(n):
    tell("before")
    return _raiser(n)


def _raiser(n):
    raise KeyError(n, "inner")


@case({})
def missing_key(d):
    return d["nothing"]


@case(0)
def failed_assert(n):
    assert n, f"no {n}"


@case(3)
def wrong_call(n):
    return _inner(n, n)


@case(0, eager=True)
def caught(n):
    try:
        return 1 / n
    except ZeroDivisionError as error:
        return tell(str(error))


@case(0, eager=True)
def caught_call(n):
    log = []
    try:
        tell(n)
        _raiser(n)
    except KeyError as error:
        log.append(error.args)
    finally:
        log.append(tell("finally"))
    return log


@case([1], eager=True)
def in_manager(log):
    with Manager(log):
        log.append(tell(2))
    return log


@case([1], eager=True)
def raises_in_manager(log):
    with Manager(log):
        tell(log)
        raise ValueError("inside")


@case(3)
def generator_consumed(n):
    return [tell(v) for v in (k * 2 for k in range(n))], list(_telling(n))


def _telling(n):
    for k in range(n):
        yield tell(k)


@case(3)
def generator_held(n):
    g = _telling(n)
    first = next(g)
    tell("between")
    return first, list(g)


@case(2)
def many_variables(n):
    a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r = range(17)
    s = a + b
    tell(s)
    return a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r


@case(1)
def starred_parameters(*args, **kwargs):
    kwargs["n"] = len(args)
    tell(args)
    return args, kwargs


@case(1)
def keyword_only(a, *, b=2):
    tell(a)
    return a + b


@case(3)
def deletes(n):
    a = [n]
    tell(a)
    del a
    b = tell(1)
    return b


@case(3)
def slices_and_sets(n):
    s = slice(0, n)
    chosen = {1, n}
    tell(s)
    return [0, 1, 2, 3, 4][s], chosen, tell(frozenset(chosen))


@case(2)
def imports_later(n):
    import json

    return json.dumps({"n": n}), tell(n)


@case(40)
def deep_recursion(n):
    return _deep(n)


def _deep(n):
    return tell(0) if n == 0 else 1 + _deep(n - 1)


@case(2)
def super_between(n):
    return _Child(n).run(1)


class _Child(_Teller):
    def run(self, k):
        tell("child")
        got = super().run(k)
        tell(got)
        return super().run(got)


def outcome(function: Any, args: tuple[Any, ...]) -> tuple[str, str, list[str]]:
    """What a call gave or raised, its arguments after, and what was told."""
    TOLD.clear()
    try:
        result = shown(function(*args))
    except Exception as error:
        result = f"raised {type(error).__name__}: {error}"
    return result, shown(args), list(TOLD)


def check(function: Any, args: tuple[Any, ...], eager: bool) -> None:
    from compiler.capture import capture, explain

    want = outcome(function, copy.deepcopy(args))
    captured = capture(function, backend=lambda gm, inputs: gm)
    for _ in range(3):
        got = outcome(captured, copy.deepcopy(args))
        assert got == want, f"{function.__name__}: {got} is not {want}"
    found = explain(captured)
    assert found.breaks or found.fallbacks, f"{function.__name__} did not break"
    # a whole function in Python, where its rest would do, would hide what fails
    allowed = ("the limit", "nothing before it to capture", "capture failed too often")
    outside = [why for why in found.fallbacks if not any(text in why for text in allowed)]
    assert not outside, f"{function.__name__}: {outside}"
    rest = any("the rest runs" in why for why in found.breaks) or found.fallbacks
    assert rest or not eager, f"{function.__name__}: {found.breaks}"


if __name__ == "__main__":
    os.environ["DLRM_CAPTURE_STRICT"] = "1"
    failed = 0
    for function, args, eager in CASES:
        try:
            check(function, args, eager)
        except Exception as error:
            failed += 1
            print(f"{function.__name__}: {type(error).__name__}: {str(error)[:600]}")
            if "-v" in sys.argv:
                traceback.print_exc()
    print(f"{len(CASES) - failed} of {len(CASES)} on Python {sys.version.split()[0]}")
    sys.exit(bool(failed))
