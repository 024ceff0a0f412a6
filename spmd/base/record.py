"""Records: classes that are their fields, as `dataclasses` makes them, at a fifth of the price.

`dataclass(frozen=True, slots=True)` writes and compiles six methods for each class when it is
imported, 0.8 ms: for the ninety classes that a first call needs that was a fifth of a process's
start. Of a record `__init__`, `__eq__` and `__hash__` are written when they are first used (most
`__init__`s are not even compiled), and the other methods are common to all. `dataclasses.fields`,
`replace` and `asdict` know records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from reprlib import recursive_repr
from types import CodeType, FunctionType
from typing import Any, TypeVar, dataclass_transform, overload

__all__ = ["field", "record"]

T = TypeVar("T")


@overload
def record(cls: type[T], /) -> type[T]: ...


@overload
def record(*, eq: bool = True, frozen: bool = True) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, eq: bool = True, frozen: bool = True) -> Any:
    """Make a class a record: slots, `__init__`, `repr`, and unless told otherwise `==` and `hash`.

    Definitions in the class itself stay. A record is frozen unless `frozen=False`, and then it has
    no hash. Records do not inherit fields from each other.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1) == Point(1, 0), Point(3)
    (True, Point(x=3, y=0))
    """
    if cls is None:
        return lambda cls: _made(cls, eq, frozen)
    return _made(cls, eq, frozen)


def _made(cls: type, eq: bool, frozen: bool) -> type:
    own = dict(cls.__dict__)
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # or `dataclass` composes one, which takes long
    # Looks at annotations and defaults, and makes slots; it has no method to write.
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    methods: dict[str, Any] = {
        "__init__": _Unwritten(made, "__init__", _frozen_init if frozen else _plain_init),
        "__repr__": _repr,
    }
    if eq:
        methods["__eq__"] = _Unwritten(made, "__eq__", _equality)
        if own.get("__hash__") is None:  # a class that defines `__eq__` alone has None there
            made.__hash__ = _Unwritten(made, "__hash__", _hash) if frozen else None
    if frozen:
        methods |= _OF_FROZEN
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    return made


# ---- methods that are written when they are first asked for --------------------------------------


class _Unwritten:
    """Stands for a method of a record until its first look-up."""

    def __init__(self, cls: Any, name: str, text_of: Callable[[Any, dict[str, Any]], str]):
        self.cls = cls
        self.name = name
        self.text_of = text_of

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        cls, name = self.cls, self.name
        written = _plain_frozen_init(cls) if self.text_of is _frozen_init else None
        if written is None:
            names: dict[str, Any] = {"_MISSING": MISSING}
            text = f"def {name}{self.text_of(cls, names)}"
            found: dict[str, Any] = {}
            exec(compile(text, f"<spmd record {cls.__qualname__}>", "exec"), names, found)
            written = found[name]
        written.__qualname__ = f"{cls.__qualname__}.{name}"
        written.__module__ = cls.__module__
        setattr(cls, name, written)
        return written.__get__(instance, owner)


def _plain_init(cls: Any, names: dict[str, Any]) -> str:
    return _init(cls, names, "self.{name} = {value}")


def _frozen_init(cls: Any, names: dict[str, Any]) -> str:
    # Slots are set through their descriptors: no `__setattr__` is asked, and no name looked up.
    for f in fields(cls):
        names[f"_set_{f.name}"] = getattr(cls, f.name).__set__
    return _init(cls, names, "_set_{name}(self, {value})")


def _plain_frozen_init(cls: Any) -> FunctionType | None:
    """The same without compiling, if all fields are parameters whose defaults are values.

    Such methods differ only in names, so one is compiled for each number of fields.
    """
    made = fields(cls)
    if not all([f.init and f.default_factory is MISSING for f in made]):
        return None
    code = _init_of(len(made)).replace(
        co_varnames=("self", *(f.name for f in made)),
        co_filename=f"<spmd record {cls.__qualname__}>",
    )
    setters = {f"_set_{k}": getattr(cls, f.name).__set__ for k, f in enumerate(made)}
    defaults = tuple([f.default for f in made if f.default is not MISSING])
    return FunctionType(code, setters, "__init__", defaults)


@functools.cache
def _init_of(count: int) -> CodeType:
    """The code of an `__init__` that sets so many slots."""
    parameters = ", ".join(["self", *(f"_{k}" for k in range(count))])
    body = "; ".join(["pass", *(f"_set_{k}(self, _{k})" for k in range(count))])
    found: dict[str, Any] = {}
    exec(f"def __init__({parameters}):\n {body}", found)
    return found["__init__"].__code__


def _init(cls: Any, names: dict[str, Any], setter: str) -> str:
    """The `__init__` of a record, which gives each slot its value."""
    parameters, body = ["self"], ["pass"]
    for f in fields(cls):
        value = _value_of(f, names)
        if f.init:
            parameters.append(_parameter(f))
        if value:
            body.append(setter.format(name=f.name, value=value))
    return f"({', '.join(parameters)}):\n " + "; ".join(body)


def _parameter(f: Field[Any]) -> str:
    if f.default is not MISSING:
        return f"{f.name}=_default_{f.name}"
    return f.name if f.default_factory is MISSING else f"{f.name}=_MISSING"


def _value_of(f: Field[Any], names: dict[str, Any]) -> str:
    """The expression for a field's value; its default or default factory is put among `names`."""
    if f.default is not MISSING:
        names[f"_default_{f.name}"] = f.default
        return f.name if f.init else f"_default_{f.name}"
    if f.default_factory is not MISSING:
        names[f"_new_{f.name}"] = f.default_factory
        new = f"_new_{f.name}()"
        return f"{new} if {f.name} is _MISSING else {f.name}" if f.init else new
    return f.name if f.init else ""


def _compared(cls: Any, owner: str) -> str:
    """The tuple of the compared fields of `owner`."""
    return "(" + "".join([f"{owner}.{f.name}, " for f in fields(cls) if f.compare]) + ")"


def _equality(cls: Any, names: dict[str, Any]) -> str:
    same = f"{_compared(cls, 'self')} == {_compared(cls, 'other')}"
    return (
        f"(self, other):\n return {same} if other.__class__ is self.__class__ else NotImplemented"
    )


def _hash(cls: Any, names: dict[str, Any]) -> str:
    return f"(self):\n return hash({_compared(cls, 'self')})"


# ---- the base of all records -------------------------------------------------------------------


@recursive_repr()
def _repr(self: Any) -> str:
    parts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr]
    return f"{self.__class__.__qualname__}({', '.join(parts)})"


def _is_field(self: Any, name: str) -> bool:
    # A class that inherits from a record may have attributes of its own.
    kind = type(self)
    return name in kind.__dataclass_fields__ or "__dataclass_fields__" in kind.__dict__


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)


_OF_FROZEN = {
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}
