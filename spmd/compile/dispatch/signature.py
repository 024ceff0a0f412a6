"""From a call's arguments to the key of a jitted function's specialisation.

A call `f(*args, **kwargs)` splits into static values, which are part of the cache key, and dynamic
pytrees, whose leaves must be arrays. `Signature` knows a function's parameters and which of them
are static or donated; `Signature.split` does the splitting and raises the user's errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError
from spmd.base.record import record
from spmd.base.source import Source
from spmd.base.tree import TreeDef, keystr, tree_flatten, tree_flatten_with_path
from spmd.base.util import function_name

_ANY_KIND = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_NEVER_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


@record
class Split:
    """A call taken apart: dynamic leaves and their structure, and the static values."""

    leaves: list[Any]
    tree: TreeDef
    static_args: tuple[tuple[int, Any], ...]
    static_kwargs: tuple[tuple[str, Any], ...]

    @property
    def static_key(self) -> Any:
        """The static values' part of a cache key: equal values of different types differ."""
        values = [v for _, v in (*self.static_args, *self.static_kwargs)]
        return self.static_args, self.static_kwargs, tuple([type(v) for v in values])


class Signature:
    """The parameters of a function, and which of them are static or donated."""

    def __init__(
        self,
        fun: Callable[..., Any],
        what: str,
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Iterable[str] | None,
        donate_argnums: int | Sequence[int] | None,
        donate_argnames: str | Iterable[str] | None,
    ):
        self.name = function_name(fun)
        self.what = f"{what}({self.name})"
        self.source = source_of(fun)
        self.signature = _signature(fun)
        # functools.wraps shows the signature of another function, which no call need fit.
        self._is_its_own = not hasattr(fun, "__wrapped__")
        self.parameters = dict(self.signature.parameters) if self.signature else {}
        self.positional = [p.name for p in self.parameters.values() if p.kind in _ANY_KIND]
        self.has_varargs = any(
            p.kind is inspect.Parameter.VAR_POSITIONAL for p in self.parameters.values()
        )
        nums, names = self._resolve(static_argnums, static_argnames, "static")
        self.static_nums, self.static_names = nums, names
        nums, names = self._resolve(donate_argnums, donate_argnames, "donate")
        self.donate_nums, self.donate_names = nums, names
        both = sorted(self.static_nums & self.donate_nums)
        if both:
            raise ArgumentError(
                f"{self.what}: argument {both[0]} is both static and donated; a static value has "
                "no buffer to donate"
            )

    # ---- names given by the user ----

    def _resolve(
        self, nums: int | Sequence[int] | None, names: str | Iterable[str] | None, kind: str
    ) -> tuple[frozenset[int], frozenset[str]]:
        """Positions and names; where one of both is missing, the signature provides it."""
        single = isinstance(nums, (int, np.integer))
        given: list[Any] = [nums] if single else list(() if nums is None else nums)  # type: ignore
        named = [names] if isinstance(names, str) else list(names or ())
        found_nums = {self._position(n, kind) for n in given}
        found_names = set(named)
        for name in named:
            self._check_name(name, kind)
            if nums is None and name in self.positional:
                found_nums.add(self.positional.index(name))
        for n in found_nums if names is None else ():
            if 0 <= n < len(self.positional) and self._by_keyword(self.positional[n]):
                found_names.add(self.positional[n])
        return frozenset(found_nums), frozenset(found_names)

    def _by_keyword(self, name: str) -> bool:
        return self.parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY

    def _position(self, n: int, kind: str) -> int:
        count = len(self.positional)
        if n < 0 and self.has_varargs:
            return n  # counted from the end of each call
        if n < 0 and self.parameters:
            n += count
        if n < 0 or (self.parameters and n >= count and not self.has_varargs):
            raise ArgumentError(
                f"{self.what}: {kind}_argnums names position {n}, but {self.name} has {count} "
                f"positional parameters ({', '.join(self.positional) or 'none'})"
            )
        return n

    def _check_name(self, name: str, kind: str) -> None:
        kinds = {p.kind for p in self.parameters.values()}
        if not isinstance(name, str):
            raise ArgumentError(f"{self.what}: {kind}_argnames holds {name!r}, which is no string")
        if name in self.parameters and self.parameters[name].kind in _NEVER_BY_NAME:
            raise ArgumentError(
                f"{self.what}: {kind}_argnames names {name!r}, which no call gives by name; use "
                f"{kind}_argnums"
            )
        known = not self.parameters or inspect.Parameter.VAR_KEYWORD in kinds
        if not known and name not in self.parameters:
            raise ArgumentError(
                f"{self.what}: {kind}_argnames names {name!r}, but {self.name} has the parameters "
                f"{', '.join(self.parameters) or '(none)'}"
            )

    # ---- a call ----

    def static_of(self, count: int) -> frozenset[int]:
        """The positions of the static ones among `count` positional arguments."""
        return self._counted(self.static_nums, count, "static")

    def _counted(self, nums: frozenset[int], count: int, kind: str) -> frozenset[int]:
        if not self.has_varargs or all(n >= 0 for n in nums):
            return nums
        lowest = min(nums)
        if lowest < -count:
            raise ArgumentError(
                f"{self.what}: {kind}_argnums names position {lowest}, but the call has {count} "
                "positional arguments"
            )
        return frozenset(n + count if n < 0 else n for n in nums)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        """Take a call apart."""
        if not self.static_nums and not self.static_names:
            leaves, tree = tree_flatten((args, kwargs))
            return Split(leaves, tree, (), ())
        static = self.static_of(len(args))
        static_args = tuple(
            (k, _hashable(self, v, f"argument {k} ({self.parameter(k)})"))
            for k, v in enumerate(args)
            if k in static
        )
        static_kwargs = tuple(
            (k, _hashable(self, kwargs[k], f"argument {k!r}"))
            for k in sorted(kwargs)
            if k in self.static_names
        )
        dynamic = tuple(v for k, v in enumerate(args) if k not in static)
        named = {k: v for k, v in kwargs.items() if k not in self.static_names}
        leaves, tree = tree_flatten((dynamic, named))
        return Split(leaves, tree, static_args, static_kwargs)

    def join(self, split: Split, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with other leaves."""
        dynamic, named = split.tree.unflatten(leaves)
        if not split.static_args and not split.static_kwargs:
            return dynamic, named
        args = list(dynamic)
        for position, value in split.static_args:
            args.insert(position, value)
        return tuple(args), {**named, **dict(split.static_kwargs)}

    def parameter(self, position: int) -> str:
        """The name of a positional argument, for errors."""
        if position < len(self.positional):
            return self.positional[position]
        variadic = [
            p.name for p in self.parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL
        ]
        start = len(self.positional)
        return f"{variadic[0]}[{position - start}]" if variadic else f"args[{position}]"

    def leaf_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """How a user would write each dynamic leaf: `params['w']`, `x[0]`."""
        names: list[str] = []
        static = self.static_of(len(args))
        for k, value in enumerate(args):
            if k not in static:
                pairs, _ = tree_flatten_with_path(value)
                names += [self.parameter(k) + keystr(path) for path, _ in pairs]
        for k in sorted(kwargs):
            if k not in self.static_names:
                pairs, _ = tree_flatten_with_path(kwargs[k])
                names += [k + keystr(path) for path, _ in pairs]
        return names

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...]:
        """For each dynamic leaf, whether the user donates it."""
        flags: list[bool] = []
        static = self.static_of(len(args))
        donated = self._counted(self.donate_nums, len(args), "donate")
        for k, value in enumerate(args):
            if k not in static:
                count = tree_flatten(value)[1].num_leaves
                flags += [k in donated] * count
        for k in sorted(kwargs):
            if k not in self.static_names:
                count = tree_flatten(kwargs[k])[1].num_leaves
                flags += [k in self.donate_names] * count
        return tuple(flags)

    def check_arity(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise Python's own TypeError, before anything is traced, if the call does not fit."""
        if self.signature is None or not self._is_its_own:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.what}: {error}; {self.name} is at {self.source}") from None


def _hashable(signature: Signature, value: Any, what: str) -> Any:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{signature.what}: static {what} is {value!r} of type {type(value).__name__}, which "
            "cannot be hashed. A static value is part of the compile cache's key: pass a tuple "
            "instead of a list, or give its class __hash__ and __eq__; arrays must not be static."
        ) from None
    return value


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None for built-in ones that do not tell."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def source_of(fun: Callable[..., Any]) -> Source:
    """The source location of a function."""
    inner = inspect.unwrap(fun) if callable(fun) else fun
    inner = getattr(inner, "func", inner)
    code = getattr(inner, "__code__", None)
    if code is None:
        return Source("<unknown>", 0, function_name(fun))
    return Source(code.co_filename, code.co_firstlineno, function_name(fun))
