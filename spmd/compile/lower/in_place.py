"""Loop bodies that may write a carried value's new contents over the old ones.

It may if nothing reads the old value after the equation that makes the new one, and that equation
itself reads it only where it writes (an elementwise kernel), or updates it in place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterator
from typing import TypeAlias

from spmd.compile.expressions.equivalence import form
from spmd.compile.expressions.group_kernel import Layout, Space, build_kernel
from spmd.compile.expressions.scalar_ops import NoKernelError
from spmd.compile.kernel.ir import Kernel, Load, Map, Store
from spmd.compile.lower.lowering import ALIASES
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Var

UPDATES = frozenset(
    "dynamic_update_slice scatter scatter_add scatter_mul scatter_min scatter_max".split()
)

Layouts: TypeAlias = tuple[Layout | None, ...]
Built: TypeAlias = dict[tuple[Space, Layouts], Kernel | None]
# Of each group, the kernels of all groups that are alike; the second finds them by their form.
_kernels: weakref.WeakKeyDictionary[ClosedJaxpr, Built] = weakref.WeakKeyDictionary()
_by_form: dict[Hashable, Built] = {}


def group_kernel(eqn: Eqn, layouts: Layouts = ()) -> Kernel | None:
    """The kernel of a fused equation, built once for all that are alike; None if it has none.

    `layouts` has an entry for each output (or none at all): where it lies in a larger array.
    """
    group = eqn.params["jaxpr"]
    known = _kernels.get(group)
    if known is None:
        shared = form(group)
        known = {} if shared is None else _by_form.setdefault(shared, {})
        _kernels[group] = known
    key = eqn.params["space"], layouts if any(layouts) else ()
    if key not in known:
        try:
            known[key] = build_kernel(group, *key)
        except NoKernelError:
            known[key] = None
    return known[key]


def may_overwrite(body: Jaxpr, operand: int, result: int) -> bool:
    """Whether result number `result` may be written over operand number `operand`."""
    old, new = body.invars[operand], body.outvars[result]
    if not isinstance(new, Var) or body.outvars.count(new) != 1:
        return False
    names = _aliases(body, old)
    if any(v in names for v in body.outvars):
        return False
    makers = [k for k, eqn in enumerate(body.eqns) if new in eqn.outvars]
    readers = [
        k
        for k, eqn in enumerate(body.eqns)
        if eqn.prim.name not in ALIASES and any(v in names for v in eqn.invars)
    ]
    if not makers or body.eqns[makers[0]].prim.name in ALIASES:
        return False
    last = max(readers, default=-1)
    if last < _first_write(body, makers[0]):
        return True
    if body.eqns[makers[0]].prim.name == "concatenate":
        return False
    return last == makers[0] and _overwrites(body.eqns[last], names, new)


def _first_write(body: Jaxpr, maker: int) -> int:
    """The first equation that may write to the place of equation `maker`'s result.

    Parts of a concatenation are written by those that make its operands.
    """
    if body.eqns[maker].prim.name != "concatenate":
        return maker
    behind = set(body.eqns[maker].invars)
    first = maker
    for k in range(maker - 1, -1, -1):
        eqn = body.eqns[k]
        if any(v in behind for v in eqn.outvars):
            first = k
            behind.update(eqn.invars if eqn.prim.name in (*ALIASES, "concatenate") else ())
    return first


def _aliases(body: Jaxpr, var: Var) -> set[Var]:
    """A variable and all that are the same bytes."""
    names = {var}
    for eqn in body.eqns:
        renames = eqn.prim.name in ALIASES or eqn.prim.name == "optimization_barrier"
        if renames:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            names.update(out for operand, out in pairs if operand in names)
    return names


def _overwrites(eqn: Eqn, names: set[Var], new: Var) -> bool:
    """Whether an equation reads an operand only where, and not after, it writes its result."""
    if eqn.prim.name == "cond":
        return _branches_overwrite(eqn, names, new)
    if eqn.prim.name in UPDATES:
        return eqn.invars[0] in names and not any(v in names for v in eqn.invars[1:])
    kernel = group_kernel(eqn) if eqn.prim.name == "fused" else None
    if kernel is None:
        return False
    out = len(eqn.invars) + eqn.outvars.index(new)
    read = {k for k, v in enumerate(eqn.invars) if v in names}
    return read <= read_in_place(kernel, out)


def _branches_overwrite(eqn: Eqn, names: set[Var], new: Var) -> bool:
    """Whether every branch may write its result over the operand, or hands it through."""
    positions = [k for k, v in enumerate(eqn.invars) if v in names]
    if len(positions) != 1 or positions[0] == 0:
        return False
    operand, result = positions[0] - 1, eqn.outvars.index(new)
    return all(
        _hands_through(branch.jaxpr, operand, result)
        or may_overwrite(branch.jaxpr, operand, result)
        for branch in eqn.params["branches"]
    )


def _hands_through(branch: Jaxpr, operand: int, result: int) -> bool:
    return branch.outvars[result] is branch.invars[operand]


@functools.lru_cache(maxsize=1 << 14)
def read_in_place(kernel: Kernel, out: int) -> frozenset[int]:
    """The arguments of a kernel that are read only where, and not after, `out` is written."""
    return frozenset(_read_in_place(kernel, out))


def _read_in_place(kernel: Kernel, out: int) -> Iterator[int]:
    stores = [
        (number, step.level, store.map)
        for number, step in enumerate(kernel.passes)
        for store in step.stores
        if isinstance(store, Store) and store.arg == out
    ]
    if len(stores) != 1 or stores[0][2].gathered:
        return
    when, level, where = stores[0]
    for k, arg in enumerate(kernel.args):
        if arg.role == "in" and (arg.size, arg.dtype) == (
            kernel.args[out].size,
            kernel.args[out].dtype,
        ):
            loads = _loads(kernel).get(k)
            if loads and all(n <= when and m == where and lv == level for n, lv, m in loads):
                yield k


@functools.lru_cache(maxsize=256)
def _loads(kernel: Kernel) -> dict[int, list[tuple[int, str, Map]]]:
    """The reads of each argument: the pass, its level, and the place."""
    found: dict[int, list[tuple[int, str, Map]]] = {}
    for number, step in enumerate(kernel.passes):
        for instr in step.instrs:
            if isinstance(instr, Load):
                found.setdefault(instr.arg, []).append((number, step.level, instr.map))
    return found
