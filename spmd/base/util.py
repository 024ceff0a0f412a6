"""Small helpers that know nothing about arrays. The only `util` module of the project."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar, cast

from spmd.base.errors import DimensionError

T = TypeVar("T")
U = TypeVar("U")
Fn = TypeVar("Fn", bound=Callable[..., Any])

# The result of a specialised call whose arguments do not match.
MISS = object()
# A function that is called in ever new ways must not try ever more closures.
MOST_MATCHERS = 8


def unzip2(pairs: Iterable[tuple[T, U]]) -> tuple[list[T], list[U]]:
    """Turn a sequence of pairs into a pair of lists."""
    first: list[T] = []
    second: list[U] = []
    for a, b in pairs:
        first.append(a)
        second.append(b)
    return first, second


def split_list(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Split `items` into consecutive lists of the given sizes, and one with the rest."""
    out = []
    at = 0
    for size in sizes:
        out.append(list(items[at : at + size]))
        at += size
    out.append(list(items[at:]))
    return out


def partition_list(which: Sequence[bool], items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split `items` into those where `which` is false and those where it is true."""
    assert len(which) == len(items), (len(which), len(items))
    lists: tuple[list[T], list[T]] = ([], [])
    for flag, item in zip(which, items, strict=True):
        lists[bool(flag)].append(item)
    return lists


def merge_lists(which: Sequence[bool], if_false: Sequence[T], if_true: Sequence[T]) -> list[T]:
    """Undo `partition_list`."""
    sources = (iter(if_false), iter(if_true))
    return [next(sources[bool(flag)]) for flag in which]


def inverse_permutation(perm: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `perm`."""
    out = [0] * len(perm)
    for k, p in enumerate(perm):
        out[p] = k
    return tuple(out)


def canonical_dim(dim: int, ndim: int, what: str = "axis") -> int:
    """Turn a possibly negative dim into one in `range(ndim)`; raise a DimensionError otherwise."""
    if not -ndim <= dim < ndim:
        raise DimensionError(f"{what} {dim} is out of bounds for an array of {ndim} dimensions")
    return dim + ndim if dim < 0 else dim


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while many long-lived objects are made, as in a compile.

    It would look at all of it again and again: for a large program that takes a tenth of the time.
    """
    if not gc.isenabled():  # by the user's wish, or by a thread that will enable it again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, and keep it from scanning them later.

    Objects of modules stay alive. They join the objects that the collector has seen often without
    being looked at, unless the program has put objects out of the collector's reach.
    """
    with collector_paused():
        yield
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


class WeakCache:
    """A cache per function object: entries die with the function they belong to.

    Functions that cannot be weakly referenced are cached by identity for the life of the process.
    """

    def __init__(self) -> None:
        self._weak: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._strong: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def of(self, function: Callable[..., Any]) -> dict[Any, Any]:
        """The dictionary of one function's entries."""
        try:
            return self._weak.setdefault(function, {})
        except TypeError:
            return self._strong.setdefault(id(function), (function, {}))[1]

    def entries(self) -> list[Any]:
        """The entries of all functions."""
        found = [*self._weak.values(), *[known for _, known in self._strong.values()]]
        return [entry for known in found for entry in known.values()]

    def clear(self) -> None:
        self._weak.clear()
        self._strong.clear()


def take_names(wrapper: Any, wrapped: Any) -> None:
    """Give a wrapper the name, docstring and annotations of a user's callable.

    The callable may be any object. Where its attributes are not of the types that functions have,
    the wrapper keeps its own.

    >>> def wrapper(): ...
    >>> class Model:
    ...     __name__ = 3
    >>> take_names(wrapper, Model())
    >>> wrapper.__name__
    'wrapper'
    """
    for name in functools.WRAPPER_ASSIGNMENTS:
        value = getattr(wrapped, name, None)
        if isinstance(value, str) or (value is not None and "name" not in name):
            try:
                setattr(wrapper, name, value)
            except TypeError:
                continue
    if isinstance(wrapped, functools.partial):
        inner = wrapped.func
        while isinstance(inner, functools.partial):
            inner = inner.func
        wrapper.__name__ = getattr(inner, "__name__", type(inner).__name__)
    wrapper.__wrapped__ = wrapped


def wraps(fun: Any) -> Callable[[Fn], Fn]:
    """`functools.wraps` for a callable of the user's, which may be any object (`take_names`)."""

    def decorate(wrapper: Fn) -> Fn:
        take_names(wrapper, fun)
        wrapper.__dict__.update(getattr(fun, "__dict__", {}))
        cast(Any, wrapper).__wrapped__ = fun
        return wrapper

    return decorate


def present_as(wrapper: Any, wrapped: Any) -> None:
    """Give an object that wraps a function its name, docstring and attributes.

    Attributes that would hide the wrapper's own methods stay behind: a ufunc's `_call` is not ours.
    """
    take_names(wrapper, wrapped)
    own = type(wrapper)
    for name, value in getattr(wrapped, "__dict__", {}).items():
        if not hasattr(own, name):
            wrapper.__dict__[name] = value


class WrappedSignature:
    """The signature that `inspect` reads of an object that wraps a function, followed or not.

    It is the value of `__signature__` in the object's class, which has a signature of its own.
    """

    def __get__(self, wrapper: Any, owner: type) -> inspect.Signature | None:
        if wrapper is None:
            return None
        try:
            return inspect.signature(wrapper.__wrapped__)
        except (TypeError, ValueError) as error:  # of a builtin, for which Python has none
            raise AttributeError(str(error)) from None


def closest(name: str, options: Sequence[str]) -> str | None:
    """The option that a misspelt name is most like, if it is like one at all.

    >>> closest("bacth", ["batch", "model"]), closest("x", ["batch"])
    ('batch', None)
    """
    rated = [(_edits(name, option), option) for option in options]
    edits, option = min(rated, default=(len(name), ""))
    return option if edits <= (len(name) + 1) // 2 and edits < len(name) else None


def _edits(a: str, b: str) -> int:
    """The edit distance (Levenshtein) between two strings."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        above, row = row, [i + 1]
        for j, y in enumerate(b):
            row.append(min(row[j] + 1, above[j + 1] + 1, above[j] + (x != y)))
    return row[-1]


# The functions with a handler, by the identity of their code: hashing code reads all of it.
handlers: dict[int, CodeType] = {}

# The action of a handler on an exception; base/traceback_filter.py sets it.
simplifiers: list[Callable[[Exception], None]] = []


def handles(f: Fn) -> Fn:
    """Mark a function that has a handler of its own: `except Exception as e: simplify(e); raise`.

    Functions that are called often have one, because a wrapper would cost time in each call.
    """
    code = f.__code__
    handlers[id(code)] = code
    return f


def api_boundary(f: Fn) -> Fn:
    """The function with a handler: exceptions that leave it have no frames of spmd."""

    @functools.wraps(f)
    def boundary(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            for simplify in simplifiers:
                simplify(error)
            raise

    handles(boundary)
    return cast(Fn, boundary)


def described(
    fun: Callable[..., Any], text: str, *values: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a wrapper the names of `fun`, and a docstring of its own.

    `text` holds {0} for the name of `fun`, {1} and so on for `values`. The
    docstring of `fun` follows.
    """
    doc = text.format(function_name(fun), *values)
    of_fun = getattr(inspect.unwrap(fun), "__doc__", None)

    def with_names(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        wraps(fun)(wrapper)
        wrapper.__doc__ = f"{doc}\n\nOriginal documentation:\n\n{of_fun}" if of_fun else doc
        return wrapper

    return with_names


def function_name(f: Any) -> str:
    """A readable name for any callable, for error messages and jaxprs."""
    name = getattr(f, "__name__", None)
    if not isinstance(name, str):  # a library's object may answer with its own "no name"
        inner = getattr(f, "func", None)
        name = function_name(inner) if inner is not None else type(f).__name__
    return name
