"""Attribute access as Python's data model has it: data descriptors, the instance, the class."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from compiler.capture.values import (
    ByIdentity,
    Constant,
    DictValue,
    FunctionValue,
    Known,
    ListValue,
    MappingValue,
    MethodValue,
    NamedMethod,
    NamespaceValue,
    NotConstant,
    ObjectValue,
    PartialValue,
    Raised,
    SetValue,
    SliceValue,
    SuperValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    look,
    raising,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

_ABSENT = object()
_BUILTIN_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def get_attribute(frame: Frame, owner: Value, name: str) -> Value | None:
    """``owner.name``, or None where Python would raise AttributeError."""
    found = frame.trace.tensors.attribute(frame, owner, name)
    if found is not None:
        return found
    if isinstance(owner, ObjectValue):
        return object_attribute(frame, owner, name)
    if isinstance(owner, ByIdentity):  # a tensor without it
        return None
    if isinstance(owner, SuperValue):
        return _super_attribute(frame, owner, name)
    if isinstance(owner, Known):
        return _known_attribute(frame, owner, name)
    if isinstance(owner, FunctionValue):
        return _function_attribute(frame, owner, name)
    if isinstance(owner, TupleValue) and name in getattr(owner.cls, "_fields", ()):
        return look(owner.items[owner.cls._fields.index(name)])  # type: ignore[attr-defined]
    if isinstance(owner, SliceValue) and name in ("start", "stop", "step"):
        return look(owner.parts[("start", "stop", "step").index(name)])
    if isinstance(owner, PartialValue) and name in ("func", "args", "keywords"):
        if name == "func":
            return owner.function
        return TupleValue(owner.args) if name == "args" else None
    if isinstance(owner, MethodValue) and name in ("__self__", "__func__"):
        return owner.receiver if name == "__self__" else owner.function
    if name == "__class__":
        return frame.trace.known(owner.cls)
    if isinstance(owner, Constant | ListValue | DictValue | SetValue | TupleValue):
        return _builtin_attribute(frame, owner, name)
    raise Unsupported(f"the attribute {name} of a {owner.cls.__name__}")


def _builtin_attribute(frame: Frame, owner: Value, name: str) -> Value | None:
    found = lookup(owner.cls, name)
    if found is _ABSENT:
        return None
    if isinstance(found, _BUILTIN_METHODS):
        return NamedMethod(owner, name)
    if isinstance(found, types.FunctionType):  # of a named tuple's class
        return MethodValue(owner, frame.trace.known(found), name)
    if isinstance(owner, Constant):
        return frame.trace.known(getattr(owner.value, name))
    raise Unsupported(f"the attribute {name} of a {owner.cls.__name__}")


def lookup(cls: type, name: str) -> Any:
    """What a class and its bases have under a name, as it stands there."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _ABSENT


def class_attribute(frame: Frame, cls: type, name: str) -> Any:
    """The same, guarded to stay so."""
    found = lookup(cls, name)
    trace = frame.trace
    if found is _ABSENT:
        return found
    source = trace.constants.source(cls, cls.__qualname__).attribute(name)
    public = getattr(cls, name, _ABSENT)
    if isinstance(found, classmethod):
        source = source.then("{}.__func__")
        public = found.__func__
    if public is getattr(cls, name, None) or isinstance(found, classmethod):
        trace.guards.same(source, public)
    return found


def held(value: Value) -> Value:
    """The dictionary that an instance of a subclass of dict is; other values as they are."""
    return value.inner if isinstance(value, MappingValue) else value


def special(frame: Frame, value: Value, name: str) -> Value | None:
    """A method that an operator calls, looked up on the class alone; None if there is none."""
    if not isinstance(value, ObjectValue):
        return None
    found = class_attribute(frame, value.cls, name)
    return frame.trace.known(found) if isinstance(found, types.FunctionType) else None


def object_attribute(frame: Frame, owner: ObjectValue, name: str) -> Value | None:
    """By the class's own ``__getattribute__``, if it has one in Python."""
    own: Any = owner.cls.__getattribute__
    if isinstance(own, types.FunctionType):
        return _or_missing(frame, own, owner, name)
    return usual_attribute(frame, owner, name)


def _or_missing(frame: Frame, function: Any, owner: Value, name: str) -> Value | None:
    """What ``__getattribute__`` or ``__getattr__`` gives, None if it raises AttributeError."""
    try:
        return look(frame.call(frame.trace.known(function), [owner, Constant(name)]))
    except Raised as error:
        if issubclass(error.exception.cls, AttributeError):
            return None
        raise


def usual_attribute(frame: Frame, owner: ObjectValue, name: str) -> Value | None:
    """By ``object.__getattribute__``."""
    trace = frame.trace
    if name == "__class__":
        return trace.known(owner.cls)
    if name == "__dict__":
        return namespace(frame, owner)
    if name == "args" and issubclass(owner.cls, BaseException):
        return TupleValue(exception_arguments(owner))
    found = class_attribute(frame, owner.cls, name)
    if isinstance(found, property):
        if found.fget is None:
            raise Unsupported(f"the property {name} without a getter")
        return look(frame.call(trace.known(found.fget), [owner]))
    if isinstance(found, types.MemberDescriptorType):  # a slot
        return _own(frame, owner, name)
    if found is not _ABSENT and hasattr(type(found), "__set__"):
        raise Unsupported(f"the descriptor {name} of {owner.cls.__name__}")
    own = _own(frame, owner, name)
    if own is not None:
        return own
    if isinstance(found, functools.cached_property):
        value = look(frame.call(trace.known(found.func), [owner]))
        set_own(frame, owner, name, value)
        return value
    if found is not _ABSENT:
        return bind(frame, found, owner, owner.cls, name)
    fallback = class_attribute(frame, owner.cls, "__getattr__")
    if isinstance(fallback, types.FunctionType):
        return _or_missing(frame, fallback, owner, name)
    return _missing(frame, owner.cls, name)


def bind(frame: Frame, found: Any, receiver: Value, cls: type, name: str) -> Value:
    """What a class attribute is when looked up through an instance."""
    trace = frame.trace
    if isinstance(found, types.FunctionType):
        return MethodValue(receiver, trace.known(found), name)
    if isinstance(found, staticmethod):
        return trace.known(found.__func__)
    if isinstance(found, classmethod):
        return MethodValue(trace.known(cls), trace.known(found.__func__), name)
    if isinstance(found, _BUILTIN_METHODS):
        return MethodValue(receiver, trace.known(found), name)
    if hasattr(type(found), "__get__") and not isinstance(found, type):
        raise Unsupported(f"the descriptor {name}")
    return trace.known(found)


def _missing(frame: Frame, obj: Any, name: str) -> Value | None:
    """Guard that an object that is known still lacks an attribute."""
    source = frame.trace.constants.source(obj, getattr(obj, "__name__", "an object"))
    frame.trace.guards.add(f"not hasattr({{}}, {name!r})", source)
    return None


def exception_arguments(exception: ObjectValue) -> list[Value]:
    known = [a for a in exception.arguments if a is not None]
    if len(known) < len(exception.arguments) or exception.obj is not None:
        raise Unsupported(f"the message of a {exception.cls.__name__}")
    return known


def _own(frame: Frame, owner: ObjectValue, name: str) -> Value | None:
    """From the instance itself: as it was set here, else as it is outside."""
    if name in owner.attributes:
        set_here = owner.attributes[name]
        return None if set_here is None else look(set_here)
    if owner.obj is None:
        return None
    trace, source = frame.trace, owner.source
    assert source is not None
    slot = isinstance(lookup(owner.cls, name), types.MemberDescriptorType)
    instance = getattr(owner.obj, "__dict__", None)
    if source.known and instance is not None:
        if name not in instance:
            if not slot:
                trace.guards.absent(trace.constants.source(instance, source.text), name)
                return None
        else:
            step = trace.held(instance, name, source.text)
            owner.attributes[name] = value = trace.wrap(instance[name], step)
            return value
    elif instance is not None and name not in instance and not slot:
        trace.guards.add(f"{name!r} not in {{}}.__dict__", source)
        return None
    try:
        obj = getattr(owner.obj, name)
    except AttributeError:
        trace.guards.add(f"not hasattr({{}}, {name!r})", source)
        return None
    owner.attributes[name] = value = trace.wrap(obj, source.attribute(name))
    return value


def namespace(frame: Frame, owner: ObjectValue) -> NamespaceValue:
    """``owner.__dict__``."""
    if owner.obj is None:
        return NamespaceValue(owner, {})
    trace, held = frame.trace, owner.obj.__dict__
    assert owner.source is not None
    step = owner.source.attribute("__dict__")
    if not all(type(name) is str for name in held):
        raise Unsupported("a __dict__ with names that are no texts")
    trace.guards.add(f"list({{}}) == {trace.constants.name(list(held))}", step)
    return NamespaceValue(owner, {k: trace.lazy(v, step.item(k)) for k, v in held.items()})


def set_attribute(frame: Frame, owner: Value, name: str, value: Value) -> None:
    if frame.trace.tensors.set_attribute(frame, owner, name, value):
        return
    if not isinstance(owner, ObjectValue):
        raise Unsupported(f"setting {name} of a {owner.cls.__name__}")
    setter = owner.cls.__setattr__
    if isinstance(setter, types.FunctionType):
        frame.call(frame.trace.known(setter), [owner, Constant(name), value])
    else:
        set_own(frame, owner, name, value)


def set_own(frame: Frame, owner: ObjectValue, name: str, value: Value) -> None:
    """``object.__setattr__``."""
    found = class_attribute(frame, owner.cls, name)
    if isinstance(found, property):
        if found.fset is None:
            raise Unsupported(f"setting the property {name} without a setter")
        frame.call(frame.trace.known(found.fset), [owner, value])
        return
    slot = isinstance(found, types.MemberDescriptorType)
    if found is not _ABSENT and hasattr(type(found), "__set__") and not slot:
        raise Unsupported(f"the descriptor {name} of {owner.cls.__name__}")
    if not slot and "__dict__" not in dir(owner.cls):
        raise Unsupported(f"setting {name}, which is no slot")
    if owner.cls.__mro__[-2].__module__ == "builtins" and not isinstance(owner, MappingValue):
        raise Unsupported(f"setting {name} of a {owner.cls.__name__}")
    frame.trace.mutate(owner)
    owner.attributes[name] = value
    owner.changed[name] = None


def delete_own(frame: Frame, owner: ObjectValue, name: str) -> None:
    """``object.__delattr__``."""
    found = class_attribute(frame, owner.cls, name)
    if found is not _ABSENT and hasattr(type(found), "__delete__"):
        raise Unsupported(f"deleting {name} of a {owner.cls.__name__}")
    if _own(frame, owner, name) is None:
        raise raising(AttributeError, None)
    frame.trace.mutate(owner)
    owner.attributes[name] = None
    owner.changed[name] = None


def _super_attribute(frame: Frame, owner: SuperValue, name: str) -> Value | None:
    mro = owner.of.__mro__
    for base in mro[mro.index(owner.after) + 1 :]:
        if name in base.__dict__:
            found = base.__dict__[name]
            if isinstance(found, property):
                return look(frame.call(frame.trace.known(found.fget), [owner.receiver]))
            return bind(frame, found, owner.receiver, owner.of, name)
    return None


def _known_attribute(frame: Frame, owner: Known, name: str) -> Value | None:
    obj, trace = owner.value, frame.trace
    source = owner.source or trace.constants.source(obj, getattr(obj, "__name__", "an object"))
    if isinstance(obj, types.ModuleType):
        if name not in vars(obj):
            if not hasattr(obj, name):
                return _missing(frame, obj, name)
            return trace.known(getattr(obj, name))  # made by the module's own __getattr__
        return trace.wrap(vars(obj)[name], trace.held(vars(obj), name, source.text))
    if isinstance(obj, type):
        found = lookup(obj, name)
        if isinstance(found, classmethod):
            return MethodValue(owner, trace.known(found.__func__), name)
        if isinstance(found, staticmethod):
            return trace.known(found.__func__)
        if found is _ABSENT and isinstance(lookup(type(obj), name), types.FunctionType):
            return MethodValue(owner, trace.known(lookup(type(obj), name)), name)
    public = getattr(obj, name, _ABSENT)
    if public is _ABSENT:
        return _missing(frame, obj, name)
    if public is getattr(obj, name):  # else it is made anew each time
        return trace.wrap(public, source.attribute(name))
    if isinstance(public, types.BuiltinMethodType | types.MethodWrapperType):
        return NamedMethod(owner, name)
    return frame.trace.known(public)


def _function_attribute(frame: Frame, owner: FunctionValue, name: str) -> Value | None:
    if name in owner.attributes:
        return owner.attributes[name]
    if name == "__name__":
        return Constant(owner.code.co_name)
    if name == "__qualname__":
        return Constant(owner.name)
    if name == "__code__":
        return frame.trace.known(owner.code)
    if owner.real is not None and owner.source is not None and hasattr(owner.real, name):
        return frame.trace.wrap(getattr(owner.real, name), owner.source.attribute(name))
    if owner.real is None or owner.source is None:
        raise Unsupported(f"the attribute {name} of a function")
    frame.trace.guards.add(f"not hasattr({{}}, {name!r})", owner.source)
    return None


def known_name(value: Value) -> str:
    """An attribute's name, given as a value."""
    try:
        name = constant(value)
    except NotConstant:
        raise Unsupported("an attribute whose name is not known") from None
    if not isinstance(name, str):
        raise Unsupported("an attribute whose name is no text")
    return name
