"""Inline cache of operations outside `jit`: frequent ones become native calls.

The one idea: an operation outside `jit` costs little arithmetic and many look-ups: promotion,
shapes, the primitive's rules, NumPy's own dispatch. After a few calls on operands of the same types
the operation is traced, and from then on a call is one look-up and the call of an entry point.

Cached and uncached results must be bit-identical. Programs that only move elements, or round at
most once, are compiled like jitted functions, with numbers as run-time operands. Where spmd itself
defines the rounding, the entry point is that of `eager_kernels.py`, whose code runs from the first
call on. Over a mesh operations are compiled one by one in any case; the closure is that of a jitted
function, if its results are laid out as theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from spmd.base.config import config
from spmd.base.context import busy
from spmd.base.traceback_filter import simplify
from spmd.base.util import MISS, handles
from spmd.compile.dispatch.eager import COMPILE_FROM_ELEMENTS, NEVER_KEPT, SIZE_GENERIC
from spmd.compile.dispatch.jit import JitFunction
from spmd.compile.lazy import eager_kernels
from spmd.core.ir import ClosedJaxpr
from spmd.sharding.array import Array
from spmd.sharding.named import NamedSharding

# A wrapper has the type of the wrapped function.
F = TypeVar("F", bound=Callable[..., Any])

# Calls of one kind before it is compiled. A program costs as much as a few hundred calls; a kind
# that is called this often mostly goes on to be.
COMPILE_AFTER = 24
# Kinds of one operation that are remembered; those that come later stay with the general path.
MOST_KINDS = 1024
# Results from this many elements on are not dominated by dispatch.
MOST_ELEMENTS = 1 << 16

# Operations that move or compare elements, or compute on integers: results have no rounding.
_EXACT = frozenset(
    "and or xor not eq ne lt le gt ge select_n neg abs copy reshape permute_dims squeeze slice "
    "dynamic_slice broadcast_in_dim rev shift_left shift_right_logical floor ceil sign round "
    "shift_right_arithmetic is_finite reduce_and reduce_or reduce_xor argmax argmin".split()
)
# Operations that round once, the same on every processor.
_ROUNDED = frozenset("add sub mul div sqrt square convert_element_type".split())
# Operations with one result for integers, in any order.
_EXACT_OF_INTEGERS = frozenset("reduce_sum reduce_prod reduce_max reduce_min max min".split())
_DTYPES = frozenset("float32 float64 int32 int64 uint32 uint64 bool".split())
# Operations that may stand beside those of `eager_kernels.py`, one step each.
_STEPS = frozenset("add sub mul div neg abs sqrt square convert_element_type select_n".split())
_ALIASES = frozenset(("reshape", "squeeze", "broadcast_in_dim"))

_NUMBERS = (int, float, bool)


class EagerCache:
    """The closures of one operation, by the types of its operands."""

    __slots__ = ("_counts", "_function", "_jitted", "table")

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._jitted: JitFunction | None = None
        self._counts: dict[Any, int] = {}
        # None: this kind was looked at and stays with the general path.
        self.table: dict[Any, Callable[..., Any] | None] = {}
        _all.append(self)

    def __call__(
        self,
        key: Any,
        args: tuple[Any, ...],
        options: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        """Apply the operation to operands of the kind `key`, which has no closure yet.

        `options` and `named` are further arguments, part of the key, which are no operands. Of
        operands over a mesh the layouts are part of the key, too, where one process has them all:
        others would have to compile at the same call.
        """
        for x in args:
            if type(x) is Array and x.shards is not None:
                key = (key, *[x._sharding if type(x) is Array else None for x in args])
                match = self.table.get(key)
                if match is not None:
                    out = match(*args)
                    if out is not MISS:
                        return out
                break
        if key not in self.table and not (
            config.disable_jit
            or config.debug_nans
            or config.debug_infs
            or config.default_device is not None  # closures note no devices
        ):
            calls = self._counts.get(key, 0) + 1
            self._counts[key] = calls
            if calls >= COMPILE_AFTER and len(self.table) < MOST_KINDS:
                del self._counts[key]
                self.table[key] = self._closure(args, options, named or {})
            elif len(self._counts) > MOST_KINDS:
                self._counts.clear()
        return self._function(*args, *options, **(named or {}))

    def _closure(
        self, args: tuple[Any, ...], options: tuple[Any, ...], named: dict[str, Any]
    ) -> Callable[..., Any] | None:
        function = self._function
        placed = [x for x in args if type(x) is Array and x._sharding is not None]
        if placed:
            return self._over_mesh(args, options, named) if _is_local(placed) else None
        if options or named:
            jitted = JitFunction(lambda *args: function(*args, *options, **named))
        else:
            jitted = self._jitted = self._jitted or JitFunction(function)
        closed = jitted.trace(*args).jaxpr
        if is_determined(closed):
            return jitted.closure(args)
        if is_size_generic(closed) and all(type(x) is Array for x in args):
            made = eager_kernels.program_of(closed)
            return None if made is None else made.entry_point
        return None

    def _over_mesh(
        self, args: tuple[Any, ...], options: tuple[Any, ...], named: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """The closure for arrays over a mesh; None unless results are laid out as without it."""
        function = self._function
        jitted = JitFunction(lambda *args: function(*args, *options, **named))
        closed = jitted.trace(*args).jaxpr
        # One equation is the program that it is compiled to outside of `jit`, too.
        is_alone = len(closed.eqns) == 1 and closed.eqns[0].prim.name not in NEVER_KEPT
        if not is_determined(closed) and not is_alone:
            return None
        expected, made = function(*args, *options, **named), jitted(*args)
        alike = type(made) is type(expected) is Array and made._sharding == expected._sharding
        return jitted.closure(args) if alike and made.aval is expected.aval else None

    def forget(self) -> None:
        """Start again: a setting changed that the closures do not look at."""
        if self._jitted is not None:
            self._jitted.clear_cache()
        self._counts.clear()
        self.table.clear()


def _is_local(placed: list[Array]) -> bool:
    """Whether this process has all shards of arrays that lie over one mesh."""
    named = [x._sharding for x in placed if x.shards is not None]
    found = [s for s in named if isinstance(s, NamedSharding) and s.is_fully_addressable]
    return len(found) == len(placed) and len({s.mesh for s in found}) == 1


_all: list[EagerCache] = []


def is_determined(closed: ClosedJaxpr) -> bool:
    """Whether each result is small and has one possible value, whatever code computes it."""
    rounded = 0
    for eqn in closed.eqns:
        if any(a.size > MOST_ELEMENTS for a in (v.aval for v in eqn.outvars)):
            return False
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if any(a.dtype.name not in _DTYPES for a in avals):
            return False
        name, is_float = eqn.prim.name, avals[0].dtype.kind == "f"
        if name in _ROUNDED:
            # From floating point to integers processors differ for numbers that do not fit.
            if is_float and avals[-1].dtype.kind != "f":
                return False
            if name == "div" and not is_float:
                return False
            rounded += name != "convert_element_type" and avals[-1].dtype.kind == "f"
        elif name in _EXACT_OF_INTEGERS:
            if is_float:
                return False
        elif name not in _EXACT:
            return False
    return rounded <= 1


def is_size_generic(closed: ClosedJaxpr) -> bool:
    """Whether evaluation, equation by equation, gives the results of `eager_kernels.py`."""
    for eqn in closed.eqns:
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if any(a.size >= COMPILE_FROM_ELEMENTS or not a.size for a in avals):
            return False
        if any(a.dtype.name not in ("float32", "float64", "bool") for a in avals):
            return False
        if eqn.prim.name not in SIZE_GENERIC | _STEPS | _ALIASES:
            return False
    return True


# ---- functions with an inline cache --------------------------------------------------------------


def cached_unary(f: F) -> F:
    """A function of one array, or a method of arrays."""
    cache = EagerCache(f)
    table = cache.table

    @handles
    @functools.wraps(f)
    def method(self: Any, /) -> Any:
        try:
            if busy or type(self) is not Array:
                return f(self)
            match = table.get(self.aval)
            if match is not None:
                out = match(self)
                if out is not MISS:
                    return out
            return cache(self.aval, (self,))
        except Exception as error:
            simplify(error)
            raise

    return cast(F, method)


def cached_binary(f: F) -> F:
    """A function of an array and another one or a number, or a method of arrays.

    Operands of any other type go straight to `f`.
    """
    cache = EagerCache(f)
    table = cache.table

    @handles
    @functools.wraps(f)
    def method(self: Any, other: Any, /) -> Any:
        try:
            kind = type(other)
            if busy or type(self) is not Array:
                return f(self, other)
            if kind is Array:
                key = self.aval, other.aval
            elif kind in _NUMBERS:
                key = self.aval, kind
            else:
                return f(self, other)
            match = table.get(key)
            if match is not None:
                out = match(self, other)
                if out is not MISS:
                    return out
            return cache(key, (self, other))
        except Exception as error:
            simplify(error)
            raise

    return cast(F, method)


def cached_arrays(f: F) -> F:
    """A function of several arrays; with further arguments, or anything else, it is as it was."""
    cache = EagerCache(f)
    table = cache.table

    @handles
    @functools.wraps(f)
    def call(*args: Any, **named: Any) -> Any:
        try:
            if busy or named:
                return f(*args, **named)
            for x in args:
                if type(x) is not Array:
                    return f(*args)
            key = tuple([x.aval for x in args])
            match = table.get(key)
            if match is not None:
                out = match(*args)
                if out is not MISS:
                    return out
            return cache(key, args)
        except Exception as error:
            simplify(error)
            raise

    return cast(F, call)


def cached_options(f: F) -> F:
    """A function of one array and options, which are part of its kind if they are plain."""
    cache = EagerCache(f)
    table = cache.table

    @handles
    @functools.wraps(f)
    def call(*args: Any, **named: Any) -> Any:
        try:
            if busy or not args or type(args[0]) is not Array:
                return f(*args, **named)
            x, *options = args
            key: Any = x.aval
            if options or named:
                if not is_plain(options) or not is_plain(named.values()):
                    return f(*args, **named)
                key = (key, len(options), *options, *named.items())
            match = table.get(key)
            if match is not None:
                out = match(x)
                if out is not MISS:
                    return out
            return cache(key, (x,), tuple(options), named)
        except Exception as error:
            simplify(error)
            raise

    return cast(F, call)


def cached_index(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`x[index]` of an array, where the index is a slice, None, `...`, or a tuple of such.

    Each index is a kind of its own. Numbers are not: a loop over an array's elements would make
    a kind of each.
    """

    def apply(x: Any, *parts: Any) -> Any:
        return f(x, _index_of(parts))

    cache = EagerCache(apply)
    table = cache.table

    @handles
    @functools.wraps(f)
    def method(self: Any, index: Any, /) -> Any:
        try:
            if busy or type(self) is not Array:
                return f(self, index)
            if type(index) is slice:
                start, stop, step = parts = index.start, index.stop, index.step
                if (
                    type(start) not in _BOUNDS
                    or type(stop) not in _BOUNDS
                    or type(step) not in _BOUNDS
                ):
                    return f(self, index)
                key = self.aval, start, stop, step
            else:
                parts = _parts_of(index)
                if parts is None:
                    return f(self, index)
                key = self.aval, parts
            match = table.get(key)
            if match is not None:
                out = match(self)
                if out is not MISS:
                    return out
            return cache(key, (self,), parts)
        except Exception as error:
            simplify(error)
            raise

    return method


_BOUNDS = frozenset((int, type(None)))


def _parts_of(index: Any) -> tuple[Any, ...] | None:
    """The parts of an index as a hashable key; None if they are not plain."""
    found: list[Any] = [tuple]
    for part in index if type(index) is tuple else (index,):
        if type(part) is slice:
            bounds = part.start, part.stop, part.step
            if not all(type(bound) in _BOUNDS for bound in bounds):
                return None
            found.append(bounds)
        elif part is None or part is Ellipsis:
            found.append(part)
        else:
            return None
    return tuple(found)


def _index_of(parts: tuple[Any, ...]) -> Any:
    """The index with these parts: the inverse of `_parts_of`."""
    if parts[0] is not tuple:
        return slice(*parts)
    return tuple([slice(*part) if type(part) is tuple else part for part in parts[1:]])


_PLAIN = frozenset((int, bool, str, type(None), type(Ellipsis)))


def is_plain(options: Any) -> bool:
    """Whether options are integers, strings, None, `...` or tuples of these: keys of a cache."""
    for value in options:
        kind = type(value)
        if kind not in _PLAIN and (kind is not tuple or not is_plain(value)):
            return False
    return True


def _forget(_: Any) -> None:
    for cache in _all:
        cache.forget()


config.on_program_update(_forget)
