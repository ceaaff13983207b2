"""The symbolic interpreter: CPython's stack machine, on values that stand for those of a run.

One small method an instruction, under its name. What an instruction computes goes through
``Machine.compute``, so that one that is not understood can be left to Python: there is one place
where the graph breaks. See ``calls`` for what calls mean and ``frames`` for the outermost function.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from typing import Any

from compiler.capture import polyfills
from compiler.capture.attributes import special
from compiler.capture.bytecode import NULL_LAST, Instruction
from compiler.capture.iterators import Generator, IteratorValue
from compiler.capture.machine import GraphBreak, Machine
from compiler.capture.methods import set_item
from compiler.capture.values import (
    NULL,
    CellValue,
    Constant,
    DictValue,
    FunctionValue,
    Handling,
    Known,
    ListValue,
    MethodValue,
    ObjectValue,
    Raised,
    Scope,
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


def literal(value: Any) -> Value:
    """A value from a code object's constants."""
    if type(value) is tuple:
        return TupleValue([literal(item) for item in value])
    if type(value) is frozenset:
        return SetValue({item: literal(item) for item in value}, frozenset)
    return Constant(value)


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


def _dictionary(keys: list[Value], values: list[Value]) -> DictValue:
    entries: dict[Any, tuple[Value, Value]] = {}
    for k, v in zip(keys, values, strict=True):
        first = entries.get(key(k), (k, v))[0]  # an equal key stays the one that came first
        entries[key(k)] = (first, v)
    return DictValue(entries)


def _function_attribute(function: FunctionValue, bit: int, value: Value) -> None:
    if bit == 8:
        function.cells = list(value.items)  # type: ignore[attr-defined]
    elif bit == 2:
        function.kwdefaults = {constant(k): v for k, v in value.entries.values()}  # type: ignore[attr-defined]
    elif bit == 1:
        function.defaults = list(value.items)  # type: ignore[attr-defined]


def _name(value: Value) -> None:
    if isinstance(value, IteratorValue):
        value.named = True


class Frame(Machine):
    """A function under interpretation; every instruction is a method."""

    def inline(self, function: FunctionValue, slots: dict[str, Value]) -> Value:
        """Interpret another function, whose arguments are bound."""
        if self.trace.depth >= 40:
            raise Unsupported("calls deeper than 40")
        slots.update(zip(function.code.co_freevars, function.cells, strict=True))
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
        self.trace.deepest = max(self.trace.deepest, self.trace.depth)
        self.trace.frames.append(frame)
        try:
            return frame.run()
        finally:
            self.trace.frames.pop()
            self.trace.depth -= 1

    # ---- the stack

    def POP_TOP(self, one: Instruction) -> None:
        self.stack.pop()

    def PUSH_NULL(self, one: Instruction) -> None:
        self.stack.append(NULL)

    def SWAP(self, one: Instruction) -> None:
        self.stack[-1], self.stack[-one.arg] = self.stack[-one.arg], self.stack[-1]

    def COPY(self, one: Instruction) -> None:
        self.stack.append(self.stack[-one.arg])

    def LOAD_CONST(self, one: Instruction) -> None:
        self.push(literal(one.arg))

    # ---- variables

    def LOAD_FAST(self, one: Instruction) -> None:
        if one.arg not in self.slots:
            raise Unsupported(f"the variable {one.arg} without a value")
        self.push(self.slots[one.arg])

    def LOAD_FAST_AND_CLEAR(self, one: Instruction) -> None:
        self.stack.append(self.slots.pop(one.arg, NULL))

    def STORE_FAST(self, one: Instruction) -> None:
        value = self.stack.pop()
        _name(value)
        if value is NULL:
            self.slots.pop(one.arg, None)
        else:
            self.slots[one.arg] = value

    def DELETE_FAST(self, one: Instruction) -> None:
        if self.slots.pop(one.arg, None) is None:
            raise Unsupported(f"deleting {one.arg}, which has no value")

    def MAKE_CELL(self, one: Instruction) -> None:
        self.slots[one.arg] = CellValue(self.slots.get(one.arg))

    def _cell(self, name: str) -> CellValue:
        cell = self.slots[name]
        assert isinstance(cell, CellValue)
        return cell

    def LOAD_CLOSURE(self, one: Instruction) -> None:
        self.stack.append(self._cell(one.arg))

    def LOAD_DEREF(self, one: Instruction) -> None:
        content = self._cell(one.arg).content
        if content is None:
            raise Unsupported(f"the variable {one.arg} without a value")
        self.push(content)

    def STORE_DEREF(self, one: Instruction) -> None:
        cell = self._cell(one.arg)
        cell.content = self.stack.pop()
        _name(cell.content)
        self.trace.mutate(cell)

    def LOAD_GLOBAL(self, one: Instruction) -> None:
        self.push(self._global(one.arg))

    def _global(self, name: str) -> Value:
        trace, scope = self.trace, self.trace.seen.get(id(self.scope))
        if isinstance(scope, Scope) and name in scope.changed:
            return scope.changed[name]
        if name in self.scope:
            return trace.wrap(self.scope[name], trace.held(self.scope, name))
        trace.guards.absent(trace.constants.source(self.scope, "the module"), name)
        builtins = self.scope["__builtins__"]
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        if name not in builtins:
            raise Unsupported(f"the name {name}, which is not defined")
        return trace.wrap(builtins[name], trace.held(builtins, name))

    def STORE_GLOBAL(self, one: Instruction) -> None:
        scope = self.trace.scope(self.scope)
        scope.changed[one.arg] = self.stack.pop()
        _name(scope.changed[one.arg])
        self.trace.mutate(scope)

    # ---- operations

    def BINARY_OP(self, one: Instruction) -> None:
        self.compute(OPERATORS[one.arg], self.take(2))

    def COMPARE_OP(self, one: Instruction) -> None:
        symbol, booled = one.arg
        if booled:  # 3.13 takes the truth of a comparison in the same instruction
            self.compute(self.trace.known(polyfills.BOOLED[symbol]), self.take(2))
        else:
            self.compute(COMPARISONS[symbol], self.take(2))

    def UNARY_NEGATIVE(self, one: Instruction) -> None:
        meaning = {
            "UNARY_NEGATIVE": operator.neg, "UNARY_POSITIVE": operator.pos, "TO_BOOL": bool,
            "UNARY_INVERT": operator.invert, "UNARY_NOT": operator.not_,
        }  # fmt: skip
        self.compute(meaning[one.op], self.take(1))

    UNARY_POSITIVE = UNARY_INVERT = UNARY_NOT = TO_BOOL = UNARY_NEGATIVE

    def IS_OP(self, one: Instruction) -> None:
        self.compute(operator.is_not if one.arg else operator.is_, self.take(2))

    def CONTAINS_OP(self, one: Instruction) -> None:
        item, container = self.take(2)
        if one.arg:
            self.compute(self.trace.known(polyfills.not_contains), [container, item])
        else:
            self.compute(operator.contains, [container, item])

    def BINARY_SUBSCR(self, one: Instruction) -> None:
        self.compute(operator.getitem, self.take(2))

    def STORE_SUBSCR(self, one: Instruction) -> None:
        value, container, index = self.take(3)
        self.compute(operator.setitem, [container, index, value], push=False)

    def DELETE_SUBSCR(self, one: Instruction) -> None:
        self.compute(operator.delitem, self.take(2), push=False)

    def FORMAT_VALUE(self, one: Instruction) -> None:
        conversion, with_spec = one.arg
        spec = self.pop() if with_spec else Constant("")
        self.compute(
            self.trace.known(polyfills.formatted), [self.pop(), Constant(conversion), spec]
        )

    def CONVERT_VALUE(self, one: Instruction) -> None:
        self.compute({1: str, 2: repr, 3: ascii}[one.arg], self.take(1))

    def BUILD_STRING(self, one: Instruction) -> None:
        self.push(Constant("".join(constant(part) for part in self.take(one.arg))))

    # ---- attributes

    def LOAD_ATTR(self, one: Instruction) -> None:
        self.compute(getattr, [self.pop(), Constant(one.arg)])

    def LOAD_METHOD(self, one: Instruction) -> None:
        owner = self.pop()
        if not NULL_LAST:
            self.stack.append(NULL)
        elif self.breaking:
            raise Unsupported("a method")
        self.compute(getattr, [owner, Constant(one.arg)])
        if NULL_LAST:
            self.stack.append(NULL)

    def STORE_ATTR(self, one: Instruction) -> None:
        value, owner = self.take(2)
        self.compute(setattr, [owner, Constant(one.arg), value], push=False)

    def DELETE_ATTR(self, one: Instruction) -> None:
        self.compute(delattr, [self.pop(), Constant(one.arg)], push=False)

    def LOAD_SUPER_ATTR(self, one: Instruction) -> None:
        function, cls, receiver = self.take(3)
        method = one.op == "LOAD_SUPER_METHOD"
        if method and not NULL_LAST:
            self.stack.append(NULL)
        owner = self.call(function, [cls, receiver])
        self.push(self.call(Known(getattr), [owner, Constant(one.arg)]))
        if method and NULL_LAST:
            self.stack.append(NULL)

    LOAD_SUPER_METHOD = LOAD_SUPER_ATTR

    # ---- containers

    def BUILD_LIST(self, one: Instruction) -> None:
        self.push(ListValue(self.take(one.arg)))

    def BUILD_TUPLE(self, one: Instruction) -> None:
        self.push(TupleValue(self.take(one.arg)))

    def BUILD_SET(self, one: Instruction) -> None:
        self.push(SetValue({key(item): item for item in self.take(one.arg)}))

    def BUILD_MAP(self, one: Instruction) -> None:
        flat = self.take(2 * one.arg)
        self.push(_dictionary(flat[::2], flat[1::2]))

    def BUILD_CONST_KEY_MAP(self, one: Instruction) -> None:
        names = self.pop()
        assert isinstance(names, TupleValue)
        self.push(_dictionary(names.items, self.take(one.arg)))

    def BUILD_SLICE(self, one: Instruction) -> None:
        parts = self.take(one.arg)
        self.push(SliceValue([*parts, *[Constant(None)] * (3 - len(parts))]))

    def LIST_TO_TUPLE(self, one: Instruction) -> None:
        self.push(TupleValue(self.call(Known(list), [self.pop()]).items))  # type: ignore[attr-defined]

    def LIST_APPEND(self, one: Instruction) -> None:
        item = self.stack.pop()
        self.trace.mutate(self.stack[-one.arg])  # behind a break, the list is from outside
        self.stack[-one.arg].items.append(item)

    def SET_ADD(self, one: Instruction) -> None:
        item = self.stack.pop()
        self.trace.mutate(self.stack[-one.arg])
        self.stack[-one.arg].grow(key(item), item)

    def MAP_ADD(self, one: Instruction) -> None:
        k, v = self.take(2)
        set_item(self, self.stack[-one.arg], k, v)

    def LIST_EXTEND(self, one: Instruction) -> None:
        more = self.pop()
        target = look(self.stack[-one.arg])
        if one.op == "DICT_MERGE":  # f(**a, **b)
            more = self.call(Known(dict), [more])
            assert isinstance(more, DictValue) and isinstance(target, DictValue)
            if more.entries.keys() & target.entries.keys():
                raise Unsupported("a keyword argument given twice")
        method = {"LIST_EXTEND": "extend"}.get(one.op, "update")
        self.call(self.call(Known(getattr), [target, Constant(method)]), [more])

    SET_UPDATE = DICT_UPDATE = DICT_MERGE = LIST_EXTEND

    def UNPACK_SEQUENCE(self, one: Instruction) -> None:
        if self.breaking:
            raise Unsupported("unpacking it")
        value = self.pop()
        items = self.trace.tensors.unpacked(value)
        if items is None:
            items = list(self.call(Known(list), [value]).items)  # type: ignore[attr-defined]
        before, after = one.arg & 255, one.arg >> 8
        if one.op == "UNPACK_SEQUENCE":
            if len(items) != one.arg:
                raise Unsupported("unpacking into another number of variables")
        else:
            if len(items) < before + after:
                raise Unsupported("unpacking too few values")
            stop = len(items) - after
            items = [*items[:before], ListValue(items[before:stop]), *items[stop:]]
        self.stack.extend(reversed(items))

    UNPACK_EX = UNPACK_SEQUENCE

    # ---- loops and jumps

    def GET_ITER(self, one: Instruction) -> None:
        self.compute(iter, self.take(1))

    def FOR_ITER(self, one: Instruction) -> None:
        iterator = self.stack[-1]
        if self.breaking or not isinstance(iterator, IteratorValue):
            raise Unsupported(f"iterating over a {iterator.cls.__name__}")
        item = iterator.advance(self)
        if item is None:
            self.stack.pop()
            self.index = one.target
        else:
            self.push(item)

    def JUMP(self, one: Instruction) -> None:
        self.index = one.target

    def POP_JUMP_IF_TRUE(self, one: Instruction) -> None:
        value = self.pop()
        if self.breaking:  # Python takes the truth; the jump is then on a bool that is known
            raise GraphBreak(Known(bool), [value], {}, push=True, again=True)
        if self.truth(value) == (one.op == "POP_JUMP_IF_TRUE"):
            self.index = one.target

    POP_JUMP_IF_FALSE = POP_JUMP_IF_TRUE

    def POP_JUMP_IF_NONE(self, one: Instruction) -> None:
        value = self.pop()
        none = isinstance(value, Constant) and value.value is None
        if none == (one.op == "POP_JUMP_IF_NONE"):
            self.index = one.target

    POP_JUMP_IF_NOT_NONE = POP_JUMP_IF_NONE

    def JUMP_IF_TRUE_OR_POP(self, one: Instruction) -> None:
        if self.breaking:
            raise Unsupported("and/or")
        if self.truth(self.stack[-1]) == (one.op == "JUMP_IF_TRUE_OR_POP"):
            self.index = one.target
        else:
            self.stack.pop()

    JUMP_IF_FALSE_OR_POP = JUMP_IF_TRUE_OR_POP

    # ---- functions

    def _call(self, args: list[Value], kwargs: dict[str, Value]) -> None:
        first, second = self.take(2)
        if NULL_LAST:
            function, receiver = first, second
        else:
            function, receiver = (second, NULL) if first is NULL else (first, second)
        self.compute(look(function), args if receiver is NULL else [receiver, *args], kwargs)

    def CALL(self, one: Instruction) -> None:
        count, names = one.arg
        args = self.take(count)
        place = len(args) - len(names)
        self._call(args[:place], dict(zip(names, args[place:], strict=True)))

    def CALL_KW(self, one: Instruction) -> None:
        names = constant(self.pop())
        args = self.take(one.arg)
        place = len(args) - len(names)
        self._call(args[:place], dict(zip(names, args[place:], strict=True)))

    def CALL_FUNCTION_EX(self, one: Instruction) -> None:
        kwargs = self.pop() if one.arg & 1 else DictValue({})
        args = self.pop()
        if not isinstance(kwargs, DictValue):
            kwargs = self.call(Known(dict), [kwargs])
        if not isinstance(args, SequenceValue):
            args = self.call(Known(list), [args])
        if NULL_LAST:
            function, _ = self.take(2)
        else:
            function = self.pop()
            if self.stack and self.stack[-1] is NULL:
                self.stack.pop()
        named = {constant(k): v for k, v in kwargs.entries.values()}  # type: ignore[attr-defined]
        self.compute(look(function), list(args.items), named)  # type: ignore[attr-defined]

    def MAKE_FUNCTION(self, one: Instruction) -> None:
        code = constant(self.pop())
        function = FunctionValue(code, self.scope, code.co_qualname)
        for bit in (8, 4, 2, 1):
            if one.arg & bit:
                _function_attribute(function, bit, self.pop())
        self.push(function)

    def SET_FUNCTION_ATTRIBUTE(self, one: Instruction) -> None:
        function = self.pop()
        assert isinstance(function, FunctionValue)
        _function_attribute(function, one.arg, self.pop())
        self.push(function)

    def RETURN_VALUE(self, one: Instruction) -> Value:
        return self.pop()

    def RETURN_GENERATOR(self, one: Instruction) -> None:
        self.stack.append(NULL)  # the following POP_TOP drops the generator

    def YIELD_VALUE(self, one: Instruction) -> Value:
        self.yielded = True
        return self.pop()

    def GET_YIELD_FROM_ITER(self, one: Instruction) -> None:
        self.compute(iter, self.take(1))

    def SEND(self, one: Instruction) -> None:
        """For ``yield from``, of what is asked for items and sent nothing."""
        iterator = self.stack[-2]
        if not isinstance(iterator, IteratorValue):
            raise Unsupported("await")
        self.stack.pop()
        item = iterator.advance(self)
        if item is None:
            self.stack.pop()
            self.push(Constant(None))  # what a generator that is gone through returns
            self.index = one.target
        else:
            self.push(item)

    def IMPORT_NAME(self, one: Instruction) -> None:
        level, wanted = (constant(v) for v in self.take(2))
        name = one.arg
        if level:
            name = importlib.util.resolve_name("." * level + name, self.scope["__package__"])
        if name not in sys.modules:
            raise Unsupported(f"importing {name} for the first time")
        self.push(self.trace.known(sys.modules[name if wanted else name.split(".")[0]]))

    def IMPORT_FROM(self, one: Instruction) -> None:
        self.push(self.call(Known(getattr), [self.stack[-1], Constant(one.arg)]))

    def LOAD_ASSERTION_ERROR(self, one: Instruction) -> None:
        self.push(Known(AssertionError))

    # ---- exceptions

    def RAISE_VARARGS(self, one: Instruction) -> None:
        if one.arg == 0 or self.breaking:
            raise Unsupported("raise")
        raised = look(self.take(one.arg)[0])  # and what it is raised from
        if isinstance(raised, Known) and isinstance(raised.value, type):
            raised = look(self.call(raised, []))
        if not isinstance(raised, ObjectValue) or not issubclass(raised.cls, BaseException):
            raise Unsupported(f"raising a {raised.cls.__name__}")
        raise Raised(raised)

    def PUSH_EXC_INFO(self, one: Instruction) -> None:
        exception = self.stack.pop()
        self.push(Handling())
        self.push(exception)

    def POP_EXCEPT(self, one: Instruction) -> None:
        self.stack.pop()

    def CHECK_EXC_MATCH(self, one: Instruction) -> None:
        classes = self.pop()
        self.push(self.call(Known(isinstance), [self.stack[-1], classes]))

    def RERAISE(self, one: Instruction) -> None:
        exception = self.pop()
        assert isinstance(exception, ObjectValue)
        raise Raised(exception)

    def WITH_EXCEPT_START(self, one: Instruction) -> None:
        exception, leave = self.stack[-1], look(self.stack[-4])
        details = [Known(exception.cls), exception, Handling()]
        self.push(self.call(leave, details))

    # ---- with

    def BEFORE_WITH(self, one: Instruction) -> None:
        manager = self.pop()
        if self.breaking:
            raise Unsupported(f"with a {manager.cls.__name__}")
        if self.trace.tensors.enter(self, manager):
            return
        leave, enter = special(self, manager, "__exit__"), special(self, manager, "__enter__")
        if leave is None or enter is None:
            raise Unsupported(f"with a {manager.cls.__name__}")
        self.stack.append(MethodValue(manager, leave, "__exit__"))
        self.compute(enter, [manager])
