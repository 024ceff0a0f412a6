"""Records: classes that are their fields, as `dataclasses` makes them, at a fraction of the price.

`dataclass(frozen=True, slots=True)` writes and compiles six methods for each class when it is
imported, 0.8 ms: for the ninety classes that a first call needs that was a fifth of a process's
start. Of a record `__init__`, `__eq__` and `__hash__` are written when they are first used (most
`__init__`s are not even compiled), the other methods are common to all, and its fields are listed
when they are first asked for. `dataclasses.fields`, `replace` and `asdict` know records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from reprlib import recursive_repr
from types import CodeType, FunctionType
from typing import Any, TypeVar, dataclass_transform, overload

__all__ = ["field", "kept_hash", "record", "replace"]

T = TypeVar("T")
MISSING: Any = object()


class Field:
    """A field of which a class says more than a default."""

    __slots__ = ("compare", "default", "default_factory", "init", "repr")

    def __init__(self, default: Any, default_factory: Any, init: bool, repr: bool, compare: bool):
        self.default, self.default_factory = default, default_factory
        self.init, self.repr, self.compare = init, repr, compare

    def described(self) -> Any:
        """The same for `dataclasses`."""
        from dataclasses import field

        said = {name: getattr(self, name) for name in self.__slots__}
        return field(**{name: value for name, value in said.items() if value is not MISSING})


def field(
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    init: bool = True,
    repr: bool = True,
    compare: bool = True,
) -> Any:
    """Describe a field of a record: `dataclasses.field` says what the parameters mean."""
    return Field(default, default_factory, init, repr, compare)


def kept_hash() -> Any:
    """Describe the field `_hash` of a record with many parts: its hash is computed once."""
    return Field(0, MISSING, init=False, repr=False, compare=False)


def replace(instance: T, **changes: Any) -> T:
    """A record with other values of some fields, as `dataclasses.replace` makes it."""
    kind: Any = type(instance)
    same = {n: getattr(instance, n) for n in kind.__match_args__ if n not in changes}
    return kind(**same, **changes)


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
    own.pop("__dict__", None)
    own.pop("__weakref__", None)
    names = tuple(cls.__annotations__)
    defaults = {name: own.pop(name) for name in names if name in own}
    given = {n: default for n, default in defaults.items() if isinstance(default, Field)}
    body: dict[str, Any] = {
        "__qualname__": cls.__qualname__,
        "__slots__": names,
        "__match_args__": tuple([n for n in names if n not in given or given[n].init]),
        "__dataclass_fields__": _Unlisted(defaults),
        "__dataclass_params__": _Unlisted(defaults),
        "__init__": _Unwritten(_frozen_init if frozen else _plain_init, defaults),
        "__repr__": _repr,
    }
    if eq:
        body["__eq__"] = _Unwritten(_equality, given)
        body["__hash__"] = _Unwritten(_hash, given) if frozen else None
        if own.get("__hash__", MISSING) is None:  # of a class that defines `__eq__` alone
            del own["__hash__"]
    # All at once: Python would look at every slot of the type again for each method set later.
    return type(cls)(cls.__name__, cls.__bases__, body | (_OF_FROZEN if frozen else {}) | own)


# ---- what is made when it is first asked for -----------------------------------------------------


class _Unlisted:
    """Stands for what `dataclasses` knows of a record, until it is first asked for."""

    def __init__(self, defaults: dict[str, Any]):
        self.defaults = defaults

    def __set_name__(self, owner: Any, name: str) -> None:
        self.cls = owner
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        from dataclasses import dataclass  # takes long, and few programs ask

        cls = self.cls
        own = {name: getattr(cls, name) for name in ("__annotations__", "__module__")}
        own["__doc__"] = cls.__name__  # or `dataclass` composes one, which takes long
        for name, default in self.defaults.items():
            own[name] = default.described() if isinstance(default, Field) else default
        twin = dataclass(init=False, repr=False, eq=False)(type(cls.__name__, (), own))
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(cls, name, getattr(twin, name))
        return getattr(cls, self.name)


class _Unwritten:
    """Stands for a method of a record until its first look-up."""

    def __init__(self, write: Callable[[Any, dict[str, Any]], Any], defaults: dict[str, Any]):
        self.write = write
        self.defaults = defaults

    def __set_name__(self, owner: Any, name: str) -> None:
        self.cls = owner
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        cls, name = self.cls, self.name
        written = self.write(cls, self.defaults)
        written.__qualname__ = f"{cls.__qualname__}.{name}"
        written.__module__ = cls.__module__
        setattr(cls, name, written)
        return written.__get__(instance, owner)


def _compiled(cls: Any, text: str, names: dict[str, Any]) -> Any:
    """The function of a definition."""
    found: dict[str, Any] = {}
    exec(compile(text, f"<spmd record {cls.__qualname__}>", "exec"), names, found)
    return found.popitem()[1]


def _plain_init(cls: Any, defaults: dict[str, Any]) -> Any:
    return _init(cls, defaults, "self.{name} = {value}", {})


def _frozen_init(cls: Any, defaults: dict[str, Any]) -> Any:
    # Slots are set through their descriptors: no `__setattr__` is asked, and no name looked up.
    setters = {name: getattr(cls, name).__set__ for name in cls.__slots__}
    if defaults and (
        any([isinstance(default, Field) for default in defaults.values()])
        or cls.__slots__[-len(defaults) :] != tuple(defaults)  # Python has an error for it
    ):
        names = {f"_set_{name}": setter for name, setter in setters.items()}
        return _init(cls, defaults, "_set_{name}(self, {value})", names)
    # Such methods differ only in names, so one is compiled for each number of fields.
    code = _init_of(len(setters)).replace(
        co_varnames=("self", *setters), co_filename=f"<spmd record {cls.__qualname__}>"
    )
    names = {f"_set_{k}": setter for k, setter in enumerate(setters.values())}
    return FunctionType(code, names, "__init__", tuple(defaults.values()))


@functools.cache
def _init_of(count: int) -> CodeType:
    """The code of an `__init__` that sets so many slots."""
    parameters = ", ".join(["self", *(f"_{k}" for k in range(count))])
    body = "; ".join(["pass", *(f"_set_{k}(self, _{k})" for k in range(count))])
    found: dict[str, Any] = {}
    exec(f"def __init__({parameters}):\n {body}", found)
    return found["__init__"].__code__


def _init(cls: Any, defaults: dict[str, Any], setter: str, names: dict[str, Any]) -> Any:
    """The `__init__` of a record, which gives each slot its value; it uses some `names`."""
    names["_MISSING"] = MISSING
    parameters, body = ["self"], ["pass"]
    for name in cls.__slots__:
        default = defaults.get(name, MISSING)
        f: Field = default if isinstance(default, Field) else field(default=default)
        value = _value_of(f, name, names)
        if f.init:
            parameters.append(_parameter(f, name))
        if value:
            body.append(setter.format(name=name, value=value))
    text = f"def __init__({', '.join(parameters)}):\n " + "; ".join(body)
    return _compiled(cls, text, names)


def _parameter(f: Field, name: str) -> str:
    if f.default is not MISSING:
        return f"{name}=_default_{name}"
    return name if f.default_factory is MISSING else f"{name}=_MISSING"


def _value_of(f: Field, name: str, names: dict[str, Any]) -> str:
    """The expression for a field's value; its default or default factory is put among `names`."""
    if f.default is not MISSING:
        names[f"_default_{name}"] = f.default
        return name if f.init else f"_default_{name}"
    if f.default_factory is not MISSING:
        names[f"_new_{name}"] = f.default_factory
        new = f"_new_{name}()"
        return f"{new} if {name} is _MISSING else {name}" if f.init else new
    return name if f.init else ""


def _compared(cls: Any, given: dict[str, Field], owner: str) -> str:
    """The tuple of the compared fields of `owner`."""
    names = [name for name in cls.__slots__ if name not in given or given[name].compare]
    return "(" + "".join([f"{owner}.{name}, " for name in names]) + ")"


def _equality(cls: Any, given: dict[str, Field]) -> Any:
    same = f"{_compared(cls, given, 'self')} == {_compared(cls, given, 'other')}"
    result = f"{same} if other.__class__ is self.__class__ else NotImplemented"
    return _compiled(cls, f"def __eq__(self, other):\n return {result}", {})


def _hash(cls: Any, given: dict[str, Field]) -> Any:
    value = f"hash({_compared(cls, given, 'self')})"
    if "_hash" not in cls.__slots__:
        return _compiled(cls, f"def __hash__(self):\n return {value}", {})
    kept = f" if not self._hash:\n  _keep(self, {value} or 1)\n return self._hash"
    return _compiled(cls, f"def __hash__(self):\n{kept}", {"_keep": cls._hash.__set__})


# ---- the base of all records -------------------------------------------------------------------


@recursive_repr()
def _repr(self: Any) -> str:
    fields = self.__dataclass_fields__.values()
    parts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if f.repr]
    return f"{self.__class__.__qualname__}({', '.join(parts)})"


def _is_field(self: Any, name: str) -> bool:
    # A class that inherits from a record may have attributes of its own.
    kind = type(self)
    return name in kind.__dataclass_fields__ or "__dataclass_fields__" in kind.__dict__


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    if _is_field(self, name):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_field(self, name):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        object.__setattr__(self, name, value)


_OF_FROZEN = {
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}
