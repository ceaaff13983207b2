"""Small functions over the language, without torch: (function, arguments) to capture and compare.

Each must be captured whole: no break, nothing left to Python. Run as a script, it checks all of
them with the interpreter that runs it; the tests do so for every CPython that is there.
"""

# ruff: noqa

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

CASES: list[tuple[Any, tuple[Any, ...]]] = []


def case(*args: Any) -> Any:
    def add(function: Any) -> Any:
        CASES.append((function, args))
        return function

    return add


class Color(enum.Enum):
    RED = 1
    GREEN = "g"


class Point(NamedTuple):
    x: Any
    y: Any = 3


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Config:
    width: int
    names: list[str] = dataclasses.field(default_factory=list)
    scale: float = 0.5

    @property
    def double(self) -> int:
        return self.width * 2

    def grown(self, by: int = 1) -> Config:
        return Config(self.width + by, [*self.names, "more"], scale=self.scale)


class Base:
    kind = "base"
    shared = [1, 2]

    def __init__(self, n: int) -> None:
        self.n = n

    def who(self) -> str:
        return f"{self.kind}:{self.n}"

    @classmethod
    def make(cls, n: int) -> Base:
        return cls(n)

    @staticmethod
    def twice(n: int) -> int:
        return 2 * n

    def __add__(self, other: Any) -> Any:
        return self.n + getattr(other, "n", other)

    def __radd__(self, other: Any) -> Any:
        return other + self.n

    def __getitem__(self, k: Any) -> Any:
        return k * self.n

    def __len__(self) -> int:
        return self.n

    def __contains__(self, k: Any) -> bool:
        return k < self.n

    def __call__(self, k: int, *, add: int = 0) -> int:
        return k * self.n + add

    def __iter__(self) -> Any:
        return iter(range(self.n))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Base) and other.n == self.n

    __hash__ = None  # type: ignore


class Derived(Base):
    kind = "derived"

    def __init__(self, n: int) -> None:
        super().__init__(n + 1)
        self._cached = None

    def who(self) -> str:
        return "<" + super().who() + ">"

    @property
    def value(self) -> int:
        return self.n

    @value.setter
    def value(self, n: int) -> None:
        self.n = n * 10

    @functools.cached_property
    def heavy(self) -> int:
        return self.n**2


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a
        self.b = [a]


class Manager:
    def __init__(self, log: list) -> None:
        self.log = log

    def __enter__(self) -> Manager:
        self.log.append("in")
        return self

    def __exit__(self, *details: Any) -> None:
        self.log.append("out")


GLOBAL = {"depth": 2, "names": ["a", "b"]}
COUNTER = 0


@case(3, 4)
def arithmetic(a, b):
    return a + b * 2 - a // b + a % b, a / b, a**b, -a, +b, ~a, a & b, a | b, a ^ b, a << 1, a >> 1


@case(3, 4.5)
def compare(a, b):
    return a < b, a <= b, a == b, a != b, a > b, a >= b, 1 < a < 5, not a, a is None, b is not None


@case(5)
def chained(a):
    return 1 < a <= 5 != 7 > 3


@case([1, 2, 3, 4])
def inplace(items):
    total = 0
    for item in items:
        total += item
        total *= 2
        total -= 1
        total //= 1
    return total


@case(10)
def while_loop(n):
    found = []
    while n > 0:
        n -= 1
        if n % 2:
            continue
        if n < 3:
            break
        found.append(n)
    else:
        found.append("never")
    return found


@case([3, 1, 2])
def for_else(items):
    for k, item in enumerate(items, 1):
        if item == 9:
            break
    else:
        k = -1
    return k, item


@case([1, 2, 3], "ab")
def comprehensions(items, text):
    squares = [i * i for i in items if i > 1]
    pairs = [(i, t) for i in items for t in text]
    return squares, pairs, {i: t for i, t in zip(items, text)}, {i % 2 for i in items}


@case([1, 2, 3])
def generator_expressions(items):
    return (
        sum(i * 2 for i in items),
        any(i > 2 for i in items),
        all(i for i in items),
        tuple(i for i in items if i != 2),
    )


def _generate(n):
    for k in range(n):
        yield k
        if k == 2:
            return


@case(5)
def generators(n):
    return list(_generate(n)), [a + b for a, b in zip(_generate(n), _generate(2))]


@case(1, 2, 3)
def starred(a, *rest, last=4, **named):
    first, *middle, end = (a, *rest, last)
    return [a, *rest], {**named, "k": first}, middle, end


def _collect(*args, **kwargs):
    return args, kwargs


@case((1, 2), {"x": 3})
def call_forms(args, kwargs):
    return _collect(*args, 5, **kwargs), _collect(0, *args, y=1, **kwargs), _collect(z=2)


def _defaults(a, b=2, /, c=3, *, d=4, e=5):
    return a, b, c, d, e


@case(7)
def defaults(a):
    return _defaults(a), _defaults(a, 1, c=9), _defaults(a, 1, 2, e=0)


@case(2)
def closures(n):
    count = 0

    def add(k):
        nonlocal count
        count += k * n
        return count

    return add(1), add(2), (lambda x, y=n: x + y + count)(5)


@case(3)
def make_functions(n):
    def outer(k):
        def inner(j):
            return j + k + n

        return inner

    return [outer(k)(1) for k in range(3)]


@case(5)
def recursion(n):
    def fact(k):
        return 1 if k <= 1 else k * fact(k - 1)

    return fact(n)


@case("abc", 3, 2.5)
def formatting(text, n, x):
    return (
        f"{text!r:>6}|{n:03d}|{x:.2f}|{n + 1}{'' if n else 'no'}|{text!s}|{text!a}",
        "%s-%d"
        % (
            text,
            n,
        ),
        "{} {a}".format(n, a=text),
    )


@case("Hello World")
def texts(text):
    return (
        text.upper(), text.split(), text[1:4], text[::-1], "-".join(w for w in text.split()),
        text.replace("l", "L"), text.startswith("He"), "W" in text, len(text), text.index("o"),
    )  # fmt: skip


@case([5, 3, 8])
def lists(items):
    made = list(items)
    made.append(1)
    made.extend([2, 3])
    made.insert(0, 9)
    popped = made.pop(), made.pop(0)
    made[0] = 7
    made[1:3] = [0]
    made.sort()
    made.reverse()
    del made[0]
    made += (4,)
    made.remove(4)
    return made, popped, made[-1], made[::2], made.index(0), made * 2, made + [1], made.copy()


@case({"a": 1, "b": 2})
def dicts(d):
    e = dict(d)
    e["c"] = 3
    e.update(x=1, a=5)
    e |= {"y": 2}
    gone = e.pop("b"), e.pop("none", 0), e.setdefault("z", []), e.get("q"), e.get("a", 1)
    del e["c"]
    return (
        e,
        gone,
        list(e),
        list(e.items()),
        sorted(e.keys()),
        "a" in e,
        len(e),
        e == d,
        {**d, "n": 0},
    )


@case(4)
def sets(n):
    s = {1, 2, n}
    s.add(7)
    s.discard(1)
    return s, s | {9}, s & {2, 7}, s - {2}, 2 in s, len(s), frozenset([1, n]), sorted(s)


@case(6)
def tuples(n):
    t = (1, n, "x")
    a, (b, c), *d = 1, (2, 3), 4, 5
    return t + (2,), t * 2, t[1], t[:2], t == (1, 6, "x"), t.index(n), len(t), (a, b, c, d)


@case([3, 1, 2], [4, 5, 6])
def builtin_functions(a, b):
    return (
        max(a), min(a, default=0), max(3, 5), min(b, key=lambda v: -v), sorted(a, reverse=True),
        sorted(b, key=lambda v: v % 3), sum(a, 10), list(map(lambda x, y: x * y, a, b)),
        list(filter(lambda x: x > 1, a)), list(zip(a, b)), list(enumerate(b, 5)),
        list(reversed(a)), list(range(1, 9, 3)), abs(-3), round(2.567, 1), divmod(7, 3), pow(2, 3),
        functools.reduce(lambda x, y: x * 10 + y, a), isinstance(a, list), isinstance(3, (str, int)),
        issubclass(bool, int), type(a) is list, callable(max), any([]), all([]), hash(3) == hash(3),
        int("12"), float("1.5"), str(3), repr("x"), bool(a), chr(65), ord("B"), hex(255), bin(5),
    )  # fmt: skip


@case([1, 2, 3])
def iterators(items):
    it = iter(items)
    first = next(it)
    pairs = list(zip(it, it))
    return first, pairs, next(it, "end"), [next(iter("xy")) for _ in range(2)]


@case([1, 2], [3])
def use_itertools(a, b):
    return (
        list(itertools.chain(a, b)), list(itertools.product(a, b)), list(itertools.islice(a, 1)),
        list(itertools.combinations([*a, *b], 2)), list(itertools.chain.from_iterable([a, b])),
        list(itertools.zip_longest(a, b)), list(itertools.pairwise(a)),
    )  # fmt: skip


@case(2.0)
def mathematics(x):
    return math.sqrt(x), math.floor(x + 0.5), math.pi * x, math.prod([2, 3]), operator.mul(x, 3)


@case(3)
def partials(n):
    add = functools.partial(_collect, n, k=1)
    return add(2), add(2, k=5), functools.partial(add, 9)(m=0)


@case(4)
def walrus(n):
    return [y for x in range(n) if (y := x * 2) > 2], (z := n + 1), z


@case(True, 0, "x")
def logic(a, b, c):
    return a and b, a or b, b or c, not b and c, a if b else c, (a and b) or c, b and a and c


@case(3)
def classes(n):
    b, d = Base(n), Derived(n)
    d.value = d.value + 1
    return (
        b.who(), d.who(), b + 1, b + d, 1 + b, b[2], len(b), 2 in b, 9 in b, b(2, add=1), list(b), d.n,
        Base.make(2).n, d.twice(4), Base.kind, isinstance(d, Base), hasattr(d, "zzz"), d.heavy, d.heavy,
        getattr(b, "n"), getattr(b, "no", "none"), type(d).__name__, d == Derived(n), b == Base(n),
        bool(b), d.shared[0],
    )  # fmt: skip


@case(2)
def returns_objects(n):
    made = Derived(n)
    made.extra = [n, made.n]
    return made.extra, Config(n).grown(3), Point(n), Pair(left=n, right=Point(1, 2)), Slotted(n).b


@case(Config(3, ["a"]))
def dataclass_argument(config):
    return config.width, config.double, config.names[0], config.grown(), dataclasses.asdict is None


@case(Derived(2))
def object_argument(obj):
    return obj.who(), obj.n, obj.value, obj.kind, obj + 1


@case(Color.RED)
def enums(color):
    return (
        color is Color.RED,
        color == Color.GREEN,
        color.name,
        color.value,
        [c.name for c in Color],
    )


@case(Point(1, 2), Pair(3, 4))
def named_tuples(p, q):
    x, y = p
    return p.x + q.left, p._replace(x=5) if False else x, y, q[1], p == (1, 2), Point(*q)


@case(3)
def context_manager(n):
    log = []
    with Manager(log) as m:
        m.log.append(n)
    with Manager(log), Manager(log):
        pass
    return log


@case(4)
def try_finally(n):
    log = []
    try:
        log.append(n)
    except ValueError:
        log.append("no")
    else:
        log.append("else")
    finally:
        log.append("finally")
    return log


@case(4)
def return_in_try(n):
    for k in range(3):
        try:
            if k == 1:
                return k + n
        finally:
            n += 1
    return None


@case(3)
def read_globals(n):
    return GLOBAL["depth"] + n, [name.upper() for name in GLOBAL["names"]]


@case({"k": [1]})
def nested_updates(d):
    out = copy_of = {}
    out["a"] = d["k"]
    copy_of["b"] = out["a"]
    return out, out["a"] is copy_of["b"]


@case(slice(1, 3))
def slices(s):
    items = [0, 1, 2, 3, 4]
    return items[s], s.start, items[slice(None, 2)], items[-2:], "hello"[s]


@case(3)
def ordered(n):
    d = OrderedDict(a=1)
    d["b"] = n
    c = defaultdict(list)
    c["x"].append(n)
    c["x"].append(1)
    return d, c, list(d.values()), c["x"]


@case(3)
def imports(n):
    import math as m
    from math import floor, pi

    return m.ceil(pi) + floor(n)


@case([1, [2, [3]]])
def nested_data(items):
    (a, (b, (c,))) = items
    return {"deep": {"list": [[a], [b, {"c": c}]]}, "t": ((a,), ())}


@case(5)
def asserts(n):
    assert n > 1, f"bad {n}"
    assert isinstance(n, int)
    return n


@case((1, 2, 3))
def sequence_checks(t):
    return isinstance(t, Sequence), isinstance(t, tuple), isinstance(t, (list, dict)), t is t


@case(None, [1])
def none_checks(a, b):
    c = a if a is not None else b
    d = [] if b is None else b[0]
    return c is b, d, a == None, b != None  # noqa


def _decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1

    return wrapper


@_decorate
def _decorated(a, b=1):
    return a * b


@case(3)
def decorators(n):
    return _decorated(n), _decorated(n, b=2)


@case([4, 5])
def aliases(items):
    both = [items, items]
    return both, both[0] is both[1]


@case([3, 4])
def mutates_list(items):
    items.append(5)
    items[0] += 1
    return len(items)


@case({"n": 1})
def mutates_dict(d):
    d["n"] += 1
    d["m"] = [d["n"]]
    d["m"].append(3)
    return None


@case(Config(1))
def mutates_object(c):
    c.width += 1
    c.names.append("x")
    c.fresh = (c.width,)
    return c.width


@case([1, 2, 3])
def swaps(items):
    items[0], items[-1] = items[-1], items[0]
    a, b, c = items
    a, b, c = c, a, b
    return a, b, c


@case({"a": [1], "b": [2]})
def removes(d):
    kept = d.pop("a")
    d["c"] = kept
    kept.append(0)
    del d["b"]
    return kept


@case([[1], [2]])
def moves(lists):
    lists[0], lists[1] = lists[1], lists[0]
    lists[0].append(9)


@case(3)
def writes_global(n):
    global COUNTER
    COUNTER = COUNTER + n
    return COUNTER


@case(2)
def match_like(n):
    if n == 1:
        return "one"
    elif n == 2:
        result = "two"
    else:
        result = "many"
    return result


@case([1.5, 2.5])
def floats(xs):
    return sum(xs), -0.0, float("inf"), xs[0] == 1.5, math.isnan(float("nan")), 1e300 * 10


@case("k")
def default_mutable(key, store={"k": 1}):  # noqa
    return store[key] + 1


@case(3)
def lambdas(n):
    table = {"add": lambda a: a + n, "mul": lambda a: a * n}
    return [f(2) for f in table.values()]


@case(2)
def returns_closure_result(n):
    fs = []
    for k in range(3):
        fs.append(lambda k=k: k * n)
    return [f() for f in fs]


@case(0)
def catches(n):
    log = []
    for what in ("raise", "key", "index", "zero", "attribute", "class", "fine"):
        try:
            if what == "raise":
                raise ValueError(f"bad {n}", what)
            if what == "key":
                {"a": 1}[what]
            if what == "index":
                log[99]
            if what == "zero":
                1 // n
            if what == "attribute":
                n.nothing
            if what == "class":
                raise LookupError
        except KeyError as error:
            log.append((what, error.args))
        except (ValueError, IndexError) as error:
            log.append((what, str(error), error.args[-1]))
        except ZeroDivisionError as error:
            log.append((what, str(error), type(error).__name__))
        except Exception as error:
            log.append(
                (what, isinstance(error, LookupError), repr(error) if what == "class" else "")
            )
        else:
            log.append("else")
        finally:
            log.append("finally")
    return log


@case({"a": 1})
def catches_from_calls(d):
    def get(key):
        try:
            return _find(d, key)
        except KeyError:
            return "none"
        finally:
            log.append(key)

    log = []
    return get("a"), get("b"), log


def _find(d, key):
    if key not in d:
        raise KeyError(key)
    return d[key]


@case([1])
def catches_in_manager(log):
    try:
        with Manager(log):
            log.append(2)
            raise ValueError("inside")
    except ValueError as error:
        log.append(str(error))
    return log


@case([1, 2])
def nested_try(items):
    out = []
    try:
        try:
            items[5]
        finally:
            out.append("inner")
    except IndexError:
        out.append("outer")
    try:
        try:
            raise TypeError("a")
        except TypeError as error:
            raise ValueError("b") from error
    except ValueError as error:
        out.append(str(error))
    try:
        next(iter(()))
    except StopIteration:
        out.append("stop")
    return out


def check(function: Any, args: tuple[Any, ...]) -> None:
    """Captured and in Python: the same result, the same changes, and nothing left to Python."""
    from compiler.capture import capture, explain

    global COUNTER
    given, want_given = copy.deepcopy(args), copy.deepcopy(args)
    COUNTER = 0
    want = function(*want_given)
    want_counter, COUNTER = COUNTER, 0
    captured = capture(function, backend=lambda gm, inputs: gm)
    for _ in range(2):
        COUNTER = 0
        given = copy.deepcopy(args)
        got = captured(*given)
        assert shown(got) == shown(want), f"{function.__name__}: {shown(got)} is not {shown(want)}"
        assert shown(given) == shown(want_given), (
            f"{function.__name__}: {given} is not {want_given}"
        )
        assert COUNTER == want_counter
    found = explain(captured)
    assert found.whole, f"{function.__name__}: {found.breaks} {found.fallbacks}"


def shown(value: Any) -> str:
    """A value as text, with types, attributes and sets in order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({sorted(map(shown, value))})"
    if isinstance(value, dict):
        inner = ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if hasattr(value, "__dict__") and not isinstance(value, (type, enum.Enum)):
        return f"{type(value).__name__}({shown(vars(value))})"
    return f"{type(value).__name__}:{value!r}"


if __name__ == "__main__":
    os.environ["DLRM_CAPTURE_STRICT"] = "1"
    failed = 0
    for function, args in CASES:
        try:
            check(function, args)
        except Exception as error:
            failed += 1
            print(f"{function.__name__}: {type(error).__name__}: {str(error)[:600]}")
    print(f"{len(CASES) - failed} of {len(CASES)} on Python {sys.version.split()[0]}")
    sys.exit(bool(failed))
