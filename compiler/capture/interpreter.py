"""The symbolic interpreter: CPython's stack machine, on values that stand for those of a run.

One small function an instruction, in a table by name. What an instruction computes goes through
``Frame.compute``, so that an instruction that is not understood can be left to Python: there is one
place where the graph breaks. See ``calls`` for what calls mean and ``frames`` for the outermost.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from compiler.capture import polyfills
from compiler.capture.attributes import special
from compiler.capture.bytecode import NULL_LAST, Instruction, decode
from compiler.capture.calls import call, truth
from compiler.capture.methods import set_item
from compiler.capture.trace import Trace
from compiler.capture.values import (
    NULL,
    CellValue,
    Constant,
    DictValue,
    FunctionValue,
    Generator,
    IteratorValue,
    Known,
    ListValue,
    MethodValue,
    SequenceValue,
    SetValue,
    SliceValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    key,
    look,
)

Handler = Callable[["Frame", Instruction], Value | None]
TABLE: dict[str, Handler] = {}


class GraphBreak(Exception):
    """Leave ``function(*args, **kwargs)`` to Python; ``again``: then repeat the instruction."""

    def __init__(
        self, function: Value, args: list[Value], kwargs: dict[str, Value], push: bool, again: bool
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.push, self.again = push, again


class Frame:
    """A function under interpretation. ``slots`` are its locals by name; some hold cells."""

    breaking = False  # only for the outermost frame, at the instruction that it breaks at

    def __init__(
        self, trace: Trace, code: CodeType, scope: dict[str, Any], slots: dict[str, Value]
    ) -> None:
        self.trace, self.code, self.scope, self.slots = trace, code, scope, slots
        self.decoded = decode(code)
        self.stack: list[Value] = []
        self.index = 0
        self.yielded = False

    def run(self) -> Value:
        """Interpret until a value is returned or yielded."""
        while True:
            result = self.step()
            if result is not None:
                return result

    def step(self) -> Value | None:
        one = self.decoded.instructions[self.index]
        self.index += 1
        handler = TABLE.get(one.op)
        if handler is None:
            raise Unsupported(f"the instruction {one.op}")
        return handler(self, one)

    def go_on(self) -> Value | None:
        """A generator's next value, None at its end."""
        self.yielded = False
        value = self.run()
        if not self.yielded:
            if not (isinstance(value, Constant) and value.value is None):
                raise Unsupported("a generator that returns a value")
            return None
        self.stack.append(Constant(None))  # what send() would have brought
        return value

    def push(self, value: Value) -> None:
        value = look(value)
        value.born = value.born or self.trace.clock
        self.stack.append(value)

    def pop(self) -> Value:
        return look(self.stack.pop())

    def take(self, count: int) -> list[Value]:
        """The topmost ``count`` values, lowest first."""
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def call(
        self, function: Value, args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value:
        if self.breaking:
            raise Unsupported("an instruction that calls several functions")
        return call(self, look(function), args, kwargs or {})

    def truth(self, value: Value) -> bool:
        return truth(self, look(value))

    def compute(
        self, function: Any, args: list[Value], kwargs: dict[str, Value] | None = None,
        push: bool = True,
    ) -> None:  # fmt: skip
        """Call what the instruction means, and push the result; or leave it to Python."""
        value = function if isinstance(function, Value) else Known(function)
        if self.breaking:
            raise GraphBreak(value, args, kwargs or {}, push, again=False)
        result = self.call(value, args, kwargs)
        if push:
            self.push(result)

    def inline(
        self, function: FunctionValue, slots: dict[str, Value]
    ) -> Value:
        """Interpret another function, whose arguments are bound."""
        if self.trace.depth >= 40:
            raise Unsupported("calls deeper than 40")
        for cell_name, cell in zip(function.code.co_freevars, function.cells, strict=True):
            slots[cell_name] = cell
        for value in slots.values():
            if isinstance(value, IteratorValue):
                value.named = True
        frame = Frame(self.trace, function.code, function.scope, slots)
        if function.code.co_flags & 0x20:  # a generator function
            if function.code.co_flags & 0x280:
                raise Unsupported("an asynchronous function")
            return Generator(frame)
        if function.code.co_flags & 0x280:
            raise Unsupported("an asynchronous function")
        self.trace.depth += 1
        try:
            return frame.run()
        finally:
            self.trace.depth -= 1


def instruction(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            TABLE[name] = handler
        return handler

    return register


# ---- the stack


@instruction("POP_TOP")
def _(f: Frame, one: Instruction) -> None:
    f.stack.pop()


@instruction("PUSH_NULL")
def _(f: Frame, one: Instruction) -> None:
    f.stack.append(NULL)


@instruction("SWAP")
def _(f: Frame, one: Instruction) -> None:
    f.stack[-1], f.stack[-one.arg] = f.stack[-one.arg], f.stack[-1]


@instruction("COPY")
def _(f: Frame, one: Instruction) -> None:
    f.stack.append(f.stack[-one.arg])


@instruction("LOAD_CONST")
def _(f: Frame, one: Instruction) -> None:
    f.push(literal(one.arg))


def literal(value: Any) -> Value:
    """A value from a code object's constants."""
    if type(value) is tuple:
        return TupleValue([literal(item) for item in value])
    if type(value) is frozenset:
        return SetValue({item: literal(item) for item in value}, frozenset)
    return Constant(value)


# ---- variables


@instruction("LOAD_FAST")
def _(f: Frame, one: Instruction) -> None:
    if one.arg not in f.slots:
        raise Unsupported(f"the variable {one.arg} without a value")
    f.push(f.slots[one.arg])


@instruction("LOAD_FAST_AND_CLEAR")
def _(f: Frame, one: Instruction) -> None:
    f.stack.append(f.slots.pop(one.arg, NULL))


@instruction("STORE_FAST")
def _(f: Frame, one: Instruction) -> None:
    value = f.stack.pop()
    _name(value)
    if value is NULL:
        f.slots.pop(one.arg, None)
    else:
        f.slots[one.arg] = value


def _name(value: Value) -> None:
    if isinstance(value, IteratorValue):
        value.named = True


@instruction("DELETE_FAST")
def _(f: Frame, one: Instruction) -> None:
    if f.slots.pop(one.arg, None) is None:
        raise Unsupported(f"deleting {one.arg}, which has no value")


@instruction("MAKE_CELL")
def _(f: Frame, one: Instruction) -> None:
    f.slots[one.arg] = CellValue(f.slots.get(one.arg))


def _cell(f: Frame, name: str) -> CellValue:
    cell = f.slots[name]
    assert isinstance(cell, CellValue)
    return cell


@instruction("LOAD_CLOSURE")
def _(f: Frame, one: Instruction) -> None:
    f.stack.append(_cell(f, one.arg))


@instruction("LOAD_DEREF")
def _(f: Frame, one: Instruction) -> None:
    content = _cell(f, one.arg).content
    if content is None:
        raise Unsupported(f"the variable {one.arg} without a value")
    f.push(content)


@instruction("STORE_DEREF")
def _(f: Frame, one: Instruction) -> None:
    cell = _cell(f, one.arg)
    cell.content = f.stack.pop()
    _name(cell.content)
    f.trace.mutate(cell)


@instruction("LOAD_GLOBAL")
def _(f: Frame, one: Instruction) -> None:
    f.push(_global(f, one.arg))


def _global(f: Frame, name: str) -> Value:
    scope = f.trace.seen.get(id(f.scope))
    if scope is not None and name in scope.changed:  # type: ignore[attr-defined]
        return scope.changed[name]  # type: ignore[attr-defined, no-any-return]
    trace = f.trace
    source = trace.constants.source(f.scope, "globals()")
    if name in f.scope:
        return trace.wrap(f.scope[name], source.then(f"{{}}[{name!r}]", name))
    trace.guards.add(f"{name!r} not in {{}}", source, text=f"no global {name}")
    builtins = f.scope["__builtins__"]
    builtins = builtins if isinstance(builtins, dict) else vars(builtins)
    if name not in builtins:
        raise Unsupported(f"the name {name}, which is not defined")
    source = trace.constants.source(builtins, "builtins")
    return trace.wrap(builtins[name], source.then(f"{{}}[{name!r}]", name))


@instruction("STORE_GLOBAL")
def _(f: Frame, one: Instruction) -> None:
    scope = f.trace.scope(f.scope)
    scope.changed[one.arg] = f.stack.pop()
    _name(scope.changed[one.arg])
    f.trace.mutate(scope)


# ---- operations

OPERATORS: dict[str, Any] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "@": operator.matmul,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift,
    ">>": operator.rshift, "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul,
    "/=": operator.itruediv, "//=": operator.ifloordiv, "%=": operator.imod,
    "**=": operator.ipow, "@=": operator.imatmul, "&=": operator.iand, "|=": operator.ior,
    "^=": operator.ixor, "<<=": operator.ilshift, ">>=": operator.irshift,
}  # fmt: skip
COMPARISONS: dict[str, Any] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@instruction("BINARY_OP")
def _(f: Frame, one: Instruction) -> None:
    f.compute(OPERATORS[one.arg], f.take(2))


@instruction("COMPARE_OP")
def _(f: Frame, one: Instruction) -> None:
    symbol, booled = one.arg
    if booled:  # 3.13 takes the truth of a comparison in the same instruction
        f.compute(f.trace.known(polyfills.BOOLED[symbol]), f.take(2))
    else:
        f.compute(COMPARISONS[symbol], f.take(2))


@instruction("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT", "UNARY_NOT", "TO_BOOL")
def _(f: Frame, one: Instruction) -> None:
    meaning = {
        "UNARY_NEGATIVE": operator.neg, "UNARY_POSITIVE": operator.pos, "TO_BOOL": bool,
        "UNARY_INVERT": operator.invert, "UNARY_NOT": operator.not_,
    }  # fmt: skip
    f.compute(meaning[one.op], f.take(1))


@instruction("IS_OP")
def _(f: Frame, one: Instruction) -> None:
    f.compute(operator.is_not if one.arg else operator.is_, f.take(2))


@instruction("CONTAINS_OP")
def _(f: Frame, one: Instruction) -> None:
    item, container = f.take(2)
    if one.arg:
        f.compute(f.trace.known(polyfills.not_contains), [container, item])
    else:
        f.compute(operator.contains, [container, item])


@instruction("BINARY_SUBSCR")
def _(f: Frame, one: Instruction) -> None:
    f.compute(operator.getitem, f.take(2))


@instruction("STORE_SUBSCR")
def _(f: Frame, one: Instruction) -> None:
    value, container, index = f.take(3)
    f.compute(operator.setitem, [container, index, value], push=False)


@instruction("DELETE_SUBSCR")
def _(f: Frame, one: Instruction) -> None:
    f.compute(operator.delitem, f.take(2), push=False)


@instruction("FORMAT_VALUE")
def _(f: Frame, one: Instruction) -> None:
    conversion, with_spec = one.arg
    spec = f.pop() if with_spec else Constant("")
    f.compute(f.trace.known(polyfills.formatted), [f.pop(), Constant(conversion), spec])


@instruction("CONVERT_VALUE")
def _(f: Frame, one: Instruction) -> None:
    f.compute({1: str, 2: repr, 3: ascii}[one.arg], f.take(1))


@instruction("BUILD_STRING")
def _(f: Frame, one: Instruction) -> None:
    f.push(Constant("".join(constant(part) for part in f.take(one.arg))))


# ---- attributes


@instruction("LOAD_ATTR")
def _(f: Frame, one: Instruction) -> None:
    f.compute(getattr, [f.pop(), Constant(one.arg)])


@instruction("LOAD_METHOD")
def _(f: Frame, one: Instruction) -> None:
    owner = f.pop()
    if not NULL_LAST:
        f.stack.append(NULL)
    elif f.breaking:
        raise Unsupported("a method")
    f.compute(getattr, [owner, Constant(one.arg)])
    if NULL_LAST:
        f.stack.append(NULL)


@instruction("STORE_ATTR")
def _(f: Frame, one: Instruction) -> None:
    value, owner = f.take(2)
    f.compute(setattr, [owner, Constant(one.arg), value], push=False)


@instruction("DELETE_ATTR")
def _(f: Frame, one: Instruction) -> None:
    f.compute(delattr, [f.pop(), Constant(one.arg)], push=False)


@instruction("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")
def _(f: Frame, one: Instruction) -> None:
    function, cls, receiver = f.take(3)
    method = one.op == "LOAD_SUPER_METHOD"
    if method and not NULL_LAST:
        f.stack.append(NULL)
    owner = f.call(function, [cls, receiver])
    f.push(f.call(Known(getattr), [owner, Constant(one.arg)]))
    if method and NULL_LAST:
        f.stack.append(NULL)


# ---- containers


@instruction("BUILD_LIST")
def _(f: Frame, one: Instruction) -> None:
    f.push(ListValue(f.take(one.arg)))


@instruction("BUILD_TUPLE")
def _(f: Frame, one: Instruction) -> None:
    f.push(TupleValue(f.take(one.arg)))


@instruction("BUILD_SET")
def _(f: Frame, one: Instruction) -> None:
    f.push(SetValue({key(item): item for item in f.take(one.arg)}))


@instruction("BUILD_MAP")
def _(f: Frame, one: Instruction) -> None:
    flat = f.take(2 * one.arg)
    f.push(_dictionary(flat[::2], flat[1::2]))


@instruction("BUILD_CONST_KEY_MAP")
def _(f: Frame, one: Instruction) -> None:
    names = f.pop()
    assert isinstance(names, TupleValue)
    f.push(_dictionary(names.items, f.take(one.arg)))


def _dictionary(keys: list[Value], values: list[Value]) -> DictValue:
    entries: dict[Any, tuple[Value, Value]] = {}
    for k, v in zip(keys, values, strict=True):
        first = entries.get(key(k), (k, v))[0]  # an equal key stays the one that came first
        entries[key(k)] = (first, v)
    return DictValue(entries)


@instruction("BUILD_SLICE")
def _(f: Frame, one: Instruction) -> None:
    parts = f.take(one.arg)
    f.push(SliceValue([*parts, *[Constant(None)] * (3 - len(parts))]))


@instruction("LIST_TO_TUPLE")
def _(f: Frame, one: Instruction) -> None:
    f.push(TupleValue(f.call(Known(list), [f.pop()]).items))  # type: ignore[attr-defined]


@instruction("LIST_APPEND")
def _(f: Frame, one: Instruction) -> None:
    item = f.stack.pop()
    f.trace.mutate(f.stack[-one.arg])  # behind a break, the list is from outside
    f.stack[-one.arg].items.append(item)  # type: ignore[attr-defined]


@instruction("SET_ADD")
def _(f: Frame, one: Instruction) -> None:
    item = f.stack.pop()
    f.trace.mutate(f.stack[-one.arg])
    f.stack[-one.arg].grow(key(item), item)  # type: ignore[attr-defined]


@instruction("MAP_ADD")
def _(f: Frame, one: Instruction) -> None:
    k, v = f.take(2)
    set_item(f, f.stack[-one.arg], k, v)  # type: ignore[arg-type]


@instruction("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _(f: Frame, one: Instruction) -> None:
    more = f.pop()
    target = look(f.stack[-one.arg])
    if one.op == "DICT_MERGE":  # f(**a, **b)
        more = f.call(Known(dict), [more])
        assert isinstance(more, DictValue) and isinstance(target, DictValue)
        if more.entries.keys() & target.entries.keys():
            raise Unsupported("a keyword argument given twice")
    method = {"LIST_EXTEND": "extend"}.get(one.op, "update")
    f.call(f.call(Known(getattr), [target, Constant(method)]), [more])


@instruction("UNPACK_SEQUENCE", "UNPACK_EX")
def _(f: Frame, one: Instruction) -> None:
    if f.breaking:
        raise Unsupported("unpacking it")
    value = f.pop()
    items = f.trace.tensors.unpacked(value)
    if items is None:
        items = list(f.call(Known(list), [value]).items)  # type: ignore[attr-defined]
    before, after = one.arg & 255, one.arg >> 8
    if one.op == "UNPACK_SEQUENCE":
        if len(items) != one.arg:
            raise Unsupported("unpacking into another number of variables")
    else:
        if len(items) < before + after:
            raise Unsupported("unpacking too few values")
        stop = len(items) - after
        items = [*items[:before], ListValue(items[before:stop]), *items[stop:]]
    f.stack.extend(reversed(items))


# ---- loops and jumps


@instruction("GET_ITER")
def _(f: Frame, one: Instruction) -> None:
    f.compute(iter, f.take(1))


@instruction("FOR_ITER")
def _(f: Frame, one: Instruction) -> None:
    iterator = f.stack[-1]
    if f.breaking or not isinstance(iterator, IteratorValue):
        raise Unsupported(f"iterating over a {iterator.cls.__name__}")
    item = iterator.advance(f)
    if item is None:
        f.stack.pop()
        f.index = one.target
    else:
        f.push(item)


@instruction("JUMP")
def _(f: Frame, one: Instruction) -> None:
    f.index = one.target


@instruction("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _(f: Frame, one: Instruction) -> None:
    value = f.pop()
    if f.breaking:  # Python takes the truth; the jump is then on a bool that is known
        raise GraphBreak(Known(bool), [value], {}, push=True, again=True)
    if f.truth(value) == (one.op == "POP_JUMP_IF_TRUE"):
        f.index = one.target


@instruction("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def _(f: Frame, one: Instruction) -> None:
    value = f.pop()
    none = isinstance(value, Constant) and value.value is None
    if none == (one.op == "POP_JUMP_IF_NONE"):
        f.index = one.target


@instruction("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _(f: Frame, one: Instruction) -> None:
    if f.breaking:
        raise Unsupported("and/or")
    if f.truth(f.stack[-1]) == (one.op == "JUMP_IF_TRUE_OR_POP"):
        f.index = one.target
    else:
        f.stack.pop()


# ---- functions


def _call(f: Frame, args: list[Value], kwargs: dict[str, Value]) -> None:
    first, second = f.take(2)
    if NULL_LAST:
        function, receiver = first, second
    else:
        function, receiver = (second, NULL) if first is NULL else (first, second)
    f.compute(look(function), args if receiver is NULL else [receiver, *args], kwargs)


@instruction("CALL")
def _(f: Frame, one: Instruction) -> None:
    count, names = one.arg
    args = f.take(count)
    place = len(args) - len(names)
    _call(f, args[:place], dict(zip(names, args[place:], strict=True)))


@instruction("CALL_KW")
def _(f: Frame, one: Instruction) -> None:
    names = constant(f.pop())
    args = f.take(one.arg)
    place = len(args) - len(names)
    _call(f, args[:place], dict(zip(names, args[place:], strict=True)))


@instruction("CALL_FUNCTION_EX")
def _(f: Frame, one: Instruction) -> None:
    kwargs = f.pop() if one.arg & 1 else DictValue({})
    args = f.pop()
    if not isinstance(kwargs, DictValue):
        kwargs = f.call(Known(dict), [kwargs])  # type: ignore[assignment]
    if not isinstance(args, SequenceValue):
        args = f.call(Known(list), [args])
    if NULL_LAST:
        function, _ = f.take(2)
    else:
        function = f.pop()
        if f.stack and f.stack[-1] is NULL:
            f.stack.pop()
    named = {constant(k): v for k, v in kwargs.entries.values()}  # type: ignore[attr-defined]
    f.compute(look(function), list(args.items), named)  # type: ignore[attr-defined]


@instruction("MAKE_FUNCTION")
def _(f: Frame, one: Instruction) -> None:
    code = constant(f.pop())
    function = FunctionValue(code, f.scope, code.co_qualname)
    for bit in (8, 4, 2, 1):
        if one.arg & bit:
            _function_attribute(function, bit, f.pop())
    f.push(function)


@instruction("SET_FUNCTION_ATTRIBUTE")
def _(f: Frame, one: Instruction) -> None:
    function = f.pop()
    assert isinstance(function, FunctionValue)
    _function_attribute(function, one.arg, f.pop())
    f.push(function)


def _function_attribute(function: FunctionValue, bit: int, value: Value) -> None:
    if bit == 8:
        function.cells = list(value.items)  # type: ignore[attr-defined]
    elif bit == 2:
        function.kwdefaults = {constant(k): v for k, v in value.entries.values()}  # type: ignore[attr-defined]
    elif bit == 1:
        function.defaults = list(value.items)  # type: ignore[attr-defined]


@instruction("RETURN_VALUE")
def _(f: Frame, one: Instruction) -> Value:
    return f.pop()


@instruction("RETURN_GENERATOR")
def _(f: Frame, one: Instruction) -> None:
    f.stack.append(NULL)  # the following POP_TOP drops the generator


@instruction("YIELD_VALUE")
def _(f: Frame, one: Instruction) -> Value:
    f.yielded = True
    return f.pop()


@instruction("IMPORT_NAME")
def _(f: Frame, one: Instruction) -> None:
    level, wanted = (constant(v) for v in f.take(2))
    name = one.arg
    if level:
        name = importlib.util.resolve_name("." * level + name, f.scope["__package__"])
    if name not in sys.modules:
        raise Unsupported(f"importing {name} for the first time")
    f.push(f.trace.known(sys.modules[name if wanted else name.split(".")[0]]))


@instruction("IMPORT_FROM")
def _(f: Frame, one: Instruction) -> None:
    f.push(f.call(Known(getattr), [f.stack[-1], Constant(one.arg)]))


@instruction("LOAD_ASSERTION_ERROR")
def _(f: Frame, one: Instruction) -> None:
    f.push(Known(AssertionError))


# ---- with


@instruction("BEFORE_WITH")
def _(f: Frame, one: Instruction) -> None:
    manager = f.pop()
    if f.breaking:
        raise Unsupported(f"with a {manager.cls.__name__}")
    if f.trace.tensors.enter(f, manager):
        return
    leave, enter = special(f, manager, "__exit__"), special(f, manager, "__enter__")
    if leave is None or enter is None:
        raise Unsupported(f"with a {manager.cls.__name__}")
    f.stack.append(MethodValue(manager, leave, "__exit__"))
    f.compute(enter, [manager])


