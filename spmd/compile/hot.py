"""Hot operations: what eager code does again and again runs as a compiled closure.

The one idea: an operation outside `jit` costs little arithmetic and much asking: promotion, shapes,
the primitive's rules, NumPy's own dispatch. When an operation was called a few times on operands of
the same types, it is traced and compiled like a jitted function, numbers as run-time operands, and
from then on a call is a look-up and the closure of `fastcall`.

Nobody may see the difference: only programs are taken whose every bit is determined, that is
which move elements, or round at most once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.compile.jit import JitFunction
from spmd.core.config import config
from spmd.core.context import busy
from spmd.core.ir import ClosedJaxpr
from spmd.sharding.array import Array
from spmd.sharding.fastmap import MISS

# Calls of one kind before it is compiled: a program costs as much as a few hundred of them, but a
# kind that came this often mostly comes for ever.
HOT_AFTER = 24
# Kinds of one operation that are remembered; those that come later stay with the general path.
MOST_KINDS = 1024
# Results from this many elements on are not dominated by dispatch.
MOST_ELEMENTS = 1 << 16

# What moves or compares elements, or computes on integers: its result has no rounding.
_EXACT = frozenset(
    "and or xor not eq ne lt le gt ge select_n neg abs copy reshape permute_dims squeeze slice "
    "dynamic_slice broadcast_in_dim rev shift_left shift_right_logical "
    "shift_right_arithmetic".split()
)
# What is rounded once, the same by every processor.
_ROUNDED = frozenset("add sub mul div convert_element_type".split())
_DTYPES = frozenset("float32 float64 int32 int64 uint32 uint64 bool".split())

_NUMBERS = (int, float, bool)


class Hot:
    """The closures of one operation, by the types of its operands."""

    __slots__ = ("_counts", "_function", "_jitted", "table")

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._jitted = JitFunction(function)
        self._counts: dict[Any, int] = {}
        # None: this kind was looked at and stays with the general path.
        self.table: dict[Any, Callable[..., Any] | None] = {}
        _all.append(self)

    def __call__(self, key: Any, args: tuple[Any, ...]) -> Any:
        """Apply the operation to operands of the kind `key`, which has no closure yet."""
        if key not in self.table and not config.disable_jit:
            calls = self._counts.get(key, 0) + 1
            self._counts[key] = calls
            if calls >= HOT_AFTER and len(self.table) < MOST_KINDS:
                del self._counts[key]
                self.table[key] = self._closure(args)
            elif len(self._counts) > MOST_KINDS:
                self._counts.clear()
        return self._function(*args)

    def _closure(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if any(type(x) is Array and x._sharding is not None for x in args):
            return None
        if not is_determined(self._jitted.trace(*args).jaxpr):
            return None
        return self._jitted.closure(args)

    def forget(self) -> None:
        """Start again: a setting changed that the closures do not look at."""
        self._jitted.clear_cache()
        self._counts.clear()
        self.table.clear()


_all: list[Hot] = []


def is_determined(closed: ClosedJaxpr) -> bool:
    """Whether each result has one possible value, whoever computes it, and is small."""
    rounded = 0
    for eqn in closed.eqns:
        if any(a.size > MOST_ELEMENTS for a in (v.aval for v in eqn.outvars)):
            return False
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if any(a.dtype.name not in _DTYPES for a in avals):
            return False
        name = eqn.prim.name
        if name in _ROUNDED:
            # From floating point to integers processors differ in what does not fit.
            if avals[0].dtype.kind == "f" and avals[-1].dtype.kind != "f":
                return False
            if name == "div" and avals[0].dtype.kind != "f":
                return False
            rounded += name != "convert_element_type" and avals[-1].dtype.kind == "f"
        elif name not in _EXACT:
            return False
    return rounded <= 1


def hot_unary(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method of arrays for an operation of one array."""
    hot = Hot(f)
    table = hot.table

    def method(self: Any) -> Any:
        if busy:
            return f(self)
        match = table.get(self.aval)
        if match is not None:
            out = match(self)
            if out is not MISS:
                return out
        return hot(self.aval, (self,))

    return method


def hot_binary(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of arrays for an operation with another array or a number.

    Operands of any other type go straight to `f`.
    """
    hot = Hot(f)
    table = hot.table

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        if busy:
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
        return hot(key, (self, other))

    return method


def _forget(_: Any) -> None:
    for hot in _all:
        hot.forget()


for _name in (
    "enable_x64",
    "disable_jit",
    "debug_nans",
    "num_cpu_devices",
    "platform",
    "check",
    "trace",
):
    config.on_update(_name, _forget)
