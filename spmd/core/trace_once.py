"""A trace cache: a user's function is traced once for the types of its operands.

It serves the functions of loops and branches, `checkpoint` and `closure_convert`, which users call
with one function again and again. `jit` and maps have caches of their own, of compiled programs.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import CodeType, FunctionType
from typing import Any

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.record import record
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.trace import Tracer


def trace_once(
    owner: Callable[..., Any] | None,
    key: Hashable,
    flat: Callable[..., tuple[Sequence[Any], Any]],
    avals: Sequence[ShapedArray],
    debug: Debug,
    finish: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None,
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `flat`, which calls the user's function `owner`, and the structure it returns.

    `flat` returns leaves and their structure; `key` says all that it depends on beside its
    operands' types, and what `finish` makes of the jaxpr. The jaxpr is kept as long as `owner`;
    nothing is kept without one. It is traced again if what the code of `owner` names has been
    rebound, and is not kept if it depends on a value of a transformation, on a mutable array, or on
    the mesh in scope.
    """
    known = _kept_of(owner) if not config.check_leaks else None
    context = state.axes, state.mesh, state.checks_varying, state.scope, config.tracing
    whole = key, tuple(avals), context
    if known is not None:
        try:
            found = known.get(whole)
        except TypeError:  # a static value that can't be hashed
            found = known = None
        if found is not None and found.names == _values_of_names(owner):
            return found.closed, found.tree
    told: list[Any] = []

    def traced(*leaves: Any) -> Sequence[Any]:
        trace = state.trace
        outs, tree = flat(*leaves)
        told[:] = tree, trace.touches
        return outs

    before = state.mesh_reads
    closed = trace_to_jaxpr(traced, avals, debug)
    if finish is not None:
        closed = finish(closed)
    tree, touches = told
    is_pure = touches is None and state.mesh_reads == before
    if known is not None and is_pure and not any(isinstance(c, Tracer) for c in closed.consts):
        if len(known) >= _MOST_KEPT:
            known.clear()
        known[whole] = _Kept(closed, tree, _values_of_names(owner))
    return closed, tree


@record(eq=False)
class _Kept:
    """The jaxpr of a function, and what the names in its code stood for."""

    closed: ClosedJaxpr
    tree: Any
    names: tuple[_Same, ...]


class _Same:
    """An object that equals itself only.

    It is not kept alive where that can be: a function that names itself would never be freed.
    """

    __slots__ = ("x",)

    def __init__(self, x: Any):
        try:
            self.x = weakref.ref(x)  # one and the same for an object
        except TypeError:
            self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x


_MOST_KEPT = 8
_kept: weakref.WeakKeyDictionary[Any, dict[Any, _Kept]] = weakref.WeakKeyDictionary()
_UNBOUND = _Same(object())


def forget_traces() -> None:
    """Forget all that was traced."""
    _kept.clear()


def _kept_of(f: Any) -> dict[Any, _Kept] | None:
    """The jaxprs of a function, if it can have some."""
    return None if f is None or not _can_be_kept(f) else _kept.setdefault(f, {})


def _can_be_kept(f: Any) -> bool:
    """Whether it is a function, or an object with a `__call__` that equals itself only."""
    kind = type(f)
    if kind is FunctionType:
        return True
    plain = kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__
    return plain and type(kind.__call__) is FunctionType and hasattr(f, "__dict__")


def _values_of_names(f: Any) -> tuple[_Same, ...]:
    """The values of the outer variables that a function's code reads and does not write.

    A function that counts its calls in such a variable does so when it is traced. Those of an
    object with a `__call__` are also its attributes.
    """
    if type(f) is not FunctionType:
        return *map(_Same, vars(f).values()), *_values_of_names(type(f).__call__)
    read, written = _names_in(f.__code__)
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    values = [_content(cell) for name, cell in cells if name not in written]
    known = f.__globals__
    values += [_Same(known[name]) for name in read if name in known]
    return tuple(values)


def _content(cell: Any) -> _Same:
    try:
        return _Same(cell.cell_contents)
    except ValueError:  # not assigned yet
        return _UNBOUND


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names that code reads as globals, and those outside of it that it writes."""
    written: set[str] = set()
    read: set[str] = set()
    left = [code]
    while left:
        inner = left.pop()
        left += [part for part in inner.co_consts if isinstance(part, CodeType)]
        used = set(inner.co_code[::2])
        if _LOADS_GLOBAL in used:
            read.update(inner.co_names)  # attributes are among them, which does no harm
        if not _WRITES.isdisjoint(used):
            found = dis.get_instructions(inner)
            written.update(x.argval for x in found if x.opcode in _WRITES)
    return tuple(sorted(read - written)), frozenset(written)


_LOADS_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_WRITES = frozenset([dis.opmap[n] for n in ("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL")])
